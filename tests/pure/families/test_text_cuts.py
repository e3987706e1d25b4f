"""A real tokenizer gives the parts of a cut text the ids that it gives the whole."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
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
TEXTS = st.lists(st.tuples(WORDS, BETWEEN), min_size=2).map(lambda pairs: "".join(map("".join, pairs)))


@cache
def cuts_of(tokenizer_json: str) -> TextCuts:
    """Cuts of the model's tokenizer, for parts of a character."""
    plain = plain_tokenizer_json(read_tokenizer_json(tokenizer_json))
    return TextCuts(tokenizers.Tokenizer.from_str(plain), at_once=1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in LIGHT else pytest.mark.families)
        for name in MODELS
        if name != "gemma3"  # its tokenizer is refused
    ],
)
@given(text=TEXTS)
def test_the_parts_of_a_cut_text_have_the_ids_of_the_whole(real: Callable[..., Any], name: str, text: str) -> None:
    model = real(name)
    encode = model.renderer.tokenizer.encode_plain
    parts = list(cuts_of(model.files.tokenizer_json).parts(text))
    assert [token_id for part in parts for token_id in encode(part)] == list(encode(text))


@pytest.mark.parametrize("name", LIGHT)
def test_chinese_is_cut_at_its_commas(real: Callable[..., Any], name: str) -> None:
    parts = cuts_of(real(name).files.tokenizer_json).parts("春眠不觉晓，处处闻啼鸟。夜来风雨声")
    assert list(parts) == ["春眠不觉晓", "，处处闻啼鸟", "。夜来风雨声"]
