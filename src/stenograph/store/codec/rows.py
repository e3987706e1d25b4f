"""A row as it lies in a store: head, payload, digest. Pure. Knows nothing of a payload's content."""

import hashlib
import struct

import msgspec

VERSION = 2
"""Version of this format. A row of a later one is damage to a server that does not know it; rows of 1 have ids and
log-probabilities as int32 and float64 alone, and are read as they are."""

OPENED, COMMIT, OUTCOME, SCORES, ENTRY = 0, 1, 2, 3, 4
"""Kinds of rows."""

_HEAD = struct.Struct("<BBxxIQQQQQ")
HEAD_BYTES = _HEAD.size
DIGEST_BYTES = 32
_PLACE = struct.Struct("<Q")
_HASHED_BYTES = 2047
"""hashlib lets go of the GIL for more, and whoever lets go of it waits up to 5 ms for a busy loop."""


_LONG_BYTES = 256 * 2**10
"""A longer body takes long to hash: others are to have the GIL meanwhile."""


class RowDamaged(Exception):
    """A row differs from the written one. The message says how."""


class Totals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sums over a session after a row, or the additions of a row to them. `num_strands` counts strands with a key.

    `outcome_seq` is the number of the row with the valid outcome, 0 if there is none.
    """

    num_strands: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    num_discarded_turns: int = 0
    num_discarded_tokens: int = 0
    outcome_seq: int = 0

    @staticmethod
    def of(head: bytes) -> "Totals":
        """The totals in a row's head. Raises RowDamaged for an unknown format."""
        return _head(head)[1]

    def after(self, kind: int, seq: int, adds: "Totals") -> "Totals":
        """The totals after row number `seq` of this kind, with its additions."""
        totals = self.plus(adds)
        return msgspec.structs.replace(totals, outcome_seq=seq) if kind == OUTCOME else totals

    def plus(self, other: "Totals") -> "Totals":
        """The sum, field by field; the outcome is this one's."""
        return Totals(
            num_strands=self.num_strands + other.num_strands,
            num_turns=self.num_turns + other.num_turns,
            num_tokens=self.num_tokens + other.num_tokens,
            num_discarded_turns=self.num_discarded_turns + other.num_discarded_turns,
            num_discarded_tokens=self.num_discarded_tokens + other.num_discarded_tokens,
            outcome_seq=self.outcome_seq,
        )


def row_body(kind: int, totals: Totals, payload: bytes) -> bytes:
    """A row's head and payload."""
    sums = (totals.num_turns, totals.num_tokens, totals.num_discarded_turns, totals.num_discarded_tokens)
    return _HEAD.pack(VERSION, kind, totals.num_strands, *sums, totals.outcome_seq) + payload


def row_digest(before: bytes, session_id: str, seq: int, body: bytes) -> bytes:
    """The digest of row number `seq` of a session, after a row with the digest `before` (the first: none)."""
    found = hashlib.sha256(before)
    found.update(session_id.encode() + _PLACE.pack(seq))
    view = memoryview(body)
    step = _HASHED_BYTES if len(body) < _LONG_BYTES else len(body)
    for start in range(0, len(body), step):
        found.update(view[start : start + step])
    return found.digest()


def row_kind(body: bytes) -> int:
    """The kind of a row. Raises RowDamaged for an unknown format."""
    return _head(body)[0]


def row_payload(body: bytes, *kinds: int) -> memoryview:
    """The payload of a row of one of these kinds. Raises RowDamaged for another, or for an unknown format."""
    if row_kind(body) not in kinds:
        raise RowDamaged(f"it is a row of kind {body[1]}, not {' or '.join(map(str, kinds))}")
    return memoryview(body)[HEAD_BYTES:]


def _head(body: bytes) -> tuple[int, Totals]:
    if len(body) < HEAD_BYTES:
        raise RowDamaged(f"it has {len(body)} bytes, and its head alone {HEAD_BYTES}")
    version, kind, strands, turns, tokens, gone_turns, gone_tokens, outcome_seq = _HEAD.unpack_from(body)
    if not 1 <= version <= VERSION:
        raise RowDamaged(f"it is written in format {version}, and this server knows {VERSION}")
    totals = Totals(
        num_strands=strands,
        num_turns=turns,
        num_tokens=tokens,
        num_discarded_turns=gone_turns,
        num_discarded_tokens=gone_tokens,
        outcome_seq=outcome_seq,
    )
    return kind, totals
