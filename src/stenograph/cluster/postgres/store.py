"""A store of sessions in a database shared by several nodes. Only the owner of a session adds to it.

Owns the writer's task and the requests to it; both run on the loop, because the work is the database's. A
group of rows is one statement, with each session's epoch and end. Where the database does not answer, the same
statement is asked again: it does nothing twice, and reports rows already there. This goes on until the
lease is over, or is given up because of it. Then nobody knows whether the rows are there: their waiters are told
so, the sessions leave memory, and their next owner reads the rows from the database.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from stenograph.cluster.postgres.lease import OwnerLease
from stenograph.cluster.postgres.owner import AWAY, OwnerMemory, SharedOwner, pause
from stenograph.cluster.postgres.shared_rows import (
    Claimed,
    DatabaseAway,
    Deletion,
    EndMove,
    HeldBy,
    OwnerName,
    SharedRows,
)
from stenograph.core.clock import Clock
from stenograph.core.errors import SessionElsewhere, StenographError, StorageUnavailable
from stenograph.core.loaded import entry
from stenograph.core.types import SessionId
from stenograph.store.base import NO_SUMS, Done, Ended, MediaStore, StoredSession, StoredSummary, StoreStats, Sums, Tail
from stenograph.store.codec.rows import COMMIT, HEAD_BYTES, OPENED, Totals, row_body, row_digest
from stenograph.store.groups import NewSession, RowAppend, RowEnd, RowGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GROUP_ROWS = 256
MAX_GROUP_BYTES = 8 * 2**20
"""Rows and bytes of one statement; a single row may be larger."""

RETRY_S = 0.05
"""Time between two attempts at an unanswered statement."""

ANSWER_LEASES = 3
"""Times of a lease within which an answer must come, though the lease is renewed: the tables may be locked."""

UNKNOWN = (
    "The database of --store did not answer before this node's lease ended: the turn may have been kept or not. Send"
    " the same request again, with its Idempotency-Key if it had one."
)
MOVED = "Another node has taken the session over, and the turn was not kept. Send the same request again."


class OwnedTail(Tail):
    """The end of a session's rows, for this node to add to, in one epoch, while it has this lease."""

    __slots__ = ("epoch", "lease")

    def __init__(self, tail: Tail, *, epoch: int, lease: OwnerLease) -> None:
        super().__init__(tail.session_id, tail.number, seq=tail.seq, digest=tail.digest, totals=tail.totals)
        self.epoch = epoch
        self.lease = lease


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSession(StoredSession):
    """A session's rows, for this node to add to."""

    epoch: int
    lease: OwnerLease

    def tail(self) -> Tail:
        # `super()` without arguments does not work in a dataclass with slots.
        return OwnedTail(StoredSession.tail(self), epoch=self.epoch, lease=self.lease)


