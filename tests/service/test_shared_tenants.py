"""Tenants and accounts of two servers on one database, with the tables in memory and with a real PostgreSQL.

What a tenant has is its own through either server; some quotas are of both servers together, the others each one's.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from standins.clock import ManualClock
from standins.postgres_server import PostgresServer
from standins.shared_rows import MemoryRows, SharedTables
from stenograph.cluster.postgres.schema import prepare
from stenograph.cluster.postgres.server import PostgresRows
from stenograph.cluster.postgres.shared_rows import SharedRows
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.core.stated_options import TAG, tag_of
from stenograph.http.listen import listen, url_of
from stenograph.text.renderer import Renderer

from .conftest import Live
from .test_accounts import accounts, num_sampled, rollout
from .test_shared_store import new_database
from .test_tenant_keys import filled, key, settings_of_team
from .test_tenants import (
    CHAT,
    GROUP,
    OPERATOR,
    Anns,
    anns,
    as_,
    check_own_sessions,
    opened,
    settings_in,
    walked,
)
from .workers_kit import Database, real_postgres, two_workers

Serve = Callable[..., AbstractAsyncContextManager[Live]]
LEASE_S = 86_400.0
"""The clocks stand still, and are moved by less."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with real_postgres() as server:
        yield server


@pytest.fixture(params=["memory", "postgres"])
async def rows(request: pytest.FixtureRequest) -> Callable[[], SharedRows]:
    """Ways to one database of the test's own, each a process's."""
    if request.param == "memory":
        tables = SharedTables(time.monotonic)
        return lambda: MemoryRows(tables)
    url = await new_database(request.getfixturevalue("postgres"))
    await prepare(url, timeout_s=60)
    return lambda: PostgresRows(url, timeout_s=60)


@asynccontextmanager
async def two_servers(
    serve: Serve, rows: Callable[[], SharedRows], clock: ManualClock, *, at: str | None = None, **options: Any
) -> AsyncIterator[list[Live]]:
    """Two servers of one process each on the database. `at` is what the first says is its address; None: its own."""
    async with AsyncExitStack() as stack:
        lives: list[Live] = []
        for said in (at, None):
            listener = stack.enter_context(listen("127.0.0.1", 0))
            opening = PostgresStore.open(rows(), clock, url=said or url_of(listener), lease_s=LEASE_S)
            store = await stack.enter_async_context(aclosing(await opening))
            lives.append(await stack.enter_async_context(serve(store=store, listener=listener, clock=clock, **options)))
        yield lives


async def test_what_a_tenant_has_is_seen_through_any_worker_of_any_server_and_by_it_alone(
    rows: Callable[[], SharedRows], renderer: Renderer, tmp_path: Path
) -> None:
    options, database = settings_in(tmp_path), Database(rows=rows)
    async with (
        two_workers(tmp_path, renderer, database=database, **options) as one,
        two_workers(tmp_path, renderer, database=database, **options) as other,
    ):
        doors = [*one.lives, *other.lives]
        made = await Anns.made(one.lives[1])
        ghost = made.session[: TAG.start] + tag_of("ann") + "4" + made.session[13:-1]
        ghost += "0" if made.session[-1] != "0" else "1"
        for door in (one.lives[0], other.lives[1]):
            await walked(door, made.session, ghost)
        for door in doors:
            await check_own_sessions(door, made)
            await check_anns_own(door, made)
        receipt = {"claim": "c", "trained": [made.session]}
        trained = await other.lives[0].call("POST", "/samples/receipt", receipt, **as_("ann"))
        assert trained.json()["trained"] == [made.session], "nobody has claimed, abandoned or deleted it"


