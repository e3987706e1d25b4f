"""Sessions of two servers of two workers each, which share a database, by the rules of test_worker_machine.py; and
servers that are stopped past their leases, between turns and in the middle of one.

A stop is made by hand: the database ends the leases of a server's workers, others are asked, and then the server's
clock says that its leases are over. `scripts/test-cluster` runs the rules, and sets EXAMPLES; the stops run by default.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from standins.shared_rows import MemoryRows, SharedTables
from stenograph.cluster.postgres.schema import prepare
from stenograph.cluster.postgres.server import PostgresRows
from stenograph.cluster.postgres.shared_rows import SharedRows
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, output_ids
from .test_worker_machine import Doors, Seen, WorkerMachine, run_machine, served
from .workers_kit import Database, real_postgres, two_workers

EXAMPLES = int(os.environ.get("EXAMPLES", "4"))
LEASE_S = 3600.0
"""Leases end by the rules alone."""
STEPS = 50
"""More than any reply has tokens."""

pytestmark = pytest.mark.timeout(120 + 5 * EXAMPLES)


def store_of(live: Live) -> PostgresStore:
    """A worker's part of the database."""
    storage = live.manager.sessions.storage
    assert storage is not None
    assert isinstance(storage.store, PostgresStore)
    return storage.store


class ServerMachine(WorkerMachine):
    """Clients of both servers beside the model. The first two workers are the first server's."""

    def server_of(self, live: Live) -> int:
        return self.doors.lives.index(live) // 2

    def owner_of(self, session: Seen) -> int:
        """The server that runs a session's turn."""
        (owner,) = [live for live in self.doors.lives if live.manager.sessions.has(session.id)]
        return self.server_of(owner)

    async def end_leases(self, server: int) -> None:
        """Have the database end the leases of a server, which does not know it."""
        for live in self.doors.lives[2 * server : 2 * server + 2]:
            store = store_of(live)
            await store._rows.leave(store.owner.needed().owner)

    async def wake(self, server: int) -> None:
        """Let a server know, and become an owner anew."""
        self.doors.clocks[server].advance(LEASE_S)
        for live in self.doors.lives[2 * server : 2 * server + 2]:
            while not store_of(live).owner.is_held:  # noqa: ASYNC110 - a lease that comes back tells nobody
                await asyncio.sleep(0)

    @rule(server=st.integers(0, 1))
    def stop(self, server: int) -> None:
        self.run(self.end_leases(server))
        self.run(self.wake(server))

    def may_be_taken(self, session: Seen, other: Live) -> bool:
        return self.owner_of(session) != self.server_of(other)

    async def taken_over(
        self,
        session: Seen,
        other: Live,
        asking: asyncio.Task[Answer],
        *,
        is_late: bool,
        ask: tuple[str, dict[str, Any], str],
    ) -> tuple[str, Script]:
        engine, owner, (path, body, key) = self.doors.engine, self.owner_of(session), ask
        first = engine.requests[-1].request_id
        await self.end_leases(owner)
        text, script = self.script()
        engine.plan(script)
        num_before = len(engine.requests)
        taking = asyncio.create_task(other.call("POST", path, body, idempotency_key=key))
        await engine.begun(num_before + 1)
        if is_late:
            engine.step_turn(first, STEPS)
            refused = await asking
        engine.step_turn(engine.requests[-1].request_id, STEPS)
        assert (await taking).status == 200
        await self.wake(owner)
        if not is_late:
            refused = await asking
        assert refused.status == 503 or is_cut_stream(refused), refused.body
        return text, script


def is_cut_stream(answer: Answer) -> bool:
    """Whether a stream that had begun ends with an error."""
    return answer.status == 200 and b'"error"' in answer.body


@contextmanager
def two_servers(rows: Callable[[], SharedRows], renderer: Renderer, folder: Path) -> Iterator[Doors]:
    """Two servers of two workers each, around one engine."""
    clocks = [ManualClock(), ManualClock()]
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    databases = [Database(rows=rows, clock=clock, lease_s=LEASE_S) for clock in clocks]
    with served([two_workers(folder, renderer, database=one, engine=engine) for one in databases]) as doors:
        doors.clocks += clocks
        yield doors


@pytest.mark.parametrize("strike", ["stop", "late"])
def test_a_turn_of_a_server_that_is_stopped_past_its_lease_is_made_once_by_another(
    strike: str, renderer: Renderer, tmp_path: Path
) -> None:
    tables = SharedTables(time.monotonic)
    with two_servers(lambda: MemoryRows(tables), renderer, tmp_path) as doors:
        machine = ServerMachine(doors)
        machine.open((0, 0), is_keyed=False)
        (session,) = machine.sessions
        for at, dialect in enumerate(("chat", "messages")):
            for stream in (False, True):
                for through in range(4):
                    machine.run(machine.turn(session, (through, at), strike, (dialect, stream)))
        machine.every_worker_lists_the_sessions_that_there_are_and_nothing_runs()
        view = machine.run(doors.lives[0].call("GET", f"/sessions/{session.id}")).json()
        assert [output_ids(record) for record in view["records"]] == session.turns
        assert len(doors.engine.requests) > len(session.turns) == 16, "some were taken over"
        machine.teardown()


@pytest.mark.cluster
def test_whatever_is_asked_of_whichever_server_is_what_one_server_says(renderer: Renderer, tmp_path: Path) -> None:
    tables = SharedTables(time.monotonic)
    with two_servers(lambda: MemoryRows(tables), renderer, tmp_path) as doors:
        run_machine(ServerMachine, doors, examples=EXAMPLES, steps=12)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An empty database in a real PostgreSQL."""
    with real_postgres() as postgres:
        asyncio.run(prepare(postgres.url(), timeout_s=20))
        yield postgres.url()


@pytest.mark.cluster
def test_the_same_with_a_real_database(url: str, renderer: Renderer, tmp_path: Path) -> None:
    with two_servers(lambda: PostgresRows(url, timeout_s=20), renderer, tmp_path) as doors:
        run_machine(ServerMachine, doors, examples=EXAMPLES, steps=12)
