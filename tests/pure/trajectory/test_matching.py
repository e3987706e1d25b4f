"""When two texts are the same JSON, against a comparison of their canonical spellings: the naive reference."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.trajectory.matching import same_json

NUMBERS = st.sampled_from([0, 1, -1, 2**53, 2**53 + 1, 2**64, 10**400, True, False, None, 0.0, -0.0, 1.0, 1.5, 2.0**53])
SCALARS = NUMBERS | st.floats() | st.integers() | st.sampled_from(["", "a", "\ud800", "1", "é"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abé"), inner, max_size=3)
)


def canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [canonical(item) for item in value]
    if isinstance(value, int) and abs(value) > 2**53:
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def naive(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return len({json.dumps(canonical(json.loads(text)), sort_keys=True) for text in (one, other)}) == 1
    except (ValueError, OverflowError, RecursionError):
        return False


def spelled(value: Any, style: int) -> str:
    """JSON in one of eight spellings."""
    items = value
    if style & 1 and isinstance(value, dict):
        items = dict(reversed(value.items()))
    separators = (",", ":") if style & 2 else (" , ", ": ")
    return json.dumps(items, ensure_ascii=bool(style & 4), separators=separators)


@given(one=VALUES, other=VALUES, styles=st.tuples(st.integers(0, 7), st.integers(0, 7)))
def test_texts_are_the_same_json_where_their_canonical_spellings_are_equal(
    one: Any, other: Any, styles: tuple[int, int]
) -> None:
    for second in (one, other):
        texts = spelled(one, styles[0]), spelled(second, styles[1])
        assert same_json(*texts) == naive(*texts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("[1", "[1 "),
        ("[" * 100_000, "[" * 100_000 + " "),
        ("\ud800", "\ud800 "),
        ("", " "),
        ("nan", "NaN"),
        ("1e999", "Infinity"),
    ],
)
def test_what_is_no_json_is_compared_as_before(one: str, other: str) -> None:
    assert same_json(one, other) == naive(one, other)
    assert same_json(one, one)
