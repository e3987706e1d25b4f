"""A body is UTF-8 or it is not, whatever pieces it is looked at in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import InvalidJson
from stenograph.dialects.common import json_bodies
from stenograph.dialects.common.json_bodies import check_utf8

PIECES = [b"a", b"\xc3", b"\xa9", b"\xe4\xb8\xad", b"\xf0\x9f", b"\x98\x80", b"\xed\xa0", b"\xff"]


@given(pieces=st.lists(st.sampled_from(PIECES)), tail=st.binary(max_size=4))
@pytest.mark.parametrize("at_once", [4, 5, 7])
def test_a_body_is_checked_in_pieces_as_it_is_at_once(at_once: int, pieces: list[bytes], tail: bytes) -> None:
    body = b"".join(pieces) + tail
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_bodies, "_BYTES_AT_ONCE", at_once)
        try:
            check_utf8(body)
            told = ""
        except InvalidJson as error:
            told = str(error)
    try:
        body.decode()
        meant = ""
    except UnicodeDecodeError as error:
        meant = f"The body is not UTF-8: {error.reason} at byte {error.start}."
    assert told == meant


def test_no_call_looks_at_a_large_body_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    decode = json_bodies.utf_8_decode

    def seen(piece: memoryview, errors: str, final: bool) -> tuple[str, int]:
        sizes.append(len(piece))
        return decode(piece, errors, final)

    monkeypatch.setattr(json_bodies, "utf_8_decode", seen)
    check_utf8("\u00e9".encode() * 3_000_000)
    assert sum(sizes) >= 6_000_000
    assert max(sizes) <= 2**20
