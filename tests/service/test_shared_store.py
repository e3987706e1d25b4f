"""Sessions in a database that nodes share: the contract, two owners, a database that goes away.

Each test runs with the tables in memory, and with a real PostgreSQL where there is one.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standins.clock import ManualClock
from standins.postgres_server import USER, PostgresServer
from standins.shared_rows import MemoryRows, SharedTables
from stenograph.cluster.postgres.connection import Lane, connect
from stenograph.cluster.postgres.schema import SCHEMA, check_connections, check_schema, prepare
from stenograph.cluster.postgres.server import NUM_CONNECTIONS, PostgresRows
from stenograph.cluster.postgres.shared_rows import Claimed, EndMove, SharedRows
from stenograph.cluster.postgres.store import OwnedTail, PostgresStore
from stenograph.core.clock import Clock, SystemClock
from stenograph.core.errors import SessionElsewhere, StartupError, StenographError, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.codec.rows import COMMIT, HEAD_BYTES, OPENED, OUTCOME, Totals, row_body, row_digest
from stenograph.store.groups import NewRow, NewSession
from tests.store_laws import ONE_TURN, appended, check_store, payloads, session_id

from .workers_kit import real_postgres

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with real_postgres() as server:
        yield server


async def new_database(postgres: PostgresServer) -> str:
    """The address of an empty database."""
    name = f"test_{uuid.uuid4().hex}"
    await asked(postgres.url(), f"CREATE DATABASE {name}")
    return postgres.url(name)


async def asked(url: str, query: str, *args: Any) -> list[Any]:
    connection = await connect(url, name="test", timeout_s=TIMEOUT_S)
    try:
        return list(await connection.fetch(query, *args))
    finally:
        connection.terminate()


MakeRows = Callable[[], SharedRows]


@pytest.fixture(params=["memory", "postgres"])
async def rows(request: pytest.FixtureRequest) -> MakeRows:
    """Ways to one database of the test's own, each a node's."""
    if request.param == "memory":
        tables = SharedTables(time.monotonic)
        return lambda: MemoryRows(tables)
    url = await new_database(request.getfixturevalue("postgres"))
    await prepare(url, timeout_s=TIMEOUT_S)
    return lambda: PostgresRows(url, timeout_s=TIMEOUT_S)


@asynccontextmanager
async def node(rows: SharedRows, *, at: str = "http://a", clock: Clock | None = None) -> AsyncIterator[PostgresStore]:
    store = await PostgresStore.open(rows, clock or SystemClock(), url=at, lease_s=30.0)
    async with aclosing(store):
        yield store


async def test_the_store_in_a_shared_database_keeps_the_contract(rows: MakeRows) -> None:
    await check_store(lambda: PostgresStore.open(rows(), SystemClock(), url="http://a", lease_s=30.0))


async def test_a_session_is_its_owners_until_the_owner_leaves(rows: MakeRows) -> None:
    id_ = session_id(1)
    async with node(rows(), at="http://b") as other:
        async with node(rows(), at="http://a") as owner:
            tail = await owner.create(id_, b"opening", at=1.0, ttl_s=1e-9)
            await appended(owner, tail, b"one")
            with pytest.raises(SessionElsewhere) as refused:
                await other.take(id_)
            assert (refused.value.url, 0 < (refused.value.retry_after_s or 0) <= 30) == ("http://a", True)
            with pytest.raises(SessionElsewhere):
                await other.delete(id_)
            assert list(await other.expired(now=10.0, limit=5)) == []
            assert list(await owner.expired(now=10.0, limit=5)) == [id_]
            assert payloads(await other.load(id_)) == [b"opening", b"one"], "whoever only reads need not own it"
            assert await owner.holder(id_) is None
            assert await other.holder(id_) is not None
        stored = await other.take(id_)
        assert payloads(stored) == [b"opening", b"one"]
        assert stored is not None
        await appended(other, stored.tail(), b"two")
        assert other.num_taken == 1
        assert await other.delete(id_)
        assert not await other.delete(id_)


async def test_whoever_waits_for_rows_goes_on_when_the_lease_is_lost_before_they_are_written() -> None:
    clock, id_ = ManualClock(), session_id(1)
    async with node(MemoryRows(SharedTables(clock.monotonic)), clock=clock) as owner:
        tail = await owner.create(id_, b"opening", at=1.0, ttl_s=None)

        async def lose() -> None:
            clock.advance(28.0)

        # In the order in which they begin: the reader, the end of the lease, the writer that the row wakes.
        reading, losing = asyncio.ensure_future(owner.load(id_)), asyncio.ensure_future(lose())
        told: list[StenographError | None] = []
        owner.append(tail, b"row", adds=ONE_TURN, at=1.0, done=told.append)
        await losing
        assert payloads(await reading) == [b"opening"], "by the lease after that one"
        assert [type(error) for error in told] == [StorageUnavailable]


@dataclass(slots=True)
class Remembered:
    """A worker's memory, which outlives it."""

    last: int | None = None

    def taken(self, owner: int) -> None:
        self.last = owner


