"""Any conversation, with the models' own files: what is written of it stays, and a bridge writes what comes after."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.messages import Message, Role
from stenograph.text.conversations import ARGUMENTS, ODD_ARGUMENTS, ODD_TEXT, WEATHER, call, result, said, user
from stenograph.text.renderer import Renderer

pytestmark = [pytest.mark.families, pytest.mark.timeout(600)]

LoadReal = Callable[..., Any]
THINKING: dict[str, object] = {}
NOT_THINKING: dict[str, object] = {"enable_thinking": False}
WITH_LATE_SYSTEM = frozenset({"glm-4.5v", "glm-4.7-flash", "glm-5.1", "glm-5.2"})
CASES = [
    *((name, kwargs) for name in sorted(WITH_LATE_SYSTEM) for kwargs in (THINKING, NOT_THINKING)),
    ("minimax-m2", THINKING),
]

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["\n\n", " zq\n", ODD_TEXT, "<|user|>", "</think>", "<tool_call>", "]~b]", "/nothink"]
)
REASONING = st.none() | TEXT.filter(bool)
NUMBERS = st.lists(st.integers(1, 9), max_size=3, unique=True)


@st.composite
def turns(draw: st.DrawFn, *, late_system: bool, reasoning: st.SearchStrategy[str | None] = REASONING) -> list[Message]:
    """A reply and what comes after it: results of its calls, or what others say; maybe nothing."""
    calls = [call(number, draw(st.sampled_from([ARGUMENTS, ODD_ARGUMENTS, "{}"]))) for number in draw(NUMBERS)]
    reply = said(draw(TEXT), *calls, reasoning=draw(reasoning))
    results = [result(one, draw(TEXT)) for one in calls]
    return [reply, *results, *draw(others(late_system=late_system))]


def others(*, late_system: bool) -> st.SearchStrategy[list[Message]]:
    system = st.builds(Message, role=st.just(Role.SYSTEM), content=TEXT)
    return st.lists(st.builds(user, TEXT) | system if late_system else st.builds(user, TEXT), max_size=2)


def stem(
    renderer: Renderer, opening: Sequence[Message], reply: Message, new: Sequence[Message], kwargs: dict[str, object]
) -> list[int]:
    """The ids of a conversation up to the reply's end: the rest is what the bridge writes, seeing none of it."""
    whole = renderer.render([*opening, reply, *new], [WEATHER], kwargs)
    bridged = renderer.bridge([9], reply, new, [WEATHER], kwargs).ids
    assert whole[len(whole) - len(bridged) :] == bridged
    return list(whole[: len(whole) - len(bridged)])


@pytest.mark.parametrize(("name", "kwargs"), CASES, ids=str)
@given(data=st.data())
def test_what_is_written_of_any_conversation_stays_and_the_bridge_writes_the_rest(
    real: LoadReal, name: str, kwargs: dict[str, object], data: st.DataObject
) -> None:
    renderer: Renderer = real(name).renderer
    late_system = name in WITH_LATE_SYSTEM
    opening = [user(data.draw(TEXT))]
    for _ in range(data.draw(st.integers(0, 2))):
        opening += data.draw(turns(late_system=late_system))
    reasoning = REASONING if kwargs is THINKING else st.none()
    reply, *new = data.draw(turns(late_system=late_system, reasoning=reasoning))
    kept = stem(renderer, opening, reply, new, kwargs)
    assert kept == stem(renderer, opening, reply, [], kwargs)
    prompt = renderer.render(opening, [WEATHER], kwargs)
    assert renderer.tokenizer.decode(kept).startswith(renderer.tokenizer.decode(prompt))
