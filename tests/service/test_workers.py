"""Several workers are one server: a request through the wrong worker is answered as through the right one."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import ScriptedEngine
from stenograph.cluster.peer_connection import DELIVERED, GREETING
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, assistant, user
from .test_delivery import BODY, ask, lose_reply
from .test_half_requests import FRAMED, OFFERS, connected
from .workers_kit import HEAD_SIZES, Workers, check_head_limits, places, serving, two_workers

pytestmark = pytest.mark.timeout(600)

Start = Callable[..., AbstractAsyncContextManager[Workers]]


@pytest.fixture
def start(tmp_path: Path, renderer: Renderer) -> Start:
    """Start workers with other settings."""
    return lambda **settings: two_workers(tmp_path, renderer, **settings)


@pytest.fixture
async def workers(start: Start) -> AsyncIterator[Workers]:
    async with start() as running:
        yield running


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [user("hi")]}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 20}),
    "messages": ("/v1/messages", {"messages": [user("hi")], "model": "m", "max_tokens": 20}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
}
CHANGES = {"x-request-id", "server-timing", "date", "content-length"}


OF_ONE_TURN = re.compile(
    rb'[0-9a-f]{24,}|(?<="created":)\d+|(?<="created_at":)[\d.]+|(?<="completed_at":)[\d.]+|(?<="createTime":")[^"]+'
)


def steady(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """An answer without what each turn has of its own: ids, times, and what its length makes of them."""
    headers = {name.lower(): value for name, value in answer.headers.items() if name.lower() not in CHANGES}
    return answer.status, headers, OF_ONE_TURN.sub(b"#", answer.body)


async def test_every_dialect_through_the_wrong_worker_is_as_through_the_right_one(workers: Workers) -> None:
    for dialect in ASKED:
        for stream in (False, True):
            await check_dialect(dialect, stream, workers)


async def check_dialect(dialect: str, stream: bool, workers: Workers) -> None:
    path, body = ASKED[dialect]
    if stream:
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
        body = body if dialect == "gemini" else {**body, "stream": True}
    answers: list[Answer] = []
    for through in (0, 1):
        session = await workers.open_at(0)
        workers.lives[0].says("fine, thanks")
        answers.append(await workers.lives[through].call("POST", f"/sessions/{session}{path}", body))
        view = (await workers.lives[through].call("GET", f"/sessions/{session}")).json()
        assert len(view["records"]) == 1
    right, wrong = answers
    assert right.status == 200
    assert steady(wrong) == steady(right)
    assert len(wrong.headers.getall("server")) == len(wrong.headers.getall("date")) == 1  # type: ignore[attr-defined]
    assert b"fine, thanks" in wrong.body


async def test_an_address_without_a_session_finds_the_worker_of_the_one_that_is_named(workers: Workers) -> None:
    ways = ({"x_session_id": "{}"}, {"authorization": "Bearer {}"}, {"x_api_key": "{}"}, {"x_goog_api_key": "{}"}, {})
    for headers in ways:
        session = await workers.open_at(1)
        named = {name: value.format(session) for name, value in headers.items()}
        path = "/v1/chat/completions" + ("" if headers else f"?key={session}")
        workers.lives[0].says("fine")
        answer = await workers.lives[0].call("POST", path, {"messages": [user("hi")]}, **named)
        assert answer.status == 200, answer.body
        assert len((await workers.lives[1].call("GET", f"/sessions/{session}")).json()["records"]) == 1


async def test_a_client_that_hangs_up_at_the_wrong_worker_stops_the_generation_at_the_owner(workers: Workers) -> None:
    session = await workers.open_at(0)
    for stream in (False, True):
        workers.lives[0].says("never said", paused=True)
        asking = asyncio.create_task(workers.lives[1].chat(session, user("hi"), stream=stream))
        await workers.engine.begun(1 + stream)
        asking.cancel()
        await workers.engine.idle()
    assert len(workers.engine.stopped) == 2
    assert (await workers.lives[1].call("GET", f"/sessions/{session}")).json()["records"] == []


async def test_a_stream_goes_through_the_wrong_worker_piece_by_piece(workers: Workers) -> None:
    live, session = workers.lives[1], await workers.open_at(0)
    live.says("abc", paused=True)
    body = json.dumps({"messages": [user("hi")], "stream": True}).encode()
    workers.engine.step()
    async with live.client.post(
        f"{live.url}/sessions/{session}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
    ) as answer:
        seen = b""
        for letter in b"abc":
            while b'"content":"%c"' % letter not in seen.replace(b" ", b""):
                seen += await answer.content.readany()
            workers.engine.step()
        workers.engine.step()
        seen += await answer.read()
    assert seen.rstrip().endswith(b"data: [DONE]")


async def test_an_abort_and_a_delete_through_the_wrong_worker_end_the_turn(workers: Workers) -> None:
    for how in ("abort", "abort_all", "delete"):
        session = await workers.open_at(0)
        workers.lives[0].says("cut short", paused=True)
        asking = asyncio.create_task(workers.lives[1].chat(session, user("hi")))
        await workers.engine.begun(len(workers.engine.requests) + 1)
        if how == "delete":
            assert (await workers.lives[1].call("DELETE", f"/sessions/{session}")).status == 204
            assert (await workers.lives[1].call("GET", f"/sessions/{session}")).status == 404
        elif how == "abort":
            assert (await workers.lives[1].call("POST", f"/sessions/{session}/abort", {})).json() == {"aborted": 1}
        else:
            answer = await workers.lives[1].call("POST", "/abort_request", {"abort_all": True})
            assert answer.json() == {"aborted": 1}
        answer = await asking
        assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")


async def test_a_retry_through_the_other_worker_joins_the_turn_or_gets_its_reply(workers: Workers) -> None:
    session = await workers.open_at(0)
    workers.lives[0].says("once", paused=True)
    body, path = {"messages": [user("hi")]}, f"/sessions/{session}/v1/chat/completions"
    first = asyncio.create_task(workers.lives[1].call("POST", path, body, idempotency_key="k"))
    await workers.engine.begun(1)
    second = asyncio.create_task(workers.lives[0].call("POST", path, body, idempotency_key="k"))
    joined = b'stenograph_retries_total{worker="0",answer="joined"} 1.0'
    while joined not in (await workers.lives[1].call("GET", "/metrics")).body:
        assert not second.done()
    workers.engine.step(10)
    one, two = await asyncio.gather(first, second)
    assert one.json()["id"] == two.json()["id"]
    third = await workers.lives[1].call("POST", path, body, idempotency_key="k")
    assert third.json()["id"] == one.json()["id"]
    assert len(workers.engine.requests) == 1
    other = await workers.lives[1].call("POST", path, {"messages": [user("ho")]}, idempotency_key="k")
    assert (other.status, other.json()["error"]["code"]) == (422, "idempotency_mismatch")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_before_which_the_client_said_that_it_closes_is_delivered(stream: bool, workers: Workers) -> None:
    session = await workers.open_at(0)
    for through in (0, 1):
        workers.lives[0].says("fine")
        body = {"messages": [user("hi")], "stream": stream}
        path = f"/sessions/{session}/v1/chat/completions"
        answer = await workers.lives[through].call("POST", path, body, connection="close")
        assert (answer.status, answer.headers["connection"]) == (200, "close")
    await workers.at_rest()
    metrics = (await workers.lives[0].call("GET", "/metrics")).body.decode()
    assert 'stenograph_stage_seconds_count{worker="0",stage="reply"} 2.0' in metrics


async def test_large_bodies_and_large_answers_go_through_unchanged(workers: Workers) -> None:
    session = await workers.open_at(1)
    text = "long text, over and over. " * 100
    workers.lives[1].says("x" * 1000)
    answer = await workers.lives[0].call(
        "POST", f"/sessions/{session}/v1/chat/completions", {"messages": [user(text)], "max_tokens": 1001}
    )
    assert answer.status == 200, answer.body
    views = [(await live.call("GET", f"/sessions/{session}")).body for live in workers.lives]
    assert views[0] == views[1]
    assert text.encode() in views[0]
    samples = [(await live.call("POST", f"/sessions/{session}/samples")).body for live in workers.lives]
    assert samples[0] == samples[1]


@pytest.mark.parametrize(("num_headers", "num_bytes"), HEAD_SIZES)
async def test_a_head_has_the_same_limits_through_the_wrong_worker(
    num_headers: int, num_bytes: int, workers: Workers
) -> None:
    session = await workers.open_at(0)
    await check_head_limits(workers.lives, session, num_headers, num_bytes)


async def test_a_connection_serves_sessions_of_all_workers_in_turn(workers: Workers) -> None:
    """Every other request is another worker's."""
    for is_chunked in (False, True):
        await check_connection(is_chunked, workers)


