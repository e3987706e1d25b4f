"""A store beside a dictionary, in any order: new sessions, rows of several sessions at once, deletes, lists, readers
that take a session anew, a full disk, a restart, and an end of the process at any write.

A row that was said to be durable is there, in its place; one that was refused is not, and neither is one before whose
write the process ended.
"""

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stenograph.core.errors import StenographError, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.base import Tail
from stenograph.store.codec.rows import COMMIT, OUTCOME, Totals
from stenograph.store.database import FileConnection
from stenograph.store.folder import DataFolder
from stenograph.store.settings import Durability
from stenograph.store.sqlite import SqliteStore
from tests.store_laws import ONE_TURN, payloads, session_id

pytestmark = pytest.mark.timeout(600)

T = TypeVar("T")

Row = tuple[int, bytes]
"""Kind and payload."""


class Dying(FileConnection):
    """A connection that fails with a full disk while a test wants it, and copies the files at a chosen statement: what
    a process that ends there leaves behind."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_full = False
        self.dies_in: int | None = None
        self.grave: Path | None = None
        self._path = path

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        is_write = sql.startswith(("INSERT", "DELETE", "COMMIT"))
        if is_write and self.is_full and not sql.startswith(("DELETE", "COMMIT")):
            error = sqlite3.OperationalError("injected")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        if is_write and self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in == 0 and self.grave is not None:
                shutil.copytree(self._path.parent, self.grave)
        return super().run(sql, parameters)


@dataclass(slots=True)
class Held:
    """A session as the dictionary has it. `tail` None: nobody goes on with it now."""

    opening: bytes
    ttl_s: float | None
    at: float
    rows: list[Row] = field(default_factory=list[Row])
    tail: Tail | None = None

    @property
    def outcome(self) -> bytes | None:
        return next((payload for kind, payload in reversed(self.rows) if kind == OUTCOME), None)


appends = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([COMMIT, COMMIT, OUTCOME]), st.binary(max_size=60)),
    min_size=1,
    max_size=8,
)


class StoreMachine(RuleBasedStateMachine):
    """Drives an `SqliteStore` and a dictionary."""

    @initialize(durability=st.sampled_from([Durability.COMMIT, Durability.INTERVAL]))
    def begin(self, durability: Durability) -> None:
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp())
        self.num_lives = self.num_sessions = 0
        self.time = 1.0
        self.held: dict[SessionId, Held] = {}
        self.durability = durability
        self.folder = DataFolder(self.root / "0", address="")
        self.open()

    def open(self) -> None:
        def connect(path: Path) -> Dying:
            self.connection = Dying(path)
            return self.connection

        self.store = self.run(SqliteStore.open(self.folder, durability=self.durability, connect=connect))

    def run(self, work: Awaitable[T]) -> T:
        async def waited() -> T:
            return await work

        return self.runner.run(waited())

    def chosen(self, which: int) -> SessionId:
        return list(self.held)[which % len(self.held)]

    @rule(opening=st.binary(max_size=30), ttl_s=st.none() | st.integers(1, 20))
    def create(self, opening: bytes, ttl_s: int | None) -> None:
        self.num_sessions += 1
        id_ = session_id(self.num_sessions)
        try:
            tail = self.run(self.store.create(id_, opening, at=self.time, ttl_s=ttl_s))
        except StorageUnavailable:
            assert self.connection.is_full
        else:
            self.held[id_] = Held(opening=opening, ttl_s=ttl_s, at=self.time, tail=tail)

    @precondition(lambda self: self.held)
    @rule(wanted=appends)
    def append(self, wanted: list[tuple[int, int, bytes]]) -> None:
        """Rows of several sessions at once: they may be one group or several."""
        self.time += 1.0
        ends = self.run(self.appended(wanted))
        for (which, kind, payload), error in zip(wanted, ends, strict=True):
            assert (error is not None) == self.connection.is_full
            if error is None:
                held = self.held[self.chosen(which)]
                held.rows.append((kind, payload))
                held.at = self.time

    async def appended(self, wanted: list[tuple[int, int, bytes]]) -> list[StenographError | None]:
        ends: list[StenographError | None] = []
        order: list[int] = []
        told = asyncio.Event()

        def done(number: int) -> Callable[[StenographError | None], None]:
            def end(error: StenographError | None) -> None:
                order.append(number)
                ends.append(error)
                if len(ends) == len(wanted):
                    told.set()

            return end

        for number, (which, kind, payload) in enumerate(wanted):
            held = self.held[self.chosen(which)]
            if held.tail is None:
                stored = await self.store.take(self.chosen(which))
                assert stored is not None
                held.tail = stored.tail()
            adds = ONE_TURN if kind == COMMIT else Totals()
            self.store.append(held.tail, payload, adds=adds, at=self.time, done=done(number), kind=kind)
        await told.wait()
        assert order == list(range(len(wanted))), "in the order of append"
        return ends

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 5))
    def leave(self, which: int) -> None:
        """A session leaves memory: who goes on with it takes it anew."""
        self.held[self.chosen(which)].tail = None

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 5), waits=st.booleans())
    def delete(self, which: int, waits: bool) -> None:
        id_ = self.chosen(which)
        del self.held[id_]
        if waits:
            assert self.run(self.store.delete(id_))
        else:
            self.store.discard(id_)
        assert not self.run(self.store.delete(id_))

    @rule(is_full=st.booleans())
    def disk(self, is_full: bool) -> None:
        self.connection.is_full = is_full

    @rule()
    def restart(self) -> None:
        self.run(self.store.aclose())
        self.reopen(self.folder.path)

    @precondition(lambda self: self.held and not self.connection.is_full)
    @rule(wanted=appends, dies_in=st.integers(1, 4))
    def kill(self, wanted: list[tuple[int, int, bytes]], dies_in: int) -> None:
        """The process ends before one of its writes. Rows come one after the other here."""
        self.num_lives += 1
        grave = self.root / str(self.num_lives)
        self.connection.grave, self.connection.dies_in = grave, dies_in
        self.time += 1.0
        for one in wanted:
            was_dead = grave.exists()
            self.run(self.appended([one]))
            if not grave.exists() and not was_dead:  # it was written in time
                held = self.held[self.chosen(one[0])]
                held.rows.append(one[1:])
                held.at = self.time
        self.run(self.store.aclose())
        self.reopen(grave if grave.exists() else self.folder.path)

    def reopen(self, path: Path) -> None:
        self.folder.close()
        self.folder = DataFolder(path, address="")
        for held in self.held.values():
            held.tail = None
        self.open()

    @invariant()
    def is_as_the_dictionary_says(self) -> None:
        for id_, held in self.held.items():
            stored = self.run(self.store.load(id_))
            assert payloads(stored) == [held.opening, *(payload for _, payload in held.rows)]
            assert stored is not None
            totals = stored.tail().totals
            num_turns = sum(kind == COMMIT for kind, _ in held.rows)
            assert (totals.num_turns, stored.at) == (num_turns, held.at)
            if held.tail is not None:
                assert (held.tail.seq, held.tail.totals) == (len(held.rows), totals)
        listed = self.run(self.store.page(limit=100, after=None))
        assert [one.session_id for one in listed] == list(self.held)
        for one in listed:
            held, row = self.held[one.session_id], one.outcome
            assert (None if row is None else row.body[48:]) == held.outcome
            assert (one.at, one.last_seq) == (held.at, len(held.rows))
        idle = {id_ for id_, one in self.held.items() if one.ttl_s is not None and one.at + one.ttl_s <= self.time}
        assert set(self.run(self.store.expired(now=self.time, limit=100))) == idle

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.run(self.store.aclose())
            self.folder.close()
            self.runner.close()
            shutil.rmtree(self.root)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=25)
