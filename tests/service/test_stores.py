"""Every store keeps the contract; the one on disk through full disks, failures, other processes and damage."""

import asyncio
import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from standins.clock import ManualClock
from stenograph.core.errors import SessionDamaged, StartupError, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store import sqlite as sqlite_store
from stenograph.store.base import checked_payloads
from stenograph.store.codec.rows import Totals
from stenograph.store.database import PAGE_BYTES, FileConnection
from stenograph.store.files import open_files
from stenograph.store.folder import LOCK_NAME, RESERVE_NAME, DataFolder, filesystem_of, looked_at
from stenograph.store.settings import Durability
from stenograph.store.sqlite import SqliteStore, sync_log
from tests.store_laws import ONE_TURN, appended, check_store, payloads, session_id

from .memory_store import MemoryStore

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    folder = DataFolder(tmp_path / "data", address="http://here:1")
    yield folder
    folder.close()


@pytest.mark.parametrize("durability", [Durability.COMMIT, Durability.INTERVAL])
async def test_the_store_in_a_file_keeps_the_contract(folder: DataFolder, durability: Durability) -> None:
    await check_store(lambda: SqliteStore.open(folder, durability=durability))


async def test_a_store_of_several_files_keeps_the_contract(folder: DataFolder) -> None:
    await check_store(lambda: open_files(folder, [0, 1, 255], durability=Durability.COMMIT, on_failed=print))


async def test_a_store_of_several_files_has_each_session_in_the_file_that_its_id_names(folder: DataFolder) -> None:
    numbers = [7, 0, 255]
    store = await open_files(folder, numbers, durability=Durability.COMMIT, on_failed=print)
    async with aclosing(store):
        ids = [SessionId(f"{number:02x}{at:030x}") for at in range(3) for number in sorted(numbers)]
        for at, id_ in enumerate(ids):
            tail = await store.create(id_, b"o", at=float(at), ttl_s=1.0, key=f"key {at % 2}")
            await appended(store, tail, b"row")
        listed: list[SessionId] = []
        while page := await store.page(limit=2, after=listed[-1] if listed else None):
            listed += [one.session_id for one in page]
        assert listed == sorted(ids)
        for nobodys in ("08" + "0" * 30, "no id", f"{7:02x}{99:030x}"):
            assert await store.page(limit=9, after=SessionId(nobodys)) == []
            assert await store.load(SessionId(nobodys)) is None
            assert not await store.delete(SessionId(nobodys))
        found = await store.find("key 0")
        assert found is not None
        assert found.session_id == ids[8]
        assert set(await store.expired(now=100.0, limit=99)) == set(ids)
        assert len(await store.expired(now=100.0, limit=4)) == 4
        assert await store.delete(ids[8])
        assert await store.load(ids[8]) is None
        assert store.stats.num_rows == len(ids)
    for number in numbers:
        one = await SqliteStore.open(folder, number=number)
        async with aclosing(one):
            assert all(int(row.session_id[:2], 16) == number for row in await one.page(limit=99, after=None))


async def test_the_store_in_memory_keeps_the_contract() -> None:
    async def one() -> MemoryStore:
        return MemoryStore()

    await check_store(one, survives=False)


# --- the disk fails --------------------------------------------------------------------------------------------------