async def check_connection(is_chunked: bool, workers: Workers) -> None:
    sessions = [await workers.open_at(0), await workers.open_at(1)]
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(workers.lives[0].url, connector=connector) as client:
        for number in range(6):
            workers.lives[0].says(f"answer {number}")
            body = json.dumps({"messages": [user(f"question {number}")]}).encode()

            async def pieces(body: bytes = body) -> AsyncIterator[bytes]:
                yield body[:10]
                yield body[10:]

            async with client.post(
                f"/sessions/{sessions[number % 2]}/v1/chat/completions",
                data=pieces() if is_chunked else body,
                headers={"content-type": "application/json"},
            ) as answer:
                assert f"answer {number}" in await answer.text()
            async with client.head(f"/sessions/{sessions[number % 2]}") as answer:
                assert answer.status == 200
    for session in sessions:
        assert len((await workers.lives[0].call("GET", f"/sessions/{session}")).json()["metadata"]["strands"]) == 3


REFUSED: list[tuple[str, str, bytes | None, int]] = [
    ("GET", "/sessions/{0}/nothing", None, 403),
    ("POST", "/sessions/{0}/v1/chat/completions", b"no json", 400),
    ("GET", "/sessions/{0}/v1/chat/completions", None, 405),
    ("GET", "/sessions/01ffffffffffffffffffffffffffffff", None, 404),
    ("GET", "/sessions/no-session", None, 404),
    ("DELETE", "/sessions/no%20session", None, 404),
    ("POST", "/sessions/{0}/v1/messages", b"{}", 400),
    ("POST", "/sessions/{0}/abort", b" " * 5000, 413),
]


