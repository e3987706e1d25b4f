"""The custody of a sample: the session and turns it is made of, and a chain of digests over them. Pure.

A turn's digest covers its data for a trainer, its place, its session, and the digest of the turn before it: so the
digest of a line's last turn stands for the whole line. It is made of values, not of a store's rows: a session in memory
has the same, an upgrade of the store does not change it, and it is computed when samples are asked for, not at a chat.
Source of the names: docs/samples.md.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import TypedDict

from stenograph.core.json_types import Count, Hex32
from stenograph.export.lines import LinePart
from stenograph.trajectory.turn import Node

CUSTODY = "custody"
"""The key of a sample's metadata."""

_PLACE = struct.Struct("<QQ")
_LENGTH = struct.Struct("<q")
_ABSENT = _LENGTH.pack(-1)
_IS_LITTLE = sys.byteorder == "little"


class Custody(TypedDict):
    """A sample's session; the digest of each of its turns, in hex; and the node ids of its trained turns."""

    session_id: Hex32
    digests: Sequence[str]
    trained: Sequence[Count]


class DigestChain:
    """The digests of a session's turns; each is computed once."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self._known: dict[int, bytes] = {}

    def __repr__(self) -> str:
        return f"<DigestChain of {self.session_id}, {len(self._known)} turns>"

    def digest(self, node: Node) -> bytes:
        """The digest of a turn, 32 bytes. Those of the turns before it are computed first, without recursion."""
        missing: list[Node] = []
        at: Node | None = node
        while at is not None and at.id not in self._known:
            missing.append(at)
            at = at.parent
        for one in reversed(missing):
            before = b"" if one.parent is None else self._known[one.parent.id]
            self._known[one.id] = _digest(before, self.session_id, one)
        return self._known[node.id]

    def custody(self, parts: Sequence[LinePart], owned: frozenset[int]) -> Custody:
        """The custody of a sample made of these parts. It trains the turns `owned`, by node id."""
        return {
            "session_id": self.session_id,
            "digests": [self.digest(part.node).hex() for part in parts],
            "trained": [part.node.id for part in parts if part.node.id in owned and part.num_sampled],
        }


def _digest(before: bytes, session_id: str, node: Node) -> bytes:
    turn, sampled = node.turn, node.turn.sampled
    pieces: list[bytes | array[int] | array[float]] = [before, session_id.encode()]
    pieces.append(_PLACE.pack(node.id, turn.num_trimmed))
    for field in (
        sampled.logprobs_kind.encode(),
        turn.new_prompt_ids,
        sampled.ids,
        sampled.logprobs,
        sampled.tempered_logprobs,
        sampled.sampling_logprobs,
    ):
        pieces += (_ABSENT,) if field is None else (_LENGTH.pack(memoryview(field).nbytes), field)
    for span in sampled.weights:
        version = span.version.encode("utf-8", "surrogatepass")
        pieces += (_LENGTH.pack(len(version)), version, _PLACE.pack(span.start, span.end))
    for one in turn.media:
        pieces += (_PLACE.pack(one.position, len(one.ids)), bytes.fromhex(one.ref.sha256), one.ids)
    return hashlib.sha256(b"".join(pieces if _IS_LITTLE else map(_little, pieces))).digest()


def _little(piece: "bytes | array[int] | array[float]") -> bytes:
    """The bytes of a piece on a machine that is not little-endian."""
    if isinstance(piece, bytes):
        return piece
    swapped = piece[:]
    swapped.byteswap()
    return swapped.tobytes()
