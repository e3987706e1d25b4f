"""Each call to the disk that SQLite makes fails in turn, falls short, or is dropped: what was acknowledged is there.

A store plays a script for each call of it; `scripts/test-crash` sets ALL_FAULTS, and then a whole server does so too
for each call, here for some.
"""

import itertools
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from standins.scripted_engine import Script
from stenograph.core.errors import SessionDamaged, StartupError, StorageUnavailable
from stenograph.core.types import Finish, FinishReason, SessionId
from stenograph.store.base import SessionStore, Tail, checked_payloads
from stenograph.store.codec.rows import COMMIT, OUTCOME
from stenograph.store.folder import DataFolder
from stenograph.store.look import looks
from stenograph.store.settings import Durability
from stenograph.store.sqlite import SqliteStore
from tests.store_laws import appended, session_id

from ..crash.faulty import Fault, FaultyDisk
from .conftest import END, Live, user

ALL_FAULTS = bool(os.environ.get("ALL_FAULTS"))
HONEST = [
    fault
    for fault in Fault
    if fault not in (Fault.SYNC_DROPPED, Fault.WRITE_DROPPED, Fault.SHORT_READ, Fault.SYNC_FAILS)
]
"""Faults of which the disk tells; a sync that fails is among `FAILS`."""

pytestmark = pytest.mark.timeout(3600 if ALL_FAULTS else 120)


@dataclass(slots=True)
class Told:
    """What a store has acknowledged, by session, and what is in doubt."""

    rows: dict[SessionId, list[bytes]] = field(default_factory=dict[SessionId, list[bytes]])
    deleted: set[SessionId] = field(default_factory=set[SessionId])
    doubted: list[tuple[SessionId, bytes | None]] = field(default_factory=list[tuple[SessionId, bytes | None]])
    """A row that may be there, or (None) a delete that may have taken place."""
    last: tuple[SessionId, bytes | None] | None = None
    """What was acknowledged last."""
    failed: list[StorageUnavailable] = field(default_factory=list[StorageUnavailable])

    def check(self, found: dict[SessionId, list[bytes]]) -> None:
        """Hold what a store has to it. Raises AssertionError."""
        for id_, rows in self.rows.items():
            doubted = [row for one, row in self.doubted if one == id_]
            if id_ in self.deleted:
                assert id_ not in found, "was deleted"
            elif id_ not in found:
                assert None in doubted, "is gone"
            else:
                more = found[id_][len(rows) :]
                assert found[id_][: len(rows)] == rows
                assert more in ([], *([row] for row in doubted if row is not None))
        unknown = found.keys() - self.rows.keys()
        assert unknown <= {id_ for id_, _ in self.doubted}

    def check_but_the_last(self, found: dict[SessionId, list[bytes]]) -> None:
        """The same, but that what was acknowledged last may not be there."""
        assert self.last is not None
        id_, row = self.last
        if row is None:
            self.deleted.discard(id_)
        else:
            self.rows[id_].pop()
        self.doubted.append(self.last)
        self.check(found)


async def play(store: SessionStore, told: Told) -> None:
    """Rollouts as they come, small and large, an outcome, a delete, another rollout; each step is tried."""
    tails: dict[SessionId, Tail] = {}

    async def attempt(id_: SessionId, row: bytes | None, work: Awaitable[object]) -> None:
        failure = store.failure
        try:
            made = await work
        except StorageUnavailable as error:
            told.failed.append(error)
            if failure is None and not error.is_full:
                told.doubted.append((id_, row))
            return
        assert failure is None, "acknowledged after the store had failed"
        told.last = (id_, row)
        if row is None:
            told.deleted.add(id_)
        elif isinstance(made, Tail):
            tails[id_], told.rows[id_] = made, [row]
        else:
            told.rows[id_].append(row)

    async def create(number: int) -> None:
        id_ = session_id(number)
        await attempt(id_, b"opening", store.create(id_, b"opening", at=1.0, ttl_s=None, key=f"k{number}"))

    async def append(number: int, row: bytes, kind: int = COMMIT) -> None:
        id_ = session_id(number)
        if id_ in tails:
            await attempt(id_, row, appended(store, tails[id_], row, kind=kind))

    for number in (1, 2, 3):
        await create(number)
        await append(number, b"one of %d" % number)
    await append(1, b"x" * 60_000)
    await append(2, b"two", OUTCOME)
    if session_id(1) in told.rows:
        await attempt(session_id(1), None, store.delete(session_id(1)))
    for number in (2, 3):
        await append(number, bytes([number]) * 30_000)
    await create(4)
    await append(4, b"last")
    with suppress(StorageUnavailable):
        await store.load(session_id(2))
        await store.page(limit=10, after=None)