class Faulty(FileConnection):
    """A connection whose statements a test can make fail, by their numbers from 1."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_run = 0
        self.fails: Callable[[int, str], int | None] = lambda number, sql: None
        self.after = False

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        self.num_run += 1
        code = self.fails(self.num_run, sql)
        if code is None:
            return super().run(sql, parameters)
        if self.after:
            super().run(sql, parameters)
        error = sqlite3.OperationalError(f"injected {code}")
        error.sqlite_errorcode = code
        raise error


class Faults:
    """Makes connections, and keeps the last one."""

    def __init__(self) -> None:
        self.made: Faulty

    def __call__(self, path: Path) -> Faulty:
        self.made = Faulty(path)
        return self.made


async def test_a_full_disk_refuses_turns_deletes_all_the_same_and_goes_on_once_there_is_room(
    folder: DataFolder,
) -> None:
    connect = Faults()
    store = await SqliteStore.open(folder, connect=connect)
    async with aclosing(store):
        large = await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        small = await store.create(session_id(2), b"", at=1.0, ttl_s=None)
        await appended(store, large, b"x" * 200_000)
        connect.made.run("PRAGMA max_page_count = 20")  # SQLite's own full disk
        with pytest.raises(StorageUnavailable, match="is full") as told:
            await appended(store, small, b"y" * 200_000)
        assert (told.value.is_full, told.value.status, told.value.code) == (True, 503, "storage_unavailable")
        assert store.failure is None
        assert small.seq == 0
        assert await store.delete(session_id(1))
        await appended(store, small, b"y" * 200_000)
        assert payloads(await store.load(session_id(2))) == [b"", b"y" * 200_000]
        assert (store.stats.num_full, store.stats.num_failed) == (1, 0)


async def test_a_session_is_deleted_with_the_room_that_was_kept_for_it(folder: DataFolder) -> None:
    connect = Faults()
    store = await SqliteStore.open(folder, connect=connect)
    reserve = folder.path / RESERVE_NAME
    async with aclosing(store):
        await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        had_room: list[bool] = []

        def full(number: int, sql: str) -> int | None:
            if sql.startswith("DELETE FROM rows"):
                had_room.append(not reserve.exists())
                return None if had_room[-1] else sqlite3.SQLITE_FULL
            return None

        connect.made.fails = full
        assert await store.delete(session_id(1))
        assert had_room == [False, True]
        assert await store.load(session_id(1)) is None
    assert reserve.exists()


@pytest.mark.parametrize("took_place", [False, True])
async def test_after_any_other_failure_nothing_more_is_acknowledged_and_the_loop_is_told(
    folder: DataFolder, took_place: bool
) -> None:
    connect = Faults()
    failed: asyncio.Future[StorageUnavailable] = asyncio.get_running_loop().create_future()
    store = await SqliteStore.open(folder, connect=connect, on_failed=failed.set_result)
    async with aclosing(store):
        tail = await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        await appended(store, tail, b"one")
        connect.made.after = took_place
        connect.made.fails = lambda number, sql: sqlite3.SQLITE_IOERR if sql.startswith("INSERT") else None
        with pytest.raises(StorageUnavailable, match="injected") as told:
            await appended(store, tail, b"two")
        assert not told.value.is_full
        assert await failed is told.value
        connect.made.fails = lambda number, sql: None
        for refused in (
            appended(store, tail, b"three"),
            store.create(session_id(2), b"", at=1.0, ttl_s=None),
            store.delete(session_id(1)),
        ):
            with pytest.raises(StorageUnavailable):
                await refused
        assert store.failure is told.value
    again = await SqliteStore.open(folder)
    async with aclosing(again):
        rows = payloads(await again.load(session_id(1)))
    assert rows == ([b"", b"one", b"two"] if took_place else [b"", b"one"]), "what the disk holds is the truth"


async def played(store: SqliteStore) -> list[tuple[int, bytes]]:
    """A few sessions' lives; what was acknowledged, a delete as None's row."""
    acknowledged: list[tuple[int, bytes]] = []
    try:
        for number in range(3):
            tail = await store.create(session_id(number), b"opening", at=1.0, ttl_s=None)
            acknowledged.append((number, b"opening"))
            for row in range(3):
                await appended(store, tail, b"%d" % row)
                acknowledged.append((number, b"%d" % row))
        await store.delete(session_id(0))
        acknowledged.append((0, b"deleted"))
    except StorageUnavailable:
        pass
    return acknowledged


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT])
@pytest.mark.parametrize("took_place", [False, True])
async def test_whichever_statement_fails_nothing_acknowledged_is_lost(
    tmp_path: Path, code: int, took_place: bool
) -> None:
    """One in doubt at most: the statement that failed, which may have taken place."""
    num_hit = 0
    for at in range(1, 200):
        folder, connect = DataFolder(tmp_path / str(at), address=""), Faults()
        store = await SqliteStore.open(folder, connect=connect)
        first, hits = connect.made.num_run, list[str]()

        def fails(number: int, sql: str, hits: list[str] = hits, when: int = first + at) -> int | None:
            if number == when:
                hits.append(sql)
            return code if number == when else None

        connect.made.fails, connect.made.after = fails, took_place
        async with aclosing(store):
            acknowledged = await played(store)
        again = await SqliteStore.open(folder)
        async with aclosing(again):
            found: list[tuple[int, bytes]] = []
            for number in range(3):
                if (stored := await again.load(session_id(number))) is not None:
                    found += [(number, bytes(row)) for row in checked_payloads(stored)]
        folder.close()
        deleted = (0, b"deleted") in acknowledged
        kept = [one for one in acknowledged if not (deleted and one[0] == 0)]
        is_delete_in_doubt = len(acknowledged) == 12 and not deleted and not any(one[0] == 0 for one in found)
        if not is_delete_in_doubt:
            assert found[: len(kept)] == kept, (at, hits)
            assert len(found) <= len(kept) + 1, (at, hits)
        if not hits:
            break
        num_hit += 1
    assert num_hit > 10


# --- who may use a folder --------------------------------------------------------------------------------------------


async def test_a_second_server_on_a_folder_is_refused_with_the_first_one_s_address(folder: DataFolder) -> None:
    with pytest.raises(StartupError, match="held by the server at http://here:1"):
        DataFolder(folder.path, address="http://there:2")
    async with aclosing(await SqliteStore.open(folder)):
        with pytest.raises(StartupError, match="http://here:1"), looked_at(folder.path):
            pass
        (folder.path / LOCK_NAME).rename(folder.path / "other")  # the file is locked by itself, too
        second = DataFolder(folder.path, address="")
        with pytest.raises(StartupError, match="locked"):
            await SqliteStore.open(second)
        second.close()


async def test_no_other_connection_comes_to_the_file_of_a_store_and_the_log_s_index_is_in_no_shared_memory(
    folder: DataFolder, tmp_path: Path
) -> None:
    """SQLite 3.7.0 to 3.51.2 can lose commits if two connections write and move the log: there is one."""

    def others_are_refused() -> None:
        for statement in ("SELECT * FROM rows", "DELETE FROM rows", "PRAGMA wal_checkpoint(PASSIVE)"):
            other = sqlite3.connect(folder.file(), timeout=0.0)
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute(statement)
            other.close()
        assert not Path(f"{folder.file()}-shm").exists()

    def connect(path: Path) -> FileConnection:
        made.append(FileConnection(path))
        return made[-1]

    made: list[FileConnection] = []
    async with aclosing(await SqliteStore.open(folder, connect=connect)) as store:
        others_are_refused()
        tail = await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
        for _ in range(5):  # more than the log that is moved
            await appended(store, tail, b"x" * 1_300_000)
            others_are_refused()
        await store.backup(tmp_path / "00.sqlite3")
        await store.delete(session_id(1))
        others_are_refused()
    assert len(made) == 1


async def test_a_file_of_a_newer_schema_or_of_another_program_stops_the_start(folder: DataFolder) -> None:
    async with aclosing(await SqliteStore.open(folder)):
        pass
    with sqlite3.connect(folder.file()) as raw:
        raw.execute("PRAGMA user_version = 3")
    raw.close()
    with pytest.raises(StartupError, match="schema 3, and this server knows 2"):
        await SqliteStore.open(folder)
    with sqlite3.connect(folder.file()) as raw:
        raw.execute("PRAGMA application_id = 7")
    raw.close()
    with pytest.raises(StartupError, match="another program"):
        await SqliteStore.open(folder)
    folder.file().write_bytes(b"no database" * 1000)
    with pytest.raises(StartupError, match="not a database"):
        await SqliteStore.open(folder)


async def test_a_file_of_small_pages_goes_on_with_them_and_a_new_one_has_large_ones(folder: DataFolder) -> None:
    page_bytes = 4096

    class OldFile(FileConnection):
        def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
            return super().run(sql.replace(f"page_size = {PAGE_BYTES}", f"page_size = {page_bytes}"), parameters)

    for number in (0, 1):
        for at, connect in enumerate((FileConnection if number else OldFile, FileConnection)):
            store = await SqliteStore.open(folder, number=number, connect=connect)
            async with aclosing(store):
                id_ = SessionId(f"{number:02x}{at:030x}")
                tail = await store.create(id_, b"", at=1.0, ttl_s=None)
                for body in (b"x" * 50_000, b"y"):
                    await appended(store, tail, body)
                assert payloads(await store.load(id_)) == [b"", b"x" * 50_000, b"y"]
    sizes = [sqlite3.connect(folder.file(number)).execute("PRAGMA page_size").fetchone()[0] for number in (0, 1)]
    assert sizes == [page_bytes, PAGE_BYTES]


async def test_a_schema_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    for at in range(1, 50):
        folder, hits = DataFolder(tmp_path / str(at), address=""), list[str]()

        def connect(path: Path, at: int = at, hits: list[str] = hits) -> Faulty:
            made = Faulty(path)

            def fails(number: int, sql: str) -> int | None:
                if number == at:
                    hits.append(sql)
                return sqlite3.SQLITE_IOERR if number == at else None

            made.fails = fails
            return made

        try:
            store = await SqliteStore.open(folder, connect=connect)
        except StartupError:
            store = await SqliteStore.open(folder)
        async with aclosing(store):
            if not hits:
                return
            await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        folder.close()
    pytest.fail("the schema takes more statements than that")


@pytest.mark.parametrize(
    ("device", "found"), [((0, 50), "nfs4"), ((8, 1), "ext4"), ((0, 60), "fuse.sshfs"), ((9, 9), "")]
)
def test_the_filesystem_of_a_folder_is_read_from_the_mounts(device: tuple[int, int], found: str) -> None:
    mounts = (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:50 / /mnt/a\\040b rw shared:2 master:1 - nfs4 host:/x rw,vers=4.2\n"
        "31 22 0:60 / /mnt/c rw - fuse.sshfs host:/x rw\n"
        "garbage\n"
    )
    assert filesystem_of(os.makedev(*device), mounts) == found


# --- damage ----------------------------------------------------------------------------------------------------------


async def test_damage_of_a_row_is_found_and_harms_no_other_session(folder: DataFolder) -> None:
    store = await SqliteStore.open(folder)
    async with aclosing(store):
        for number in (1, 2):
            tail = await store.create(session_id(number), b"opening", at=1.0, ttl_s=None)
            for row in range(3):
                await appended(store, tail, b"row %d" % row)
    raw = sqlite3.connect(folder.file(), isolation_level=None)
    raw.execute("UPDATE rows SET body = CAST(replace(body, 'row 1', 'roW 1') AS BLOB) WHERE session = 1 AND seq = 2")
    raw.close()
    store = await SqliteStore.open(folder)
    async with aclosing(store):
        damaged = await store.load(session_id(1))
        assert damaged is not None
        with pytest.raises(SessionDamaged, match="in row 2: its digest does not fit"):
            checked_payloads(damaged)
        assert payloads(await store.load(session_id(2))) == [b"opening", b"row 0", b"row 1", b"row 2"]


async def test_a_backup_has_what_was_acknowledged_before_it_and_others_go_on_meanwhile(
    folder: DataFolder, tmp_path: Path
) -> None:
    store = await SqliteStore.open(folder)
    async with aclosing(store):
        tail = await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
        for _ in range(20):
            await appended(store, tail, b"x" * 1_000_000)
        backup = asyncio.ensure_future(store.backup(tmp_path / "00.sqlite3"))
        await appended(store, tail, b"meanwhile")
        assert await backup > 20_000_000
        with pytest.raises(OSError, match="unable to open"):
            await store.backup(tmp_path / "no" / "such")
        await appended(store, tail, b"after")
    raw = sqlite3.connect(tmp_path / "00.sqlite3")
    assert raw.execute("SELECT count(*) FROM rows").fetchone()[0] in (20, 21)
    assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()


async def test_a_wait_that_is_cancelled_takes_nothing_back(folder: DataFolder) -> None:
    store = await SqliteStore.open(folder)
    async with aclosing(store):
        creating = asyncio.ensure_future(store.create(session_id(1), b"opening", at=1.0, ttl_s=None))
        await asyncio.sleep(0)
        creating.cancel()
        assert payloads(await store.load(session_id(1))) == [b"opening"]
    with pytest.raises(StorageUnavailable, match="closed"):
        await store.load(session_id(1))


async def test_closing_writes_what_is_waiting(folder: DataFolder) -> None:
    store = await SqliteStore.open(folder, durability=Durability.INTERVAL)
    tail = await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
    told: list[object] = []
    for number in range(500):
        store.append(tail, b"%d" % number, adds=ONE_TURN, at=1.0, done=told.append)
    await store.aclose()
    assert told == [None] * 500
    store = await SqliteStore.open(folder)
    async with aclosing(store):
        found = await store.load(session_id(1))
        assert found is not None
        assert Totals.of(found.rows[-1].body).num_turns == 500


def test_the_codes_of_sqlite_are_those_that_it_documents() -> None:
    assert (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, errno.ENOSPC) == (13, 11, 26, 28)


async def test_rows_of_several_sessions_wait_for_each_other_also_after_a_read(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a job that has come since, and waits itself, ends their wait."""
    monkeypatch.setattr(sqlite_store, "GATHER_S", 3600.0)
    async with aclosing(await SqliteStore.open(folder)) as store:
        first, *others = [await store.create(session_id(n), b"", at=1.0, ttl_s=None) for n in range(5)]
        assert await store.load(session_id(0)) is not None
        await appended(store, first, b"row")
        ends = []
        for tail in others:
            ends.append(asyncio.ensure_future(appended(store, tail, b"row")))
            await asyncio.sleep(0)
            await asyncio.to_thread(os.sched_yield)  # time for a thread that would not wait
        assert await store.load(session_id(0)) is not None
        await asyncio.gather(*ends)
        assert (store.stats.num_rows, store.stats.num_groups) == (5, 2)


