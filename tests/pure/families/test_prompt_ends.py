"""The end of a prompt, which its last few ids say where their text is long enough: as if more were looked at."""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.text.renderer import PROMPT_END_TOKENS, Renderer

from .conftest import MODELS

LoadReal = Callable[..., Any]
LIGHT = ("qwen3", "deepseek-v4")
NAMES = [
    pytest.param(name, marks=() if name in LIGHT else pytest.mark.families)
    for name in MODELS
    if name != "gemma3"  # its tokenizer is refused
]


@st.composite
def prompts(draw: st.DrawFn, renderer: Renderer) -> "array[int]":
    """Ids of texts with marks, blanks and control tokens, and of any tokens, of which some are half a character."""
    tokenizer, syntax = renderer.tokenizer, renderer.family.syntax
    known = st.sampled_from(
        ["\n", "\n\n", " ", "assistant", "<", "é", "◁", *syntax.markers, *tokenizer.added_spellings[:8]]
    )
    text = "".join(draw(st.lists(known | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=8)))
    odd = draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4))
    return tokenizer.encode(text) + array("i", odd) if draw(st.booleans()) else array("i", odd) + tokenizer.encode(text)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_the_last_few_ids_of_a_prompt_say_what_more_of_them_would_say(
    real: LoadReal, name: str, data: st.DataObject
) -> None:
    renderer: Renderer = real(name).renderer
    ids = data.draw(prompts(renderer))
    whole = renderer.family.syntax.prompt_end(renderer.tokenizer.decode(ids[-PROMPT_END_TOKENS:]))
    assert renderer.prompt_end(ids) is whole
