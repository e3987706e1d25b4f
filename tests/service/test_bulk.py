"""Many sessions at once: their samples in one answer, listed, deleted and aborted by what a trainer knows of them."""

import asyncio
import io
import json
import socket
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pyarrow.ipc
import pytest
from safetensors.numpy import load

from stenograph.dialects.sessions import BulkSamplesRequest
from stenograph.http import bulk_routes
from stenograph.http.bulk_parts import OneAnswer, OwnParts
from stenograph.http.bulk_routes import FRAMES_TYPE
from stenograph.session import storage
from stenograph.store.base import StoredSummary
from stenograph.store.database import FileConnection
from stenograph.store.restored import ListedSession

from .conftest import Live, assistant, user
from .test_durable import Serve, conversation, folder, kept

__all__ = ["folder", "kept"]


async def rollout(live: Live, **options: Any) -> str:
    session = await live.open(**options)
    live.says("one")
    assert (await live.chat(session, user("a"))).status == 200
    return session


def frames(body: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """The heads and payloads of an answer, which ends where the last one does."""
    parts, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 8], "little")
        parts.append(body[at + 8 : at + 8 + size])
        at += 8 + size
    assert at == len(body)
    return [(json.loads(head), payload) for head, payload in zip(parts[::2], parts[1::2], strict=True)]


async def bulk(live: Live, **asked: Any) -> list[tuple[dict[str, Any], bytes]]:
    answer = await live.call("POST", "/samples", asked)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == FRAMES_TYPE
    return frames(answer.body)


async def own(live: Live, session: str) -> bytes:
    return (await live.call("POST", f"/sessions/{session}/samples", {})).body


