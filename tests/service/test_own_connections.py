"""Connections to engines over real sockets: framing, reuse, flow control, and nothing left at the end.

What is the same over TLS is tested with it too.
"""

import asyncio
import contextlib
import socket
import tracemalloc
from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import pytest
import uvloop
from yarl import URL

from stenograph.core.errors import InvalidRequest, UpstreamUnreachable
from stenograph.engine.http.connections import Connections
from stenograph.engine.http.transport import EngineTransport
from stenograph.offload.body_slots import BodySlots

from .tls import server_tls, trusted

__all__ = ["trusted"]

NUM_SMALL = 300
HUGE_BYTES = 64 * 2**20
SCHEMES = ("http", "https")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Runs `serve` for each connection, until the connection or the test ends."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.num_connections = self.num_ended = 0
        self.changed = asyncio.Condition()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
        finally:
            writer.close()
            async with self.changed:
                self.num_ended += 1
                self.changed.notify_all()

    async def ended(self, num: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_ended >= num)


@asynccontextmanager
async def served(serve: Serve, host: str = "127.0.0.1", scheme: str = "http") -> AsyncGenerator[tuple[Server, str]]:
    server = Server(serve)
    tls = server_tls() if scheme == "https" else None
    async with await asyncio.start_server(server.handle, host, 0, ssl=tls) as listening:
        port = listening.sockets[0].getsockname()[1]
        yield server, f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        await server.ended(server.num_connections)


@asynccontextmanager
async def opened(url: str, body_slots: BodySlots | None = None) -> AsyncGenerator[EngineTransport]:
    transport = EngineTransport(url, 10.0, body_slots)
    transport.open()
    try:
        yield transport
    finally:
        await transport.aclose()


