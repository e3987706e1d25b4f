"""Base64 and back, a piece at a time: binascii holds the GIL for the whole of its input. Pure; loaded with media."""

import binascii
import hashlib
from collections.abc import Iterator

_PIECE_CHARS = 2**20
"""About a millisecond of work. A multiple of four: each piece is base64 by itself."""
_PIECE_BYTES = _PIECE_CHARS // 4 * 3


def decoded_pieces(text: bytes) -> Iterator[bytes]:
    """The bytes of a base64 text. Raises ValueError for anything but padded base64 of RFC 4648, section 4, and for a
    text that would not come back from its bytes."""
    view = memoryview(text)
    for start in range(0, len(text), _PIECE_CHARS):
        piece = view[start : start + _PIECE_CHARS]
        body = binascii.a2b_base64(piece, strict_mode=True)
        if len(body) * 4 != len(piece) * 3 and start + _PIECE_CHARS < len(text):
            raise ValueError("padding stands before the end")
        yield body
    if text and binascii.b2a_base64(binascii.a2b_base64(text[-4:]), newline=False) != text[-4:]:
        raise ValueError("the last character has bits that no byte has")


def decoded(text: bytes) -> bytes:
    """The bytes of a base64 text. Raises ValueError."""
    return b"".join(decoded_pieces(text))


def encoded(content: bytes) -> bytes:
    """Bytes as a base64 text."""
    view = memoryview(content)
    starts = range(0, len(content), _PIECE_BYTES)
    return b"".join([binascii.b2a_base64(view[at : at + _PIECE_BYTES], newline=False) for at in starts])


def measured(text: bytes) -> tuple[str, int]:
    """SHA-256 of the bytes of a base64 text, in hex, and their number. Raises ValueError."""
    digest, num_bytes = hashlib.sha256(), 0
    for piece in decoded_pieces(text):
        digest.update(piece)
        num_bytes += len(piece)
    return digest.hexdigest(), num_bytes
