"""What may happen to a server with a store at the same moment: deletes, evictions, restarts, backups, a folder that is
removed, a clock that goes back. Nothing acknowledged is lost, and nothing that was deleted comes back.
"""

import asyncio
import io
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from standins.clock import ManualClock
from stenograph.cli.store_commands import check_folder
from stenograph.core.errors import StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.base import StoredSession
from stenograph.store.database import FileConnection
from stenograph.store.folder import DataFolder
from stenograph.store.look import looks
from stenograph.store.sqlite import SqliteStore
from tests.store_laws import appended, session_id

from .conftest import Live, assistant, user

pytestmark = pytest.mark.timeout(600)

Serve = Callable[..., AbstractAsyncContextManager[Live]]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DataFolder]:
    folder = DataFolder(tmp_path / "data", address="")
    yield folder
    folder.close()


@asynccontextmanager
async def kept(serve: Serve, folder: DataFolder, **options: Any) -> AsyncIterator[Live]:
    store = await SqliteStore.open(folder)
    async with aclosing(store), serve(store=store, **options) as live:
        yield live


async def replies_of(live: Live, session: str) -> list[str]:
    view = (await live.call("GET", f"/sessions/{session}")).json()
    return [record["response"]["choices"][0]["message"]["content"] for record in view["records"]]


class HeldStore(SqliteStore):
    """A store of whose next read the answer is held back, once it is there."""

    held: "asyncio.Future[None] | None" = None
    is_there: "asyncio.Future[None]"

    def hold(self) -> None:
        self.held = self._loop.create_future()
        self.is_there = self._loop.create_future()

    async def take(self, session_id: SessionId) -> StoredSession | None:
        found = await super().take(session_id)
        if (held := self.held) is not None:
            self.held = None
            self.is_there.set_result(None)
            await held
        return found


async def test_a_session_that_is_woken_goes_on_and_is_evicted_while_it_is_read_is_read_again(
    serve: Serve, folder: DataFolder
) -> None:
    store = await HeldStore.open(folder)
    assert isinstance(store, HeldStore)
    async with aclosing(store), serve(store=store, max_sessions=1) as live:
        session = await live.open(history="tree")
        live.says("one")
        assert (await live.chat(session, user("hello"))).status == 200
        await live.open()  # evicts it
        store.hold()
        held = store.held
        assert held is not None
        late = asyncio.create_task(live.chat(session, user("hello"), assistant("one"), user("late"), seed=9))
        await store.is_there
        live.says("two")
        quick = await live.chat(session, user("hello"), assistant("one"), user("quick"))
        assert quick.status == 200
        await live.open()  # evicts it again
        live.says("three")
        held.set_result(None)
        assert (await late).status == 200
        assert store.failure is None
        ledger = (await live.call("GET", f"/sessions/{session}/ledger")).json()
        assert len(ledger["requests"]) == 3
    async with kept(serve, folder) as live:
        metadata = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]
        assert len(metadata["tree"]["nodes"]) == 3


@pytest.mark.parametrize("is_turn_first", [False, True])
async def test_a_delete_beside_a_turn_is_answered_when_the_session_is_gone_for_good(
    serve: Serve, folder: DataFolder, is_turn_first: bool
) -> None:
    async with kept(serve, folder) as live:
        session = await live.open()
        live.says("one")
        assert (await live.chat(session, user("hello"))).status == 200
        script = live.says("two", paused=True)
        turn = asyncio.create_task(live.chat(session, user("hello"), assistant("one"), user("more")))
        await live.engine.begun(2)
        if is_turn_first:
            live.engine.step(len(script.ids) + 1)
        deletes = [asyncio.create_task(live.call("DELETE", f"/sessions/{session}")) for _ in range(3)]
        assert sorted([(await one).status for one in deletes]) == [204, 404, 404]
        await turn
        assert (await live.call("GET", f"/sessions/{session}")).status == 404
    async with kept(serve, folder) as live:
        assert (await live.call("GET", f"/sessions/{session}")).status == 404
    out = io.StringIO()
    folder.close()
    assert check_folder(folder.path, out=out, progress=lambda *_: None) == 0, out.getvalue()


