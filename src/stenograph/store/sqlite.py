"""Sessions in an SQLite file: one thread to write and to read, one statement for each group of rows.

Owns the thread. The loop gathers rows while the thread writes those before them, hands them over together and goes on;
the thread writes a group by one statement, and tells the loop of all of it at once. Numbers and digests of rows are
settled on the thread, when they are written: a failed row leaves no gap, and nothing behind it depends on it.
"""

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from stenograph.core.clock import Clock, SystemClock
from stenograph.core.errors import StenographError, StorageUnavailable
from stenograph.core.loaded import entry
from stenograph.core.types import SessionId
from stenograph.store import queries
from stenograph.store.base import NO_SUMS, Done, Ended, MediaStore, StoredSession, StoredSummary, StoreStats, Sums, Tail
from stenograph.store.codec.rows import COMMIT, OPENED, Totals, row_body, row_digest
from stenograph.store.database import Connect, Database, FileConnection
from stenograph.store.folder import DataFolder
from stenograph.store.groups import MAX_GROUP_ROWS, NewSession, RowAppend, RowGroup, statements
from stenograph.store.settings import Durability

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_PERIOD_S = 1.0
"""Time after which the thread looks whether the file is still in its place. Not at each write: a look lets go of the
GIL, and to get it back beside a busy loop takes up to 5 ms."""

GATHER_S = 0.005
"""The least time from the end of a group to the next, where several sessions write: a sync costs as much CPU for one
row as for many. One client's turns follow one another and do not wait for it."""

SYNC_AFTER_S = 0.5
"""With `interval`, the time from a write to the start of its sync: the sync, and the group or the read before it, have
the rest of the second at risk in a loss of power."""


class _FileJob(Generic[T]):
    """Any other job of the thread: it has the file to itself meanwhile."""

    def __init__(self, work: Callable[[Database], T], future: "asyncio.Future[T]") -> None:
        self.work = work
        self._future = future
        self.answer: T | BaseException | None = None

    def tell(self) -> None:
        if self._future.done():  # whoever waited has left
            return
        if isinstance(self.answer, BaseException):
            self._future.set_exception(self.answer)
        else:
            self._future.set_result(self.answer)  # type: ignore[arg-type]  # it has run


_Deletion = tuple[SessionId, Sums, "asyncio.Future[bool]"]


class _Deletions(_FileJob[set[SessionId]]):
    """Sessions deleted together, each with its waiter."""

    def __init__(self, waiting: "Sequence[_Deletion]", store: "SqliteStore") -> None:
        self._waiting = waiting
        sums_of = {session_id: adds for session_id, adds, _ in reversed(waiting)}  # of the first deletion of each
        super().__init__(partial(store.delete_on_thread, sums_of), store.unheard())

    def tell(self) -> None:
        there = set(self.answer) if isinstance(self.answer, set) else set[SessionId]()
        for session_id, _, future in self._waiting:
            if future.done():
                continue
            if isinstance(self.answer, BaseException):
                future.set_exception(self.answer)
            else:
                future.set_result(session_id in there)
                there.discard(session_id)


_Job = RowAppend | _FileJob[object]
_Handed = list[RowAppend] | _FileJob[object] | None
"""None: the end."""