async def request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """A request's method, target and body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    method, target, _ = head.split(" ", 2)
    length = next((line for line in head.split("\r\n") if line.startswith("content-length:")), "x:0")
    return method.upper(), target, await reader.readexactly(int(length.partition(":")[2]))


def replying(reply: bytes, *, closes: bool = False) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await request(reader)
            writer.write(reply)
            if closes:
                writer.close()

    return serve


# -- with TLS and without it

REPLIES = {
    "length": (b"HTTP/1.1 200 OK\r\nA: b\r\nContent-Length: 3\r\n\r\nabc", 200, b"abc"),
    "chunked": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 200, b"abc"),
    "empty": (b"HTTP/1.1 404 None\r\nContent-Length: 0\r\n\r\n", 404, b""),
    "no content": (b"HTTP/1.1 204 None\r\n\r\n", 204, b""),
    "not modified": (b"HTTP/1.1 304 None\r\nContent-Length: 9\r\n\r\n", 304, b""),
    "interim": (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na", 200, b"a"),
    "large": (b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + b"abc" * 1_000_000, 200, b"abc" * 1_000_000),
}  # fmt: skip


async def test_the_name_and_password_of_an_engines_address_are_sent() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    heads: list[str] = []
    async with served(serve) as (_, url), opened(url.replace("//", "//me:p%40ss@")) as transport:
        assert await transport.post("/x", b"{}", (), lambda reply: reply.status) == 200
    lines = (line.split(": ", 1) for line in heads[0].split("\r\n")[1:-2])
    sent = {name.lower(): value for name, value in lines}
    assert b64decode(sent["authorization"].removeprefix("Basic ")) == b"me:p@ss"


@asynccontextmanager
async def connections(url: str) -> AsyncGenerator[Connections]:
    made = Connections(URL(url), 10.0, reuses=True)
    made.open()
    try:
        yield made
    finally:
        await made.aclose()


async def whole(connections: Connections, method: str, body: bytes = b"") -> tuple[int, bytes]:
    exchange = await connections.ask(method, "/", [("accept-encoding", "identity")], body)
    try:
        read = await exchange.piece()
        while pieces := await exchange.pieces(1_000_000):
            read += b"".join(pieces)
        return exchange.status, read
    finally:
        exchange.leave()


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", REPLIES)
async def test_replies_that_keep_their_connection_come_over_one(scheme: str, name: str) -> None:
    reply, status, body = REPLIES[name]
    async with served(replying(reply), scheme=scheme) as (server, url), connections(url) as pool:
        for _ in range(3):
            assert await whole(pool, "POST", b"x" * 200_000) == (status, body)
        assert server.num_connections == 1


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_body_without_a_length_ends_with_its_connection(scheme: str) -> None:
    serve = replying(b"HTTP/1.1 200 OK\r\n\r\n" + b"abc" * 100_000, closes=True)
    async with served(serve, scheme=scheme) as (server, url), connections(url) as pool:
        for _ in range(3):
            assert await whole(pool, "GET") == (200, b"abc" * 100_000)
        assert server.num_connections == 3


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_the_reply_to_a_head_request_has_no_body(scheme: str) -> None:
    async with (
        served(replying(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"), scheme=scheme) as (_, url),
        connections(url) as pool,
    ):
        for _ in range(3):
            assert await whole(pool, "HEAD") == (200, b"")


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_request_that_is_cancelled_closes_its_connection(scheme: str) -> None:
    asked = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        asked.set()
        assert await reader.read() == b""

    async with served(serve, scheme=scheme) as (server, url), connections(url) as pool:
        waiting = asyncio.ensure_future(whole(pool, "POST", b"{}"))
        await asked.wait()
        waiting.cancel()
        await server.ended(1)
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_a_generation_is_never_sent_twice_and_a_get_is(scheme: str) -> None:
    """The engine hangs up on the second request of each connection, when it has read it."""
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append((await request(reader))[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        heard.append((await request(reader))[0])

    async with served(serve, scheme=scheme) as (server, url), connections(url) as pool:
        assert await whole(pool, "POST", b"{}") == (200, b"a")
        with pytest.raises(UpstreamUnreachable) as caught:
            await whole(pool, "POST", b"{}")
        assert not caught.value.reply_began
        assert heard == ["POST", "POST"]
        assert await whole(pool, "POST", b"{}") == (200, b"a")
        assert await whole(pool, "GET") == (200, b"a")
        assert heard == ["POST", "POST", "POST", "GET", "GET"]
        assert server.num_connections == 3


# -- without TLS


async def test_a_reply_that_nobody_takes_stays_in_its_engine_s_socket() -> None:
    """A stream and a large body; both go on when they are taken."""
    num_sent = 0
    piece = b"data: " + b"x" * 65_000 + b"\n\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        while True:
            target = (await request(reader))[1]
            if target == "/small":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
                continue
            kind = b"text/event-stream" if target == "/events" else b"text/plain"
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: %b\r\n\r\n" % kind)
            for _ in range(HUGE_BYTES // len(piece)):
                writer.write(piece)
                await writer.drain()
                num_sent += len(piece)
            return

    slots = BodySlots(1)
    async with served(serve) as (_, url), opened(url, slots) as transport:
        tracemalloc.start()
        try:
            async with slots.slot() as held, aclosing(transport.events("/events", b"{}", ())) as events:
                await held.take()
                assert await anext(events) == b"x" * 65_000
                large = asyncio.ensure_future(transport.forward("GET", "/large", (), b""))
                for _ in range(NUM_SMALL):
                    assert (await transport.forward("GET", "/small", (), b"")).body == b"a"
                num_held_back, peak = 2 * HUGE_BYTES - num_sent, tracemalloc.get_traced_memory()[1]
                assert not large.done()
                async for _ in events:
                    pass
        finally:
            tracemalloc.stop()
        assert len((await large).body) == HUGE_BYTES // len(piece) * len(piece)
    assert num_held_back > HUGE_BYTES
    assert peak < 4 * 2**20


@pytest.mark.parametrize("num_extra", [-1, 0, 1])
async def test_a_large_body_is_as_long_as_it_says(num_extra: int) -> None:
    """One byte less is a cut. One more is nobody's: its connection ends, whenever it comes."""
    body = bytes(range(250)) * 12_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    sent = head + (body + b"x" * num_extra)[: len(body) + num_extra]
    async with served(replying(sent, closes=num_extra < 0)) as (server, url), opened(url) as transport:
        seen: list[bytes | UpstreamUnreachable] = []
        for _ in range(4):
            try:
                seen.append((await transport.forward("GET", "/", (), b"")).body)
            except UpstreamUnreachable as error:
                seen.append(error)
        if num_extra < 0:
            assert [isinstance(one, UpstreamUnreachable) and one.reply_began for one in seen] == [True] * 4
        else:
            assert seen[0] == body
            assert all(one == body or (num_extra and isinstance(one, UpstreamUnreachable)) for one in seen)
            assert num_extra or server.num_connections == 1


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that never answers."""
    await reader.read()


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_request_that_is_cancelled_while_it_connects_leaves_nothing_to_wait_for(scheme: str) -> None:
    """On the server's own loop, which says nothing to the protocol of a connection that was cancelled so early."""

    async def cancel_after(num_iterations: int, url: str) -> None:
        connections = Connections(URL(url), 5.0, reuses=True)
        connections.open()
        asking = asyncio.ensure_future(connections.ask("POST", "/", (), b"{}"))
        for _ in range(num_iterations):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        await connections.aclose()

    async def all_of_them() -> None:
        async with served(silent, scheme=scheme) as (_, url):
            for num_iterations in range(40):
                await cancel_after(num_iterations, url)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_them())


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_request_that_is_cancelled_once_its_connection_is_made_leaves_nothing_to_wait_for(scheme: str) -> None:
    """On the server's own loop, which makes the protocol's connection an iteration before it says so to the task: of
    what is cancelled then, the protocol never hears the end."""

    async def cancel_once_made(url: str) -> None:
        connections = Connections(URL(url), 5.0, reuses=True)
        connections.open()
        asking = asyncio.ensure_future(connections.ask("POST", "/", (), b"{}"))
        while not connections._all:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        await connections.aclose()

    async def all_of_them() -> None:
        async with served(silent, scheme=scheme) as (_, url):
            for _ in range(20):
                await cancel_once_made(url)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(all_of_them())


