"""Ids as JSON text, in fragments that join. Pure."""

from array import array
from collections.abc import Iterable

import msgspec


def encode_ids(ids: "array[int]") -> bytes:
    """Ids with commas between them, without brackets: fragments, joined by `join_ids`, are a fragment again."""
    return msgspec.json.encode(ids.tolist())[1:-1]


def join_ids(fragments: Iterable[bytes]) -> bytes:
    """One fragment of several, of which some may be empty; of any JSON values, not of ids alone."""
    return b",".join(fragment for fragment in fragments if fragment)
