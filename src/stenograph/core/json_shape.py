"""The depth of a JSON value, the number of its elements, and its text without spaces, all found in its text. Pure.

A decoder would make an object of each value to say as much, and keep the GIL meanwhile, as a formatter does. Here a
piece of the text at a time is reduced to its quotes, brackets and commas, and these are counted by vectors.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

PIECE_BYTES = 2**18

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_IS_SPACE = np.zeros(256, np.bool_)
_IS_SPACE[list(b" \t\r\n")] = True
_OTHERS = {kept: bytes(set(range(256)) - set(kept)) for kept in (b'"[]{}', b'"[]{},')}
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1


def num_levels(text: bytes | Raw) -> int:
    """The arrays and objects around the most deeply nested value. `text` is a JSON value; 0 for one without any."""
    return max((int(levels.max()) for _, levels in _marks(text, b'"[]{}')), default=0)


def num_elements(text: bytes | Raw) -> Iterator[int]:
    """The elements of a JSON array, or the members of an object, as far as each piece of the text has them; the last is
    of all. `text` is a nonempty one of either."""
    num = 1
    for marks, levels in _marks(text, b'"[]{},'):
        num += int(np.count_nonzero((marks == _COMMA) & (levels == 1)))
        yield num


def without_spaces(text: bytes | Raw) -> bytes:
    """A JSON value without the spaces and line breaks between its tokens. `text` is valid JSON."""
    if len(memoryview(text)) <= PIECE_BYTES:
        return msgspec.json.format(bytes(text), indent=-1)
    return b"".join(_without_spaces(memoryview(text)))


def _without_spaces(whole: memoryview) -> Iterator[bytes]:
    is_inside, start = False, 0
    while start < len(whole):
        end = _cut(whole, start)
        piece = bytes(whole[start:end])
        found = np.frombuffer(piece.replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
        quotes = found == _QUOTE
        outside = (np.cumsum(quotes, dtype=np.int32) & 1) == is_inside
        is_inside ^= bool(np.count_nonzero(quotes) & 1)
        spaces = outside & _IS_SPACE[found]
        yield np.frombuffer(piece, np.uint8)[~spaces].tobytes() if spaces.any() else piece
        start = end


def _marks(text: bytes | Raw, kept: bytes) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int32]]]:
    """Of each piece the bytes `kept`, of those outside of strings, and how many arrays and objects are open after each.
    Pieces without any are left out."""
    whole, level, is_inside, start = memoryview(text), 0, False, 0
    while start < len(whole):
        end = _cut(whole, start)
        # The pair first: what is left before a quote is then a backslash of its own.
        escaped = bytes(whole[start:end]).replace(b"\\\\", b"").replace(b'\\"', b"")
        found = np.frombuffer(escaped.translate(None, _OTHERS[kept]), np.uint8)
        quotes = found == _QUOTE
        outside = (np.cumsum(quotes, dtype=np.int32) & 1) == is_inside
        is_inside ^= bool(np.count_nonzero(quotes) & 1)
        marks = found[outside]
        if len(marks):
            levels = level + np.cumsum(_STEP[marks], dtype=np.int32)
            level = int(levels[-1])
            yield marks, levels
        start = end


def _cut(text: memoryview, start: int) -> int:
    """The end of a piece: not between a backslash and what it escapes."""
    end = min(start + PIECE_BYTES, len(text))
    before = end
    while before > start and text[before - 1] == _BACKSLASH:
        before -= 1
    return end if (end - before) % 2 == 0 or end == len(text) else end - 1
