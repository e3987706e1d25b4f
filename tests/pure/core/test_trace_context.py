"""W3C trace context: what is valid is read as OpenTelemetry's own propagator reads it, everything else is ignored."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from stenograph.core.trace_context import MAX_STATE_MEMBERS, TraceContext, read_trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"


def ids(digits: int) -> st.SearchStrategy[str]:
    return st.integers(1, 16**digits - 1).map(lambda number: f"{number:0{digits}x}")


def read(parent: str, *states: str) -> TraceContext | None:
    pairs = [
        (b"traceparent", parent.encode("latin-1")),
        *((b"tracestate", state.encode("latin-1")) for state in states),
    ]
    return read_trace_context(pairs)


def as_opentelemetry(parent: str, state: str | None = None) -> tuple[str, str, bool] | None:
    """The same, by OpenTelemetry's propagator."""
    carrier = {"traceparent": parent} | ({} if state is None else {"tracestate": state})
    span = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier, Context())).get_span_context()
    if not span.is_valid:
        return None
    return f"{span.trace_id:032x}", f"{span.span_id:016x}", bool(span.trace_flags & 1)


def facts(context: TraceContext | None) -> tuple[str, str, bool] | None:
    return None if context is None else (context.trace_id, context.span_id, context.is_sampled)


KEYS = st.text("az09_-*/", max_size=20).map("k{}".format) | st.text("az09", min_size=1, max_size=5).map("0t@s{}".format)
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E, exclude_characters=",="), max_size=30).map(
    lambda text: text.strip() or "v"  # space around a value is not part of it
)
MEMBERS = st.dictionaries(KEYS, VALUES, max_size=3).map(lambda found: [f"{key}={found[key]}" for key in found])
CONTEXTS = st.builds(
    TraceContext, trace_id=ids(32), span_id=ids(16), is_sampled=st.booleans(), state=MEMBERS.map(",".join)
)


@given(CONTEXTS)
def test_a_context_that_is_passed_on_is_read_as_it_was(context: TraceContext) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in context.headers()]
    assert read_trace_context(pairs) == context
    assert as_opentelemetry(dict(context.headers())["traceparent"]) == facts(context)


@given(st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate", b"other"]), st.binary(max_size=80))))
def test_any_bytes_are_read_or_ignored(headers: Sequence[tuple[bytes, bytes]]) -> None:
    found = read_trace_context(headers)
    if found is not None:
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", found.headers()[0][1])


@given(st.integers(0, len(VALID) - 1), st.sampled_from([chr(code) for code in range(256)]), st.sampled_from("irc"))
@example(at=0, new="f", how="r")
def test_a_traceparent_that_is_damaged_is_ignored_where_opentelemetry_ignores_it(at: int, new: str, how: str) -> None:
    """One character is inserted, replaced or cut."""
    damaged = VALID[:at] + (new if how != "c" else "") + VALID[at + (how != "i") :]
    if damaged.startswith("\r") or "\n" in damaged or damaged.strip(" \t") != damaged:
        return  # no header has a line break, and the space around it is HTTP's
    assert facts(read(damaged)) == as_opentelemetry(damaged)


@pytest.mark.parametrize(
    ("parent", "is_valid"),
    [
        (VALID, True),
        (f" \t{VALID}\t ", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
        (f"cc-{TRACE}-{SPAN}-01.what", False),
        (f"{VALID}-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (VALID.upper(), False),
        ("", False),
    ],
)
def test_the_recommendations_own_cases(parent: str, is_valid: bool) -> None:
    assert facts(read(parent)) == ((TRACE, SPAN, True) if is_valid else None)


def test_of_the_flags_only_sampled_is_known_and_passed_on() -> None:
    for flags in range(256):
        found = read(f"00-{TRACE}-{SPAN}-{flags:02x}")
        assert found is not None
        assert found.is_sampled == bool(flags & 1)
        assert found.headers() == (("traceparent", f"00-{TRACE}-{SPAN}-0{flags & 1}"),)


def test_two_traceparents_are_none() -> None:
    pair = (b"traceparent", VALID.encode())
    assert read_trace_context([pair, pair]) is None


@pytest.mark.parametrize(
    ("states", "passed_on"),
    [
        (["a=1, b=2 ,,", "\tc@d=3"], "a=1,b=2,c@d=3"),
        ([""], ""),
        (["a=1,a=2"], ""),
        (["a=1,B=2"], ""),
        (["a"], ""),
        (["a=b=c"], ""),
        (["a=\xe9"], ""),
        ([",".join(f"k{number}=v" for number in range(MAX_STATE_MEMBERS))],) * 2,
        ([",".join(f"k{number}=v" for number in range(MAX_STATE_MEMBERS + 1))], ""),
    ],
)
def test_a_tracestate_is_passed_on_whole_or_not_at_all(states: list[str], passed_on: str | list[str]) -> None:
    found = read(VALID, *states)
    assert found is not None
    assert found.state == (passed_on if isinstance(passed_on, str) else passed_on[0])