async def test_errors_through_the_wrong_worker_are_those_of_the_right_one(start: Start) -> None:
    async with start(max_body_bytes=4096) as workers:
        session = await workers.open_at(1)
        for method, path, body, status in REFUSED:
            right, wrong = [
                await workers.lives[through].call(method, path.replace("{0}", session), body) for through in (1, 0)
            ]
            assert (wrong.status, wrong.body, steady(wrong)) == (right.status, right.body, steady(right))
            assert wrong.status == status
            assert (await workers.lives[0].call("GET", f"/sessions/{session}")).status == 200  # the way is whole


async def test_the_address_that_a_client_came_by_is_the_one_it_gets(workers: Workers) -> None:
    """A session that is opened with a key may be another worker's: behind a proxy its addresses are the proxy's all the
    same."""
    for key in ("a", "b", "c", "d"):
        answer = await workers.lives[0].call(
            "POST", "/sessions", {}, idempotency_key=key, host="localhost:1234", x_forwarded_proto="https"
        )
        opened = answer.json()
        assert opened["base_url"] == f"https://localhost:1234/sessions/{opened['session_id']}/v1"


@pytest.mark.parametrize("has_store", [False, True])
async def test_a_key_opens_one_session_whichever_worker_is_asked(has_store: bool, start: Start, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": tmp_path / "data"} if has_store else {}
    keys = [f"key {number}" for number in range(6)]
    async with start(**options) as workers:
        asked = [live.call("POST", "/sessions", {}, idempotency_key=key) for key in keys for live in workers.lives]
        answers = [answer.json()["session_id"] for answer in await asyncio.gather(*asked)]
        assert answers[::2] == answers[1::2]
        assert {answer[:2] for answer in answers} == {"00", "01"}
        other = await workers.lives[0].call("POST", "/sessions", {"group": "g"}, idempotency_key=keys[0])
        assert other.status == 422
    if has_store:  # also where another number of workers looks for it
        for num in (3, 1):
            async with start(num=num, **options) as workers:
                for key, session in zip(keys, answers[::2], strict=True):
                    again = await workers.lives[-1].call("POST", "/sessions", {}, idempotency_key=key)
                    assert again.json()["session_id"] == session
                    assert (await workers.lives[0].call("GET", f"/sessions/{session}")).status == 200


async def test_lists_metrics_and_readiness_are_those_of_all(workers: Workers) -> None:
    sessions = [await workers.open_at(number) for number in (0, 0, 0, 1, 1)]
    listed: list[str] = []
    for limit in (1, 2, 3, 5, 100):
        found: list[str] = []
        after = ""
        while True:
            page = (await workers.lives[1].call("GET", f"/sessions?limit={limit}{after}")).json()
            found += [one["session_id"] for one in page["sessions"]]
            if page["next"] is None:
                break
            assert page["next"] == found[-1]
            after = f"&after={page['next']}"
        assert found == (listed or found)
        listed = found
    assert sorted(listed) == sorted(sessions)
    for bad in ("?limit=0", "?limit=x", "?after=nothing", "?what=1", f"?after={'01' * 16}"):
        answers = [await live.call("GET", f"/sessions{bad}") for live in workers.lives]
        assert answers[0].status == answers[1].status
        assert answers[0].status in (400, 404)
    for live in workers.lives:
        text = (await live.call("GET", "/metrics")).body.decode()
        assert 'stenograph_sessions{worker="0"} 3.0' in text
        assert 'stenograph_sessions{worker="1"} 2.0' in text
        assert text.count("# TYPE stenograph_sessions gauge") == 1
    ready = await workers.lives[0].call("GET", "/ready")
    assert (ready.status, len(ready.json()["engines"])) == (200, 1)
    await workers.engine.aclose()
    assert (await workers.lives[0].call("GET", "/ready")).status == 503
    health = [(await live.call("GET", "/health")).json()["instance_id"] for live in workers.lives]
    assert health[0] == health[1]


async def test_a_client_is_not_taken_for_a_worker_that_passes_its_request_on(workers: Workers) -> None:
    """Each of the workers that are asked would ask all of them again."""
    for live in workers.lives:
        assert (await live.call("GET", "/metrics", x_stenograph_client="-")).status == 200
        assert (await live.call("POST", "/workers/abort", x_stenograph_client="-")).status == 404
    assert sum(len(server.server_state.connections) for server in workers.servers) < 10


async def test_keys_are_asked_for_once_and_by_the_worker_that_serves(start: Start) -> None:
    async with start(api_key=("secret",)) as workers:
        key = {"authorization": "Bearer secret"}
        session = (await workers.lives[1].call("POST", "/sessions", {}, **key)).json()["session_id"]
        for path in (f"/sessions/{session}", "/sessions"):
            assert (await workers.lives[0].call("GET", path)).status == 401
            assert (await workers.lives[0].call("GET", path, **key)).status == 200
        assert (await workers.lives[0].call("POST", "/abort_request", {"abort_all": True})).status == 401
        workers.lives[0].says("stateless")  # with keys, a bearer names no session
        answer = await workers.lives[0].call(
            "POST", "/v1/chat/completions", {"messages": [user("hi")]}, x_api_key="secret"
        )
        assert answer.status == 200


@pytest.mark.parametrize("framing", FRAMED)
async def test_an_offer_to_upgrade_goes_to_the_right_worker_with_its_body(framing: str, workers: Workers) -> None:
    session = await workers.open_at(1)
    header, body = FRAMED[framing]
    for live in workers.lives:
        async with connected(live) as (reader, writer):
            for _ in range(2 if framing == "length" else 1):  # a chunked one that is passed on is a connection's last
                writer.write(f"POST /sessions/{session}/detokenize HTTP/1.1\r\nhost: localhost\r\n".encode())
                writer.write(b"content-type: application/json\r\n" + OFFERS[0] + header + b"\r\n" + body)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                await reader.readuntil(b"}")


async def test_limits_hold_for_all_workers_together(start: Start) -> None:
    async with start(max_in_flight=3, max_sessions=4) as workers:
        sessions = [await workers.open_at(number) for number in (0, 1, 0, 1)]
        for live in workers.lives:
            refused = await live.call("POST", "/sessions", {})
            assert (refused.status, refused.json()["error"]["code"]) == (429, "limit_exceeded")
            assert "holds its 4 sessions" in refused.json()["error"]["message"]
        for _ in range(3):
            workers.lives[0].says("slow", paused=True)
        running = [
            asyncio.create_task(workers.lives[number % 2].chat(session, user("hi")))
            for number, session in enumerate(sessions[:3])
        ]
        await workers.engine.begun(3)
        for through in workers.lives:
            refused = await through.chat(sessions[3], user("hi"))
            assert (refused.status, refused.json()["error"]["code"]) == (429, "limit_exceeded")
            assert "runs 3 of at most 3" in refused.json()["error"]["message"]
        workers.engine.step(100)
        assert [(await one).status for one in running] == [200] * 3
        assert (await workers.lives[0].call("DELETE", f"/sessions/{sessions[3]}")).status == 204
        assert (await workers.lives[0].call("POST", "/sessions", {})).status == 200


async def test_with_a_store_idle_sessions_of_one_worker_make_room_for_anothers(start: Start, tmp_path: Path) -> None:
    async with start(max_sessions=4, data_dir=tmp_path / "data") as workers:
        first = [await workers.open_at(0) for _ in range(4)]
        second = [await workers.open_at(1) for _ in range(4)]
        for session in (*first, *second):
            workers.lives[0].says("fine")
            assert (await workers.lives[1].chat(session, user("hi"))).status == 200
        for live in workers.lives:
            live.manager.sessions.give_way()
        assert [live.manager.sessions.num_sessions for live in workers.lives] == [2, 2]


async def test_a_backup_has_the_files_of_all(start: Start, tmp_path: Path) -> None:
    async with start(data_dir=tmp_path / "data") as workers:
        sessions = [await workers.open_at(0), await workers.open_at(1)]
        for session in sessions:
            workers.lives[0].says("kept")
            assert (await workers.lives[0].chat(session, user("hi"))).status == 200
        path = str(tmp_path / "copy")
        answer = await workers.lives[1].call("POST", "/backup", {"path": path})
        assert answer.status == 200, answer.body
        assert answer.json()["bytes"] == sum(file.stat().st_size for file in (tmp_path / "copy").iterdir())
        again = await workers.lives[1].call("POST", "/backup", {"path": path})
        assert again.status == 400
    async with start(num=1, data_dir=tmp_path / "copy") as workers:
        for session in sessions:
            assert len((await workers.lives[0].call("GET", f"/sessions/{session}")).json()["records"]) == 1
            workers.lives[0].says("on")
            assert (await workers.lives[0].chat(session, user("hi"), assistant("kept"), user("on"))).status == 200


async def test_a_worker_that_is_away_is_503_in_the_words_of_the_protocol(renderer: Renderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size)
    here, away = places(tmp_path, 2)
    session = "01" + "0" * 30
    started = serving(here, engine, renderer, patience_s=0.05)
    async with started as (url, manager, _), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        answer = await live.chat(session, user("hi"))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "worker_unavailable"
        answer = await live.call("POST", f"/sessions/{session}/v1/messages", {"messages": [user("hi")]})
        assert (answer.status, answer.json()["type"]) == (503, "error")
        assert (await live.call("GET", "/ready")).status == 503
        away.listener.close()  # now there is nobody to wait for
        answer = await live.call("GET", f"/sessions/{session}")
        assert answer.status == 503
        text = (await live.call("GET", "/metrics")).body.decode()
        assert 'stenograph_forwards_failed_total{worker="0"} 3.0' in text
        assert (await live.call("GET", "/health")).status == 200
    here.listener.close()


async def test_a_body_that_comes_after_its_answer_does_not_end_the_way(renderer: Renderer, tmp_path: Path) -> None:
    """It comes in one read with the word that the answer has left."""
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size)
    (place,) = places(tmp_path, 1)
    async with serving(place, engine, renderer):
        reader, writer = await asyncio.open_unix_connection(place.sockets[0])
        assert await reader.readexactly(1) == GREETING
        for _ in range(3):
            writer.write(
                b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\nx-stenograph-client: -\r\ncontent-length: 4\r\n\r\n"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 404")
            (length,) = re.findall(rb"content-length: ([0-9]+)", head)
            await reader.readexactly(int(length))
            writer.write(b"body" + DELIVERED)
        writer.close()
        await writer.wait_closed()
    place.listener.close()


async def test_a_large_reply_that_nobody_read_through_the_wrong_worker_comes_again(start: Start) -> None:
    """The owner has handed all of it over; the other worker still has it when its client leaves."""
    async with start(max_context_tokens=2**22) as workers:
        path, live = f"/sessions/{await workers.open_at(0)}/v1/completions", workers.lives[1]
        live.says("one")
        live.says("two")
        await lose_reply(live, path, BODY)
        again = await ask(live, path, BODY, x_stainless_retry_count="1")
        assert again.json()["choices"][0]["text"] == "one"
        assert len(workers.engine.requests) == 1
        other = await ask(live, path, BODY, x_stainless_retry_count="1")
        assert other.json()["choices"][0]["text"] == "two"