async def test_rows_of_one_iteration_of_the_loop_are_one_group(folder: DataFolder) -> None:
    async with aclosing(await SqliteStore.open(folder)) as store:
        tails = [await store.create(session_id(n), b"", at=1.0, ttl_s=None) for n in range(5)]
        for tail in tails[1:]:
            store.append(tail, b"row", adds=ONE_TURN, at=1.0, done=lambda error: None)
            for _ in range(1000):
                os.sched_yield()  # time for a thread that would not wait
        await appended(store, tails[0], b"row")
        assert (store.stats.num_rows, store.stats.num_groups) == (5, 1)


class Counting(FileConnection):
    """Counts transactions."""

    num_commits = 0

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        self.num_commits += sql == "COMMIT"
        return super().run(sql, parameters)


async def test_sessions_that_are_deleted_together_go_in_one_transaction(folder: DataFolder) -> None:
    made: list[Counting] = []
    connect = lambda path: made.append(Counting(path)) or made[-1]  # noqa: E731
    async with aclosing(await SqliteStore.open(folder, connect=connect)) as store:
        for number in range(40):
            await store.create(session_id(number), b"", at=1.0, ttl_s=None)
        made[0].num_commits = 0
        wanted = [session_id(n) for n in (*range(30), 7, 99)]
        deleting = asyncio.gather(*map(store.delete, wanted))
        store.discard(session_id(39))
        assert await deleting == [True] * 30 + [False] * 2
        assert made[0].num_commits == 1
        left = await store.page(limit=100, after=None)
        assert [one.session_id for one in left] == [session_id(n) for n in range(30, 39)]
    with pytest.raises(StorageUnavailable, match="closed"):
        await store.delete(session_id(30))


