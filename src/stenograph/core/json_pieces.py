"""A JSON value as text, in pieces, each written in about a millisecond. Pure.

Writing JSON holds the GIL wherever it is done, so a thread is no place for a large value: it is written on the loop, a
piece at a time (offload/pool.py). The pieces, joined, are msgspec's text of the same value.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

PIECE_VALUES = 8192
"""Numbers written at once: half a millisecond for ids, one for logprobs."""

PIECE_CHARS = 64 * 1024
"""Characters of a text written at once."""

PIECE_BYTES = 32 * 1024
PIECE_FRAGMENTS = 256
"""Fragments are joined up to this size or number: each piece costs an event-loop iteration and a send."""

_PLAIN = frozenset({int, float, bool, type(None)})
"""Types written at once in any number up to PIECE_VALUES."""

_FEW_CHARS = 1024
_FEW_VALUES = 16
_FEW_KEYS = PIECE_VALUES // _FEW_VALUES


T = TypeVar("T")


class Written:
    """A value already in text, or written by a caller able to cut it. msgspec must not know its type."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces


def json_whole(value: object) -> bytes:
    """The text of `json_pieces`, written at once: for small values."""
    return _WHOLE.encode(value)


def json_pieces(value: object) -> Iterator[bytes]:
    """Write any value that msgspec writes, and besides arrays, numpy arrays, iterators (lists, written as they are
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
    """A list, each chunk of it written at once."""
    before = b"["
    for chunk in chunks:
        if chunk:
            yield before + msgspec.json.encode(chunk)[1:-1]
            before = b","
    yield b"[]" if before == b"[" else b"]"


def as_list(values: Iterator[T]) -> Sequence[T]:
    """An iterator, typed as the list written of it by `json_pieces`. It is to be written, once, not looked at."""
    return cast("Sequence[T]", values)


def as_chunked_list(chunks: Iterable[Sequence[T]]) -> Sequence[T]:
    """The same of `list_pieces`."""
    return cast("Sequence[T]", Written(list_pieces(chunks)))


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
    if len(value) <= _FEW_KEYS and all(map(_is_small, value.values())):
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


def _plain(value: object) -> object:
    """The form of a value unknown to msgspec, for it to write."""
    match value:
        case Written():
            return msgspec.Raw(b"".join(value.pieces))
        case array():
            return cast("array[int]", value).tolist()
        case np.ndarray():
            return cast("NDArray[np.generic]", value).tolist()
        case Iterator():
            return list(cast("Iterator[object]", value))
        case _:
            raise NotImplementedError(type(value).__name__)


_WHOLE = msgspec.json.Encoder(enc_hook=_plain)


def _is_small(value: object) -> bool:
    if type(value) is list:
        few = cast("list[object]", value)
        if len(few) > _FEW_VALUES:
            return False
        return _PLAIN.issuperset(kinds := set(map(type, few))) or (
            kinds == {str} and max(map(len, cast("list[str]", few))) <= _FEW_CHARS // _FEW_VALUES
        )
    if type(value) is dict:
        inner = cast("dict[object, object]", value)
        return len(inner) <= _FEW_VALUES and all(_is_short(one) for pair in inner.items() for one in pair)
    return type(value) in _PLAIN or (isinstance(value, str) and len(value) <= _FEW_CHARS)


def _is_short(value: object) -> bool:
    """Whether a value is small where there are several beside it."""
    return type(value) in _PLAIN or (isinstance(value, str) and len(value) <= _FEW_CHARS // _FEW_VALUES)
