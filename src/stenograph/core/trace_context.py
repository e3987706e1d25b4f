"""A request's place in a trace, as W3C's Trace Context carries it between services. Pure.

Source: https://www.w3.org/TR/trace-context-2/, sections 3.2 (traceparent), 3.3 (tracestate) and 4 (processing).
"""

import re
from collections.abc import Iterable

from msgspec import Struct

PARENT_HEADER = "traceparent"
STATE_HEADER = "tracestate"

MAX_STATE_MEMBERS = 32
"""The most list members of a tracestate. Source: section 3.3.1.1."""

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_MEMBER = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
"""A key and a value. Source: sections 3.3.1.3.1 and 3.3.1.3.2, with the multi-tenant keys of the first edition."""

_VERSION, _NO_VERSION = b"00", b"ff"
_SAMPLED = 0x01


class TraceContext(Struct, frozen=True, kw_only=True, gc=False):
    """A span in a trace, the parent of the next service's. Ids are lower-case hexadecimal, 32 and 16 digits.

    `is_sampled`: whoever made the span records it. `state` is other vendors' tracestate, as it came.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""

    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers that tell a service of it."""
        parent = (PARENT_HEADER, f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}")
        return (parent, (STATE_HEADER, self.state)) if self.state else (parent,)


def read_trace_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """The context of a request; None where it has none, or no valid one. Names are in lower case.

    An invalid tracestate is left out, and one without a valid traceparent is not looked at.
    """
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    found = _PARENT.fullmatch(parents[0].strip(b" \t")) if len(parents) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _NO_VERSION or (version == _VERSION and more is not None):
        return None
    if not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return TraceContext(
        trace_id=trace_id.decode(),
        span_id=span_id.decode(),
        is_sampled=bool(int(flags, 16) & _SAMPLED),
        state=_state(states),
    )


def _state(values: list[bytes]) -> str:
    """The members of all tracestates in their order; nothing where one of them is not valid, or comes twice."""
    members: list[str] = []
    for value in values:
        for part in value.decode("latin-1").split(","):
            member = part.strip(" \t")
            if not member:
                continue
            if _MEMBER.fullmatch(member) is None:
                return ""
            members.append(member)
    keys = {member.partition("=")[0] for member in members}
    return ",".join(members) if len(keys) == len(members) <= MAX_STATE_MEMBERS else ""