async def test_a_process_that_is_started_again_has_its_sessions_at_once(rows: MakeRows) -> None:
    id_, memory = session_id(1), Remembered()

    async def started() -> PostgresStore:
        return await PostgresStore.open(rows(), SystemClock(), url="http://a#1", lease_s=3600.0, memory=memory)

    killed = await started()  # which never leaves
    await appended(killed, await killed.create(id_, b"opening", at=1.0, ttl_s=None), b"one")
    before = memory.last
    async with node(rows(), at="http://a#0") as other:
        with pytest.raises(SessionElsewhere) as refused:
            await other.take(id_)
        assert refused.value.url == "http://a", "any worker passes it on"
        async with aclosing(await started()) as again:
            assert memory.last != before
            stored = await again.take(id_)
            assert payloads(stored) == [b"opening", b"one"]
            with pytest.raises(StorageUnavailable):
                await appended(killed, OwnedTail(stored.tail(), epoch=1, lease=killed.owner.needed()), b"late")
    await killed.aclose()


async def test_a_row_of_an_owner_whose_session_was_taken_is_refused_and_told_of(rows: MakeRows) -> None:
    id_, stays = session_id(1), session_id(2)
    asking = rows()
    async with aclosing(asking), node(rows(), at="http://a") as owner:
        tails = [await owner.create(one, b"opening", at=1.0, ttl_s=None) for one in (id_, stays)]
        lease = owner.owner.needed()
        await asking.leave(lease.owner)  # as if the lease had run out: the owner does not know yet
        thief = await asking.join("http://b", lease_s=30.0, instead_of=None)
        assert await asking.claim(id_, thief) == Claimed(session=tails[0].number, epoch=2, is_new=True)
        moved: list[SessionId] = []
        owner.on_moved = moved.append
        refused, kept = await asyncio.gather(
            appended(owner, tails[0], b"too late"), appended(owner, tails[1], b"in time"), return_exceptions=True
        )
        assert isinstance(refused, StorageUnavailable)
        assert kept is None, "no other session of the group is harmed"
        assert (moved, owner.num_refused) == ([id_], 1)
        assert payloads(await owner.load(id_)) == [b"opening"]
        assert payloads(await owner.load(stays)) == [b"opening", b"in time"]


async def test_a_lease_that_ran_out_is_never_renewed(rows: MakeRows) -> None:
    asking = rows()
    async with aclosing(asking):
        owner = await asking.join("http://a", lease_s=30.0, instead_of=None)
        assert await asking.renew(owner, lease_s=30.0)
        assert list(await asking.owners()) == ["http://a"]
        assert await asking.renew(owner, lease_s=0.0)
        assert list(await asking.owners()) == []
        assert not await asking.renew(owner, lease_s=30.0)
        again = await asking.join("http://a", lease_s=30.0, instead_of=owner)
        assert again > owner
        assert await asking.renew(again, lease_s=30.0)