def sync_log(path: Path) -> None:
    """Sync a log. Raises OSError; FileNotFoundError if it has been moved into the file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


class SqliteStore:
    """A store in a folder. Make it with `open`; use it on the loop running then."""

    def __init__(
        self,
        database: Database,
        folder: DataFolder,
        *,
        durability: Durability,
        on_failed: Callable[[StorageUnavailable], None],
        number: int = 0,
        clock: Clock,
        sync: Callable[[Path], None],
    ) -> None:
        self._clock = clock
        self._sync_log = sync
        self._database = database
        self._folder = folder
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Handed] = queue.SimpleQueue()
        self._gathered: list[RowAppend] = []
        """Rows for the thread, not handed over yet."""
        self._hand_over_at: asyncio.Handle | None = None
        self._num_handed = 0
        """Lists of rows handed over whose end has not been told."""
        self._failure: StorageUnavailable | None = None
        self._num_rows = self._num_groups = self._num_bytes = self._num_full = self._num_failed = 0
        self._write_s = 0.0
        self._last_tail: Tail | None = None
        self._last_end_s = float("-inf")
        self._log = None if durability is Durability.COMMIT else Path(f"{folder.file(number)}-wal")
        self._unsynced_since: float | None = None
        self._looked_at = time.monotonic()
        self._is_closed = False
        self._deletions: list[_Deletion] = []
        """Sessions deleted in this event-loop iteration."""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls,
        folder: DataFolder,
        *,
        durability: Durability = Durability.COMMIT,
        connect: Connect = FileConnection,
        on_failed: Callable[[StorageUnavailable], None] = lambda failure: None,
        number: int = 0,
        clock: Clock | None = None,
        sync: Callable[[Path], None] = sync_log,
    ) -> "SqliteStore":
        """Open or make a file, by its number, of a folder held by this process. Raises StartupError.

        `on_failed` is called on the loop when the store has failed for good. `clock` says when the log is to be synced
        with `interval`, and `sync` does it, on the store's thread.
        """
        folder.reserve()
        database = await asyncio.to_thread(Database, folder.file(number), durability=durability, connect=connect)
        made = partial(cls, database, folder, durability=durability, on_failed=on_failed, number=number)
        return made(clock=clock or SystemClock(), sync=sync)

    def __repr__(self) -> str:
        return f"<SqliteStore in {self._folder!r}, failed={self._failure is not None}>"

    is_shared = False

    @property
    def media(self) -> MediaStore:
        return cast("MediaStore", entry("stenograph.store.media:FileMedia")(self))

    @property
    def failure(self) -> StorageUnavailable | None:
        return self._failure

    @property
    def stats(self) -> StoreStats:
        return StoreStats(
            num_rows=self._num_rows,
            num_groups=self._num_groups,
            num_bytes=self._num_bytes,
            num_full=self._num_full,
            num_failed=self._num_failed,
            write_s=self._write_s,
        )

    def append(self, tail: Tail, payload: bytes, *, adds: Totals, at: float, done: Done, kind: int = COMMIT) -> None:
        if self._is_closed:
            self._loop.call_soon(done, _closed())
            return
        self._gathered.append(RowAppend(tail, kind, payload, adds, at, done))
        if self._hand_over_at is None and not self._num_handed:
            self._hand_over_soon()

    def _hand_over_soon(self) -> None:
        """Hand the rows over together with the others of this event-loop iteration, or after a while, if another
        session has just written one."""
        left_s = self._last_end_s + GATHER_S - time.monotonic()
        if left_s > 0 and self._gathered[0].tail is not self._last_tail:
            self._hand_over_at = self._loop.call_later(left_s, self._hand_over)
        else:
            self._hand_over_at = self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if self._hand_over_at is not None:
            self._hand_over_at.cancel()
            self._hand_over_at = None
        rows, self._gathered = self._gathered, []
        for start in range(0, len(rows), MAX_GROUP_ROWS):
            self._num_handed += 1
            self._jobs.put(rows[start : start + MAX_GROUP_ROWS])

    def _told(self, jobs: Sequence[_Job], num_handed: int) -> None:
        """Tell each job of its end, and hand over what was gathered meanwhile."""
        _tell_all(jobs)
        self._num_handed -= num_handed
        if self._gathered and self._hand_over_at is None and not self._num_handed:
            self._hand_over_soon()

    async def create(
        self, session_id: SessionId, payload: bytes, *, at: float, ttl_s: float | None, key: str | None = None
    ) -> Tail:
        body = row_body(OPENED, Totals(), payload)
        digest = row_digest(b"", session_id, 0, body)

        def create(database: Database) -> Tail:
            number = database.last_number + 1
            new = NewSession(
                number=number, session_id=session_id, ttl_s=ttl_s, at=at, body=body, digest=digest, key=key
            )
            database.insert_session(new)
            database.last_number = number
            return Tail(session_id, number, seq=0, digest=digest, totals=Totals())

        return await self.call(create)

    async def take(self, session_id: SessionId) -> StoredSession | None:
        return await self.load(session_id)

    def check_owned(self, tail: Tail) -> None:
        """Nobody else can have it."""

    async def load(self, session_id: SessionId) -> StoredSession | None:
        return await self.call(lambda database: queries.read(database, session_id))

    async def find(self, key: str) -> StoredSession | None:
        return await self.call(lambda database: queries.find(database, key))

    async def delete(self, session_id: SessionId, adds: Sums = NO_SUMS) -> bool:
        if self._is_closed:
            raise _closed()
        future: asyncio.Future[bool] = self._loop.create_future()
        self._delete_soon(session_id, adds, future)
        return await future

    def discard(self, session_id: SessionId, adds: Sums = NO_SUMS) -> None:
        self._delete_soon(session_id, adds, self.unheard())

    async def ended(self) -> Ended:
        return await self.call(Database.ended)

    def _delete_soon(self, session_id: SessionId, adds: Sums, future: "asyncio.Future[bool]") -> None:
        """Delete a session together with the others of this event-loop iteration."""
        if not self._deletions:
            self._loop.call_soon(self._delete_all)
        self._deletions.append((session_id, adds, future))

    def _delete_all(self) -> None:
        waiting, self._deletions = self._deletions, []
        if waiting:
            self._put_urgent(_Deletions(waiting, self))  # type: ignore[arg-type]  # its answers go to their own futures

    def unheard(self) -> "asyncio.Future[Any]":
        """A future without a waiter."""
        future: asyncio.Future[Any] = self._loop.create_future()
        future.cancel()
        return future

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        return await self.call(lambda database: queries.page(database, limit=limit, after=after))

    async def expired(self, *, now: float, limit: int) -> Sequence[SessionId]:
        return await self.call(lambda database: queries.expired(database, now=now, limit=limit))

    async def backup(self, path: Path) -> int:
        def copy(database: Database) -> int:
            database.backup(path, self._run_meanwhile)
            return path.stat().st_size

        return await self.call(copy)

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._delete_all()
            self._put_urgent(None)
        await asyncio.wait({self._ended})
        self._thread.join()

    async def call(self, work: Callable[[Database], T]) -> T:
        """Do other work with the file, on its thread, in turn. Raises StorageUnavailable, and as `work`."""
        if self._is_closed:
            raise _closed()
        future: asyncio.Future[T] = self._loop.create_future()
        self._put_urgent(_FileJob(work, future))  # type: ignore[arg-type]  # its answer goes to its own future
        return await future

    def _put_urgent(self, job: "_FileJob[object] | None") -> None:
        self._hand_over()
        self._jobs.put(job)

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            is_open = True
            while is_open:
                is_open = self._run_waiting(waits=True)
            self._sync()
        finally:
            try:
                self._database.close()
            finally:
                self._tell(self._ended.set_result, None)

    def _run_waiting(self, *, waits: bool) -> bool:
        """Do the waiting jobs, and tell the loop of them; False at the end. `waits`: for the first one."""
        jobs, num_handed, is_end = self._taken(waits=waits)
        if jobs:
            began = time.perf_counter()
            self._look()
            for group in statements(jobs):
                self._do(group)
                self._sync_if_due()
            self._write_s += time.perf_counter() - began
            self._tell(partial(self._told, jobs), num_handed)
            self._move_log()
        self._sync_if_due()
        return not is_end

    def _run_meanwhile(self) -> None:
        """Do the waiting jobs, between two parts of a backup."""
        self._run_waiting(waits=False)

    def _taken(self, *, waits: bool) -> tuple[list[_Job], int, bool]:
        """The jobs that wait, how many lists of rows they came in, and whether they are the last."""
        jobs: list[_Job] = []
        num_handed = 0
        while len(jobs) < MAX_GROUP_ROWS:
            try:
                handed = self._jobs.get(waits and not jobs, self._patience_s())
            except queue.Empty:
                break
            if isinstance(handed, list):
                num_handed += 1
                jobs += handed
            elif handed is not None:
                jobs.append(handed)
            elif waits:
                return jobs, num_handed, True
            else:
                self._jobs.put(None)  # a backup is on its way: the end comes after it
                break
        return jobs, num_handed, False

    def _patience_s(self) -> float | None:
        """Time to wait for a job: until written rows have to be synced."""
        if self._unsynced_since is None:
            return None
        return max(0.0, self._unsynced_since + SYNC_AFTER_S - self._clock.monotonic())

    def _sync_if_due(self) -> None:
        if self._patience_s() == 0.0:
            self._sync()

    def _do(self, group: "list[RowAppend] | _FileJob[object]") -> None:
        if self._log is not None and self._unsynced_since is None:  # it may write something that has to be synced
            self._unsynced_since = self._clock.monotonic()
        if isinstance(group, list):
            self._write(group)
            return
        if self._failure is not None:
            group.answer = self._failure
            return
        try:
            group.answer = group.work(self._database)
        except Exception as error:  # noqa: BLE001 -- raised where it was asked for: the thread serves others
            group.answer = error
            self._note(error)

    def _write(self, jobs: list[RowAppend]) -> None:
        """Write a group's rows in one statement, and move the ends of their sessions if the write succeeds."""
        error: StenographError | None = self._failure
        if error is None:
            pending = RowGroup.of(jobs)
            try:
                self._database.insert_rows(pending.rows)
            except Exception as failed:  # noqa: BLE001 -- whoever waits is told, whatever it is
                error = failed if isinstance(failed, StorageUnavailable) else _unexpected(failed)
                self._note(error)
            else:
                self._written(pending)
        if error is not None:
            for job in jobs:
                job.error = error

    def _written(self, group: RowGroup) -> None:
        group.move_ends()
        self._num_rows += len(group.rows)
        self._num_groups += 1
        self._num_bytes += sum(len(row.body) for row in group.rows)
        self._last_tail = next(iter(group.ends.values())).tail if len(group.ends) == 1 else None
        self._last_end_s = time.monotonic()

    def delete_on_thread(self, sums_of: Mapping[SessionId, Sums], database: Database) -> set[SessionId]:
        """Delete also when the disk is full: with the room kept for it. The sessions found."""
        try:
            return database.delete(sums_of)
        except StorageUnavailable as error:
            if not error.is_full:
                raise
        self._folder.give_up_reserve()
        there = database.delete(sums_of)
        database.move_log(truncates=True)
        self._folder.reserve()
        return there

    def _look(self) -> None:
        """Check now and then whether written rows can be found again."""
        if self._failure is None and time.monotonic() - self._looked_at >= LOOK_PERIOD_S:
            self._looked_at = time.monotonic()
            try:
                self._database.check_in_place()
            except StorageUnavailable as error:
                self._note(error)

    def _move_log(self) -> None:
        """Move a long log into the file, after telling the waiters; a failure is one of the disk."""
        if self._failure is None and self._database.is_log_long:
            try:
                self._database.move_log()
            except StorageUnavailable as error:
                self._note(error)

    def _sync(self) -> None:
        """Sync the log of `interval`: SQLite itself does so only when it moves the log into the file."""
        self._unsynced_since = None
        if self._log is None or self._failure is not None:
            return
        try:
            self._sync_log(self._log)
        except FileNotFoundError:
            return  # it has been moved into the file
        except OSError as error:
            self._note(StorageUnavailable(f"The store's log cannot be synced: {error}", is_full=False))

    def _note(self, error: Exception) -> None:
        """Count a failure; the first permanent one is kept, and the loop is told."""
        if not isinstance(error, StorageUnavailable):
            return
        if error.is_full:
            self._num_full += 1
            return
        self._num_failed += 1
        if self._failure is None:
            self._failure = error
            self._tell(self._on_failed, error)

    def _tell(self, what: Callable[[T], object], about: T) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, about)


def _closed() -> StorageUnavailable:
    return StorageUnavailable("The store is closed: the server is shutting down.", is_full=False)


def _unexpected(error: Exception) -> StorageUnavailable:
    problem = f"The store cannot write any more ({error!r}); the server is about to end."
    made = StorageUnavailable(problem, is_full=False)
    made.__cause__ = error
    return made


def _tell_all(jobs: Sequence[_Job]) -> None:
    """Tell each of its end; if one of them fails at it, the others hear of theirs."""
    for job in jobs:
        try:
            job.tell()
        except Exception:
            log.exception("what followed a write has failed")
