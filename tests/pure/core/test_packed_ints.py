"""Whole numbers in few bytes: as small as they allow, the same again, and nothing that an engine damaged."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.replay import PackedInts, int32_of_base64

INT32 = st.integers(-(2**31), 2**31 - 1)


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@given(st.lists(st.integers(0, 255) | st.integers(0, 2**16 - 1) | INT32))
def test_numbers_come_back_from_the_smallest_type_that_holds_them(numbers: list[int]) -> None:
    int32 = np.array(numbers, "<i4")
    packed = PackedInts.of(int32)
    assert packed.values.tolist() == numbers
    assert not packed.values.flags.writeable
    assert packed.base64 == text_of(int32.tobytes())
    assert PackedInts.of(int32_of_base64(packed.base64)) == packed
    least, most = min(numbers, default=0), max(numbers, default=0)
    assert packed.item_bytes == (4 if least < 0 or most >= 2**16 else 2 if most >= 256 else 1)
    assert len(packed.data) == len(numbers) * packed.item_bytes


@given(st.text(max_size=40) | st.text("AQ=+/", max_size=40) | st.binary(max_size=40).map(text_of))
def test_base64_is_read_or_refused_as_python_does(text: str) -> None:
    """But for padding beyond a whole four, which Python passes over."""
    try:
        expected = np.frombuffer(base64.b64decode(text, validate=True), "<i4").tolist()
        assert len(text) - len(text.rstrip("=")) < 3, "more padding than any text needs"
    except (ValueError, AssertionError):
        with pytest.raises(ValueError, match=r"."):
            int32_of_base64(text)
    else:
        assert int32_of_base64(text).tolist() == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("AAA", "base64"),
        ("AAAA", "3 bytes are not a whole number"),
        ("é" * 4, "base64"),
        (text_of(bytes(8))[:-8] + "\n" + text_of(bytes(8))[-8:], "base64"),
        (text_of(bytes(196_606)) + text_of(bytes(12)), "base64"),
        (text_of(bytes(800_000))[:-8] + "é" + text_of(bytes(12))[-7:], "base64"),
    ],
)
def test_damaged_base64_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        int32_of_base64(text)


@pytest.mark.parametrize(("size", "item_bytes"), [(3, 2), (6, 4), (6, 3), (8, 8), (1, 0)])
def test_bytes_that_are_no_numbers_are_none(size: int, item_bytes: int) -> None:
    with pytest.raises(ValueError, match="are no numbers"):
        PackedInts(bytes(size), item_bytes)
