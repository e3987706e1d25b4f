"""Servers that share a database: any of them takes any request, and the owner of its session serves it."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from standins.clock import ManualClock
from standins.shared_rows import MemoryRows, SharedTables
from stenograph.cli.main import main
from stenograph.cluster.postgres.connection import Lane
from stenograph.cluster.postgres.schema import prepare
from stenograph.cluster.postgres.server import PostgresRows
from stenograph.cluster.postgres.shared_rows import SharedRows
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.core.clock import SystemClock
from stenograph.http.listen import listen, url_of

from .conftest import Live, assistant, output_ids, user
from .test_durable import conversation
from .workers_kit import HEAD_SIZES, check_head_limits, real_postgres

pytestmark = pytest.mark.timeout(600)

Serve = Callable[..., AbstractAsyncContextManager[Live]]


@dataclass(slots=True)
class Node:
    """A server and its store."""

    live: Live
    store: PostgresStore


@pytest.fixture
def tables() -> SharedTables:
    return SharedTables(time.monotonic)


@pytest.fixture
def node(serve: Serve, tables: SharedTables) -> Callable[..., AbstractAsyncContextManager[Node]]:
    """A server on the tables. `at` is its address; None: its own."""

    @asynccontextmanager
    async def started(
        at: str | None = None,
        clock: ManualClock | None = None,
        rows: SharedRows | None = None,
        lease_s: float = 30.0,
        **options: object,
    ) -> AsyncIterator[Node]:
        with listen("127.0.0.1", 0) as listener:
            url = at or url_of(listener)
            shared = rows or MemoryRows(tables)
            store = await PostgresStore.open(shared, clock or SystemClock(), url=url, lease_s=lease_s)
            async with aclosing(store), serve(store=store, listener=listener, clock=clock, **options) as live:
                yield Node(live, store)

    return started


MakeNode = Callable[..., AbstractAsyncContextManager[Node]]


async def test_any_node_takes_a_request_and_the_owner_serves_it(node: MakeNode) -> None:
    async with node() as owner, node() as other:
        session = await owner.live.open(metadata={"task": 1})
        owner.live.says("one")
        first = await other.live.chat(session, user("hello"))
        assert (first.status, first.json()["choices"][0]["message"]["content"]) == (200, "one")
        assert "x-request-id" in first.headers
        assert all(len(first.headers.getall(name)) == 1 for name in ("server", "date"))  # type: ignore[attr-defined]
        owner.live.says("two")
        messages = (user("hello"), assistant("one"), user("and on"))
        streamed = await other.live.chat(session, *messages, stream=True)
        events = [line[6:] for line in streamed.body.decode().splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
        assert text == "two"
        owner.live.says("by the header")
        body = {"messages": [user("another opening")]}
        by_header = await other.live.call("POST", "/v1/chat/completions", body, x_session_id=session)
        assert by_header.status == 200, by_header.body
        views = [(await one.live.call("GET", f"/sessions/{session}")).json() for one in (owner, other)]
        assert views[0] == views[1]
        assert len(views[0]["records"]) >= 2
        assert (other.store.num_taken, len(other.live.engine.requests)) == (0, 0)
        wrong = await other.live.chat(session, {"role": "user", "content": 3})
        assert wrong.status == 400, "refusals are passed on as they are"
        put = await other.live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0, "verdict": "ok"})
        assert put.status == 200
        gone = await other.live.call("DELETE", f"/sessions/{session}")
        assert (gone.status, gone.body) == (204, b"")
        assert (await owner.live.call("GET", f"/sessions/{session}")).status == 404
        metrics = (await other.live.call("GET", "/metrics")).body.decode()
        assert 'stenograph_requests_passed_on_total{outcome="unreachable"} 0.0' in metrics
        assert "stenograph_lease_held 1.0" in metrics


async def test_a_token_is_good_at_every_node_of_its_session_and_for_no_other(node: MakeNode) -> None:
    keys = {"api_key": ("trainer",)}
    async with node(**keys) as owner, node(**keys) as other:
        opened = [(await owner.live.call("POST", "/sessions", {}, x_api_key="trainer")).json() for _ in range(2)]
        (mine, sibling), body = opened, {"messages": [user("hello")]}
        at, bearer = f"/sessions/{mine['session_id']}", f"Bearer {mine['token']}"
        for path in ("/v1/chat/completions", f"{at}/v1/chat/completions"):
            owner.live.says("one")
            answer = await other.live.call("POST", path, body, authorization=bearer)
            assert answer.status == 200, answer.body
        owner.live.says("one")
        assert (await other.live.call("POST", f"/v1/chat/completions?k%65y={mine['token']}", body)).status == 200
        for method, path in (("POST", f"/sessions/{sibling['session_id']}/v1/chat/completions"), ("GET", at)):
            refused = await other.live.call(method, path, body, authorization=bearer)
            assert (refused.status, refused.json()["error"]["code"]) == (403, "forbidden")
        ledger = await other.live.call("GET", f"{at}/ledger", x_api_key="trainer")
        assert ledger.json()["num_requests"] == 3


@pytest.mark.parametrize(("num_headers", "num_bytes"), HEAD_SIZES)
async def test_a_head_has_the_same_limits_through_any_node(num_headers: int, num_bytes: int, node: MakeNode) -> None:
    async with node() as owner, node() as other:
        session = await owner.live.open()
        await check_head_limits([owner.live, other.live], session, num_headers, num_bytes)


async def test_who_hangs_up_at_one_node_ends_the_turn_at_the_owner(node: MakeNode) -> None:
    async with node() as owner, node() as other:
        session = await owner.live.open()
        owner.live.says("never read", paused=True)
        chat = asyncio.ensure_future(other.live.chat(session, user("hello")))
        await owner.live.engine.begun(1)
        chat.cancel()
        await asyncio.wait({chat})
        await owner.live.engine.idle()
        owner.live.says("in its place")
        again = await other.live.chat(session, user("hello"))
        assert again.json()["choices"][0]["message"]["content"] == "in its place"


async def test_sessions_of_a_node_that_left_go_on_at_another(node: MakeNode) -> None:
    async with node() as other:
        async with node() as owner:
            session = await owner.live.open()
            owner.live.says("one")
            assert (await owner.live.chat(session, user("hello"))).status == 200
            before = (await owner.live.call("GET", f"/sessions/{session}")).json()
        after = (await other.live.call("GET", f"/sessions/{session}")).json()
        assert [output_ids(record) for record in after["records"]] == [output_ids(one) for one in before["records"]]
        other.live.says("two")
        answer = await other.live.chat(session, user("hello"), assistant("one"), user("and on"))
        assert answer.status == 200
        assert other.store.num_taken == 1


async def test_a_node_that_cannot_be_reached_is_named_until_its_lease_has_run_out(node: MakeNode) -> None:
    async with node() as other, node(at="http://127.0.0.1:9") as owner:
        session = await owner.live.open()
        refused = await other.live.chat(session, user("hello"))
        assert (refused.status, refused.json()["error"]["code"]) == (503, "session_elsewhere")
        assert "http://127.0.0.1:9" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        as_messages = await other.live.call(
            "POST", f"/sessions/{session}/v1/messages", {"model": "m", "max_tokens": 5, "messages": [user("hello")]}
        )
        assert as_messages.json()["type"] == "error", "in the words of the protocol that was spoken"
        passed_on = await other.live.call("GET", f"/sessions/{session}", x_stenograph_passed_on="1")
        assert passed_on.status == 503, "what was passed on is not passed on again"


async def test_a_node_that_says_nothing_is_waited_for_as_long_as_a_turn_may_take(node: MakeNode) -> None:
    heads: list[bytes] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        await reader.read()
        writer.close()

    deaf = await asyncio.start_server(silent, "127.0.0.1", 0)
    at = f"127.0.0.1:{deaf.sockets[0].getsockname()[1]}"
    options = {"request_timeout_s": 0.2, "abort_grace_s": 0.1}
    async with deaf, node(**options) as other, node(at=f"http://{at}") as owner:
        session = await owner.live.open()
        refused = await other.live.call("GET", f"/sessions/{session}?from=0", host="127.0.0.1", x_thing="kept")
        assert (refused.status, refused.json()["error"]["code"]) == (503, "session_elsewhere")
        metrics = (await other.live.call("GET", "/metrics")).body.decode()
        assert 'stenograph_requests_passed_on_total{outcome="unreachable"} 1.0' in metrics
    head = heads[0].lower()
    assert head.startswith(b"get /sessions/%b?from=0 http/1.1\r\n" % session.encode())
    assert b"\r\nhost: %b\r\n" % at.encode() in head
    assert (head.count(b"\r\nhost:"), head.count(b"\r\nx-stenograph-passed-on: 1\r\n")) == (1, 1)
    assert b"\r\nx-thing: kept\r\n" in head


async def test_what_a_page_of_another_site_asks_for_is_not_passed_on(node: MakeNode) -> None:
    async with node() as other, node(at="http://127.0.0.1:9") as owner:
        session = await owner.live.open()
        for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
            refused = await other.live.call("GET", f"/sessions/{session}", **headers)
            assert (refused.status, refused.json()["error"]["code"]) == (403, "forbidden")
        metrics = (await other.live.call("GET", "/metrics")).body.decode()
        assert 'stenograph_requests_passed_on_total{outcome="unreachable"} 0.0' in metrics


async def test_a_node_whose_lease_is_over_answers_for_no_session_and_ends_its_turns(
    node: MakeNode, tables: SharedTables
) -> None:
    clock = ManualClock()
    async with node(clock=clock) as owner:
        session = await owner.live.open()
        owner.live.says("one")
        assert (await owner.live.chat(session, user("hello"))).status == 200
        owner.live.says("never kept", paused=True)
        chat = asyncio.ensure_future(owner.live.chat(session, user("hello"), assistant("one"), user("and on")))
        await owner.live.engine.begun(2)
        tables.leave(owner.store.owner.needed().owner)  # the database has ended it; the node is stopped meanwhile
        owner.store._living.cancel()
        clock.advance(27.0)
        refused = await chat
        assert (refused.status, refused.json()["error"]["code"]) == (503, "storage_unavailable")
        assert "retry-after" in refused.headers
        for method, path in (("GET", ""), ("GET", "/ledger"), ("DELETE", "")):
            answer = await owner.live.call(method, f"/sessions/{session}{path}")
            assert (answer.status, answer.json()["error"]["code"]) == (503, "storage_unavailable"), path
        assert owner.live.manager.sessions.num_sessions == 0
        assert (await owner.live.call("GET", "/ready")).status == 503
        assert (await owner.live.call("GET", "/health")).status == 200
        assert (await owner.live.call("POST", "/sessions", {})).status == 503
    async with node() as other:
        shown = (await other.live.call("GET", f"/sessions/{session}")).json()
        assert len(shown["records"]) == 1


@dataclass(slots=True)
class SharedTime:
    """A database, and the clock of each server on it: they differ by `apart_s`, and run alike."""

    rows: Callable[[], SharedRows]
    age: Callable[[float], Awaitable[object]]
    """Lets the database's clock run."""
    clocks: list[ManualClock] = field(default_factory=list)

    def clock(self, apart_s: float) -> ManualClock:
        self.clocks.append(ManualClock(wall=time.time() + apart_s))
        return self.clocks[-1]

    async def passes(self, seconds: float) -> None:
        await self.age(seconds)
        for clock in self.clocks:
            clock.advance(seconds)


