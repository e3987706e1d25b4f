"""Several workers are one server: a request through the wrong worker is answered as through the right one."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stenograph.render.renderer import Renderer

from .conftest import Answer, Live, assistant, user
from .workers_kit import Workers, two_workers

pytestmark = pytest.mark.timeout(60)

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


def steady(answer: Answer) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items() if name.lower() not in CHANGES}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", list(ASKED))
async def test_every_dialect_through_the_wrong_worker_is_as_through_the_right_one(
    dialect: str, stream: bool, workers: Workers
) -> None:
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
    assert (wrong.status, steady(wrong)) == (right.status, steady(right)) == (200, steady(right))
    assert len(wrong.headers.getall("server")) == len(wrong.headers.getall("date")) == 1  # type: ignore[attr-defined]
    assert b"fine, thanks" in wrong.body
    assert wrong.body.count(b"\n") == right.body.count(b"\n")


@pytest.mark.parametrize(
    "headers",
    [
        {"x_session_id": "{}"},
        {"authorization": "Bearer {}"},
        {"x_api_key": "{}"},
        {"x_goog_api_key": "{}"},
        {},
    ],
)
async def test_an_address_without_a_session_finds_the_worker_of_the_one_that_is_named(
    headers: dict[str, str], workers: Workers
) -> None:
    session = await workers.open_at(1)
    named = {name: value.format(session) for name, value in headers.items()}
    query = "" if headers else f"?key={session}"
    workers.lives[0].says("fine")
    answer = await workers.lives[0].call("POST", f"/v1/chat/completions{query}", {"messages": [user("hi")]}, **named)
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
    async with live.client.post(
        f"{live.url}/sessions/{session}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
    ) as answer:
        seen = b""
        for letter in b"abc":
            workers.engine.step()
            while b'"content":"%c"' % letter not in seen.replace(b" ", b""):
                seen += await answer.content.readany()
        workers.engine.step(2)
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
    joined = b'stenograph_retries_total{worker="0",outcome="joined"} 1.0'
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
