"""Base64 a piece at a time is the library's base64, and what would not come back is refused."""

import base64
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.base64_text import decoded, encoded, measured


@given(st.binary(max_size=400) | st.integers(0, 9).map(lambda more: b"\xa5" * (3 * 2**18 - 4 + more)))
def test_bytes_come_back_from_their_text(content: bytes) -> None:
    text = encoded(content)
    assert text == base64.b64encode(content)
    assert decoded(text) == content
    assert measured(text) == (hashlib.sha256(content).hexdigest(), len(content))


@given(st.binary(max_size=40))
def test_whatever_is_taken_comes_back_the_same(text: bytes) -> None:
    try:
        content = decoded(text)
    except ValueError:
        return
    assert base64.b64encode(content) == text


@pytest.mark.parametrize(
    "text",
    [b"QUJD=", b"QQ", b"QQ==QQ==", b"Q Q==", b"QR==", b"QQ=\n", b"A" * 1048574 + b"==QUJD", b"-_-_", b"\xff"],
)
def test_text_that_no_bytes_have_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decoded(text)