@pytest.fixture(params=["memory", "postgres"])
async def shared_time(request: pytest.FixtureRequest) -> AsyncIterator[SharedTime]:
    if request.param == "memory":
        database = ManualClock(monotonic=time.time())
        tables = SharedTables(database.monotonic)

        async def age(seconds: float) -> None:
            database.advance(seconds)

        yield SharedTime(rows=lambda: MemoryRows(tables), age=age)
        return
    with real_postgres() as postgres:
        url = postgres.url()
        await prepare(url, timeout_s=20)
        lane = Lane(url, name="test", timeout_s=20)
        async with aclosing(lane):

            def set_back(seconds: float) -> Awaitable[object]:
                """A real clock does not run for a test: what it has dated is older."""
                return lane.fetch("UPDATE stenograph_ends SET at = at - $1::float8", seconds)

            yield SharedTime(rows=lambda: PostgresRows(url, timeout_s=20), age=set_back)


DAY_S = 86_400.0


@pytest.mark.parametrize("apart_s", [-DAY_S, 0.0, DAY_S])
async def test_a_session_lives_its_ttl_whatever_the_servers_clocks_say(
    node: MakeNode, shared_time: SharedTime, apart_s: float
) -> None:
    """The first server's clock is right; the second's is a day behind or ahead."""

    async def is_there(live: Live, session: str) -> bool:
        await live.manager.sessions.expire_kept()
        return (await live.call("GET", f"/sessions/{session}")).status == 200

    clock, rows = shared_time.clock(0.0), shared_time.rows
    async with node(clock=clock, rows=rows(), lease_s=DAY_S) as one:
        sessions = [await one.live.open(ttl_s=1000) for _ in range(2)]
        for session in sessions:
            one.live.says("one")
            assert (await one.live.chat(session, user("hello"))).status == 200
    async with node(clock=shared_time.clock(apart_s), rows=rows(), lease_s=DAY_S) as other:
        assert await is_there(other.live, sessions[0])
        await shared_time.passes(900)
        assert await is_there(other.live, sessions[0])
        other.live.says("two")
        assert (await other.live.chat(sessions[0], user("hello"), assistant("one"), user("more"))).status == 200
        await shared_time.passes(200)
        assert [await is_there(other.live, session) for session in sessions] == [True, False]
    async with node(clock=shared_time.clock(-apart_s), rows=rows(), lease_s=DAY_S) as third:
        await shared_time.passes(700)
        assert await is_there(third.live, sessions[0])
        await shared_time.passes(150)
        assert not await is_there(third.live, sessions[0])


