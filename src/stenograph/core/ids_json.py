"""Ids as JSON text, in fragments for joining. Pure.

The text of each id is in a table. A fragment is put together from it without a Python object for each id: a third of a
JSON encoder's time for a list of them.
"""

import contextlib
from array import array
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.types import Prompt

PIECE_IDS = 2**15

_NUM_WRITTEN = 2**18
"""Ids with a text in the table: no vocabulary of a served model has more. The others are written one by one."""
_WIDTH = 8
"""Bytes of a row: an id of at most six digits, its comma, and zeros, never found in a text of ids."""
_FEW_IDS = 64
"""Fewer are written sooner one by one."""


def _written_ids() -> NDArray[np.uint64]:
    """Each id's text as a row of `_WIDTH` bytes: one number [_NUM_WRITTEN]."""
    rows = np.zeros((_NUM_WRITTEN, _WIDTH), np.uint8)
    first = 0
    for num_digits in range(1, len(str(_NUM_WRITTEN - 1)) + 1):
        rest = np.arange(first, min(10**num_digits, _NUM_WRITTEN), dtype=np.uint32)
        chosen = slice(first, first + len(rest))
        rows[chosen, num_digits] = ord(",")
        for column in reversed(range(num_digits)):
            rest, digit = np.divmod(rest, 10)
            rows[chosen, column] = digit + ord("0")
        first = chosen.stop
    return rows.view(np.uint64).ravel()


_WRITTEN = _written_ids()


def encode_ids(ids: "array[int]") -> bytes:
    """Ids with commas between them, without brackets: fragments, joined by `join_ids`, are a fragment again."""
    if len(ids) >= _FEW_IDS:
        with contextlib.suppress(IndexError):  # one that is not in the table
            return _WRITTEN.take(np.frombuffer(ids, np.uint32)).tobytes().translate(None, b"\0")[:-1]
    return msgspec.json.encode(ids.tolist())[1:-1]


def prompt_json(prompt: Prompt) -> list[bytes]:
    """All ids of a prompt as JSON without brackets, in parts, commas included."""
    if prompt.json_fragments is None:
        return [encode_ids(prompt.ids)]
    parts: list[bytes] = []
    for fragment in filter(None, prompt.json_fragments):
        parts += (b",", fragment) if parts else (fragment,)
    return parts


def pieces_of(ids: "array[int]") -> Iterator["array[int]"]:
    """Ids in pieces, each written in a quarter of a millisecond, for callers that must not hold the loop for longer.

    Writing holds the GIL, so a thread is no place for it: the loop would wait for the GIL at each of its own calls.
    """
    return (ids[start : start + PIECE_IDS] for start in range(0, len(ids), PIECE_IDS))


def join_ids(fragments: Iterable[bytes]) -> bytes:
    """One fragment of several, some possibly empty; of any JSON values, not of ids alone."""
    return b",".join([fragment for fragment in fragments if fragment])
