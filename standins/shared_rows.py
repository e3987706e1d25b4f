"""The database that nodes share, in memory: the same answers as `cluster/postgres/server.py`, for simulations.

`SharedTables` is the database: each method is one statement, done whole. `MemoryRows` is a node's way to it, on which
statements and answers can be held up and lost.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from stenograph.cluster.postgres.shared_rows import Claimed, Deletion, EndMove, HeldBy
from stenograph.core.messages import MediaRef
from stenograph.core.types import SessionId
from stenograph.store.base import Ended, StoredRow, StoredSession, StoredSummary, Sums
from stenograph.store.codec.rows import HEAD_BYTES
from stenograph.store.groups import NewRow, NewSession

T = TypeVar("T")


@dataclass(slots=True)
class _Owner:
    name: str
    until: float


@dataclass(slots=True, kw_only=True)
class _SharedSession:
    number: int
    new: NewSession
    owner: int
    epoch: int = 1
    seq: int = 0
    at: float
    head: bytes
    outcome: int = 0
    rows: dict[int, StoredRow] = field(default_factory=dict[int, StoredRow])
    media: dict[str, tuple[MediaRef, bytes]] = field(default_factory=dict[str, tuple[MediaRef, bytes]])


class SharedTables:
    """Owners, sessions and rows. `now` is the database's clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._owners: dict[int, _Owner] = {}
        self._sessions: dict[SessionId, _SharedSession] = {}
        self.sums = Counter[str]()
        """The sums of deleted sessions."""
        self._num_owners = 0
        self._num_sessions = 0
        self.num_holders = 0
        """Questions for the holder of a session."""

    def __repr__(self) -> str:
        return f"<SharedTables {len(self._owners)} owners, {len(self._sessions)} sessions>"

    def epoch(self, session_id: SessionId) -> int:
        """The epoch of a session that is there."""
        return self._sessions[session_id].epoch

    def move(self, session_id: SessionId, owner: int) -> SessionId:
        """Give a session to an owner, as a takeover does."""
        held = self._sessions[session_id]
        held.owner, held.epoch = owner, held.epoch + 1
        return session_id

    def join(self, name: str, lease_s: float, instead_of: int | None) -> int:
        if instead_of is not None:
            self._owners.pop(instead_of, None)
        self._num_owners += 1
        self._owners[self._num_owners] = _Owner(name, self._now() + lease_s)
        return self._num_owners

    def renew(self, owner: int, lease_s: float) -> bool:
        found, now = self._owners.get(owner), self._now()
        if found is None or found.until <= now:
            return False
        found.until = now + lease_s
        return True

    def leave(self, owner: int) -> None:
        self._owners.pop(owner, None)

    def owners(self) -> list[str]:
        return [owner.name for owner in self._owners.values() if owner.until > self._now()]

    def create(self, new: NewSession, owner: int) -> int | None:
        held = self._sessions.get(new.session_id)
        if held is None and owner in self._owners:
            self._num_sessions += 1
            held = _SharedSession(
                number=self._num_sessions, new=new, owner=owner, at=self._now(), head=new.body[:HEAD_BYTES]
            )
            self._sessions[new.session_id] = held
        if held is None or held.new.digest != new.digest or held.owner != owner or held.seq:
            return None
        return held.number

    def append(self, moves: Sequence[EndMove], rows: Sequence[NewRow]) -> set[int]:
        moved: set[int] = set()
        by_number = {held.number: held for held in self._sessions.values()}
        for move in moves:
            held = by_number.get(move.session)
            if held is None or held.epoch != move.epoch or held.seq != move.before:
                continue
            held.seq, held.head, held.outcome = move.seq, move.head, move.totals.outcome_seq
            held.at = self._now() if move.has_turn else held.at
            for row in rows:
                if row.session == move.session:
                    held.rows[row.seq] = StoredRow(seq=row.seq, body=row.body, digest=row.digest)
            moved.add(move.session)
        return moved

    def already(self, moves: Sequence[EndMove]) -> set[int]:
        by_number = {held.number: held for held in self._sessions.values()}
        return {
            move.session
            for move in moves
            if (held := by_number.get(move.session)) is not None
            and (row := held.rows.get(move.seq)) is not None
            and row.digest == move.digest
        }

    def claim(self, session_id: SessionId, owner: int) -> Claimed | HeldBy | None:
        held, now = self._sessions.get(session_id), self._now()
        if held is None:
            return None
        if held.owner == owner:
            return Claimed(session=held.number, epoch=held.epoch, is_new=False)
        other, own = self._owners.get(held.owner), self._owners.get(owner)
        if other is not None and other.until > now:
            return HeldBy(owner=held.owner, name=other.name, remaining_s=other.until - now)
        self._owners.pop(held.owner, None)
        if own is None or own.until <= now:
            return HeldBy(owner=0, name="", remaining_s=0.0)
        held.owner, held.epoch = owner, held.epoch + 1
        return Claimed(session=held.number, epoch=held.epoch, is_new=True)

    def holder(self, session_id: SessionId, owner: int) -> HeldBy | None:
        self.num_holders += 1
        held, now = self._sessions.get(session_id), self._now()
        if held is None or held.owner == owner:
            return None
        other = self._owners.get(held.owner)
        if other is None or other.until <= now:
            return None
        return HeldBy(owner=held.owner, name=other.name, remaining_s=other.until - now)

    def read(self, session_id: SessionId) -> StoredSession | None:
        held = self._sessions.get(session_id)
        if held is None:
            return None
        rows = [_opening(held), *(held.rows[seq] for seq in sorted(held.rows))]
        idle_s = self._now() - held.at
        return StoredSession(session_id=session_id, number=held.number, at=held.at, idle_s=idle_s, rows=rows)

    def find(self, key: str) -> StoredSession | None:
        found = [held for held in self._sessions.values() if held.new.key == key]
        if not found:
            return None
        last = found[-1]
        return StoredSession(session_id=last.new.session_id, number=last.number, at=last.new.at, rows=[_opening(last)])

    def delete(self, session_id: SessionId, owner: int, adds: Sums) -> Deletion:
        held = self._sessions.get(session_id)
        if held is None:
            return Deletion.ABSENT
        if held.owner != owner:
            return Deletion.NOT_OWNED
        del self._sessions[session_id]
        self.sums.update(adds)
        return Deletion.DELETED

    @property
    def there(self) -> set[str]:
        """The ids of all sessions."""
        return set(self._sessions)

    def media_of(self, session_id: SessionId) -> dict[str, tuple[MediaRef, bytes]]:
        held = self._sessions.get(session_id)
        return {} if held is None else held.media

    def page(self, limit: int, after: SessionId | None) -> list[StoredSummary]:
        if after is not None and after not in self._sessions:
            return []
        first = 0 if after is None else self._sessions[after].number
        later = [held for held in self._sessions.values() if held.number > first]
        return [
            StoredSummary(
                session_id=held.new.session_id,
                number=held.number,
                opened=_opening(held),
                last_head=held.head,
                last_seq=held.seq,
                at=held.at,
                outcome=held.rows[held.outcome] if held.outcome else None,
            )
            for held in later[:limit]
        ]

    def expired(self, limit: int, owner: int) -> list[SessionId]:
        def is_free(held: _SharedSession) -> bool:
            other = self._owners.get(held.owner)
            return held.owner == owner or other is None or other.until <= self._now()

        return [
            id_
            for id_, held in self._sessions.items()
            if held.new.ttl_s is not None and held.at + held.new.ttl_s <= self._now() and is_free(held)
        ][:limit]


