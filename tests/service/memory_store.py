"""Sessions in a dictionary: the contract of a store in a page, for tests and to compare other stores with."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import msgspec

from stenograph.core.errors import StorageUnavailable
from stenograph.core.messages import MediaItem
from stenograph.core.types import SessionId
from stenograph.store.base import (
    NO_SUMS,
    Done,
    Ended,
    MediaStore,
    StoredRow,
    StoredSession,
    StoredSummary,
    StoreStats,
    Sums,
    Tail,
)
from stenograph.store.codec.rows import COMMIT, HEAD_BYTES, OPENED, Totals, row_body, row_digest
from stenograph.store.folder import keep_private


@dataclass(slots=True, kw_only=True)
class _HeldRows:
    number: int
    ttl_s: float | None
    at: float
    key: str | None
    rows: list[StoredRow] = field(default_factory=list[StoredRow])
    media: dict[str, MediaItem] = field(default_factory=dict[str, MediaItem])


class MemoryStore:
    """A store that survives nothing. `refuse` is raised, and told, instead of every write while it is set."""

    def __init__(self) -> None:
        self.refuse: StorageUnavailable | None = None
        self._sessions: dict[SessionId, _HeldRows] = {}
        self._num_created = 0
        self._sums = Counter[str]()
        self._stats: StoreStats = StoreStats()

    def __repr__(self) -> str:
        return f"<MemoryStore of {len(self._sessions)} sessions>"

    is_shared = False

    @property
    def media(self) -> MediaStore:
        return self

    async def put(self, session_id: SessionId, items: Sequence[MediaItem]) -> None:
        self._check()
        if (held := self._sessions.get(session_id)) is not None:
            held.media.update({item.ref.sha256: item for item in items if item.ref.sha256 not in held.media})

    async def get(self, session_id: SessionId, sha256: str) -> MediaItem | None:
        held = self._sessions.get(session_id)
        return None if held is None else held.media.get(sha256)

    @property
    def failure(self) -> StorageUnavailable | None:
        return None if self.refuse is None or self.refuse.is_full else self.refuse

    @property
    def stats(self) -> StoreStats:
        return self._stats

    async def create(
        self, session_id: SessionId, payload: bytes, *, at: float, ttl_s: float | None, key: str | None = None
    ) -> Tail:
        self._check()
        self._num_created += 1
        body = row_body(OPENED, Totals(), payload)
        digest = row_digest(b"", session_id, 0, body)
        held = _HeldRows(number=self._num_created, ttl_s=ttl_s, at=at, key=key)
        held.rows.append(StoredRow(seq=0, body=body, digest=digest))
        self._sessions[session_id] = held
        return Tail(session_id, held.number, seq=0, digest=digest, totals=Totals())

    def append(self, tail: Tail, payload: bytes, *, adds: Totals, at: float, done: Done, kind: int = COMMIT) -> None:
        refusal = self.refuse
        if refusal is None:
            tail.seq, tail.totals = tail.seq + 1, tail.totals.after(kind, tail.seq + 1, adds)
            body = row_body(kind, tail.totals, payload)
            tail.digest = row_digest(tail.digest, tail.session_id, tail.seq, body)
            held = self._sessions[tail.session_id]
            held.at = at
            held.rows.append(StoredRow(seq=tail.seq, body=body, digest=tail.digest))
            stats = self._stats
            self._stats = replace(stats, num_rows=stats.num_rows + 1, num_groups=stats.num_groups + 1)
        asyncio.get_running_loop().call_soon(done, refusal)

    async def take(self, session_id: SessionId) -> StoredSession | None:
        return await self.load(session_id)

    def check_owned(self, tail: Tail) -> None:
        """Nobody else can have it."""

    async def load(self, session_id: SessionId) -> StoredSession | None:
        held = self._sessions.get(session_id)
        if held is None:
            return None
        return StoredSession(session_id=session_id, number=held.number, at=held.at, rows=tuple(held.rows))

    async def find(self, key: str) -> StoredSession | None:
        found = [(id_, held) for id_, held in self._sessions.items() if held.key == key]
        if not found:
            return None
        id_, held = found[-1]
        return StoredSession(session_id=id_, number=held.number, at=held.at, rows=held.rows[:1])

    async def delete(self, session_id: SessionId, adds: Sums = NO_SUMS) -> bool:
        if self.failure is not None:
            raise self.failure
        if is_there := session_id in self._sessions:
            self.discard(session_id, adds)
        return is_there

    def discard(self, session_id: SessionId, adds: Sums = NO_SUMS) -> None:
        if self._sessions.pop(session_id, None) is not None:
            self._sums.update(adds)

    async def ended(self) -> Ended:
        return Ended(dict(self._sums), set(self._sessions))

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        if after is not None and after not in self._sessions:
            return []
        first = 0 if after is None else self._sessions[after].number
        later = ((id_, held) for id_, held in self._sessions.items() if held.number > first)
        return [_summary(id_, held) for id_, held in islice(later, limit)]

    async def expired(self, *, now: float, limit: int) -> Sequence[SessionId]:
        idle = (id_ for id_, held in self._sessions.items() if held.ttl_s is not None and held.at + held.ttl_s <= now)
        return list(islice(idle, limit))

    async def backup(self, path: Path) -> int:
        content = msgspec.msgpack.encode({id_: [row.body for row in held.rows] for id_, held in self._sessions.items()})
        keep_private(path)
        return await asyncio.to_thread(path.write_bytes, content)

    async def aclose(self) -> None:
        """Nothing is waiting."""

    def _check(self) -> None:
        if self.refuse is not None:
            raise self.refuse


def _summary(session_id: SessionId, held: _HeldRows) -> StoredSummary:
    last = held.rows[-1]
    outcome_seq = Totals.of(last.body).outcome_seq
    return StoredSummary(
        session_id=session_id,
        number=held.number,
        opened=held.rows[0],
        last_head=last.body[:HEAD_BYTES],
        last_seq=last.seq,
        at=held.at,
        outcome=held.rows[outcome_seq] if outcome_seq else None,
    )
