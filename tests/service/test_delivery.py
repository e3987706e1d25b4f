"""A reply is delivered when its last byte has left for a live client; until then its own retry gets it again."""

import asyncio
import gc
import io
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.errors import EngineUnavailable
from stenograph.session.reply_buffer import ReplyBuffer
from stenograph.session.steps import RunningTurn
from stenograph.session.turn import RequestRun
from stenograph.session.watch import RequestTask
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, running, user

BODY: dict[str, Any] = {"prompt": [319] * 2_500_000, "return_token_ids": True}
"""A prompt that makes a reply of 10 MB, which no socket buffer holds."""


@pytest.fixture
async def live(renderer: Renderer) -> AsyncIterator[Live]:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=2**22)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


async def lose_reply(live: Live, path: str, body: Any, **headers: str) -> None:
    """Ask, read nothing of the reply that is handed over, and break the connection off."""
    loop = asyncio.get_running_loop()
    host, _, port = live.url.removeprefix("http://").partition(":")
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(data)}", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, (host, int(port)))
        await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode() + data)
        await loop.sock_recv(sock, 1)  # it is on its way
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def ask(live: Live, path: str, body: Any, **headers: str) -> Answer:
    """Ask, and read the whole reply."""
    named = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    data = io.BytesIO(json.dumps(body).encode())
    async with live.client.post(live.url + path, data=data, headers=named) as answer:
        return Answer(status=answer.status, headers=answer.headers, body=await answer.read())


@pytest.mark.parametrize("key", [{}, {"idempotency_key": "k"}], ids=["no key", "a key on the first try"])
async def test_a_large_reply_that_nobody_read_comes_again_and_once_read_is_delivered(
    live: Live, key: dict[str, str]
) -> None:
    live.says("one")
    live.says("two")
    path = f"/sessions/{await live.open()}/v1/completions"
    await lose_reply(live, path, BODY, **key)
    again = await ask(live, path, BODY, x_stainless_retry_count="1")
    assert (again.status, len(again.body) > 10_000_000) == (200, True)
    assert again.json()["choices"][0]["text"] == "one"
    assert len(live.engine.requests) == 1
    other = await ask(live, path, BODY, x_stainless_retry_count="1")
    assert other.json()["choices"][0]["text"] == "two"


async def test_the_retry_of_a_later_request_does_not_get_an_earlier_ones_undelivered_reply(live: Live) -> None:
    live.says("one")
    live.engine.plan(Script(ids=(), error=EngineUnavailable("it died")))
    live.says("two")
    path = f"/sessions/{await live.open()}/v1/completions"
    await lose_reply(live, path, BODY)
    assert (await ask(live, path, BODY)).status == 503  # another request, with the same body
    retry = await ask(live, path, BODY, x_stainless_retry_count="1")
    assert retry.json()["choices"][0]["text"] == "two"


async def test_a_key_still_asks_for_its_own_turn_after_a_request_with_the_same_body(live: Live) -> None:
    live.says("one")
    live.engine.plan(Script(ids=(), error=EngineUnavailable("it died")))
    path = f"/sessions/{await live.open()}/v1/chat/completions"
    body = {"messages": [user("hi")]}
    for _ in range(2):
        first = await ask(live, path, body, idempotency_key="k")
        assert first.json()["choices"][0]["message"]["content"] == "one"
        if len(live.engine.requests) == 1:
            assert (await ask(live, path, body)).status == 503
    assert len(live.engine.requests) == 2


def told(answer: Answer) -> dict[str, Any]:
    """What a chat's reply says, however it is cut into events."""
    if answer.headers["content-type"].startswith("application/json"):
        return {key: value for key, value in answer.json().items() if key != "created"}
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line and line != "data: [DONE]"]
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "ids": {event["id"] for event in events},
        "prompt_token_ids": [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event],
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "token_ids": [id_ for choice in choices for id_ in choice.get("token_ids", ())],
        "logprobs": [row for choice in choices for row in (choice["logprobs"] or {"content": ()})["content"]],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": [event["usage"] for event in events if event.get("usage")],
        "remaining": answer.headers.get("x-stenograph-remaining-tokens"),
    }


def kept_of_turns() -> list[object]:
    """What ran for turns, and is held by something."""
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, (RequestTask, RequestRun, RunningTurn, ReplyBuffer))]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_kept_reply_says_the_same_and_keeps_nothing_that_ran(live: Live, stream: bool) -> None:
    before = kept_of_turns()  # by what else ran in this process: a failure's traceback holds its turns
    live.says("a reply of several tokens " * 30)
    session_id = await live.open()
    path = f"/sessions/{session_id}/v1/chat/completions"
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"messages": [user("hi")], "logprobs": True, "top_logprobs": 2, "return_token_ids": True, **options}
    first = await ask(live, path, body, idempotency_key="k")
    # The handler of the first has ended with this; and no connection can time out while the heap is searched.
    assert (await live.call("GET", f"/sessions/{session_id}", connection="close")).status == 200
    assert [one for one in kept_of_turns() if not any(one is old for old in before)] == []
    again = await ask(live, path, body, idempotency_key="k")
    assert len(live.engine.requests) == 1
    assert told(again) == told(first)


@pytest.mark.parametrize("num_bytes", [100, 300_000])
async def test_a_client_that_hangs_up_while_its_turn_runs_stops_it_whatever_its_body(
    live: Live, num_bytes: int
) -> None:
    """Of a large body reading is paused: a hang-up after it is seen all the same."""
    live.says("never heard", paused=True)
    session_id = await live.open()
    body = json.dumps({"messages": [user("x" * num_bytes)]}).encode()
    host, _, port = live.url.removeprefix("http://").partition(":")
    head = f"POST /sessions/{session_id}/v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    await live.engine.begun(1)
    writer.close()
    await live.engine.idle()
    live.says("heard")
    answer = await live.chat(session_id, user("x"))
    assert answer.status == 200, answer.body
    assert len(live.manager.sessions.get(session_id).nodes) == 1


@pytest.mark.parametrize(
    ("version", "header"), [("1.1", "connection: close"), ("1.0", "accept: */*")], ids=["close", "HTTP/1.0"]
)
async def test_a_client_that_keeps_no_connection_gets_its_whole_reply_and_then_the_end(
    live: Live, version: str, header: str
) -> None:
    live.says("one")
    data = json.dumps({"messages": [user("a")]}).encode()
    host, _, port = live.url.removeprefix("http://").partition(":")
    lines = [f"POST /v1/chat/completions HTTP/{version}", f"host: {host}", f"content-length: {len(data)}", header]
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    fields = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (fields["connection"], int(fields["content-length"])) == ("close", len(body))
    assert json.loads(body)["choices"][0]["message"]["content"] == "one"