class Syncs:
    """Says when a log was synced, by the clock of its store. A sync takes a tenth of a second of it."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.at: list[float] = []
        self.came = threading.Event()

    def __call__(self, path: Path) -> None:
        self.at.append(self.clock.monotonic())
        self.clock.advance(0.1)
        sync_log(path)
        self.came.set()


async def test_with_interval_a_single_row_is_synced_within_its_second(folder: DataFolder) -> None:
    clock = ManualClock()
    syncs = Syncs(clock)
    async with aclosing(
        await SqliteStore.open(folder, durability=Durability.INTERVAL, clock=clock, sync=syncs)
    ) as store:
        tail = await store.create(session_id(1), b"", at=1.0, ttl_s=None)
        clock.advance(0.6)
        await asyncio.to_thread(syncs.came.wait)  # nothing else is asked of the store
        began = clock.monotonic()
        await appended(store, tail, b"row")
        assert len(syncs.at) == 1
        clock.advance(0.6)
        await store.page(limit=1, after=None)
        assert await store.page(limit=1, after=None)
        assert len(syncs.at) == 2
        assert clock.monotonic() - began < 1.0


class Taking(FileConnection):
    """Statements take time by the clock; it knows when something was written."""

    def __init__(self, path: Path, clock: ManualClock, *, each_s: float) -> None:
        super().__init__(path)
        self._clock = clock
        self._each_s = each_s
        self.written: list[float] = []

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        if sql.startswith(("INSERT", "DELETE")):
            self.written.append(self._clock.monotonic())
        self._clock.advance(self._each_s)
        return super().run(sql, parameters)


@pytest.mark.parametrize("each_s", [0.001, 0.03])
async def test_with_interval_what_is_written_among_many_jobs_is_synced_within_its_second(
    folder: DataFolder, each_s: float
) -> None:
    clock = ManualClock()
    syncs, made = Syncs(clock), list[Taking]()

    def connect(path: Path) -> Taking:
        made.append(Taking(path, clock, each_s=0.0))
        return made[-1]

    store = await SqliteStore.open(folder, durability=Durability.INTERVAL, connect=connect, clock=clock, sync=syncs)
    async with aclosing(store):
        tails = [await store.create(session_id(n), b"", at=1.0, ttl_s=None) for n in range(20)]
        made[0]._each_s = each_s
        rows = [appended(store, tail, b"row") for tail in tails for _ in range(5)]
        await asyncio.gather(*(work for row in rows for work in (row, store.load(session_id(1)))))
    late = [min(at for at in syncs.at if at >= written) - written for written in made[0].written]
    assert max(late) <= 1.0 - 0.1
