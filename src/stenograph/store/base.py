"""The interface of a store of sessions, and its contract, which tests/store_laws.py checks.

A store keeps rows of bytes: a session's opening, then one row for each commit, outcome and
annotation, in order. It knows
neither the content of a row (store/codec) nor the meaning of a session. Its methods are called on the event loop; the
work is done elsewhere.

The contract:
- `create`, `append` and `delete` are durable when they report their end, as far as the store's durability goes, and
  whole or absent if the process ends before. A cancelled wait takes nothing back: it only means unknown.
- Rows of one session are written in the order of `append`, and `done` is called in that order, on the loop, once each.
- A failed row is absent now, unless the store has failed for good: then the next start tells. It harms no other row:
  the number and the digest of a row are settled as it is written.
- After a full disk all goes on once there is room, and `delete` works meanwhile. Any other failure to write a file is
  for good: `failure` is set, and nothing is done any more. A database comes back after an outage.
- `take` is for going on with a session, `load` for reading alone. One caller at a time goes on with a session: the one
  with its `Tail`. Where several processes share a store, another may go on with it meanwhile: `check_owned` tells, and
  a row appended then is refused.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from stenograph.core.errors import SessionDamaged, StenographError, StorageUnavailable
from stenograph.core.messages import MediaItem
from stenograph.core.types import SessionId
from stenograph.store.codec.rows import (
    COMMIT,
    DIGEST_BYTES,
    ENTRY,
    OPENED,
    OUTCOME,
    SCORES,
    RowDamaged,
    Totals,
    row_digest,
    row_payload,
)

FULL_RETRY_S = 10.0
"""Time for a client to wait while the disk is full."""

Sums = Mapping[str, int]
"""Numbers by key, as what is left of deleted sessions."""

NO_SUMS: Sums = {}


class Ended(NamedTuple):
    """The rest of the deleted sessions, and the ids of the others."""

    sums: Sums
    there: Set[str]


Done = Callable[[StenographError | None], None]
"""Called on the loop when a row is durable (None), or with the reason for its absence."""


class Tail:
    """The end of a session's rows, where the next one goes. Changed by the store alone, on its own thread."""

    __slots__ = ("digest", "number", "seq", "session_id", "totals")

    def __init__(self, session_id: SessionId, number: int, *, seq: int, digest: bytes, totals: Totals) -> None:
        self.session_id = session_id
        self.number = number
        self.seq = seq
        self.digest = digest
        self.totals = totals

    def __repr__(self) -> str:
        return f"<Tail of {self.session_id} at row {self.seq}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """One row as it was written. The opening is row 0."""

    seq: int
    body: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session's rows, in order, the opening first. Not checked; see `checked_payloads`.

    `at` is when the last was written, in seconds of the epoch; `idle_s` is the time since then by the same clock, None
    if the clock is this machine's.
    """

    session_id: SessionId
    number: int
    at: float
    rows: Sequence[StoredRow]
    idle_s: float | None = None

    def tail(self) -> Tail:
        """Where the next row goes. Raises RowDamaged if the last row has no head."""
        last, totals = self.rows[-1], Totals.of(self.rows[-1].body)
        return Tail(self.session_id, self.number, seq=last.seq, digest=last.digest, totals=totals)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSummary:
    """A session in a list: its opening, its outcome if it has one, and the head of its last row. `at`: as
    `StoredSession` has it."""

    session_id: SessionId
    number: int
    opened: StoredRow
    last_head: bytes
    last_seq: int
    at: float
    outcome: StoredRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts of a store since it was opened: rows, their groups, writes failed for a full disk, other failed writes,
    and the seconds of all groups."""

    num_rows: int = 0
    num_groups: int = 0
    num_bytes: int = 0
    num_full: int = 0
    num_failed: int = 0
    write_s: float = 0.0


class MediaStore(Protocol):
    """Media of sessions. Each content is kept once, by its SHA-256, for as long as a session has it."""

    async def put(self, session_id: SessionId, items: Sequence[MediaItem]) -> None:
        """Keep media of a session, durably; nothing of a session that is gone. Raises StorageUnavailable."""
        ...

    async def get(self, session_id: SessionId, sha256: str) -> MediaItem | None:
        """A medium of a session; None if it has none with this hash. Raises StorageUnavailable."""
        ...


class SessionStore(Protocol):
    """Rows of sessions. The module's docstring is the contract. `is_shared`: other processes may have some of them."""

    is_shared: bool

    @property
    def media(self) -> MediaStore:
        """The media of its sessions; they go with them."""
        ...

    @property
    def stats(self) -> StoreStats:
        """Its counts, as they are now."""
        ...

    @property
    def failure(self) -> StorageUnavailable | None:
        """The failure that stops all work: for good, or until a lost database is back. None while there is none."""
        ...

    async def create(
        self, session_id: SessionId, payload: bytes, *, at: float, ttl_s: float | None, key: str | None = None
    ) -> Tail:
        """Keep a new session, by a `key` too if it has one. Raises StorageUnavailable."""
        ...

    async def find(self, key: str) -> StoredSession | None:
        """The opening of the last session kept by a key; None if there is none. Raises as `take`."""
        ...

    def append(self, tail: Tail, payload: bytes, *, adds: Totals, at: float, done: Done, kind: int = COMMIT) -> None:
        """Write a row behind a session's last. `done` reports its end; nothing is raised."""
        ...

    async def take(self, session_id: SessionId) -> StoredSession | None:
        """The rows of a session, to go on with it; None if there is none.

        Raises SessionDamaged if they cannot be read, StorageUnavailable, or SessionElsewhere if another process has it.
        """
        ...

    def check_owned(self, tail: Tail) -> None:
        """Raise StorageUnavailable if another process may go on with the session by now."""
        ...

    async def load(self, session_id: SessionId) -> StoredSession | None:
        """The rows of a session, to read alone; as `take`."""
        ...

    async def delete(self, session_id: SessionId, adds: Sums = NO_SUMS) -> bool:
        """Forget a session and all its rows, and add to the sums if there was one, both or neither; whether there was
        one. Raises StorageUnavailable."""
        ...

    def discard(self, session_id: SessionId, adds: Sums = NO_SUMS) -> None:
        """Delete a session without waiting for it: for who is being cancelled."""
        ...

    async def ended(self) -> Ended:
        """All that deletions have added, and the sessions there are, both at one moment. Raises StorageUnavailable."""
        ...

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        """Up to `limit` sessions in the order of their creation, those after `after`. Raises StorageUnavailable.

        Empty if there is no session `after`.
        """
        ...

    async def expired(self, *, now: float, limit: int) -> Sequence[SessionId]:
        """Up to `limit` sessions whose last row is older than they may be idle. Raises StorageUnavailable. `now` is of
        this machine's clock, in seconds of the epoch; a shared store goes by its own."""
        ...

    async def backup(self, path: Path) -> int:
        """Write a copy of all durable rows to a new file, while others go on; its bytes. Raises OSError."""
        ...

    async def aclose(self) -> None:
        """Write all waiting rows, and close."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionColumns:
    """The columns of a session outside its digests; its rows say the same. `times` by number of row, 0 the
    opening's."""

    ttl_s: float | None
    key: str | None
    times: Mapping[int, float]


def checked_payloads(stored: StoredSession) -> list[memoryview]:
    """The payloads of a session's rows, opening first, each held to its digest and its place.

    Raises SessionDamaged, naming the first row that differs from the written one.
    """
    payloads: list[memoryview] = []
    before = b""
    for seq, row in enumerate(stored.rows):
        try:
            if row.seq != seq:
                raise RowDamaged(f"row {seq} is missing, row {row.seq} follows")
            if len(row.digest) != DIGEST_BYTES or row_digest(before, stored.session_id, seq, row.body) != row.digest:
                raise RowDamaged("its digest does not fit its bytes and the row before")
            kinds = (OPENED,) if seq == 0 else (COMMIT, OUTCOME, SCORES, ENTRY)
            payloads.append(row_payload(row.body, *kinds))
        except RowDamaged as error:
            raise damaged_at(stored.session_id, row.seq, error) from error
        before = row.digest
    return payloads


def damaged_at(session_id: str, seq: int, error: RowDamaged) -> SessionDamaged:
    """The error of a session for damage in one of its rows."""
    return SessionDamaged(session_id, place="its opening" if seq == 0 else f"row {seq}", problem=str(error))
