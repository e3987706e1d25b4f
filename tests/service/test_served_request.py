"""A request of our own HTTP connection, as an application sees it: what it may send, and what it may do wrong."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from stenograph.dialects.common.errors import refusal
from stenograph.http.connection import connections_of
from stenograph.http.metrics import Metrics
from stenograph.http.served_request import MOST_UNTAKEN_BYTES
from stenograph.http.settings import Settings

CLOSE = b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncGenerator[int]:
    """A socket on which an application is served: its port."""
    config = uvicorn.Config(app, lifespan="off", interface="asgi3", log_config=None)
    made: Callable[..., asyncio.Protocol] = connections_of(Settings(), Metrics(), lambda error: refusal(error, None))
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: made(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await server.wait_closed()
        await asyncio.gather(*state.tasks)


async def sent_back(port: int, *parts: bytes) -> bytes:
    """All that comes back for these bytes, until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()
    finally:
        writer.close()


def answering(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(content: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def test_an_application_sees_the_request_and_its_body_comes_in_pieces() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.update(scope)
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message["body"])
            more = message["more_body"]
        content = b"".join(pieces)
        await send(start(200, (b"content-length", b"%d" % len(content))))
        await send(body(content))
        assert await receive() == {"type": "http.disconnect"}

    content = bytes(range(256)) * (MOST_UNTAKEN_BYTES // 64)
    async with serving(app) as port:
        head = b"POST /a%20b?c=d HTTP/1.1\r\nX-One: 1\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(content)
        answer = await sent_back(port, head + length, content[:10], content[10:])
    assert answer.endswith(b"\r\n\r\n" + content)
    assert (seen["method"], seen["path"], seen["raw_path"]) == ("POST", "/a b", b"/a%20b")
    assert (seen["query_string"], seen["http_version"], seen["client"][0]) == (b"c=d", "1.1", "127.0.0.1")
    assert (b"x-one", b"1") in seen["headers"]


FRAMED: dict[str, tuple[tuple[Message, ...], bytes]] = {
    "chunked": (
        (start(200, (b"a", b"b")), body(b"x", more=True), body(b"")),
        b"\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    ),
    "with its length": (
        (start(200, (b"content-length", b"2")), body(b"xy")),
        b"content-length: 2\r\nconnection: close\r\n\r\nxy",
    ),
    "without a body": ((start(204), body(b"")), b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"),
}


@pytest.mark.parametrize(("messages", "expected"), FRAMED.values(), ids=FRAMED)
async def test_an_answer_is_framed_as_it_was_announced(messages: tuple[Message, ...], expected: bytes) -> None:
    async with serving(answering(*messages)) as port:
        assert (await sent_back(port, CLOSE)).endswith(expected)


async def test_the_answer_to_head_has_its_length_and_no_body() -> None:
    async with serving(answering(start(200, (b"content-length", b"2")), body(b"xy"))) as port:
        answer = await sent_back(port, CLOSE.replace(b"GET", b"HEAD"))
    assert answer.endswith(b"content-length: 2\r\nconnection: close\r\n\r\n")


WRONG: dict[str, tuple[Message, ...]] = {
    "nothing": (),
    "a body before its head": (body(b"x"),),
    "a line break in a header": (start(200, (b"a", b"b\r\nc: d")), body(b"")),
    "a name that is none": (start(200, (b"a b", b"c")), body(b"")),
}


@pytest.mark.parametrize("messages", WRONG.values(), ids=WRONG)
async def test_an_application_that_cannot_begin_its_answer_is_our_error(messages: tuple[Message, ...]) -> None:
    async with serving(answering(*messages)) as port:
        answer = await sent_back(port, CLOSE.replace(b"connection: close\r\n", b""))  # it is closed all the same
    assert answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
    assert answer.lower().count(b"connection: close") == 1


CUT: dict[str, tuple[Message, ...]] = {
    "no end": (start(200, (b"content-length", b"2")), body(b"x", more=True)),
    "too short": (start(200, (b"content-length", b"2")), body(b"x")),
    "too long": (start(200, (b"content-length", b"2")), body(b"x", more=True), body(b"yz")),
    "chunks without an end": (start(), body(b"x", more=True)),
}


@pytest.mark.parametrize("messages", CUT.values(), ids=CUT)
async def test_an_answer_that_is_not_what_was_announced_is_cut_off(messages: tuple[Message, ...]) -> None:
    async with serving(answering(*messages)) as port:
        answer = await sent_back(port, CLOSE.replace(b"connection: close\r\n", b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert not answer.endswith((b"0\r\n\r\n", b"xy", b"xyz"))


async def test_a_client_that_waits_to_be_told_is_told_once_its_body_is_wanted() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        await answering(start(200, (b"content-length", b"2")), body(message["body"]))(scope, receive, send)

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"xy")
        assert (await reader.read()).endswith(b"\r\n\r\nxy")
        writer.close()


async def test_requests_follow_one_another_on_a_connection_whose_bodies_nobody_read() -> None:
    """An answer that comes before its request is whole: the rest of it is read and dropped."""
    async with serving(answering(start(200, (b"content-length", b"1")), body(b"x"))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (4 * MOST_UNTAKEN_BYTES))
            assert (await reader.readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200 OK\r\n")
            for _ in range(4):
                writer.write(b"y" * MOST_UNTAKEN_BYTES)
                await writer.drain()
        writer.close()


async def test_several_who_wait_for_the_client_all_hear_that_it_left() -> None:
    heard: list[Message] = []
    begun, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        begun.set()
        waits: list[Awaitable[Message]] = [receive(), receive()]
        heard.extend(await asyncio.gather(*waits))
        ended.set()

    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await begun.wait()
        writer.close()
        await ended.wait()
    assert heard == [{"type": "http.disconnect"}] * 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(st.binary(min_size=1, max_size=300), st.data())
async def test_a_body_is_the_same_however_it_is_cut(content: bytes, data: st.DataObject) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message["body"])
            more = message["more_body"]
        await answering(start(), body(b"".join(pieces)))(scope, receive, send)

    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=3)))
    chunks = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True) if a < b]
    if data.draw(st.booleans(), label="chunked"):
        head = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        parts = [head, *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n"]
    else:
        parts = [b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(content), *chunks]
    async with serving(app) as port:
        answer = await sent_back(port, *parts)
    assert answer.endswith(b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content))
