"""A row as it lies in a store: head, payload, digest. Pure. Knows nothing of what a payload says."""

import hashlib
import struct
from dataclasses import dataclass

VERSION = 1
"""Version of this format. A row of a later one is damage to a server that does not know it."""

OPENED, COMMIT = 0, 1
"""Kinds of rows."""

_HEAD = struct.Struct("<BBxxIQQQQ")
HEAD_BYTES = _HEAD.size
DIGEST_BYTES = 32
_PLACE = struct.Struct("<Q")
_HASHED_BYTES = 2047
"""hashlib lets go of the GIL for more, and whoever lets go of it waits up to 5 ms for a busy loop."""


class RowDamaged(Exception):
    """A row is not what was written. The message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over a session after a row, or what a commit adds to them. `num_strands` counts those that have a key."""

    num_strands: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_discarded_turns: int = 0
    num_discarded_tokens: int = 0

    @staticmethod
    def of(head: bytes) -> "Totals":
        """The totals in a row's head. Raises RowDamaged for a format that is not known."""
        return _head(head)[1]

    def plus(self, other: "Totals") -> "Totals":
        """The sum, field by field."""
        return Totals(
            num_strands=self.num_strands + other.num_strands,
            num_turns=self.num_turns + other.num_turns,
            num_tokens=self.num_tokens + other.num_tokens,
            num_discarded_turns=self.num_discarded_turns + other.num_discarded_turns,
            num_discarded_tokens=self.num_discarded_tokens + other.num_discarded_tokens,
        )


def row_body(kind: int, totals: Totals, payload: bytes) -> bytes:
    """A row's head and payload."""
    sums = (totals.num_turns, totals.num_tokens, totals.num_discarded_turns, totals.num_discarded_tokens)
    return _HEAD.pack(VERSION, kind, totals.num_strands, *sums) + payload


def row_digest(before: bytes, session_id: str, seq: int, body: bytes) -> bytes:
    """The digest of row number `seq` of a session, whose row before it has the digest `before` (the first: none)."""
    found = hashlib.sha256(before)
    found.update(session_id.encode() + _PLACE.pack(seq))
    view = memoryview(body)
    for start in range(0, len(body), _HASHED_BYTES):
        found.update(view[start : start + _HASHED_BYTES])
    return found.digest()


def row_payload(body: bytes, kind: int) -> memoryview:
    """The payload of a row of that kind. Raises RowDamaged for another, or for a format that is not known."""
    if _head(body)[0] != kind:
        raise RowDamaged(f"it is a row of kind {body[1]}, not {kind}")
    return memoryview(body)[HEAD_BYTES:]


def _head(body: bytes) -> tuple[int, Totals]:
    if len(body) < HEAD_BYTES:
        raise RowDamaged(f"it has {len(body)} bytes, and its head alone {HEAD_BYTES}")
    version, kind, strands, turns, tokens, gone_turns, gone_tokens = _HEAD.unpack_from(body)
    if version != VERSION:
        raise RowDamaged(f"it is written in format {version}, and this server knows {VERSION}")
    totals = Totals(
        num_strands=strands,
        num_turns=turns,
        num_tokens=tokens,
        num_discarded_turns=gone_turns,
        num_discarded_tokens=gone_tokens,
    )
    return kind, totals