async def check_anns_own(door: Live, made: Anns) -> None:
    """Ann has her session and the fork of it, whatever Bob has done; and the deleted one in her accounts."""
    for query in ("", f"?group={GROUP}"):
        listed = (await door.call("GET", f"/sessions{query}", **as_("ann"))).json()["sessions"]
        assert sorted(one["session_id"] for one in listed) == sorted([made.session, made.fork])
    given = await door.call("POST", "/samples", {"sessions": [made.session]}, **as_("ann"))
    assert made.session.encode() in given.body
    told = await accounts_of(door, "ann", "?by=session")
    assert (told["live_sessions"], told["ended_sessions"]) == (2, 1)
    assert {row["key"] for row in told["rows"]} >= {made.session, None}
    mine, whole = told["whole"], await accounts_of(door, "ann", f"?group={GROUP}")
    assert (mine["sampled"], mine["sampled"] > 0) == (whole["whole"]["sampled"], True)
    assert (await accounts_of(door, "bob", ""))["whole"]["sampled"] == 0
    groups = (await door.call("GET", "/console/api/groups", **as_("bob"))).body
    assert made.session.encode() not in groups
    refused = await door.call("DELETE", f"/sessions/{made.session}", **as_("ann"))
    assert (refused.status, refused.json()["error"]["code"]) == (409, "session_claimed")


async def accounts_of(door: Live, name: str, query: str) -> Any:
    answer = await door.call("GET", f"/accounts{query}", **as_(name))
    assert answer.status == 200, answer.body
    return answer.json()


async def test_who_may_not_know_of_a_session_does_not_learn_that_its_server_is_away(
    serve: Serve, rows: Callable[[], SharedRows], tmp_path: Path
) -> None:
    async with two_servers(serve, rows, ManualClock(), at="http://127.0.0.1:9", **settings_in(tmp_path)) as (
        one,
        other,
    ):
        session = await opened(one, "ann")
        for passed_on in ({}, {"x_stenograph_passed_on": "1"}):
            for method, path, body in (
                ("GET", f"/sessions/{session}", None),
                ("POST", f"/sessions/{session}/v1/chat/completions", CHAT),
                ("DELETE", f"/sessions/{session}", None),
            ):
                for headers, expected in (
                    (as_("ann"), (503, "session_elsewhere")),
                    (as_("bob"), (404, "session_not_found")),
                    ({}, (401, "unauthorized")),
                ):
                    answer = await other.call(method, path, body, **headers, **passed_on)
                    assert (answer.status, answer.json()["error"]["code"]) == expected, (path, headers, passed_on)


async def test_servers_count_a_tenants_sessions_together(
    serve: Serve, rows: Callable[[], SharedRows], tmp_path: Path
) -> None:
    clock = ManualClock()
    async with two_servers(serve, rows, clock, **settings_of_team(tmp_path, quotas="sessions = 3")) as (one, other):
        session = await filled([one])
        for live in (other, one):
            refused = await live.call("POST", "/sessions", {}, **key("agent"))
            assert refused.status == 429
            assert "team has 3 of at most 3 sessions" in refused.json()["error"]["message"]
        assert (await other.call("DELETE", f"/sessions/{session}", **key("agent"))).status == 204
        clock.advance(1)
        assert (await one.call("POST", "/sessions", {}, **key("agent"))).status == 200
        assert (await other.call("POST", "/sessions", {}, **key("agent"))).status == 429


async def test_servers_count_a_tenants_stored_tokens_together(
    serve: Serve, rows: Callable[[], SharedRows], tmp_path: Path
) -> None:
    clock, options = ManualClock(), settings_in(tmp_path, ann="stored_tokens = 4\n")
    async with two_servers(serve, rows, clock, **options) as (one, other):
        session, fresh = await anns(one), await opened(other, "ann")
        path = f"/sessions/{fresh}/v1/chat/completions"
        refused = await other.call("POST", path, CHAT, **as_("ann"))
        assert (refused.status, "of at most 4; delete" in refused.json()["error"]["message"]) == (429, True)
        assert (await other.call("DELETE", f"/sessions/{session}", **as_("ann"))).status == 204
        clock.advance(1)
        other.says("there is room")
        assert (await other.call("POST", path, CHAT, **as_("ann"))).status == 200
        clock.advance(10)
        refused = await one.call(
            "POST", f"/sessions/{await opened(one, 'ann')}/v1/chat/completions", CHAT, **as_("ann")
        )
        assert refused.status == 429, "counted again each ten seconds"