async def found_in(folder: Path) -> dict[SessionId, list[bytes]]:
    """All sessions of a folder, as a server would read them, each row held to its digest."""
    held = DataFolder(folder, address="")
    try:
        store = await SqliteStore.open(held)
        async with aclosing(store):
            ids = [one.session_id for one in await store.page(limit=100, after=None)]
            stored = [await store.load(id_) for id_ in ids]
            return {one.session_id: list(map(bytes, checked_payloads(one))) for one in stored if one is not None}
    finally:
        held.close()


def faults_in(folder: Path) -> list[str]:
    """What `stenograph check` finds: damage of the structure, of the log, of rows."""
    try:
        with looks(folder) as files:
            for file in files:
                for one in file.summaries():
                    stored = file.read(one.session_id)
                    assert stored is not None
                    checked_payloads(stored)
            return [fault for file in files for fault in file.faults()]
    except (StartupError, StorageUnavailable, SessionDamaged) as error:
        return [str(error)]


async def lived(
    folder: Path, fault: Fault, at: int, durability: Durability = Durability.COMMIT
) -> tuple[FaultyDisk, Told]:
    """A store that meets a fault at a call, and what it acknowledged."""
    held = DataFolder(folder, address="")
    disk, told = FaultyDisk(held.path, fault, at), Told()
    try:
        with suppress(StartupError):
            store = await SqliteStore.open(held, connect=disk.connect, durability=durability)
            async with aclosing(store):
                await play(store, told)
                disk.write_out(Path(f"{folder}-killed"))
                disk.was_opened = True
    finally:
        held.close()
    return disk, told


def chosen(within: Path, *, sparse: int) -> Iterator[tuple[int, Path]]:
    """The numbers of the calls that a fault befalls, all of them or some, each with a folder while it is looked at."""
    for at in itertools.islice(itertools.count(1, 1 if ALL_FAULTS else sparse), 10_000):
        (folder := within / f"{at}").mkdir()
        yield at, folder
        shutil.rmtree(folder)


@pytest.mark.parametrize("fault", HONEST)
async def test_whichever_call_fails_what_a_store_acknowledged_is_there_after_it_and_after_a_loss_of_power(
    tmp_path: Path, fault: Fault
) -> None:
    hits: Counter[str] = Counter()
    for at, folder in chosen(tmp_path, sparse=11):
        disk, told = await lived(folder / "data", fault, at)
        if not disk.hit:
            break
        hits[disk.hit] += 1
        draws = [None, *(random.Random(f"{at}/{one}") for one in range(2 if ALL_FAULTS else 1))]
        for number, draw in enumerate(draws):
            told.check(await found_in(disk.write_out(folder / f"{number}", draw)))
        if fault in (Fault.FULL, Fault.FULL_FROM_NOW_ON):
            assert all(error.is_full for error in told.failed)
            assert session_id(1) not in told.rows or session_id(1) in told.deleted, "is deleted with the room kept"
    sys.stdout.write(f"\n{fault}: {sum(hits.values())} calls, {dict(hits)}\n")
    assert sum(hits.values()) > 10


