"""While the slots are held, large replies wait in their engine's socket, and small ones come."""

import asyncio
import contextlib
import gzip
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import pytest

from stenograph.core.errors import UpstreamInvalid
from stenograph.engine.http.inflate import PIECE_BYTES
from stenograph.engine.http.transport import EngineTransport
from stenograph.offload.body_slots import BodySlots

LARGE_BYTES = 64 * 2**20
"""More than the sockets between two processes hold."""

NUM_SMALL = 300
"""Meanwhile large ones would have come, if they flowed."""


class BodyServer:
    """Answers every request with as many bytes as its path says; `num_sent` of its answers are out of its hands."""

    def __init__(self) -> None:
        self.num_asked = self.num_sent = 0
        self.changed = asyncio.Condition()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_bytes = int((await reader.readuntil(b"\r\n\r\n")).split()[1].lstrip(b"/"))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % num_bytes)
        writer.write(bytes(num_bytes))
        await self._note(asked=1)
        writer.close()
        await writer.wait_closed()
        await self._note(sent=1)

    async def _note(self, *, asked: int = 0, sent: int = 0) -> None:
        async with self.changed:
            self.num_asked += asked
            self.num_sent += sent
            self.changed.notify_all()

    async def reached(self, *, asked: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_asked >= asked)


@asynccontextmanager
async def serving(slots: BodySlots) -> AsyncGenerator[tuple[BodyServer, EngineTransport]]:
    bodies = BodyServer()
    async with await asyncio.start_server(bodies.handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        transport = EngineTransport(f"http://{host}:{port}", 10.0, slots)
        transport.open()
        try:
            yield bodies, transport
        finally:
            await transport.aclose()


async def size_of(transport: EngineTransport, num_bytes: int) -> int:
    return len((await transport.forward("GET", f"/{num_bytes}", [], b"")).body)


async def test_large_replies_wait_in_their_engines_socket_while_the_slots_are_held_and_small_ones_come() -> None:
    slots = BodySlots(1)
    async with serving(slots) as (bodies, transport):
        async with slots.slot() as held:
            await held.take()
            large = [asyncio.ensure_future(size_of(transport, LARGE_BYTES)) for _ in range(3)]
            await bodies.reached(asked=3)
            for asked in range(NUM_SMALL):
                assert await size_of(transport, 1000) == 1000
                await bodies.reached(asked=4 + asked)
            assert not any(one.done() for one in large)
            assert bodies.num_sent <= NUM_SMALL
        assert await asyncio.gather(*large) == [LARGE_BYTES] * 3


async def test_large_replies_that_come_at_once_are_decoded_in_iterations_of_their_own() -> None:
    iterations = [0]
    decoded: list[int] = []

    def count() -> None:
        iterations[0] += 1
        counting[0] = loop.call_soon(count)

    async def ask(transport: EngineTransport) -> None:
        await transport.post("/1000000", b"", (), lambda _: decoded.append(iterations[0]))

    loop = asyncio.get_running_loop()
    counting = [loop.call_soon(count)]
    async with serving(BodySlots(8)) as (_, transport), asyncio.TaskGroup() as tasks:
        for _ in range(40):
            tasks.create_task(ask(transport))
    counting[0].cancel()
    assert len(decoded) == 40
    # One before the count goes up, and one after that in the same iteration.
    assert max(Counter(decoded).values()) <= 2


# -- replies that inflate


class GzipServer:
    """Answers every request with a body that is sent compressed, whatever was asked for."""

    def __init__(self, body: bytes) -> None:
        self._sent = gzip.compress(body, mtime=0)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(self._sent) + self._sent)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("limit", [32 * 2**20, 16 * 2**20], ids=["fits", "is a bomb"])
async def test_a_reply_inflates_in_pieces_between_which_the_loop_serves_others(limit: int) -> None:
    """One copy of it at most is in memory; of one that is too large, no more than the limit."""
    num_bytes, num_passes, ended = 24 * 2**20, 0, False

    async def others() -> None:
        nonlocal num_passes
        while not ended:
            num_passes += 1
            await asyncio.sleep(0)

    async with await asyncio.start_server(GzipServer(bytes(num_bytes)).handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        transport = EngineTransport(f"http://{host}:{port}", 10.0, max_reply_bytes=limit)
        transport.open()
        other = asyncio.create_task(others())
        tracemalloc.start()
        try:
            if num_bytes <= limit:
                assert await size_of(transport, 0) == num_bytes
            else:
                with pytest.raises(UpstreamInvalid, match="--max-reply-bytes"):
                    await size_of(transport, 0)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            ended = True
            await other
            await transport.aclose()
    assert num_passes >= min(num_bytes, limit) // PIECE_BYTES
    assert peak < 1.5 * min(num_bytes, limit)


async def test_an_event_that_does_not_end_is_refused_at_the_limit() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: ")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"x" * 10_000)
                await writer.drain()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        transport = EngineTransport(f"http://{host}:{port}", 10.0, max_reply_bytes=100_000)
        transport.open()
        async with aclosing(transport.events("/", b"{}", ())) as events:
            with pytest.raises(UpstreamInvalid, match=r"100000 bytes \(--max-reply-bytes\)") as caught:
                await anext(events)
        await transport.aclose()
    assert caught.value.law == "event_size"