async def test_nothing_is_left_when_the_transport_is_closed() -> None:
    """Of connections that are idle, that wait for a reply, that are within one, and that stream."""
    arrived = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            target = (await request(reader))[1]
            if target == "/small":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
                continue
            if target == "/body":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nabc")
            arrived.release()

    async with served(serve) as (server, url):
        before = asyncio.all_tasks()
        async with opened(url) as transport:
            waiting = [
                asyncio.ensure_future(transport.forward("GET", target, (), b"")) for target in ("/body", "/hang")
            ]
            for _ in waiting:
                await arrived.acquire()
            assert (await transport.forward("GET", "/small", (), b"")).body == b"a"
            assert server.num_connections == 3
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in ended] == [UpstreamUnreachable] * 2
        await server.ended(3)
    assert asyncio.all_tasks() <= before


async def test_an_engine_that_answers_before_it_was_asked_all_is_heard_and_its_connection_not_used_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Large\r\nContent-Length: 1\r\n\r\na")
        with contextlib.suppress(ConnectionError):
            while await reader.read(2**20):
                pass

    async with served(serve) as (server, url), opened(url) as transport:
        for number in range(2):
            assert (await transport.forward("POST", "/", (), bytes(HUGE_BYTES))).status == 413
            assert server.num_connections == number + 1


async def test_an_engine_is_found_at_an_address_of_version_6() -> None:
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    async with served(replying(REPLIES["length"][0]), "::1") as (_, url), opened(url) as transport:
        assert (await transport.forward("GET", "/", (), b"")).body == b"abc"


