"""What is seen in a JSON text of how deep it nests and how many elements it has is what a decoder finds."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core import json_shape
from stenograph.core.json_shape import num_elements, num_levels, without_spaces

TEXTS = st.text(alphabet='ab"\\[]{},:\n\U0001f600é', max_size=8)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def levels_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(levels_of, inner), default=0)


@pytest.fixture(params=[2, 3, 5, 2**18])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_shape, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")])
def test_the_text_has_the_shape_that_a_decoder_finds(ascii_only: bool, separators: tuple[str, str]) -> None:
    @given(VALUES)
    def check(value: Any) -> None:
        text = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
        assert num_levels(text) == levels_of(value)
        if isinstance(value, dict | list) and value:
            assert list(num_elements(text))[-1] == len(value)

    check()


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("num", range(8))
def test_backslashes_before_a_quote_are_paired_wherever_a_piece_ends(num: int) -> None:
    text = json.dumps(["\\" * num + '"[', {"\\" * num: []}]).encode()
    assert (num_levels(text), list(num_elements(text))[-1]) == (3, 2)


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (" , ", "\t:\r\n")])
def test_the_text_without_spaces_is_what_a_formatter_writes(ascii_only: bool, separators: tuple[str, str]) -> None:
    @given(VALUES)
    def check(value: Any) -> None:
        text = json.dumps(value, ensure_ascii=ascii_only, separators=separators).encode()
        assert without_spaces(text) == msgspec.json.format(text, indent=-1)

    check()


def test_no_formatter_is_given_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    given_bytes: list[int] = []

    def noted(text: bytes, *, indent: int) -> bytes:
        given_bytes.append(len(text))
        return json_format(text, indent=indent)

    json_format = msgspec.json.format
    monkeypatch.setattr(msgspec.json, "format", noted)
    small, large = b'{"a": [1, 2]}', json.dumps({"a": [" "] * 200_000}).encode()
    assert without_spaces(small) == b'{"a":[1,2]}'
    assert without_spaces(large) == large.replace(b", ", b",").replace(b": ", b":")
    assert given_bytes == [len(small)]
