"""Many sessions of several workers at once: through whichever worker, the answers are those that one process gives."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.ipc
import pytest

from standins.scripted_engine import ScriptedEngine
from stenograph.client.samples import decoded
from stenograph.client.tree import framed_tree
from stenograph.text.renderer import Renderer
from tests.pure.trainers.test_trees import facts

from .conftest import Live, user
from .test_bulk import bulk, frames, listed, own, rollout
from .test_claims import claim, receipt
from .workers_kit import Workers, places, serving, two_workers

pytestmark = pytest.mark.timeout(600)

GROUP = ("GET", "/console/api/group?name=g")

Start = Callable[..., AbstractAsyncContextManager[Workers]]


@pytest.fixture
def start(tmp_path: Path, renderer: Renderer) -> Start:
    return lambda **settings: two_workers(tmp_path, renderer, **settings)


@pytest.fixture
async def workers(start: Start) -> AsyncIterator[Workers]:
    async with start() as running:
        yield running


async def rollouts(workers: Workers, *, at: tuple[int, ...] = (0, 1, 1, 0, 1), **options: Any) -> list[str]:
    """Sessions of these workers with a turn each, in the order in which they were opened."""
    return [await rollout(workers.lives[worker], **options) for worker in at]


def arrow(body: bytes) -> tuple[Any, dict[str, Any]]:
    """The rows of a stream, and what its last record batch says."""
    batches = list(pyarrow.ipc.open_stream(io.BytesIO(body)).iter_batches_with_custom_metadata())
    assert batches[-1].batch.num_rows == 0
    table = pyarrow.ipc.open_stream(io.BytesIO(body)).read_all()
    return table, {key.decode(): json.loads(value) for key, value in batches[-1].custom_metadata.items()}


async def test_samples_come_in_the_order_of_their_ids_or_oldest_first_whosever_they_are(workers: Workers) -> None:
    ids = await rollouts(workers, group="g")
    unknown = "01" + "0" * 30
    for live in workers.lives:
        asked = [ids[4], ids[0], unknown, "no id", ids[1], ids[0]]
        told = await bulk(live, sessions=asked)
        assert [head.get("session_id") for head, _ in told] == [*asked[:-1], None]
        assert [head["error"]["code"] for head, _ in told if "error" in head] == ["session_not_found"] * 2
        assert told[0][1] == await own(live, ids[4])
        assert told[-1][0] == {"done": True, "sessions": 5, "failed": 2, "deleted": 0, "not_deleted": []}
        assert [head.get("session_id") for head, _ in await bulk(live, group="g")] == [*ids, None]
        assert [head.get("session_id") for head, _ in await bulk(live, where={"step": 1})] == [None]
        answer = await live.call("POST", "/samples", {"group": "g", "format": "arrow"})
        table, told_last = arrow(answer.body)
        assert table["session_id"].to_pylist() == ids
        assert told_last == {"sessions": 5, "failed": 0, "deleted": 0, "not_deleted": []}
    bodies = [(await live.call("POST", "/samples", {"group": "g"})).body for live in workers.lives]
    assert bodies[0] == bodies[1]


@pytest.mark.parametrize("layout", ["safetensors", "arrow"])
async def test_what_has_left_is_deleted_at_its_worker_and_what_goes_on_stays(layout: str, workers: Workers) -> None:
    ids = await rollouts(workers, group="g")
    live = workers.lives[0]
    chats = []
    for at, session in enumerate((ids[3], ids[4])):  # one of each worker
        live.says("two", paused=True)
        chats.append(asyncio.ensure_future(live.chat(session, user("b"))))
        await live.engine.begun(6 + at)
    answer = await workers.lives[1].call("POST", "/samples", {"group": "g", "delete": True, "format": layout})
    told = arrow(answer.body)[1] if layout == "arrow" else frames(answer.body)[-1][0]
    assert (told["deleted"], told["not_deleted"]) == (3, ids[3:])
    assert sorted(await listed(live, "group=g")) == sorted(ids[3:])
    live.engine.step(10)
    assert [answer.status for answer in await asyncio.gather(*chats)] == [200, 200]
    assert (await bulk(live, group="g", delete=True))[-1][0]["deleted"] == 2
    assert await listed(live, "") == []


async def large(workers: Workers, worker: int) -> str:
    """A session whose samples are more than all buffers between it and a client hold: each has its metadata."""
    live = workers.lives[worker]
    session = await workers.open_at(worker, group="g", metadata={"long": "x" * 60_000})
    for at in range(100):
        live.says("one")
        assert (await live.chat(session, user(f"strand {at}"))).status == 200
    return session


def slow_client() -> aiohttp.ClientSession:
    """A client whose kernel takes little that it has not read."""

    def small(address: Any) -> socket.socket:
        made = socket.socket(address[0], address[1])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return made

    connector = aiohttp.TCPConnector(force_close=True, socket_factory=small)
    return aiohttp.ClientSession(connector=connector, read_bufsize=4096)


async def test_a_client_that_leaves_ends_all_and_keeps_what_it_has_not_taken(workers: Workers) -> None:
    live = workers.lives[0]
    ids = [await large(workers, 1), await rollout(workers.lives[0], group="g")]
    async with (
        slow_client() as client,
        client.post(f"{live.url}/samples", json={"group": "g", "delete": True}) as answer,
    ):
        await workers.held_back(1)  # what nobody reads is made no further than the buffers hold
        answer.close()
    await workers.at_rest()
    assert await listed(live, "group=g") == [ids[1], ids[0]]
    told = (await live.call("GET", "/accounts")).json()
    assert told["whole"]["tokens"]["trained"] == 0


@pytest.mark.parametrize("layout", ["safetensors", "arrow"])
async def test_an_answer_whose_worker_dies_half_way_is_cut(layout: str, workers: Workers) -> None:
    live = workers.lives[0]
    asked = {"sessions": [await rollout(live), await large(workers, 1)], "format": layout, "delete": True}
    async with (
        slow_client() as client,
        client.post(f"{live.url}/samples", json=asked) as answer,
    ):
        await workers.held_back(1)
        workers.cut(1)
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
    await workers.at_rest()
    assert await listed(live, "") == asked["sessions"][1:]  # the first had left


async def test_sessions_of_a_worker_that_is_away_have_their_error_and_a_filter_without_it_is_cut(
    renderer: Renderer, tmp_path: Path
) -> None:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size)
    here, away = places(tmp_path, 2)
    away.listener.close()
    async with serving(here, engine, renderer) as (url, manager, _), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        session, other = await rollout(live), "01" + "0" * 30
        told = await bulk(live, sessions=[session, other, session], delete=True)
        assert told[1][0]["error"]["code"] == "worker_unavailable"
        assert (told[-1][0]["failed"], told[-1][0]["deleted"]) == (1, 1)
        with pytest.raises(aiohttp.ClientError):
            await bulk(live, group="g")
        for method, path in (
            ("DELETE", "/sessions?group=g"),
            ("GET", "/accounts"),
            ("GET", "/sessions?group=g"),
            GROUP,
        ):
            answer = await live.call(method, path)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    here.listener.close()


async def test_filters_hold_across_workers_page_by_page_and_delete_at_all(workers: Workers) -> None:
    ids = [
        await workers.open_at(at % 2, group=f"g{at % 3}", metadata={"at": at, "name": "a b", "odd": at % 2})
        for at in range(12)
    ]
    await workers.lives[0].call("PUT", f"/sessions/{ids[9]}/outcome", {"reward": 1})
    for live in workers.lives:
        for limit in (1, 2, 3, 100):
            found, after = list[str](), ""
            while True:
                page = (await live.call("GET", f"/sessions?group=g0&limit={limit}{after}")).json()
                found += [one["session_id"] for one in page["sessions"]]
                if page["next"] is None:
                    break
                after = f"&after={page['next']}"
            assert found == [ids[0], ids[6], ids[3], ids[9]]  # worker by worker
        assert await listed(live, "metadata.at=3") == [ids[3]]
        assert await listed(live, "metadata.name=a%20b&metadata.at=5") == [ids[5]]
        assert await listed(live, "metadata.odd=1&group=g1") == [ids[1], ids[7]]
        assert await listed(live, "state=ended") == [ids[9]]
        assert await listed(live, "state=busy") == []
        for query in ("state=gone", "stat=idle"):
            assert (await live.call("GET", f"/sessions?{query}")).status == 400
            assert (await live.call("DELETE", f"/sessions?{query}")).status == 400
        assert (await live.call("DELETE", "/sessions")).status == 400
    assert (await workers.lives[0].call("DELETE", "/sessions?group=g0&state=open")).json() == {
        "deleted": 3,
        "claimed": 0,
    }
    assert (await workers.lives[1].call("DELETE", "/sessions?group=g0")).json() == {"deleted": 1, "claimed": 0}
    assert (await workers.lives[1].call("DELETE", "/sessions?group=g0")).json() == {"deleted": 0, "claimed": 0}
    assert len(await listed(workers.lives[0], "")) == 8


async def test_accounts_are_those_of_all_workers(workers: Workers) -> None:
    live = workers.lives[0]
    ids = await rollouts(workers, at=(0, 1, 1), group="g")
    await rollouts(workers, at=(1,))
    await bulk(live, sessions=ids[:2], delete=True)
    views = [(await one.call("GET", "/accounts")).json() for one in workers.lives]
    assert views[0]["whole"] == views[1]["whole"]
    one = (await own_tokens(live)) // 4
    rows = {row["key"]: row for row in views[0]["rows"]}
    assert (rows["g"]["tokens"]["trained"], rows["g"]["tokens"]["open"]) == (2 * one, one)
    assert (rows[None]["sampled"], rows[None]["tokens"]["open"]) == (one, one)
    assert (views[0]["live_sessions"], views[0]["ended_sessions"]) == (2, 2)
    only = (await live.call("GET", "/accounts?group=g")).json()
    assert (only["live_sessions"], only["ended_sessions"], only["rows"]) == (1, 2, [rows["g"]])
    whys = [(await one.call("GET", "/accounts/why?group=g")).json()["rows"] for one in workers.lives]
    assert sorted(whys[0], key=str) == sorted(whys[1], key=str)
    assert sum(row["tokens"] for row in whys[0]) == 3 * one
    assert (await live.call("GET", "/accounts?what=1")).status == 400


async def own_tokens(live: Live) -> int:
    return (await live.call("GET", "/accounts")).json()["whole"]["sampled"]


async def test_no_client_gets_to_what_workers_ask_each_other(workers: Workers) -> None:
    """Also not by a request that one worker passes on to another."""
    session, other = await workers.open_at(0), await workers.open_at(1)
    body = {"session_id": session, "revision": "0 None"}
    for live in workers.lives:
        for named in ({}, {"x_session_id": session}, {"x_session_id": other}):
            for path in ("opened", "ids", "part", "delete", "rollout", "now", "watch"):
                answer = await live.call("POST", f"/workers/{path}", body, **named)
                assert (answer.status, answer.json()["error"]["code"]) == (404, "route_not_found")
    assert sorted(await listed(workers.lives[0], "")) == sorted([session, other])


async def test_what_is_of_all_is_asked_of_all_whatever_session_its_headers_name(workers: Workers) -> None:
    sessions = [await workers.open_at(0), await workers.open_at(1)]
    for live in workers.lives:
        for session in sessions:
            text = (await live.call("GET", "/metrics", x_session_id=session)).body.decode()
            assert 'stenograph_sessions{worker="0"} 1.0' in text
            assert 'stenograph_sessions{worker="1"} 1.0' in text


async def test_lines_of_scores_are_the_same_whosever_the_sessions_are(workers: Workers) -> None:
    ids = await rollouts(workers, at=(0, 1), group="g")
    empty = [await live.open(group="g") for live in workers.lives]
    asked = [*ids, *empty, "01" + "0" * 30, "01" + "0" * 30 + "/abort?", "no\r\nid", "ü€" * 16]
    told = []
    for live in workers.lives:
        answer = await live.call("POST", "/scores", {"sessions": asked})
        assert answer.status == 200, answer.body
        lines = [json.loads(line) for line in answer.body.splitlines()]
        assert [line.get("session_id") for line in lines] == [*asked, None]
        assert [line["error"]["status"] for line in lines if "error" in line] == [400] * 2 + [404] * 4
        told.append([{name: line[name] for name in line if name != "was_scored"} for line in lines[:-1]])
    assert told[0] == told[1]


async def test_any_worker_claims_the_sessions_of_all_and_each_once(workers: Workers) -> None:
    ids = await rollouts(workers, at=(0, 1, 1), group="g")
    for session in ids:
        await workers.lives[0].call("PUT", f"/sessions/{session}/outcome", {"reward": 1})
    told = await asyncio.gather(*(claim(live, n=2) for live in workers.lives for _ in range(3)))
    found = [session for one in told for session in one["sessions"]]
    assert sorted(found) == sorted(ids)
    for one in told:
        assert (await receipt(workers.lives[1], one["claim"], *one["sessions"]))["trained"] == one["sessions"]
    late = await workers.open_at(1, group="g")
    assert (await workers.lives[0].call("POST", "/abandon", {"group": "g"})).json() == {"abandoned": [late]}
    assert (await workers.lives[0].chat(late, user("a"))).status == 410


async def test_sessions_of_several_workers_are_one_tree_through_any_of_them(workers: Workers) -> None:
    ids = await rollouts(workers, group="g")
    flat = [(await own(workers.lives[0], one)) for one in ids]
    wanted = [{**facts(sample), "response": ""} for payload in flat for sample in decoded(payload)]
    for live in workers.lives:
        answer = await live.call("POST", "/samples", {"sessions": ids, "format": "tree"})
        tree = framed_tree(answer.body, set())
        assert [facts(sample) for sample in tree.samples()] == wanted
        assert len(tree.tokens) * len(ids) == tree.num_flat, "five rollouts alike are one line"