@pytest.mark.parametrize("apart_s", [-DAY_S, DAY_S])
async def test_an_outcome_lengthens_no_sessions_life_on_any_server(
    node: MakeNode, shared_time: SharedTime, apart_s: float
) -> None:
    async with node(clock=shared_time.clock(apart_s), rows=shared_time.rows(), lease_s=DAY_S) as one:
        session = await one.live.open(ttl_s=1000)
        one.live.says("one")
        assert (await one.live.chat(session, user("hello"))).status == 200
        await shared_time.passes(900)
        assert (await one.live.call("PUT", f"/sessions/{session}/outcome", {"reward": 1.0})).status == 200
    async with node(clock=shared_time.clock(0.0), rows=shared_time.rows(), lease_s=DAY_S) as other:
        assert (await other.live.call("GET", f"/sessions/{session}")).status == 200
        await shared_time.passes(200)
        assert (await other.live.call("GET", f"/sessions/{session}")).status == 404


async def test_a_backup_is_the_database_s_own(node: MakeNode, tmp_path: Path) -> None:
    async with node() as one:
        answer = await one.live.call("POST", "/backup", {"path": str(tmp_path / "copy")})
        assert answer.status == 400
        assert "pg_dump" in answer.json()["error"]["message"]
    assert not os.listdir(tmp_path)


