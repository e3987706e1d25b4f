"""Servers of several workers that share a database: through whichever worker of whichever server a request comes, the
owner of its session serves it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stenograph.render.renderer import Renderer
from stenograph.testing.standins.shared_rows import SharedTables

from .conftest import Answer, Live, assistant, user
from .test_workers import ASKED, steady
from .workers_kit import Workers, two_workers

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Two servers of two workers each."""

    one: Workers
    other: Workers
    tables: SharedTables

    @property
    def doors(self) -> list[Live]:
        """All workers: the first two are of the first server."""
        return [*self.one.lives, *self.other.lives]

    @property
    def strangers(self) -> list[Live]:
        """A worker of the same server as the owner, which is the first server's last, and both of the other server."""
        return [self.one.lives[0], *self.other.lives]

    async def open(self, **options: object) -> str:
        """A session of the first server's last worker."""
        return await self.one.lives[1].open(**options)


@pytest.fixture
async def cluster(tmp_path: Path, renderer: Renderer) -> AsyncIterator[Cluster]:
    tables = SharedTables(time.monotonic)
    async with (
        two_workers(tmp_path, renderer, tables=tables) as one,
        two_workers(tmp_path, renderer, tables=tables) as other,
    ):
        yield Cluster(one, other, tables)


async def test_a_request_through_any_worker_of_any_server_is_as_through_the_owner(cluster: Cluster) -> None:
    for dialect in ASKED:
        for stream in (False, True):
            await check_dialect(dialect, stream, cluster)
    assert not cluster.other.engine.requests, "nobody has taken a session"


async def check_dialect(dialect: str, stream: bool, cluster: Cluster) -> None:
    path, body = ASKED[dialect]
    if stream:
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
        body = body if dialect == "gemini" else {**body, "stream": True}
    answers: list[Answer] = []
    for door in [cluster.one.lives[1], *cluster.strangers]:
        session = await cluster.open()
        cluster.one.lives[1].says("fine, thanks")
        answers.append(await door.call("POST", f"/sessions/{session}{path}", body))
        view = (await door.call("GET", f"/sessions/{session}")).json()
        assert len(view["records"]) == 1
    right, *others = answers
    assert right.status == 200
    for answer in others:
        assert (answer.status, steady(answer)) == (200, steady(right))
        assert b"fine, thanks" in answer.body


async def test_who_hangs_up_at_any_worker_of_any_server_ends_the_turn(cluster: Cluster) -> None:
    session, engine = await cluster.open(), cluster.one.engine
    for at, door in enumerate(cluster.strangers):
        for stream in (False, True):
            cluster.one.lives[1].says("never said", paused=True)
            asking = asyncio.create_task(door.chat(session, user("hi"), stream=stream))
            await engine.begun(2 * at + 1 + stream)
            asking.cancel()
            await engine.idle()
    assert len(engine.stopped) == 6
    assert (await cluster.strangers[0].call("GET", f"/sessions/{session}")).json()["records"] == []


async def test_aborts_retries_and_deletes_through_any_worker_of_any_server(cluster: Cluster) -> None:
    engine, body = cluster.one.engine, {"messages": [user("hi")]}
    for at, door in enumerate(cluster.strangers):
        session = await cluster.open()
        path = f"/sessions/{session}/v1/chat/completions"
        cluster.one.lives[1].says("never whole", paused=True)
        asking = asyncio.create_task(door.call("POST", path, body, idempotency_key="one"))
        await engine.begun(2 * at + 1)
        assert (await door.call("POST", f"/sessions/{session}/abort", {})).json() == {"aborted": 1}
        assert (await asking).json()["choices"][0]["finish_reason"] == "abort"
        cluster.one.lives[1].says("whole")
        asked = [one.call("POST", path, body, idempotency_key="two") for one in cluster.doors]
        answers = await asyncio.gather(*asked)  # whether they join the turn or get its reply
        assert {answer.status for answer in answers} == {200}
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert len(engine.requests) == 2 * at + 2
        assert (await door.call("DELETE", f"/sessions/{session}")).status == 204
        for one in cluster.doors:
            assert (await one.call("GET", f"/sessions/{session}")).status == 404


async def test_a_session_that_is_opened_with_a_key_is_one_for_all_servers(cluster: Cluster) -> None:
    for door in cluster.doors:
        key = f"key of {door.url}"
        opened = [await one.call("POST", "/sessions", {}, idempotency_key=key) for one in [door, *cluster.doors]]
        assert len({one.json()["session_id"] for one in opened}) == 1
        refused = await cluster.doors[-1].call("POST", "/sessions", {"group": "g"}, idempotency_key=key)
        assert refused.json()["error"]["code"] == "idempotency_mismatch"


async def test_a_stream_and_a_large_body_go_through_piece_by_piece(cluster: Cluster) -> None:
    session, text = await cluster.open(), "long text, over and over. " * 100
    for door in cluster.strangers:
        cluster.one.lives[1].says("abc", paused=True)
        body = json.dumps({"messages": [user(text)], "stream": True, "seed": 1}).encode()
        cluster.one.engine.step()
        async with door.client.post(
            f"{door.url}/sessions/{session}/v1/chat/completions",
            data=body,
            headers={"content-type": "application/json"},
        ) as answer:
            seen = b""
            for letter in b"abc":
                while b'"content":"%c"' % letter not in seen.replace(b" ", b""):
                    seen += await answer.content.readany()
                cluster.one.engine.step()
            cluster.one.engine.step()
            seen += await answer.read()
        assert seen.rstrip().endswith(b"data: [DONE]")


async def test_what_another_worker_has_is_asked_of_the_database_once(cluster: Cluster) -> None:
    session, door = await cluster.open(), cluster.one.lives[0]
    for _ in range(3):
        assert (await door.call("HEAD", f"/sessions/{session}")).status == 200
    assert cluster.tables.num_holders == 1


async def test_sessions_of_a_server_that_has_left_go_on_at_any_worker_of_another(
    tmp_path: Path, renderer: Renderer
) -> None:
    tables = SharedTables(time.monotonic)
    async with two_workers(tmp_path, renderer, tables=tables, num=3) as other:
        async with two_workers(tmp_path, renderer, tables=tables) as one:
            sessions = [await live.open() for live in one.lives for _ in range(2)]
            for at, session in enumerate(sessions):
                one.lives[0].says("one")
                assert (await other.lives[at % 3].chat(session, user("hi"))).status == 200
        for at, session in enumerate(sessions):
            other.lives[0].says("two")
            answer = await other.lives[at % 3].chat(session, user("hi"), assistant("one"), user("and on"))
            assert answer.status == 200, answer.body
            views = [(await live.call("GET", f"/sessions/{session}")).body for live in other.lives]
            assert len(json.loads(views[0])["records"]) == 2
            assert views[1:] == views[:-1]
