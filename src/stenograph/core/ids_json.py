"""Ids as JSON text, in fragments that join. Pure."""

from array import array
from collections.abc import Iterable, Iterator

import msgspec

PIECE_IDS = 8192
MOST_FRAGMENTS = 16


def encode_ids(ids: "array[int]") -> bytes:
    """Ids with commas between them, without brackets: fragments, joined by `join_ids`, are a fragment again."""
    return msgspec.json.encode(ids.tolist())[1:-1]


def pieces_of(ids: "array[int]") -> Iterator["array[int]"]:
    """Ids in pieces that are each written in half a millisecond, for callers that must not hold the loop for longer.

    Writing holds the GIL, so a thread is no place for it: the loop would wait for the GIL at each of its own calls.
    """
    return (ids[start : start + PIECE_IDS] for start in range(0, len(ids), PIECE_IDS))


def merged_fragments(fragments: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The same text in few fragments. Where there are many, each becomes more than twice as long as the next: what
    grows at its end is copied a logarithm of times in all, not once each time."""
    if len(fragments) <= MOST_FRAGMENTS:
        return fragments
    kept: list[bytes] = []
    for fragment in fragments:
        kept.append(fragment)
        while len(kept) > 1 and 2 * len(kept[-1]) >= len(kept[-2]):
            last = kept.pop()
            kept[-1] = join_ids((kept[-1], last))
    return tuple(kept)


def join_ids(fragments: Iterable[bytes]) -> bytes:
    """One fragment of several, of which some may be empty; of any JSON values, not of ids alone."""
    return b",".join([fragment for fragment in fragments if fragment])


def with_commas(fragments: Iterable[bytes]) -> list[bytes]:
    """The parts that one fragment of several is made of, commas included."""
    parts: list[bytes] = []
    for fragment in fragments:
        if fragment:
            parts += (b",", fragment) if parts else (fragment,)
    return parts