async def test_what_is_in_a_database_is_listed_and_checked_without_a_server(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    with real_postgres() as postgres:
        url = postgres.url()
        assert await asyncio.to_thread(main, ["check", url]) == 2
        assert "there are no sessions in this database" in capsys.readouterr().err
        await prepare(url, timeout_s=20)
        store = await PostgresStore.open(PostgresRows(url, timeout_s=20), SystemClock(), url="http://a", lease_s=30.0)
        async with aclosing(store), serve(store=store) as live:
            sessions = [await live.open() for _ in range(3)]
            for session in sessions:
                await conversation(live, session, turns=["one", "two", "three"])
            assert await asyncio.to_thread(main, ["check", url]) == 0, "a server may run meanwhile"
        assert capsys.readouterr().out == "3 sessions, 12 rows: whole\n"
        assert await asyncio.to_thread(main, ["inspect", url]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == sessions
        assert await asyncio.to_thread(main, ["inspect", url, sessions[0]]) == 0
        assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["one", "two", "three"]
        assert await asyncio.to_thread(main, ["inspect", url, "0" * 32]) == 2
        lane = Lane(url, name="test", timeout_s=20)
        async with aclosing(lane):
            await lane.fetch("UPDATE stenograph_rows SET body = set_byte(body, 100, 1) WHERE session = 2 AND seq = 2")
            await lane.fetch("DELETE FROM stenograph_rows WHERE session = 3 AND seq = 3")
            await lane.fetch("DELETE FROM stenograph_sessions WHERE number = 1")
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["check", url]) == 1
        said = capsys.readouterr().out
    assert f"Session {sessions[1]} is damaged on disk, in row 2" in said
    assert f"session {sessions[2]} ends at row 3 by its end, and at row 2 by its rows" in said
    assert "session number 1 is gone, but 3 rows of it are there" in said