async def test_an_engine_is_found_at_the_second_address_of_its_name() -> None:
    """`localhost` is also ::1 on most machines, where nobody listens."""
    serve = replying(REPLIES["length"][0])
    async with served(serve) as (_, url), opened(url.replace("127.0.0.1", "localhost")) as transport:
        assert (await transport.forward("GET", "/", (), b"")).body == b"abc"


async def test_a_path_of_the_address_comes_before_each_request_s() -> None:
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(REPLIES["length"][0])

    async with served(serve) as (_, url), opened(url + "/engine%2F1/") as transport:
        await transport.post("/generate", b"", (("x-a", "b"),), lambda reply: reply)
    lines = asked[0].split("\r\n")
    assert lines[0] == "POST /engine%2F1/generate HTTP/1.1"
    assert sorted(lines[1:-2]) == [
        "accept-encoding: identity",
        "accept: */*",
        "content-length: 0",
        "content-type: application/json",
        f"host: {url.removeprefix('http://')}",
        "x-a: b",
    ]


@pytest.mark.parametrize("pair", [("a", "b\r\nc: d"), ("a\nb", "c"), ("a", "b\rc"), ("a", "b\0")])
async def test_a_header_cannot_make_another_one(pair: tuple[str, str]) -> None:
    async with served(replying(REPLIES["length"][0])) as (server, url), opened(url) as transport:
        with pytest.raises(InvalidRequest):
            await transport.forward("GET", "/", [pair], b"")
        assert not server.num_connections


@pytest.mark.usefixtures("trusted")
async def test_a_certificate_is_of_the_host_and_of_an_authority_that_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve = replying(REPLIES["length"][0])
    async with served(serve, scheme="https") as (server, url):
        for named in ("127.0.0.1", "localhost"):
            async with opened(url.replace("127.0.0.1", named)) as transport:
                assert (await transport.forward("GET", "/", (), b"")).body == b"abc"
        async with opened(url.replace("127.0.0.1", "127.0.0.2")) as transport:
            with pytest.raises(UpstreamUnreachable, match="could not be reached"):
                await transport.forward("GET", "/", (), b"")
        monkeypatch.delenv("SSL_CERT_FILE")
        async with opened(url) as transport:
            with pytest.raises(UpstreamUnreachable, match=r"certificate verify failed: self.signed certificate"):
                await transport.forward("GET", "/", (), b"")
        await server.ended(2)


@pytest.mark.usefixtures("trusted")
async def test_a_large_reply_over_tls_comes_while_it_is_taken_and_one_that_is_cut_is_one() -> None:
    body = bytes(range(250)) * 12_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with served(replying(head + body), scheme="https") as (server, url), opened(url) as transport:
        for _ in range(3):
            assert (await transport.forward("GET", "/", (), b"")).body == body
        assert server.num_connections == 1
    cut = replying(head + body[:-1], closes=True)
    async with served(cut, scheme="https") as (_, url), opened(url) as transport:
        with pytest.raises(UpstreamUnreachable) as caught:
            await transport.forward("GET", "/", (), b"")
        assert caught.value.reply_began


@pytest.mark.usefixtures("trusted")
def test_replies_over_tls_keep_their_connection_on_the_server_s_own_loop() -> None:
    async def ask() -> None:
        reply, status, body = REPLIES["large"]
        async with served(replying(reply), scheme="https") as (server, url), connections(url) as pool:
            for _ in range(5):
                assert await whole(pool, "POST", b"x" * 200_000) == (status, body)
            assert server.num_connections == 1

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


async def test_tls_to_a_server_without_it_is_unreachable() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with served(serve) as (_, url), opened(url.replace("http:", "https:")) as transport:
        where = url.removeprefix("http://")
        with pytest.raises(UpstreamUnreachable, match=rf"The engine at {where} could not be reached: .*WRONG_VERSION"):
            await transport.forward("GET", "/", (), b"")