async def test_a_session_that_is_there_already_is_only_its_owners_and_only_while_it_is_new(rows: MakeRows) -> None:
    asking, id_ = rows(), session_id(1)
    async with aclosing(asking):
        owner = await asking.join("http://a", lease_s=30.0, instead_of=None)
        other = await asking.join("http://b", lease_s=30.0, instead_of=None)
        body = row_body(OPENED, Totals(), b"opening")
        new = NewSession(
            number=0, session_id=id_, ttl_s=None, at=1.0, body=body, digest=row_digest(b"", id_, 0, body), key=None
        )
        assert await asking.create(new, 10**9) is None, "nobody is that owner"
        number = await asking.create(new, owner)
        assert number is not None
        assert await asking.create(new, owner) == number
        assert await asking.create(new, other) is None
        await asking.leave(owner)
        assert await asking.claim(id_, other) == Claimed(session=number, epoch=2, is_new=True)
        assert await asking.create(new, owner) is None


# --- a database without room ----------------------------------------------------------------------------------------

ROLE_BACKENDS = "SELECT pid FROM pg_stat_activity WHERE usename = $1"


async def limited_role(url: str, limit: int) -> tuple[str, str]:
    """A role with this CONNECTION LIMIT that owns the database, and the database's address for it."""
    role = f"role_{uuid.uuid4().hex}"
    await asked(url, f"CREATE ROLE {role} LOGIN CONNECTION LIMIT {limit}")
    await asked(url, f"ALTER SCHEMA public OWNER TO {role}")
    return role, url.replace(f"//{USER}@", f"//{role}@")


async def test_a_node_whose_lease_is_all_it_can_ask_for_lets_it_go_and_comes_back(postgres: PostgresServer) -> None:
    url = await new_database(postgres)
    role, own_url = await limited_role(url, limit=-1)
    await prepare(own_url, timeout_s=TIMEOUT_S)
    rows = PostgresRows(own_url, timeout_s=TIMEOUT_S)
    async with aclosing(await PostgresStore.open(rows, SystemClock(), url="http://a", lease_s=1.0)) as owner:
        lost = asyncio.Event()
        owner.on_lost = lost.set
        tail = await owner.create(session_id(1), b"opening", at=1.0, ttl_s=None)
        await asked(url, f"ALTER ROLE {role} CONNECTION LIMIT 1")
        others = f"{ROLE_BACKENDS} AND application_name <> 'stenograph lease'"
        await asked(url, f"SELECT pg_terminate_backend(pid) FROM ({others}) AS found", role)
        while await asked(url, others, role):
            continue  # one that has not ended yet would keep the row
        with pytest.raises(StorageUnavailable):
            await appended(owner, tail, b"row")
        await lost.wait()
        assert owner.failure is not None
        with pytest.raises(StorageUnavailable):
            await owner.load(session_id(1))
        with pytest.raises(StorageUnavailable):
            await owner.create(session_id(2), b"opening", at=1.0, ttl_s=None)
        await asked(url, f"ALTER ROLE {role} CONNECTION LIMIT -1")
        stored = None
        while stored is None:
            await owner.owner.joined.wait()
            with suppress(SessionElsewhere, StorageUnavailable):  # on a slow machine the next lease may be lost as well
                stored = await owner.take(session_id(1))
            await asyncio.sleep(0)
        assert payloads(stored) == [b"opening"]


async def test_a_statement_that_never_ends_costs_the_lease_not_the_node(postgres: PostgresServer) -> None:
    """The tables are locked: every connection is there, and none of them answers."""
    url = await new_database(postgres)
    await prepare(url, timeout_s=TIMEOUT_S)
    store = await PostgresStore.open(PostgresRows(url, timeout_s=0.3), SystemClock(), url="http://a", lease_s=0.4)
    blocker = await connect(url, name="test", timeout_s=TIMEOUT_S)
    try:
        async with aclosing(store):
            tail = await store.create(session_id(1), b"opening", at=1.0, ttl_s=None)
            await blocker.execute("BEGIN; LOCK TABLE stenograph_rows, stenograph_sessions")
            with pytest.raises(StorageUnavailable):
                await appended(store, tail, b"row")
            with pytest.raises(StorageUnavailable):
                await store.load(session_id(1))
            assert store.owner.num_lost > 0
    finally:
        blocker.terminate()