class PostgresStore:
    """A node's part of a shared database. Make it with `open`.

    `on_lost` is called on the loop when every session in memory may be another's by now, `on_moved` when one is.
    """

    def __init__(
        self, rows: SharedRows, clock: Clock, *, url: str, lease_s: float, memory: OwnerMemory | None = None
    ) -> None:
        """`url` is the name of this process as an owner; `memory`: as `SharedOwner` has it."""
        self._rows = rows
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.owner = SharedOwner(rows, clock, name=url, lease_s=lease_s, on_lost=self._lost, memory=memory)
        self.on_lost: Callable[[], None] = lambda: None
        self.on_moved: Callable[[SessionId], None] = lambda session_id: None
        self._waiting: deque[RowAppend] = deque()
        self._writing: Sequence[RowAppend] = ()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._asked: set[asyncio.Task[Any]] = set()
        self._stats: StoreStats = StoreStats()
        self._is_closed = False
        self.num_taken = 0
        """Sessions taken from another owner."""
        self.num_refused = 0
        """Rows refused by the database because their session had moved."""
        self._living = self._loop.create_task(self.owner.live(), name="lease")
        self._writer = self._loop.create_task(self._write_all(), name="store")

    @classmethod
    async def open(
        cls, rows: SharedRows, clock: Clock, *, url: str, lease_s: float, memory: OwnerMemory | None = None
    ) -> "PostgresStore":
        """A process's part, once it has its first lease."""
        store = cls(rows, clock, url=url, lease_s=lease_s, memory=memory)
        await store.owner.joined.wait()
        return store

    def __repr__(self) -> str:
        return f"<PostgresStore of {self.owner!r}>"

    @property
    def failure(self) -> StorageUnavailable | None:
        if self.owner.held() is not None:
            return None
        return StorageUnavailable(AWAY, is_full=False, retry_after_s=self.owner.retry_s)

    is_shared = True

    @property
    def media(self) -> MediaStore:
        return cast("MediaStore", entry("stenograph.cluster.postgres.media:SharedMedia")(self, self._rows))

    @property
    def stats(self) -> StoreStats:
        return self._stats

    def append(self, tail: Tail, payload: bytes, *, adds: Totals, at: float, done: Done, kind: int = COMMIT) -> None:
        self._waiting.append(RowAppend(tail, kind, payload, adds, at, done))
        self._wake.set()

    async def create(
        self, session_id: SessionId, payload: bytes, *, at: float, ttl_s: float | None, key: str | None = None
    ) -> Tail:
        lease, body = self.owner.needed(), row_body(OPENED, Totals(), payload)
        digest = row_digest(b"", session_id, 0, body)
        new = NewSession(number=0, session_id=session_id, ttl_s=ttl_s, at=at, body=body, digest=digest, key=key)
        number = await self.ask(lambda: self._created(new, lease), lease)
        if number is None or self.owner.held() is not lease:
            raise self._unknown()
        return OwnedTail(Tail(session_id, number, seq=0, digest=digest, totals=Totals()), epoch=1, lease=lease)

    async def take(self, session_id: SessionId) -> StoredSession | None:
        lease = self.owner.needed()
        claimed = await self._claimed(session_id, lease)
        if claimed is None:
            return None
        stored = await self.ask(lambda: self._rows.read(session_id), lease)
        if self.owner.held() is not lease:
            raise self._unknown()
        if stored is None:
            return None
        return OwnedSession(
            session_id=stored.session_id,
            number=stored.number,
            at=stored.at,
            idle_s=stored.idle_s,
            rows=stored.rows,
            epoch=claimed.epoch,
            lease=lease,
        )

    async def _created(self, new: NewSession, lease: OwnerLease) -> int | None:
        """As `SharedRows.create`. One with a key is tried once: another node may find it, and its turns may go on,
        before this one has its answer. Raises StorageUnavailable then; the client asks again by its key."""
        try:
            return await self._rows.create(new, lease.owner)
        except DatabaseAway as error:
            if new.key is None:
                raise
            raise self._unknown() from error

    def check_owned(self, tail: Tail) -> None:
        lease = self.owner.needed()
        if not isinstance(tail, OwnedTail) or tail.lease is not lease:
            raise self._not_kept()

    async def load(self, session_id: SessionId) -> StoredSession | None:
        await self._rows_settled(session_id)
        return await self.ask(lambda: self._rows.read(session_id))

    async def find(self, key: str) -> StoredSession | None:
        return await self.ask(lambda: self._rows.find(key))

    async def holder(self, session_id: SessionId) -> HeldBy | None:
        """Another node with the session; None if there is none. Raises StorageUnavailable."""
        lease = self.owner.needed()
        return await self.ask(lambda: self._rows.holder(session_id, lease.owner), lease)

    async def owners(self) -> Sequence[str]:
        """The names of all owners with running leases. Raises StorageUnavailable."""
        return await self.ask(self._rows.owners)

    async def delete(self, session_id: SessionId, adds: Sums = NO_SUMS) -> bool:
        lease = self.owner.needed()
        claimed = await self._claimed(session_id, lease)
        if claimed is None:
            return False
        deletion = await self.ask(lambda: self._rows.delete(session_id, lease.owner, adds), lease)
        if deletion is Deletion.NOT_OWNED:
            raise StorageUnavailable(MOVED, is_full=False, retry_after_s=1.0)
        return True  # absent: an attempt that was not answered has deleted it

    async def ended(self) -> Ended:
        return await self.ask(self._rows.ended)

    def discard(self, session_id: SessionId, adds: Sums = NO_SUMS) -> None:
        async def delete() -> None:
            with suppress(StenographError):  # without a lease it is left to its owner, or to the end of its time
                await self.delete(session_id, adds)

        self._own(delete())

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        return await self.ask(lambda: self._rows.page(limit=limit, after=after))

    async def expired(self, *, now: float, limit: int) -> Sequence[SessionId]:
        lease = self.owner.needed()
        return await self.ask(lambda: self._rows.expired(limit=limit, owner=lease.owner), lease)

    async def backup(self, path: Path) -> int:
        raise OSError(f"sessions are in PostgreSQL, not in {path.name}: back the database up, for instance by pg_dump")

    async def aclose(self) -> None:
        while self._asked:
            await asyncio.wait(self._asked)
        self._is_closed = True
        self._wake.set()
        await asyncio.wait({self._writer})
        self._living.cancel()
        await asyncio.wait({self._living})
        await self.owner.leave()
        await self._rows.aclose()

    async def _claimed(self, session_id: SessionId, lease: OwnerLease) -> Claimed | None:
        """The session as this owner's; None if there is none. Raises SessionElsewhere."""
        await self._rows_settled(session_id)
        claimed = await self.ask(lambda: self._rows.claim(session_id, lease.owner), lease)
        if isinstance(claimed, HeldBy):
            raise held_elsewhere(session_id, claimed)
        self.num_taken += claimed is not None and claimed.is_new
        return claimed

    async def _rows_settled(self, session_id: SessionId) -> None:
        """Wait for a session's rows on their way: a later read has them."""
        while any(job.tail.session_id == session_id for job in (*self._writing, *self._waiting)):
            await self._settled.wait()

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, question: Callable[[], Coroutine[Any, Any, T]], lease: OwnerLease | None = None) -> T:
        """Ask until there is an answer, or no time for it. A cancelled wait takes nothing back."""
        if self._is_closed:
            raise StorageUnavailable("The store is closed: the server is shutting down.", is_full=False)
        lease = lease or self.owner.needed()
        task = self._own(self._answered(question, lease))
        await asyncio.wait({task})
        try:
            return task.result()
        except DatabaseAway:
            raise StorageUnavailable(AWAY, is_full=False, retry_after_s=self.owner.retry_s) from None

    def _own(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = self._loop.create_task(work, name="ask-the-database")
        self._asked.add(task)
        task.add_done_callback(self._unasked)
        return task

    def _unasked(self, task: "asyncio.Task[Any]") -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it, or has left

    async def _answered(self, question: Callable[[], Awaitable[T]], lease: OwnerLease) -> T:
        """Ask until there is an answer. Raises DatabaseAway when the lease is over, or was not enough for one."""
        until = self._clock.monotonic() + ANSWER_LEASES * lease.lease_s
        while True:
            try:
                return await question()
            except DatabaseAway:
                await pause(self._clock, RETRY_S)
                if self.owner.held() is not lease or self._clock.monotonic() >= until:
                    raise

    # --- writing -----------------------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        """Write the waiting rows, a group at a time, until the store is closed and nothing waits."""
        while True:
            while not self._waiting:
                if self._is_closed:
                    return
                self._wake.clear()
                await self._wake.wait()
            began = self._clock.monotonic()
            self._writing = self._taken()
            await self._write(self._writing)
            self._writing = ()
            self._tell_settled()
            self._stats = replace(self._stats, write_s=self._stats.write_s + self._clock.monotonic() - began)

    def _taken(self) -> list[RowAppend]:
        jobs: list[RowAppend] = []
        num_bytes = 0
        while self._waiting and len(jobs) < MAX_GROUP_ROWS and num_bytes < MAX_GROUP_BYTES:
            job = self._waiting.popleft()
            jobs.append(job)
            num_bytes += len(job.payload)
        return jobs

    async def _write(self, jobs: Sequence[RowAppend]) -> None:
        lease = self.owner.held()
        mine = [job for job in jobs if isinstance(job.tail, OwnedTail) and job.tail.lease is lease]
        if len(mine) < len(jobs):
            self._tell([job for job in jobs if job not in mine], self._not_kept())
        self._writing = mine
        if lease is None or not mine:
            return
        group = RowGroup.of(mine)
        try:
            kept = await self._answered(lambda: self._rows.append(_moves(group), group.rows), lease)
        except DatabaseAway:
            self._note(is_full=False)
            self.owner.give_up(lease, "rows could not be written")  # which tells whoever waits for them
            return
        except StorageUnavailable as error:
            self._note(is_full=error.is_full)
            if self.owner.held() is lease:  # else they have been told
                self._tell(mine, error)
            return
        if self.owner.held() is lease:
            self._written(mine, group, kept)

    def _written(self, jobs: Sequence[RowAppend], group: RowGroup, kept: set[int]) -> None:
        """Report the rows now there, and let go of the sessions with missing rows."""
        stats, num_bytes = self._stats, sum(len(row.body) for row in group.rows if row.session in kept)
        num_kept = sum(row.session in kept for row in group.rows)
        self._stats = replace(
            stats,
            num_rows=stats.num_rows + num_kept,
            num_groups=stats.num_groups + 1,
            num_bytes=stats.num_bytes + num_bytes,
        )
        moved = {end.tail.session_id for end in group.ends.values() if end.tail.number not in kept}
        for end in group.ends.values():
            if end.tail.number in kept:
                end.move()
        for job in jobs:
            self._tell([job], self._moved() if job.tail.session_id in moved else None)
        self.num_refused += len(group.rows) - num_kept
        for session_id in moved:
            log.warning("session %s was taken over by another node, and leaves memory", session_id)
            self.on_moved(session_id)

    def _lost(self) -> None:
        """The lease is over: rows on their way may be there or not, waiting rows are not."""
        writing, waiting = self._writing, list(self._waiting)
        self._writing = ()
        self._waiting.clear()
        self._tell(writing, self._unknown())
        self._tell(waiting, self._not_kept())
        self._tell_settled()
        self.on_lost()

    def _tell_settled(self) -> None:
        """Rows are on their way no more: waiters for this look again."""
        self._settled.set()
        self._settled = asyncio.Event()

    def _tell(self, jobs: Sequence[RowAppend], error: StenographError | None) -> None:
        """Tell each of its end; if one of them fails at it, the others still hear of theirs."""
        for job in jobs:
            job.error = error
            try:
                job.tell()
            except Exception:
                log.exception("what followed a write has failed")

    def _note(self, *, is_full: bool) -> None:
        stats = self._stats
        if is_full:
            self._stats = replace(stats, num_full=stats.num_full + 1)
        else:
            self._stats = replace(stats, num_failed=stats.num_failed + 1)

    def _unknown(self) -> StorageUnavailable:
        return StorageUnavailable(UNKNOWN, is_full=False, retry_after_s=self.owner.retry_s)

    def _not_kept(self) -> StorageUnavailable:
        return StorageUnavailable(AWAY, is_full=False, retry_after_s=self.owner.retry_s)

    def _moved(self) -> StorageUnavailable:
        return StorageUnavailable(MOVED, is_full=False, retry_after_s=1.0)


def held_elsewhere(session_id: str, held: HeldBy) -> SessionElsewhere:
    """The refusal of another process's session: where its server is, and when the lease runs out."""
    server = OwnerName.of(held.name).server
    return SessionElsewhere(session_id, url=server, retry_after_s=max(0.1, held.remaining_s))


def _moves(group: RowGroup) -> list[EndMove]:
    """The ends of a group's sessions: as they are, and as they are to be."""
    return [_move(end) for end in group.ends.values()]


def _move(end: RowEnd) -> EndMove:
    tail = end.tail
    assert isinstance(tail, OwnedTail), "only an owner adds rows"
    head = row_body(COMMIT, end.totals, b"")
    assert len(head) == HEAD_BYTES
    return EndMove(
        session=tail.number,
        epoch=tail.epoch,
        before=tail.seq,
        seq=end.seq,
        digest=end.digest,
        totals=end.totals,
        head=head,
        has_turn=end.has_turn,
    )
