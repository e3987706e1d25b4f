"""A real tokenizer gives the parts of a cut text the ids that it gives the whole."""

from array import array
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.model.text_cuts import TextCuts
from stenograph.model.tokenizer_json import plain_tokenizer_json, read_tokenizer_json

from .conftest import MODELS
from .test_any_reply import LIGHT

WORDS = st.sampled_from(
    [
        "春眠",
        "处处闻啼鸟",
        "かな",
        "カナ",
        "한국어",
        "naïve",
        "é",
        "The",
        "camelCase",
        "Привет",
        "नमस्ते",
        "𠮷野",
        "ªº",
        "ǅ",
        "12",
        "½",
    ],
)
BETWEEN = st.sampled_from([*"\n ，。、.,/_01", "\n\n", " \n", "\n ", "  ", "'s ", "，\n", "”", "\u3000", "", "<", "\t"])
LONGEST = 130
"""Characters of these models' longest token, and two: no cut is so near to the end of a run."""
TEXTS = st.lists(st.tuples(WORDS, BETWEEN), min_size=2).map(lambda pairs: "".join(map("".join, pairs)) * 20)


@cache
def cuts_of(tokenizer_json: str, at_once: int = 100) -> TextCuts:
    """Cuts of the model's tokenizer, for parts of so many characters."""
    plain = plain_tokenizer_json(read_tokenizer_json(tokenizer_json))
    return TextCuts(tokenizers.Tokenizer.from_str(plain), at_once=at_once)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in LIGHT else pytest.mark.families)
        for name in MODELS
        if name != "gemma3"  # its tokenizer is refused
    ],
)
@settings(max_examples=30)
@given(text=TEXTS)
def test_the_parts_of_a_cut_text_have_the_ids_of_the_whole(real: Callable[..., Any], name: str, text: str) -> None:
    model = real(name)
    encode = model.renderer.tokenizer.encode_plain
    parts = cuts_of(model.files.tokenizer_json).parts(encode, text)
    assert [token_id for _, part in parts for token_id in part] == list(encode(text))


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("unit", ["春", "𠮷", "ꙮ", "🙂", "é", "?é", "🙂a", "春A", "a1"])
def test_a_run_of_many_ids_is_cut_with_the_ids_of_the_whole(real: Callable[..., Any], name: str, unit: str) -> None:
    model = real(name)
    encode, text = model.renderer.tokenizer.encode_plain, "春 a" + unit * 1000 + "é'漢 1a"
    parts = cuts_of(model.files.tokenizer_json).parts(encode, text)
    assert max(end - start for (start, _), (end, _) in pairwise(parts)) < 100 + LONGEST
    assert len(text) - parts[-1][0] < 4 * LONGEST + 100
    assert [token_id for _, part in parts for token_id in part] == list(encode(text))


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("unit", [" ", "\u3000", "\n", "春"])
def test_no_part_is_longer_than_the_most_but_all_the_rest(real: Callable[..., Any], name: str, unit: str) -> None:
    model = real(name)
    encode, text = model.renderer.tokenizer.encode_plain, "ab 春 c" * 100 + unit * 3000 + "Za 1" * 400
    plain = tokenizers.Tokenizer.from_str(plain_tokenizer_json(read_tokenizer_json(model.files.tokenizer_json)))
    asked: list[str] = []

    def record(part: str) -> "array[int]":
        asked.append(part)
        return array("i", encode(part))

    parts = TextCuts(plain, at_once=100, at_most=1000).parts(record, text)
    assert all(len(part) <= 1000 or text.endswith(part) for part in asked)
    assert [token_id for _, part in parts for token_id in part] == list(encode(text))