FAILS = "CREATE FUNCTION own.current_setting(text) RETURNS text LANGUAGE plpgsql AS $$BEGIN RAISE 'not now'; END$$"


async def test_a_connection_whose_first_statement_fails_is_closed(postgres: PostgresServer) -> None:
    url = await new_database(postgres)
    role, own_url = await limited_role(url, limit=-1)
    for query in (
        f"CREATE SCHEMA own AUTHORIZATION {role}",
        FAILS,
        f"ALTER ROLE {role} SET search_path = own, pg_catalog",
    ):
        await asked(url, query)
    with pytest.raises(Exception, match="not now") as failed:
        await connect(own_url, name="test", timeout_s=TIMEOUT_S)
    assert failed.traceback, "it holds the connection, so that nothing else closes it"
    for _ in range(100):
        if not await asked(url, ROLE_BACKENDS, role):
            return
    pytest.fail("the connection is still there")


@pytest.mark.parametrize("limit", [0, 1, 4])
async def test_a_start_says_how_many_connections_are_missing(postgres: PostgresServer, limit: int) -> None:
    _, url = await limited_role(await new_database(postgres), limit)
    said = f"needs {NUM_CONNECTIONS} .* and got {limit}: too many connections for role" if limit else "cannot connect"
    with pytest.raises(StartupError, match=said):
        await check_connections(url, num=NUM_CONNECTIONS, timeout_s=TIMEOUT_S)


def test_the_page_of_machines_has_the_number_of_connections() -> None:
    page = Path(__file__).parents[2] / "docs" / "machines.md"
    assert NUM_CONNECTIONS == 5
    assert "**Connections**: five a process" in page.read_text()


async def test_a_server_starts_and_works_with_the_connections_that_are_documented(postgres: PostgresServer) -> None:
    url = await new_database(postgres)
    role, own_url = await limited_role(url, NUM_CONNECTIONS)
    for _ in range(2):
        await check_connections(own_url, num=NUM_CONNECTIONS, timeout_s=TIMEOUT_S)
        await prepare(own_url, timeout_s=TIMEOUT_S)
    rows = PostgresRows(own_url, timeout_s=TIMEOUT_S)
    async with aclosing(await PostgresStore.open(rows, SystemClock(), url="http://a", lease_s=30.0)) as owner:
        tails = [await owner.create(session_id(n), b"opening", at=1.0, ttl_s=None) for n in range(9)]
        await asyncio.gather(*(appended(owner, tail, b"row") for tail in tails))
        assert len(await asyncio.gather(*(owner.take(session_id(n)) for n in range(9)))) == 9
        assert len(await asked(url, ROLE_BACKENDS, role)) == NUM_CONNECTIONS


async def test_a_lane_that_cannot_connect_does_not_stand_before_one_that_can(postgres: PostgresServer) -> None:
    url = await new_database(postgres)
    role, own_url = await limited_role(url, limit=-1)
    await prepare(own_url, timeout_s=TIMEOUT_S)
    rows = PostgresRows(own_url, timeout_s=TIMEOUT_S)
    async with aclosing(rows):
        await rows.join("http://a", lease_s=30.0, instead_of=None)
        await asked(url, f"ALTER ROLE {role} CONNECTION LIMIT 3")  # the lease, the rows, one for all else
        answers = await asyncio.gather(*(rows.owners() for _ in range(3)), return_exceptions=True)
        assert [list(one) for one in answers if not isinstance(one, BaseException)], "one of them can"
        for _ in range(6):
            assert list(await rows.owners()) == ["http://a"]