async def test_a_dropped_write_is_found_by_check_or_loses_nothing_but_what_came_last(tmp_path: Path) -> None:
    """A disk that says it has written, and has not, once: SQLite takes a hole in its log for the end, so `check` has to
    look before a server starts. No software knows that the last write is missing."""
    ends: Counter[str] = Counter()
    for at, folder in chosen(tmp_path, sparse=5):
        disk, told = await lived(folder / "data", Fault.WRITE_DROPPED, at)
        if not disk.hit:
            break
        killed = folder / "data-killed"
        if not disk.was_opened:
            ends["noticed at the start"] += 1
            continue
        ends[await end_of(killed, told)] += 1
    sys.stdout.write(f"\na dropped write, then the end of the process: {dict(ends)}\n")
    assert ends["found by check"] > 5


async def end_of(folder: Path, told: Told) -> str:
    """What has become of a folder: fine, damage that is found, or what came last is gone. Raises AssertionError."""
    if faults_in(folder):
        return "found by check"
    found = await found_in(folder)
    try:
        told.check(found)
    except AssertionError:
        told.check_but_the_last(found)
        return "what came last is gone"
    return "nothing lost"


LARGE = bytes(range(256)) * 5 * 1024
"""1.25 MiB, as the row of a reply with a payload for replay."""


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_sync_that_fails_when_the_log_is_moved_is_a_failure_too_and_loses_nothing(
    tmp_path: Path, at: int
) -> None:
    """The first is that of the row itself, the second that of the log before it is moved, the third of the file."""
    held = DataFolder(tmp_path / "data", address="")
    disk = FaultyDisk(held.path)
    store = await SqliteStore.open(held, connect=disk.connect)
    async with aclosing(store):
        tail = await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
        rows = [4 * LARGE + bytes([number]) for number in range(4)]
        for row in rows[:-1]:
            await appended(store, tail, row)
        disk.strike(Fault.SYNC_FAILS, at)
        if at == 1:
            with pytest.raises(StorageUnavailable):
                await appended(store, tail, rows.pop())
        else:
            await appended(store, tail, rows[-1])  # comes before the log is moved
        with pytest.raises(StorageUnavailable):
            await store.load(session_id(1))
        assert store.failure is not None
    held.close()
    for number in range(4):
        found = await found_in(disk.write_out(tmp_path / f"{number}", random.Random(number)))
        assert found[session_id(1)][: 1 + len(rows)] == [b"opening", *rows]


async def test_a_large_row_is_whole_or_absent_wherever_its_write_ends(tmp_path: Path) -> None:
    num_ends = 0
    for at in itertools.count(1, 1 if ALL_FAULTS else 23):
        held = DataFolder(tmp_path / f"{at}", address="")
        disk = FaultyDisk(held.path)
        store = await SqliteStore.open(held, connect=disk.connect)
        async with aclosing(store):
            tail = await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
            await appended(store, tail, LARGE + b"1")
            disk.strike(Fault.FAILS_FROM_NOW_ON, at)
            with suppress(StorageUnavailable):
                await appended(store, tail, LARGE + b"2")
        is_acknowledged = tail.seq == 2
        held.close()
        for number, draw in enumerate([None, random.Random(at)]):
            out = disk.write_out(tmp_path / f"{at}-{number}", draw)
            rows = (await found_in(out))[session_id(1)]
            assert rows[:2] == [b"opening", LARGE + b"1"]
            assert rows[2:] in ([[LARGE + b"2"]] if is_acknowledged else [[], [LARGE + b"2"]])
            shutil.rmtree(out)
        if is_acknowledged:
            break
        num_ends += 1
    assert num_ends > 5


# --- a whole server --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Heard:
    """What a client of a server was answered."""

    replies: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    deleted: set[str] = field(default_factory=set[str])
    in_doubt: list[str] = field(default_factory=list[str])
    """Sessions of which a request failed, and may have taken place all the same."""
    num_refused: int = 0


