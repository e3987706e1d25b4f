"""Sessions of whatever a model may sample, hostile replies too: no drift that only a bug makes.

Replies are texts, markers of reasoning and of calls, and any other ids, ended by a stop token, a token limit or an
abort. What a text is tokenized as in one piece, and what piece by piece, are two spellings of it.
"""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.types import Finish, FinishReason
from stenograph.text.renderer import Renderer

from .conftest import MODELS
from .test_odd_replies import ABORT, STOP, Grown, stops_of

LoadReal = Callable[..., Any]
LENGTH = Finish(reason=FinishReason.LENGTH)
LIGHT = ("qwen3", "deepseek-v4")
WORDS = ("Hello", " world", "\n", "\n\n", " ", "é", "日本", '{"a": 1}', "x")
CALLS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "get_weather")
MAX_TURNS = 5


@st.composite
def replies(draw: st.DrawFn, renderer: Renderer) -> "tuple[array[int], Finish]":
    """Ids as sampled, and how that ended."""
    tokenizer, marks = renderer.tokenizer, renderer.family.syntax.reasoning
    around = () if marks is None else (marks.open, marks.close, f"{marks.open}\n", f"\n{marks.close}\n\n")
    pieces = draw(st.lists(st.sampled_from([*WORDS, *around, *around, *CALLS]), max_size=6))
    if draw(st.booleans()):
        ids = tokenizer.encode("".join(pieces))
    else:
        ids = array("i", [id_ for piece in pieces for id_ in tokenizer.encode(piece)])
    added = set(tokenizer.added_tokens.values())
    any_id = st.integers(0, tokenizer.vocab_size - 1).filter(lambda id_: id_ not in added)
    ids.extend(draw(st.lists(any_id, max_size=3)))
    finish = draw(st.sampled_from([STOP, STOP, LENGTH, ABORT]))
    if finish is STOP:
        ids.append(draw(st.sampled_from(list(stops_of(renderer)))))
    return ids, finish if ids else ABORT


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in LIGHT else pytest.mark.families)
        for name in MODELS
        if name != "gemma3"  # its tokenizer is refused
    ],
)
@given(data=st.data())
def test_a_session_of_any_replies_has_no_forbidden_drift(real: LoadReal, name: str, data: st.DataObject) -> None:
    renderer: Renderer = real(name).renderer
    grown = Grown(renderer, data.draw(st.sampled_from([{}, {"enable_thinking": False}])))
    for _ in range(data.draw(st.integers(1, MAX_TURNS))):
        sampled, finish = data.draw(replies(renderer))
        grown.answer(sampled, finish)
        grown.check()
        if finish is ABORT:
            break
        grown.ask()