@pytest.fixture(params=["session", "transaction", "statement"])
def pooler(request: pytest.FixtureRequest, postgres: PostgresServer, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A real pgbouncer before the database in this mode, and its port."""
    program = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if program is None:
        pytest.skip("no pgbouncer is installed: scripts/test-cluster installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    (tmp_path / "pgbouncer.ini").write_text(
        f"[databases]\n* = host=127.0.0.1 port={postgres.port} user={USER}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nauth_type = any\npool_mode = {request.param}\nunix_socket_dir =\n"
    )
    user = ["-u", "nobody"] if os.getuid() == 0 else []
    with subprocess.Popen(
        [program, *user, str(tmp_path / "pgbouncer.ini")], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert any("process up" in line for line in process.stderr), "pgbouncer has ended"
            yield request.param, port
        finally:
            process.kill()


async def test_a_pooler_that_does_not_keep_sessions_is_refused_in_words(
    postgres: PostgresServer, pooler: tuple[str, int]
) -> None:
    mode, port = pooler
    url = (await new_database(postgres)).replace(f":{postgres.port}/", f":{port}/")
    if mode != "session":
        for _ in range(3):  # once there are prepared statements of an earlier try, too
            with pytest.raises(StartupError, match="pool_mode = session, or PostgreSQL's own address"):
                await check_connections(url, num=NUM_CONNECTIONS, timeout_s=TIMEOUT_S)
        return
    await check_connections(url, num=NUM_CONNECTIONS, timeout_s=TIMEOUT_S)
    await prepare(url, timeout_s=TIMEOUT_S)
    rows = PostgresRows(url, timeout_s=TIMEOUT_S)
    async with aclosing(await PostgresStore.open(rows, SystemClock(), url="http://a", lease_s=30.0)) as owner:
        await appended(owner, await owner.create(session_id(1), b"opening", at=1.0, ttl_s=None), b"row")


# --- the tables in memory are those of PostgreSQL --------------------------------------------------------------------

SHORT, LONG = 0.0, 3600.0
OWNER = st.integers(0, 2)
SESSION = st.integers(0, 2)
STATEMENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), OWNER, st.sampled_from([SHORT, LONG])),
        st.tuples(st.just("renew"), OWNER, st.sampled_from([SHORT, LONG])),
        st.tuples(st.just("leave"), OWNER, st.none()),
        st.tuples(st.just("create"), OWNER, SESSION),
        st.tuples(st.just("claim"), OWNER, SESSION),
        st.tuples(st.just("holder"), OWNER, SESSION),
        st.tuples(st.just("append"), st.tuples(SESSION, SESSION), st.integers(-1, 1)),
        st.tuples(st.just("delete"), OWNER, SESSION),
        st.tuples(st.just("look"), OWNER, SESSION),
    ),
    max_size=25,
)


@dataclass(slots=True)
class Played:
    """Statements that are asked of one database, and what is known of it meanwhile. `salt` makes ids of its own."""

    rows: SharedRows
    salt: str
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    owners: dict[int, int] = field(default_factory=dict[int, int])
    last: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    names: dict[int, int] = field(default_factory=dict[int, int])

    def id(self, number: int) -> SessionId:
        return SessionId(f"{self.salt}{number:04x}")

    async def run(self, statement: tuple[Any, ...]) -> Any:
        """The answer, without what differs between two databases: their numbers."""
        what, one, other = statement
        if what == "append":
            return await self._append(one, other)
        owner = self.owners.get(one, 10**9)
        if what == "join":
            self.owners[one] = await self.rows.join(f"http://{one}", lease_s=other, instead_of=self.owners.get(one))
            return None
        if what in ("renew", "leave"):
            return await (self.rows.renew(owner, lease_s=other) if what == "renew" else self.rows.leave(owner))
        return await self._of_session(what, self.id(other), other, owner)

    async def _of_session(self, what: str, id_: SessionId, one: int, owner: int) -> Any:
        if what == "create":
            return await self._create(id_, one, owner)
        if what == "claim":
            claimed = await self.rows.claim(id_, owner)
            if isinstance(claimed, Claimed):
                self.last[one] = (claimed.epoch, self.last[one][1])
                return claimed.epoch, claimed.is_new
            return None if claimed is None else claimed.name
        if what == "holder":
            held = await self.rows.holder(id_, owner)
            return None if held is None else held.name
        return await (self.rows.delete(id_, owner, {"a": 1}) if what == "delete" else self._look(id_, owner))

    async def _create(self, id_: SessionId, one: int, owner: int) -> bool:
        body = row_body(OPENED, Totals(), id_.encode())
        digest = row_digest(b"", id_, 0, body)
        new = NewSession(number=0, session_id=id_, ttl_s=1e-9, at=1.0, body=body, digest=digest, key=self.salt)
        number = await self.rows.create(new, owner)
        if number is not None and self.numbers.get(one) != number:
            self.numbers[one], self.last[one] = number, (1, 0)
        return number is not None

    async def _append(self, sessions: tuple[int, int], behind: int) -> Any:
        """Rows for one or two sessions, behind their end, or before or after it."""
        moves: list[EndMove] = []
        rows: list[NewRow] = []
        for one in dict.fromkeys(sessions):
            epoch, seq = self.last.get(one, (1, 0))
            before = max(0, seq + behind)
            totals = Totals(num_turns=before + 1, outcome_seq=before + 1)
            body = row_body(OUTCOME if before % 2 else COMMIT, totals, b"%d" % before)
            digest = row_digest(b"", self.id(one), before + 1, body)
            session = self.numbers.get(one, 10**9)
            rows.append(NewRow(session=session, seq=before + 1, at=2.0, body=body, digest=digest))
            moves.append(
                EndMove(
                    session=session,
                    epoch=epoch,
                    before=before,
                    seq=before + 1,
                    digest=digest,
                    totals=totals,
                    head=body[:HEAD_BYTES],
                    has_turn=before % 2 == 0,
                )
            )
        if len({move.session for move in moves}) < len(moves):
            return None  # two that are not there
        kept = await self.rows.append(moves, rows)
        for one, move in zip(dict.fromkeys(sessions), moves, strict=True):
            if move.session in kept:
                self.last[one] = (self.last[one][0], max(move.seq, self.last[one][1]))
        return [move.session in kept for move in moves]

    async def _look(self, id_: SessionId, owner: int) -> Any:
        stored, found = await self.rows.read(id_), await self.rows.find(self.salt)
        page = [one for one in await self.rows.page(limit=1000, after=None) if one.session_id.startswith(self.salt)]
        after = await self.rows.page(limit=1000, after=page[0].session_id) if page else []
        expired = await self.rows.expired(limit=1000, owner=owner)
        return (
            None if stored is None else list(stored.rows),
            None if found is None else (found.session_id, found.at, list(found.rows)),
            [(one.session_id, one.last_head, one.last_seq, one.opened, one.outcome) for one in page],
            [one.session_id for one in after if one.session_id.startswith(self.salt)],
            [one for one in expired if one.startswith(self.salt)],
        )


def test_the_tables_in_memory_answer_as_postgresql_does(postgres: PostgresServer) -> None:
    async def prepared() -> PostgresRows:
        url = await new_database(postgres)
        await prepare(url, timeout_s=TIMEOUT_S)
        return PostgresRows(url, timeout_s=TIMEOUT_S)

    with asyncio.Runner() as runner:
        real = runner.run(prepared())

        @settings(max_examples=25)
        @given(STATEMENTS)
        def agree(statements: list[tuple[Any, ...]]) -> None:
            async def both() -> None:
                salt = uuid.uuid4().hex[:28]
                played = [Played(real, salt), Played(MemoryRows(SharedTables(time.monotonic)), salt)]
                for statement in statements:
                    answers = [await one.run(statement) for one in played]
                    assert answers[0] == answers[1], statement

            runner.run(both())

        agree()
        runner.run(real.aclose())


# --- schema ----------------------------------------------------------------------------------------------------------


async def test_a_newer_schema_is_refused_and_an_older_one_is_brought_up_whole_or_not_at_all(
    postgres: PostgresServer,
) -> None:
    url = await new_database(postgres)
    with pytest.raises(StartupError, match="no sessions in this database"):
        await check_schema(url, timeout_s=TIMEOUT_S)
    await asyncio.gather(*(prepare(url, timeout_s=TIMEOUT_S) for _ in range(4)))  # several nodes start at once
    await check_schema(url, timeout_s=TIMEOUT_S)
    later = (*[""] * SCHEMA, "CREATE TABLE stenograph_new (a int); CREATE TABLE stenograph_rows (a int)")
    with pytest.raises(StartupError, match="already exists"):
        await prepare(url, timeout_s=5, migrations=later)
    found = await asked(url, "SELECT to_regclass('stenograph_new'), version FROM stenograph_schema")
    assert found[0] == (None, SCHEMA)
    await prepare(url, timeout_s=5, migrations=(*[""] * SCHEMA, "CREATE TABLE stenograph_new (a int)"))
    with pytest.raises(StartupError, match=f"has schema {SCHEMA + 1}, and this server knows {SCHEMA}"):
        await prepare(url, timeout_s=TIMEOUT_S)
    with pytest.raises(StartupError, match="a newer stenograph has written it"):
        await check_schema(url, timeout_s=TIMEOUT_S)


async def test_a_connection_commits_before_it_answers_whatever_the_database_says(
    postgres: PostgresServer,
) -> None:
    shown = await asked(postgres.url(synchronous_commit="off"), "SHOW synchronous_commit")
    assert shown[0][0] == "on"


# --- the database is away --------------------------------------------------------------------------------------------


async def test_rows_are_kept_once_though_every_connection_is_ended_again_and_again(postgres: PostgresServer) -> None:
    """Connections die at any moment of a commit: before it, after it, while it is answered."""
    url = await new_database(postgres)
    await prepare(url, timeout_s=TIMEOUT_S)
    id_ = session_id(1)
    end_all = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'stenograph rows'"
    )
    lane = Lane(url, name="test", timeout_s=TIMEOUT_S)
    async with aclosing(lane), node(PostgresRows(url, timeout_s=TIMEOUT_S)) as store:
        tail = await store.create(id_, b"opening", at=1.0, ttl_s=None)
        num_ended = num_rows = 0
        while num_ended < 15:
            rows = [appended(store, tail, b"%d" % (num_rows + one)) for one in range(3)]
            ended, *_ = await asyncio.gather(lane.fetch(end_all), *rows)
            num_ended, num_rows = num_ended + len(ended), num_rows + 3
        assert payloads(await store.load(id_)) == [b"opening", *(b"%d" % number for number in range(num_rows))]
        assert tail.totals == Totals(num_turns=num_rows, num_tokens=num_rows * ONE_TURN.num_tokens)


async def test_while_the_database_is_away_all_is_refused_and_after_it_all_goes_on(postgres: PostgresServer) -> None:
    url = await new_database(postgres)
    await prepare(url, timeout_s=TIMEOUT_S)
    id_, clock = session_id(1), ManualClock()
    async with node(PostgresRows(url, timeout_s=TIMEOUT_S), clock=clock) as store:
        tail = await store.create(id_, b"opening", at=1.0, ttl_s=None)
        await appended(store, tail, b"one")
        lost = asyncio.Event()
        store.on_lost = lost.set
        await asyncio.to_thread(postgres.kill)
        try:
            second = asyncio.ensure_future(appended(store, tail, b"two"))
            await asyncio.sleep(0)  # it is with the store
            clock.advance(27.0)
            with pytest.raises(StorageUnavailable, match=r"does not answer|may have been kept or not") as refused:
                await second
            assert lost.is_set()
            assert refused.value.retry_after_s == 5.0
            assert store.failure is not None
            with pytest.raises(StorageUnavailable, match="does not answer"):
                await store.take(id_)
            store.owner.joined.clear()
        finally:
            await asyncio.to_thread(postgres.start)
        joined = asyncio.ensure_future(store.owner.joined.wait())
        while not joined.done():
            clock.advance(0.05)  # it asks again after a while
            await asyncio.wait({joined}, timeout=0.01)
        with pytest.raises(StorageUnavailable):
            await appended(store, tail, b"of a session that is not in memory any more")
        stored = await store.take(id_)
        assert stored is not None
        assert payloads(stored) in ([b"opening", b"one"], [b"opening", b"one", b"two"])
        await appended(store, stored.tail(), b"three")
        assert payloads(await store.load(id_))[-1] == b"three"