class Way(Protocol):
    """The way of a statement to the database, and of its answer back. Raises DatabaseAway."""

    def __call__(self, statement: Callable[[], T]) -> Awaitable[T]: ...


async def at_once(statement: Callable[[], T]) -> T:
    """A way on which nothing is lost."""
    return statement()


class MemoryRows:
    """One node's way to the tables."""

    def __init__(self, tables: SharedTables, way: Way = at_once) -> None:
        self._tables = tables
        self._way = way

    def __repr__(self) -> str:
        return f"<MemoryRows of {self._tables!r}>"

    async def join(self, name: str, *, lease_s: float, instead_of: int | None) -> int:
        return await self._way(lambda: self._tables.join(name, lease_s, instead_of))

    async def renew(self, owner: int, *, lease_s: float) -> bool:
        return await self._way(lambda: self._tables.renew(owner, lease_s))

    async def leave(self, owner: int) -> None:
        await self._way(lambda: self._tables.leave(owner))

    async def owners(self) -> Sequence[str]:
        return await self._way(self._tables.owners)

    async def create(self, new: NewSession, owner: int) -> int | None:
        return await self._way(lambda: self._tables.create(new, owner))

    async def append(self, moves: Sequence[EndMove], rows: Sequence[NewRow]) -> set[int]:
        kept = await self._way(lambda: self._tables.append(moves, rows))
        if left := [move for move in moves if move.session not in kept]:
            kept = kept | await self._way(lambda: self._tables.already(left))
        return kept

    async def claim(self, session_id: SessionId, owner: int) -> Claimed | HeldBy | None:
        return await self._way(lambda: self._tables.claim(session_id, owner))

    async def holder(self, session_id: SessionId, owner: int) -> HeldBy | None:
        return await self._way(lambda: self._tables.holder(session_id, owner))

    async def read(self, session_id: SessionId) -> StoredSession | None:
        return await self._way(lambda: self._tables.read(session_id))

    async def find(self, key: str) -> StoredSession | None:
        return await self._way(lambda: self._tables.find(key))

    async def delete(self, session_id: SessionId, owner: int, adds: Sums) -> Deletion:
        return await self._way(lambda: self._tables.delete(session_id, owner, adds))

    async def ended(self) -> Ended:
        return await self._way(lambda: Ended(dict(self._tables.sums), self._tables.there))

    async def media_of(self, session_id: SessionId) -> Collection[str]:
        return await self._way(lambda: set(self._tables.media_of(session_id)))

    async def put_media(self, session_id: SessionId, ref: MediaRef, body: bytes) -> None:
        await self._way(lambda: self._tables.media_of(session_id).setdefault(ref.sha256, (ref, body)))

    async def get_media(self, session_id: SessionId, sha256: str) -> tuple[MediaRef, bytes] | None:
        return await self._way(lambda: self._tables.media_of(session_id).get(sha256))

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        return await self._way(lambda: self._tables.page(limit, after))

    async def expired(self, *, limit: int, owner: int) -> Sequence[SessionId]:
        return await self._way(lambda: self._tables.expired(limit, owner))

    async def aclose(self) -> None:
        """Nothing is open."""


def _opening(held: _SharedSession) -> StoredRow:
    return StoredRow(seq=0, body=held.new.body, digest=held.new.digest)
