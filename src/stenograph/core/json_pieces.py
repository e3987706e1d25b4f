"""A JSON value as text, in pieces of which each is written in about a millisecond. Pure.

Writing JSON holds the GIL wherever it is done, so a thread is no place for what is large: it is written on the loop, a
piece at a time (offload/loop_share.py). The pieces, joined, are what msgspec writes of the same value.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

PIECE_VALUES = 8192
"""Numbers that are written at once: half a millisecond for ids, one for logprobs."""

PIECE_CHARS = 64 * 1024
"""Characters of a text that are written at once."""

PIECE_BYTES = 32 * 1024
PIECE_FRAGMENTS = 256
"""Fragments are joined until they are that long, or that many: each piece costs a pass of the loop and a send."""

_PLAIN = frozenset({int, float, bool, type(None)})
"""Types of which any number up to PIECE_VALUES is written at once."""

_FEW_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Written:
    """A value that is text already, or is written by whoever knows how to cut it."""

    pieces: Iterable[bytes]


def json_pieces(value: object) -> Iterator[bytes]:
    """Write a value: what msgspec writes, and besides arrays, numpy arrays, iterators (lists, written as they are
    taken from) and `Written`. A fragment is small, or large enough to be a piece; `joined` makes pieces of them.
    """
    match value:
        case Written():
            yield from value.pieces
        case str() if len(value) > PIECE_CHARS:
            yield from _text_pieces(value)
        case dict():
            yield from _object_pieces(cast("dict[object, object]", value))
        case list() | tuple():
            yield from _list_pieces(cast("Sequence[object]", value))
        case array():
            yield from _array_pieces(cast("array[int]", value))
        case np.ndarray():
            yield from _ndarray_pieces(cast("NDArray[np.generic]", value))
        case Iterator():
            yield from _element_pieces(cast("Iterator[object]", value))
        case _:
            yield msgspec.json.encode(value)


def list_pieces(chunks: Iterable[Sequence[object]]) -> Iterator[bytes]:
    """A list of which each chunk is written at once."""
    before = b"["
    for chunk in chunks:
        if chunk:
            yield before + msgspec.json.encode(chunk)[1:-1]
            before = b","
    yield b"[]" if before == b"[" else b"]"


def joined(fragments: Iterable[bytes]) -> Iterator[bytes]:
    """The same text in pieces, each of at least PIECE_BYTES or PIECE_FRAGMENTS fragments, but for the last."""
    waiting: list[bytes] = []
    size = 0
    for fragment in fragments:
        waiting.append(fragment)
        size += len(fragment)
        if size >= PIECE_BYTES or len(waiting) >= PIECE_FRAGMENTS:
            yield b"".join(waiting)
            waiting.clear()
            size = 0
    if size:
        yield b"".join(waiting)


def _text_pieces(text: str) -> Iterator[bytes]:
    yield b'"'
    for start in range(0, len(text), PIECE_CHARS):
        yield msgspec.json.encode(text[start : start + PIECE_CHARS])[1:-1]
    yield b'"'


def _object_pieces(value: dict[object, object]) -> Iterator[bytes]:
    if len(value) <= PIECE_VALUES and all(map(_is_small, value.values())):
        yield msgspec.json.encode(value)
        return
    before = b"{"
    for key, inner in value.items():
        yield before + msgspec.json.encode({key: None})[1:-5]  # keys are written as JSON strings, whatever they are
        yield from json_pieces(inner)
        before = b","
    yield b"}"


def _list_pieces(values: Sequence[object]) -> Iterator[bytes]:
    before = b"["
    for start in range(0, len(values), PIECE_VALUES):
        chunk = values[start : start + PIECE_VALUES]
        if all(type(value) in _PLAIN for value in chunk):
            yield before + msgspec.json.encode(chunk)[1:-1]
            before = b","
            continue
        for value in chunk:
            yield before
            yield from json_pieces(value)
            before = b","
    yield b"[]" if before == b"[" else b"]"


def _element_pieces(values: Iterator[object]) -> Iterator[bytes]:
    before = b"["
    for value in values:
        yield before
        yield from json_pieces(value)
        before = b","
    yield b"[]" if before == b"[" else b"]"


def _array_pieces(values: "array[int] | array[float]") -> Iterator[bytes]:
    starts = range(0, len(values), PIECE_VALUES)
    return list_pieces(values[start : start + PIECE_VALUES].tolist() for start in starts)


def _ndarray_pieces(values: NDArray[np.generic]) -> Iterator[bytes]:
    """An array of any shape, so many rows at once as have PIECE_VALUES numbers."""
    num_rows = max(1, PIECE_VALUES * max(1, len(values)) // max(1, values.size))
    return list_pieces(values[start : start + num_rows].tolist() for start in range(0, len(values), num_rows))


def _is_small(value: object) -> bool:
    return type(value) in _PLAIN or (isinstance(value, str) and len(value) <= _FEW_CHARS)