async def ask(live: Live, store: SqliteStore, heard: Heard, session: str, method: str, path: str, body: Any) -> Any:
    """One request: its answer, or None if it is refused as a server without a disk has to."""
    failure = store.failure
    answer = await live.call(method, path, body)
    if answer.status in (200, 204):
        assert failure is None, f"{method} {path} was acknowledged after the store had failed"
        return answer.json() if answer.body else {}
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (503, "storage_unavailable"), answer.body
    heard.num_refused += 1
    is_full = "is full" in error["message"]
    assert "retry-after" in answer.headers
    assert is_full == (store.failure is None)
    if failure is None and not is_full:
        heard.in_doubt.append(session)
    return None


async def talk(live: Live, store: SqliteStore, heard: Heard) -> None:
    """Rollouts of a client that takes every refusal, and looks at what it has."""
    for number in range(3):
        opened = await ask(live, store, heard, "", "POST", "/sessions", {})
        if opened is None:
            continue
        session = opened["session_id"]
        path = f"/sessions/{session}"
        heard.replies[session] = []
        messages: list[dict[str, Any]] = []
        for turn in range(2):
            seed, ids = 10 * number + turn, live.renderer.tokenizer.encode(f"reply {number} {turn}" + "!" * 1000)
            live.engine.plan_for(seed, Script(ids=(*ids, END), finish=Finish(reason=FinishReason.STOP, matched=END)))
            messages.append(user(f"question {turn}"))
            body = {"messages": messages, "seed": seed}
            reply = await ask(live, store, heard, session, "POST", f"{path}/v1/chat/completions", body)
            if reply is None:
                break
            heard.replies[session].append(reply["id"])
            messages.append(reply["choices"][0]["message"])
        await ask(live, store, heard, session, "PUT", f"{path}/outcome", {"reward": 1.0})
        if store.failure is None:
            assert await shown(live, session) == heard.replies[session]
        if number == 0 and await ask(live, store, heard, session, "DELETE", path, None) is not None:
            heard.deleted.add(session)
            assert (await live.call("GET", path)).status == 404


async def shown(live: Live, session: str) -> list[str]:
    """The replies of a session's records."""
    view = (await live.call("GET", f"/sessions/{session}")).json()
    return [record["response"]["id"] for record in view["records"]]


@pytest.mark.parametrize("fault", [Fault.FAILS, Fault.FAILS_FROM_NOW_ON, Fault.FULL, Fault.FULL_FROM_NOW_ON])
async def test_whichever_call_fails_a_server_says_so_and_has_what_it_acknowledged(
    tmp_path: Path, serve: Callable[..., AbstractAsyncContextManager[Live]], fault: Fault
) -> None:
    num_hit = num_refused = 0
    for at, folder in chosen(tmp_path, sparse=29):
        held, heard = DataFolder(folder / "data", address=""), Heard()
        disk = FaultyDisk(held.path, fault, at)
        try:
            store = await SqliteStore.open(held, connect=disk.connect)
        except StartupError:
            continue
        async with aclosing(store), serve(store=store) as live:
            await talk(live, store, heard)
            ready = await live.call("GET", "/ready")
            assert ready.status == (200 if store.failure is None else 503), ready.body
        held.close()
        if not disk.hit:
            break
        num_hit, num_refused = num_hit + 1, num_refused + heard.num_refused
        if fault is Fault.FULL_FROM_NOW_ON and heard.replies:
            assert not set(list(heard.replies)[:1]) - heard.deleted, "a full disk keeps room for a delete"
        held = DataFolder(disk.write_out(folder / "again", random.Random(at)), address="")
        store = await SqliteStore.open(held)
        async with aclosing(store), serve(store=store) as live:
            for session, replies in heard.replies.items():
                found = await shown(live, session) if session not in heard.deleted else []
                doubted = session in heard.in_doubt
                assert found[: len(replies)] == replies or (doubted and not found) or session in heard.deleted
                assert len(found) <= len(replies) + doubted
            for session in heard.deleted:
                assert (await live.call("GET", f"/sessions/{session}")).status == 404
        held.close()
    sys.stdout.write(f"\n{fault}, a whole server: {num_hit} calls, {num_refused} requests refused\n")
    assert num_hit > 1