async def test_tokens_a_minute_and_turns_in_flight_are_each_servers(
    serve: Serve, rows: Callable[[], SharedRows], tmp_path: Path
) -> None:
    options = settings_in(tmp_path, ann="tokens_a_minute = 8\n", bob="in_flight = 1\nwaiting = 1\n")
    async with two_servers(serve, rows, ManualClock(), **options) as (one, other):
        await anns(one)  # more than eight tokens
        path = f"/sessions/{await opened(other, 'ann')}/v1/chat/completions"
        refused = await one.call(
            "POST", f"/sessions/{await opened(one, 'ann')}/v1/chat/completions", CHAT, **as_("ann")
        )
        assert (refused.status, "tokens a minute" in refused.json()["error"]["message"]) == (429, True)
        other.says("the other's own")
        assert (await other.call("POST", path, CHAT, **as_("ann"))).status == 200
        running: list[asyncio.Task[Any]] = []
        for live in (one, other):
            num_begun = len(live.engine.requests)
            live.says("goes on", paused=True)
            path = f"/sessions/{await opened(live, 'bob')}/v1/chat/completions"
            chats = [asyncio.ensure_future(live.call("POST", path, CHAT, **as_("bob")))]
            await live.engine.begun(num_begun + 1)
            chats += [asyncio.ensure_future(live.call("POST", path, CHAT, **as_("bob"))) for _ in range(2)]
            (refused,), waiting = await asyncio.wait(chats, return_when=asyncio.FIRST_COMPLETED)
            assert (await refused).json()["error"]["code"] == "limit_exceeded"
            running += waiting
        for live in (one, other):
            live.says("the one that waited")
            live.engine.step(100)
        assert [(await chat).status for chat in running] == [200] * 4
        by = (await one.call("GET", "/accounts?by=tenant", **OPERATOR)).json()["rows"]
        assert {row["key"] for row in by} == {"ann", "bob"}


async def test_the_accounts_of_two_servers_balance_at_each_moment_of_deletions(
    serve: Serve, rows: Callable[[], SharedRows]
) -> None:
    async with two_servers(serve, rows, ManualClock()) as (one, other):
        made = [await rollout((one, other)[num % 2], "x" * (num % 7 + 1), group="gh"[num % 3 > 0]) for num in range(60)]
        total = sum(num for _, num in made)
        assert total == await num_sampled(one) + await num_sampled(other)
        for live in (one, other):
            live.manager.sessions.evict(15, 0)  # some are read, others are as they are in memory
        gone = asyncio.gather(
            *(
                (other, one)[num // 2 % 2].call("DELETE", f"/sessions/{id_}")
                for num, (id_, _) in enumerate(made)
                if num % 4
            )
        )
        seen = set[tuple[int, int]]()
        while not gone.done():
            for told in await asyncio.gather(*(accounts(live, f"?by={by}") for live in (one, other) for by in BY)):
                seen.add((told["whole"]["sampled"], told["live_sessions"] + told["ended_sessions"]))
        assert {answer.status for answer in await gone} == {204}
        assert seen == {(total, 60)}
        by_group = [(await accounts(live, "?by=group"))["rows"] for live in (one, other)]
        assert by_group[0] == by_group[1]
        assert {row["key"] for row in by_group[0]} == {"g", "h"}
        for live in (one, other):
            left = [id_ for num, (id_, _) in enumerate(made) if num % 4 == 0]
            listed = (await live.call("GET", "/sessions")).json()["sessions"]
            assert [each["session_id"] for each in listed] == left


BY = ("group", "cause")