async def test_a_backup_under_load_is_whole_and_each_session_is_a_beginning_of_what_it_became(
    serve: Serve, folder: DataFolder, tmp_path: Path
) -> None:
    async with kept(serve, folder) as live:
        sessions = [await live.open() for _ in range(6)]

        async def roll(number: int, session: str) -> None:
            messages: list[dict[str, Any]] = []
            for turn in range(12):
                messages.append(user(f"question {turn} " + "x" * 100))
                live.says(f"answer {turn}")
                answer = await live.chat(session, *messages, seed=number)
                assert answer.status == 200, answer.body
                messages.append(answer.json()["choices"][0]["message"])

        work = asyncio.gather(*(roll(number, session) for number, session in enumerate(sessions)))
        backups = [tmp_path / f"backup {number}" for number in range(3)]
        for backup in backups:
            answer = await live.call("POST", "/backup", {"path": str(backup)})
            assert answer.status == 200, answer.body
        await work
        became = {session: await replies_of(live, session) for session in sessions}
    assert {len(replies) for replies in became.values()} == {12}
    for backup in backups:
        out = io.StringIO()
        assert check_folder(backup, out=out, progress=lambda *_: None) == 0, out.getvalue()
        again = DataFolder(backup, address="")
        async with kept(serve, again) as live:
            for session, replies in became.items():
                found = await replies_of(live, session)
                assert found == replies[: len(found)]
        again.close()


async def test_a_store_whose_folder_was_removed_says_so_within_a_second(folder: DataFolder) -> None:
    """SQLite would write on, into files that nobody finds again."""
    store = await SqliteStore.open(folder)
    async with aclosing(store):
        tail = await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
        await appended(store, tail, b"one")
        shutil.rmtree(folder.path)

        async def write_on() -> None:
            while True:
                await appended(store, tail, b"more")

        with pytest.raises(StorageUnavailable, match="was deleted or moved"):
            await write_on()
        assert store.failure is not None
        assert not store.failure.is_full


@pytest.mark.parametrize("what", ["00.sqlite3", "00.sqlite3-wal"])
def test_a_file_or_a_log_that_was_moved_or_replaced_is_not_in_place(tmp_path: Path, what: str) -> None:
    connection = FileConnection(tmp_path / "00.sqlite3")
    connection.run("PRAGMA journal_mode = WAL")
    connection.run("CREATE TABLE t (x)")
    assert connection.is_in_place()
    (tmp_path / what).rename(tmp_path / "elsewhere")
    assert not connection.is_in_place()
    (tmp_path / what).write_bytes((tmp_path / "elsewhere").read_bytes())
    assert not connection.is_in_place()
    connection.close()


async def test_a_clock_that_goes_back_keeps_sessions_longer_and_changes_nothing_else(
    serve: Serve, folder: DataFolder
) -> None:
    clock = ManualClock()
    async with kept(serve, folder, clock=clock) as live:
        session = await live.open(ttl_s=100)
        for turn, text in enumerate(["one", "two"]):
            live.says(text)
            asked = [user("hello"), *([assistant("one"), user("more")] if turn else [])]
            assert (await live.chat(session, *asked)).status == 200
    earlier = ManualClock(wall=clock.wall() - 10_000)
    async with kept(serve, folder, clock=earlier) as live:
        assert await replies_of(live, session) == ["one", "two"]
        await live.manager.sessions.expire_kept()
        live.says("three")
        asked = [user("hello"), assistant("one"), user("more"), assistant("two"), user("again")]
        assert (await live.chat(session, *asked)).status == 200
        before = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]
    async with kept(serve, folder, clock=earlier) as live:
        assert await replies_of(live, session) == ["one", "two", "three"]
        assert (await live.call("GET", f"/sessions/{session}")).json()["metadata"] == before
    folder.close()
    with looks(folder.path) as files:
        assert [fault for file in files for fault in file.faults()] == []


async def test_a_session_does_not_expire_while_a_turn_of_it_is_on_its_way(serve: Serve, folder: DataFolder) -> None:
    clock = ManualClock()
    async with kept(serve, folder, clock=clock, request_timeout_s=100_000) as live:
        session = await live.open(ttl_s=100)
        script = live.says("late", paused=True)
        turn = asyncio.create_task(live.chat(session, user("hello")))
        await live.engine.begun(1)
        clock.advance(1000)
        live.manager.sessions.expire()
        await live.manager.sessions.expire_kept()
        live.engine.step(len(script.ids) + 1)
        assert (await turn).status == 200
    async with kept(serve, folder, clock=clock) as live:
        assert await replies_of(live, session) == ["late"]