@pytest.mark.parametrize("form", ["arrow", "safetensors"])
async def test_no_two_sessions_have_their_samples_made_in_one_iteration_of_the_loop(
    live: Live, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        await rollout(live, group="g")
    made_in: list[int] = []
    num_passes = 0
    loop, made = asyncio.get_running_loop(), OwnParts.made

    def count() -> None:
        nonlocal num_passes, counting
        num_passes += 1
        counting = loop.call_soon(count)

    async def noted(self: OwnParts, session_id: str, wire: BulkSamplesRequest) -> OneAnswer:
        made_in.append(num_passes)
        return await made(self, session_id, wire)

    monkeypatch.setattr(OwnParts, "made", noted)
    counting = loop.call_soon(count)
    answer = await live.call("POST", "/samples", {"group": "g", "format": form})
    counting.cancel()
    assert answer.status == 200
    assert len(set(made_in)) == 6


async def test_sessions_of_many_turns_are_deleted_a_few_in_an_iteration_of_the_loop(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_routes, "FORGOTTEN_TURNS", 2)
    for _ in range(6):
        await rollout(live, group="g")
    gone_by_pass: list[int] = []
    loop = asyncio.get_running_loop()

    def look() -> None:
        nonlocal looking
        gone_by_pass.append(live.manager.sessions.num_forgotten)
        looking = loop.call_soon(look)

    looking = loop.call_soon(look)
    answer = await live.call("DELETE", "/sessions?group=g")
    looking.cancel()
    assert answer.json() == {"deleted": 6, "claimed": 0}
    assert max(after - before for before, after in pairwise([*gone_by_pass, 6])) <= 2


async def test_sessions_on_disk_are_listed_a_few_in_an_iteration_of_the_loop(
    kept: Serve, folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept() as live:
        for _ in range(8):
            await live.open(metadata={"a": "x" * (storage.READ_AT_ONCE_BYTES // 3)})
    read_in: list[int] = []
    num_passes = 0
    loop, listed_session = asyncio.get_running_loop(), storage.listed_session

    def count() -> None:
        nonlocal num_passes, counting
        num_passes += 1
        counting = loop.call_soon(count)

    def noted(summary: StoredSummary) -> ListedSession:
        read_in.append(num_passes)
        return listed_session(summary)

    monkeypatch.setattr(storage, "listed_session", noted)
    async with kept() as live:
        counting = loop.call_soon(count)
        answer = await live.call("GET", "/sessions")
        counting.cancel()
    assert len(answer.json()["sessions"]) == 8
    assert max(Counter(read_in).values()) == 3


async def test_sessions_that_a_filter_deletes_are_one_group_of_the_store(kept: Serve, folder: Any) -> None:
    async with kept() as live:
        woken = [await rollout(live, group="g") for _ in range(4)]
        other = await rollout(live)
    commits: list[str] = []

    class Counting(FileConnection):
        def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
            if sql == "COMMIT":
                commits.append(sql)
            return super().run(sql, parameters)

    async with kept(connect=Counting) as live:
        for session in woken[:2]:  # the others are on disk alone
            live.says("two")
            assert (await live.chat(session, user("a"), assistant("one"), user("b"))).status == 200
        commits.clear()
        answer = await live.call("DELETE", "/sessions?group=g")
        assert (answer.status, answer.json()) == (200, {"deleted": 4, "claimed": 0})
        assert len(commits) <= 2  # those in memory, and those that were read
        assert await listed(live, "limit=9") == [other]


async def listed(live: Live, query: str) -> list[str]:
    answer = await live.call("GET", f"/sessions?{query}")
    assert answer.status == 200, answer.body
    return [one["session_id"] for one in answer.json()["sessions"]]


async def test_samples_of_many_sessions_come_in_one_answer_and_one_that_fails_spoils_no_other(live: Live) -> None:
    first, empty, second = await rollout(live), await live.open(), await rollout(live)
    unknown = "0" * 32
    told = await bulk(live, sessions=[second, unknown, empty, first, second])
    assert [head.get("session_id") for head, _ in told] == [second, unknown, empty, first, None]
    assert (told[0][1], told[3][1]) == (await own(live, second), await own(live, first))
    assert (told[1][0]["error"]["code"], told[1][1]) == ("session_not_found", b"")
    assert (told[2][0]["num_samples"], told[2][1]) == (0, await own(live, empty))
    assert told[-1] == ({"done": True, "sessions": 4, "failed": 1, "deleted": 0, "not_deleted": []}, b"")


async def test_samples_by_group_state_and_metadata_and_as_arrow(live: Live) -> None:
    one = await rollout(live, group="g", metadata={"step": 3, "task": "a"})
    two = await rollout(live, group="g", metadata={"step": 4, "task": "a"})
    await rollout(live, group="h", metadata={"step": 3})
    await live.call("PUT", f"/sessions/{two}/outcome", {"reward": 1})
    empty = await live.open(group="g", metadata={"step": 9})
    assert [head.get("session_id") for head, _ in await bulk(live, group="g")] == [one, two, empty, None]
    assert [head.get("session_id") for head, _ in await bulk(live, group="g", state="ended")] == [two, None]
    assert [head.get("session_id") for head, _ in await bulk(live, where={"step": 4})] == [two, None]
    assert [head.get("session_id") for head, _ in await bulk(live, where={"step": "4"})] == [None]
    answer = await live.call("POST", "/samples", {"group": "g", "format": "arrow"})
    table = pyarrow.ipc.open_stream(io.BytesIO(answer.body)).read_all()
    assert table["session_id"].to_pylist() == [one, two, empty]
    assert table["empty_reason"].to_pylist() == [None, None, "no_records"]
    assert table["reward"].to_pylist() == [None, 1.0, None]
    (payload,) = [payload for head, payload in await bulk(live, sessions=[one]) if "session_id" in head]
    assert table["tokens"].to_pylist()[0] == load(payload)["tokens.0"].tolist()
    failed = await live.call("POST", "/samples", {"sessions": ["no"], "format": "arrow"})
    (row,) = pyarrow.ipc.open_stream(io.BytesIO(failed.body)).read_all().to_pylist()
    assert (json.loads(row["error"])["code"], row["tokens"]) == ("session_not_found", None)


async def test_sessions_are_deleted_once_their_samples_have_left_but_not_those_that_go_on(live: Live) -> None:
    done, running = await rollout(live, group="g"), await rollout(live, group="g")
    live.says("two", paused=True)
    chat = asyncio.ensure_future(live.chat(running, user("b")))
    await live.engine.begun(3)
    told = await bulk(live, group="g", delete=True)
    assert [head.get("session_id") for head, _ in told] == [done, running, None]
    assert (told[-1][0]["deleted"], told[-1][0]["not_deleted"]) == (1, [running])
    assert await listed(live, "group=g") == [running]
    live.engine.step(10)
    assert (await chat).status == 200
    assert (await bulk(live, group="g", delete=True))[-1][0]["deleted"] == 1
    assert await listed(live, "group=g") == []


async def test_sessions_whose_samples_no_client_has_taken_are_not_deleted(live: Live) -> None:
    ids = [await rollout(live, group="g", metadata={"long": "x" * 60_000}) for _ in range(60)]
    body = json.dumps({"sessions": ids, "delete": True}).encode()
    address = urlsplit(live.url)
    head = f"POST /samples HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        client.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(client, 12) == b"HTTP/1.1 200"
        assert ids[-1] in await listed(live, "group=g")
    assert ids[-1] in await listed(live, "group=g&limit=1000")


async def test_sessions_are_listed_by_filter_page_by_page(live: Live) -> None:
    ids = [await live.open(group=f"g{at % 2}", metadata={"at": at, "name": "a b"}) for at in range(7)]
    wanted, found, after = ids[1::2], list[str](), ""
    while True:
        page = (await live.call("GET", f"/sessions?group=g1&limit=2{after}")).json()
        found += [one["session_id"] for one in page["sessions"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert found == wanted
    assert await listed(live, "metadata.at=3") == [ids[3]]
    assert await listed(live, "metadata.name=a%20b&metadata.at=5") == [ids[5]]
    assert await listed(live, "metadata.no=5") == []
    assert await listed(live, "state=open&group=g0") == ids[::2]
    assert await listed(live, "state=ended") == await listed(live, "state=busy") == []
    for query, param in (("state=gone", "/state"), ("stat=idle", None)):
        answer = await live.call("GET", f"/sessions?{query}")
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_sessions_are_deleted_by_filter_and_never_without_one(live: Live) -> None:
    ids = [await live.open(group=f"g{at % 2}") for at in range(5)]
    assert (await live.call("DELETE", "/sessions")).status == 400
    answer = await live.call("DELETE", "/sessions?group=g0")
    assert (answer.status, answer.json()) == (200, {"deleted": 3, "claimed": 0})
    assert await listed(live, "") == ids[1::2]
    assert (await live.call("DELETE", "/sessions?group=g0")).json() == {"deleted": 0, "claimed": 0}


async def test_the_turns_of_a_group_are_aborted_and_no_others(live: Live) -> None:
    one, other = await live.open(group="g"), await live.open(group="h")
    live.says("one", paused=True)
    live.says("two", paused=True)
    chats = [asyncio.ensure_future(live.chat(one, user("a")))]
    await live.engine.begun(1)
    chats.append(asyncio.ensure_future(live.chat(other, user("a"))))
    await live.engine.begun(2)
    assert (await live.call("POST", "/abort_request", {"group": "g"})).json() == {"aborted": 1}
    assert (await chats[0]).json()["choices"][0]["finish_reason"] == "abort"
    live.engine.step(10)
    assert (await chats[1]).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"sessions": [], "group": "g"}, "/group"),
        ({"group": "g", "state": "gone"}, "/state"),
        ({"group": "g", "format": "json"}, "/format"),
        ({"group": "g", "kinds": ["no"]}, "/kinds/0"),
        ({"group": "g", "unknown": 1}, "/unknown"),
        ({"sessions": ["a"] * 10_001}, "/sessions"),
    ],
)
async def test_a_request_for_samples_of_no_sessions_is_refused(live: Live, body: Any, param: str | None) -> None:
    answer = await live.call("POST", "/samples", body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_sessions_that_are_on_disk_alone_are_selected_and_read_without_being_woken(kept: Serve) -> None:
    async with kept(max_sessions=1) as live:
        ids = []
        for step in range(3):
            ids.append(await live.open(group="g", metadata={"step": step}))
            await conversation(live, ids[-1], turns=["one"])
        await live.open()
        assert not any(map(live.manager.sessions.has, ids))
        assert await listed(live, "group=g&metadata.step=1") == [ids[1]]
        told = await bulk(live, group="g", delete=True)
        assert [head.get("session_id") for head, _ in told] == [*ids, None]
        assert not any(map(live.manager.sessions.has, ids))
        assert told[-1][0]["deleted"] == 3
        assert await listed(live, "group=g") == []
