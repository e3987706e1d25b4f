"""Servers of several workers that share a database: through whichever worker of whichever server a request comes, the
owner of its session serves it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from standins.shared_rows import MemoryRows, SharedTables
from stenograph.cluster.postgres.shared_rows import OwnerName
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.core.clock import SystemClock
from stenograph.core.types import SessionId
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, assistant, user
from .test_bulk import frames, rollout
from .test_workers import ASKED, steady
from .test_workers_bulk import arrow
from .workers_kit import Workers, two_workers

pytestmark = pytest.mark.timeout(600)


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


async def test_samples_of_many_are_given_out_and_deleted_wherever_the_sessions_are(cluster: Cluster) -> None:
    for door in cluster.doors:
        for layout in ("safetensors", "arrow"):
            ids = [await rollout(live, group="g") for live in cluster.doors]
            asked = {"group": "g", "delete": True, "format": layout}
            answer = await door.call("POST", "/samples", asked)
            assert answer.status == 200, answer.body
            if layout == "arrow":
                table, told = arrow(answer.body)
                shown = table["session_id"].to_pylist()
            else:
                *found, (told, _) = frames(answer.body)
                shown = [head["session_id"] for head, _ in found]
                told.pop("done")
            assert shown == ids
            assert told == {"sessions": 4, "failed": 0, "deleted": 4, "not_deleted": []}
            assert (await door.call("GET", "/sessions")).json()["sessions"] == []
    told = [(await door.call("GET", "/accounts")).json() for door in cluster.doors]
    assert told[1:] == told[:-1]
    assert (told[0]["ended_sessions"], told[0]["whole"]["tokens"]["discarded"]) == (32, 0)
    assert told[0]["whole"]["tokens"]["trained"] > 0


async def test_the_consoles_group_has_the_rollouts_of_all_servers(cluster: Cluster) -> None:
    sessions = [await door.open(group="g") for door in cluster.doors]
    for door, session in zip(cluster.doors, sessions, strict=True):
        door.says("fine, thanks")
        assert (await door.chat(session, user("hi"))).status == 200
    for at, door in enumerate(cluster.doors):
        rollouts = (await door.call("GET", "/console/api/group?name=g")).json()["rollouts"]
        assert sorted(one["session_id"] for one in rollouts) == sorted(sessions)
        assert {one["num_turns"] for one in rollouts} == {1}
        known = [one["session_id"] for one in rollouts if one["busy"] is False]
        assert known == [sessions[at]], "whether a turn runs is not known of another process's"


async def test_what_goes_on_at_another_server_is_not_deleted_with_its_samples(cluster: Cluster) -> None:
    live, door = cluster.one.lives[1], cluster.other.lives[0]
    session = await rollout(live, group="g")
    live.says("two", paused=True)
    asking = asyncio.create_task(live.chat(session, user("another opening")))
    await cluster.one.engine.begun(2)
    told = frames((await door.call("POST", "/samples", {"group": "g", "delete": True})).body)[-1][0]
    assert (told["deleted"], told["not_deleted"]) == (0, [session])
    (listed,) = (await door.call("GET", "/sessions?group=g")).json()["sessions"]
    assert (listed["session_id"], listed["busy"]) == (session, None)
    for method, path, body in (
        ("GET", "/sessions?state=idle", None),
        ("DELETE", "/sessions?state=busy", None),
        ("POST", "/samples", {"state": "idle"}),
    ):
        refused = await door.call(method, path, body)
        assert (refused.status, refused.json()["error"]["param"]) == (400, "/state"), path
    cluster.one.engine.step(10)
    assert (await asking).status == 200


async def test_sessions_are_deleted_by_filter_and_turns_aborted_wherever_they_are(cluster: Cluster) -> None:
    for at, door in enumerate(cluster.doors):
        ids = [await live.open(group="g") for live in cluster.doors]
        kept = await cluster.doors[at - 1].open(group="h")
        chats = []
        for live, session in zip(cluster.doors, ids, strict=True):
            live.says("never whole", paused=True)
            begun = len(live.engine.requests) + 1
            chats.append(asyncio.create_task(live.chat(session, user("hi"))))
            await live.engine.begun(begun)
        assert (await door.call("POST", "/abort_request", {"group": "h"})).json() == {"aborted": 0}
        asked = {"group": "g"} if at % 2 else {"abort_all": True}
        assert (await door.call("POST", "/abort_request", asked)).json() == {"aborted": 4}
        for chat in chats:
            assert (await chat).json()["choices"][0]["finish_reason"] == "abort"
        assert (await door.call("DELETE", "/sessions?group=g")).json() == {"deleted": 4, "claimed": 0}
        (left,) = (await door.call("GET", "/sessions")).json()["sessions"]
        assert left["session_id"] == kept
        assert (await cluster.doors[at - 2].call("DELETE", "/sessions?group=h")).json() == {"deleted": 1, "claimed": 0}


async def test_the_keys_of_whoever_asks_go_to_the_other_servers(tmp_path: Path, renderer: Renderer) -> None:
    tables, keys = SharedTables(time.monotonic), {"api_key": ("k1",)}
    async with (
        two_workers(tmp_path, renderer, tables=tables, **keys) as one,
        two_workers(tmp_path, renderer, tables=tables, **keys) as other,
    ):
        for key in ({"x_api_key": "k1"}, {"authorization": "Bearer k1"}):
            for live in (*one.lives, *other.lives):
                assert (await live.call("POST", "/sessions", {"group": "g"}, **key)).status == 200
            assert (await one.lives[0].call("DELETE", "/sessions?group=g")).status == 401
            aborted = await one.lives[0].call("POST", "/abort_request", {"abort_all": True}, **key)
            assert aborted.json() == {"aborted": 0}
            deleted = await one.lives[0].call("DELETE", "/sessions?group=g", **key)
            assert deleted.json() == {"deleted": 4, "claimed": 0}
        for live in (*one.lives, *other.lives):
            assert (await live.call("POST", "/sessions?key=k1", {"group": "g"})).status == 200
        told = frames((await one.lives[0].call("POST", "/samples?key=k1", {"group": "g", "delete": True})).body)[-1][0]
        assert told["deleted"] == 4


async def test_a_server_that_does_not_answer_is_named_and_nothing_is_half_without_a_word(cluster: Cluster) -> None:
    away, door = "http://127.0.0.1:9", cluster.other.lives[0]
    rows = MemoryRows(cluster.tables)
    store = await PostgresStore.open(rows, SystemClock(), url=away, lease_s=30.0)
    async with aclosing(store):
        session = await cluster.open(group="g")
        theirs = cluster.tables.move(SessionId(await cluster.open(group="g")), store.owner.needed().owner)
        for method, path, body in (
            ("POST", "/abort_request", {"abort_all": True}),
            ("DELETE", "/sessions?group=g", None),
        ):
            refused = await door.call(method, path, body)
            assert (refused.status, refused.json()["error"]["code"]) == (503, "worker_unavailable"), path
            assert away in refused.json()["error"]["message"]
        found = frames((await door.call("POST", "/samples", {"group": "g", "delete": True})).body)
        assert [head["error"]["code"] for head, _ in found[:-1]] == ["worker_unavailable"]
        assert found[-1][0]["failed"] == 1
        listed = (await door.call("GET", "/sessions")).json()["sessions"]
        assert [one["session_id"] for one in listed] == [theirs], f"{session} was deleted"


async def test_a_request_whose_owner_has_an_unreadable_name_is_answered(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    rows = MemoryRows(cluster.tables)
    store = await PostgresStore.open(rows, SystemClock(), url="http://127.0.0.1:9#one", lease_s=30.0)
    async with aclosing(store):
        session = cluster.tables.move(SessionId(await cluster.open()), store.owner.needed().owner)
        door = cluster.one.lives[0]
        for method, path, body in (
            ("GET", f"/sessions/{session}", None),
            ("POST", f"/sessions/{session}/v1/chat/completions", {"messages": [user("hi")]}),
            ("POST", f"/sessions/{session}/v1/messages", {"messages": [user("long " * 30000)], "max_tokens": 9}),
        ):
            refused = await door.call(method, path, body)
            assert refused.status == 500, (path, refused.body)
            assert b"The server failed on this request." in refused.body
        assert f"no owner was found for GET /sessions/{session}" in caplog.text
        cluster.one.lives[1].says("fine, thanks")
        assert (await door.chat(await cluster.open(), user("hi"))).status == 200, "others go on"


async def test_a_pause_names_the_servers_that_go_on(cluster: Cluster) -> None:
    (other,) = {OwnerName.of(name).server for name in cluster.tables.owners()} - {cluster.one.lives[0].url}
    for door in cluster.one.lives:
        for path in ("/pause_generation", "/continue_generation"):
            answer = await door.call("POST", path, {})
            assert (answer.status, answer.headers["x-stenograph-not-asked"]) == (200, other), path
        for method, path in (("POST", "/engines"), ("DELETE", "/engines/http%3A%2F%2F127.0.0.1%3A1")):
            answer = await door.call(method, path, {"url": "http://127.0.0.1:1"})
            assert (answer.status, answer.headers["x-stenograph-not-asked"]) == (404, other), path
    assert "x-stenograph-not-asked" not in (await cluster.one.lives[0].call("GET", "/accounts")).headers


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
