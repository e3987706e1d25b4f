"""A forced value always stands, a default only where the request is silent, and all else is the client's."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, CompletionRequest, TurnRequest
from stenograph.core.errors import ContextLengthExceeded, InvalidRequest, StenographError
from stenograph.core.messages import Message, Role
from stenograph.core.sampling_rules import RULED, SamplingRules, blame_session
from stenograph.core.types import ParamOutOfRange, SamplingParams

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.tuples(st.tuples(st.integers(0, 9), st.floats(-100, 100))),
    "max_tokens": st.integers(1, 40),
    "stop": st.lists(st.text(min_size=1), max_size=2).map(tuple),
}
some = st.fixed_dictionaries({}, optional=VALUES)
rules = st.builds(SamplingRules, default=some, force=some)


def request_of(said: dict[str, Any], *, is_chat: bool = True, **unruled: Any) -> TurnRequest:
    """A request that says these values; one of `unruled` no rules may set."""
    params = SamplingParams(**said, **unruled)
    given = frozenset((*said, *unruled))
    if is_chat:
        messages = (Message(role=Role.USER, content="hi"),)
        return ChatRequest(messages=messages, params=params, said=given, sent={"temperature": "1"})
    return CompletionRequest(prompts=("hi",), params=params, said=given, sent={"temperature": "1"})


def test_the_values_here_are_all_that_rules_may_set() -> None:
    assert set(VALUES) == set(RULED)


@given(rules, some, st.booleans(), st.booleans())
def test_a_forced_value_stands_a_default_where_nothing_is_said_and_the_rest_is_the_client_s(
    rules: SamplingRules, said: dict[str, Any], is_chat: bool, ignores: bool
) -> None:
    request = request_of(said, is_chat=is_chat, ignore_eos=ignores)
    ruled = rules.ruled(request)
    for name in SamplingParams.__struct_fields__:
        applied = getattr(ruled.params, name)
        if name in rules.force:
            assert applied == rules.force[name]
        elif name in rules.default and name not in said:
            assert applied == rules.default[name]
        else:
            assert applied == getattr(request.params, name)
    assert ruled.imposed == {*rules.force, *(rules.default.keys() - said.keys())}
    for name in request.__struct_fields__:
        if name not in ("params", "imposed"):
            assert getattr(ruled, name) is getattr(request, name)


@given(rules, rules, some)
def test_rules_over_others_win_name_by_name_and_force_still_beats_default(
    upper: SamplingRules, lower: SamplingRules, said: dict[str, Any]
) -> None:
    params = upper.over(lower).applied_to(SamplingParams(**said), frozenset(said))
    for name in RULED:
        asked = said.get(name, getattr(SamplingParams(), name))
        default = upper.default.get(name, lower.default.get(name, asked)) if name not in said else asked
        assert getattr(params, name) == upper.force.get(name, lower.force.get(name, default))
    assert upper.over(None) is upper


@pytest.mark.parametrize("part", ["default", "force"])
def test_a_min_tokens_above_the_max_tokens_of_the_rules_is_lowered_to_it(part: str) -> None:
    request = request_of({}, min_tokens=9)
    ruled = SamplingRules(**{part: {"max_tokens": 4}}).ruled(request)
    assert (ruled.params.max_tokens, ruled.params.min_tokens) == (4, 4)
    assert "min_tokens" not in ruled.imposed


def test_a_value_that_equals_the_neutral_one_is_said_where_the_client_sent_it() -> None:
    ruled = SamplingRules(default={"temperature": 0.5, "stop": ("x",)}).ruled(
        request_of({"temperature": 1.0, "stop": ()})
    )
    assert ruled.params == SamplingParams()


def test_rules_that_no_request_may_have_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"rules cannot set \['ignore_eos'\]"):
        SamplingRules(default={"ignore_eos": True})
    with pytest.raises(ParamOutOfRange, match="top_p"):
        SamplingRules(force={"top_p": 0.0})


def test_a_dialect_that_does_not_say_what_its_client_gave_is_a_bug_that_shows() -> None:
    request = ChatRequest(messages=(Message(role=Role.USER, content="hi"),), params=SamplingParams(max_tokens=7))
    with pytest.raises(AssertionError, match=r"\['max_tokens'\]"):
        SamplingRules(default={"max_tokens": 3}).ruled(request)


TOO_LONG = ContextLengthExceeded(num_prompt_tokens=5, max_tokens=9, max_context_tokens=10)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (InvalidRequest("no.", blame=Blame(RequestPart.SAMPLING, path=("stop",))), "stop"),
        (InvalidRequest("no.", blame=Blame(RequestPart.SAMPLING, path=("logit_bias", 3))), "logit_bias"),
        (InvalidRequest("no.", blame=Blame(RequestPart.MAX_TOKENS)), "max_tokens"),
        (TOO_LONG, "max_tokens"),
    ],
)
def test_an_error_blames_no_field_whose_value_the_session_set(error: StenographError, name: str) -> None:
    blame, message = error.blame, error.message
    blame_session(error, frozenset({"seed"}))
    assert (error.blame, error.message, str(error)) == (blame, message, message)
    blame_session(error, frozenset({name}))
    assert error.blame is None
    assert error.message == str(error) == f"{message} {error.remark}"
    assert error.remark.startswith(f"The session sets {name}, not the request (")
