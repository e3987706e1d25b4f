"""Requests that never end, and requests that never come: each is refused at a limit or a deadline, in our shape."""

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stenograph.http.connection import LINGER_BYTES, ClientConnection
from stenograph.offload.body_slots import BodySlots

from .conftest import Live, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SOON_S = 0.5
"""A deadline that a test can wait for: nothing else ends what it ends. A stalled machine is not silent for so long."""


@asynccontextmanager
async def connected(live: Live) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    address = urlsplit(live.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    """The status and the error's code of the one answer on a connection that is then closed."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "code", "param"}
    return int(head.split()[1]), error["code"]


@pytest.mark.parametrize(
    ("start", "more", "expected"),
    [
        (b"GET /", b"x" * 65536, (414, "uri_too_long")),
        (b"GET / HTTP/1.1\r\na: ", b"x" * 65536, (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 8192, (431, "headers_too_large")),
        (b"GET / HTTP/1.1\r\n" + b"x" * 100, b"x" * 65536, (431, "headers_too_large")),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", b"x" * 65536, (431, "headers_too_large")),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\na: ", b"x" * 65536, (431, "headers_too_large")),
    ],
)
async def test_what_never_ends_is_refused_at_a_limit_before_a_key_is_asked_for_and_the_client_sees_why(
    serve: Serve, start: bytes, more: bytes, expected: tuple[int, str]
) -> None:
    async with serve(api_key=("key",)) as live, connected(live) as (reader, writer):
        if b"chunked" in start:
            start = start.replace(b"content-type", b"authorization: Bearer key\r\ncontent-type")
        writer.write(start)
        answer = asyncio.ensure_future(answer_of(reader))
        num_sent = 0
        while not answer.done() and num_sent < 64 * len(more):
            writer.write(more)
            num_sent += len(more)
            await asyncio.wait({answer, asyncio.ensure_future(writer.drain())}, return_when="FIRST_COMPLETED")
        assert await answer == expected
        page = (await live.call("GET", "/metrics")).body.decode()
        assert f'stenograph_errors_total{{code="{expected[1]}"}} 1.0' in page


async def test_a_refused_client_that_goes_on_sending_is_cut_off(live: Live) -> None:
    async with connected(live) as (_, writer):
        writer.write(b"GET / HTTP/1.1\r\na: " + b"x" * 65536)

        async def send_on() -> None:
            for _ in range(64 * LINGER_BYTES // 65536):
                writer.write(b"x" * 65536)
                await writer.drain()

        with pytest.raises(ConnectionError):
            await send_on()


def num_connections() -> int:
    gc.collect()
    return sum(isinstance(one, ClientConnection) for one in gc.get_objects())


async def test_two_thousand_half_sent_requests_are_gone_after_their_deadline(serve: Serve) -> None:
    parts = [HEAD, b"G", HEAD + b"content-length: 9\r\n\r\n{", HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{"]
    async with serve(header_timeout_s=5.0, body_timeout_s=5.0) as live, AsyncExitStack() as stack:
        await live.call("GET", "/health")
        num_before, num_connections_before = len(asyncio.all_tasks()), num_connections()
        readers: list[asyncio.StreamReader] = []
        for part in parts * 500:
            reader, writer = await stack.enter_async_context(connected(live))
            writer.write(part)
            readers.append(reader)
        assert {await answer_of(reader) for reader in readers} == {(408, "request_timeout")}
        await stack.aclose()
        for _ in range(1000):  # until the server has heard of the last ones that were closed
            assert (await live.call("GET", "/health")).status == 200
            if num_connections() <= num_connections_before:
                break
        assert num_connections() <= num_connections_before
        assert len(asyncio.all_tasks()) <= num_before + 2
        assert live.manager.num_in_flight == 0


@pytest.mark.parametrize("part", [b"", b"\r\n"])
async def test_a_connection_that_sends_nothing_is_closed_without_an_answer(serve: Serve, part: bytes) -> None:
    async with serve(header_timeout_s=SOON_S) as live, connected(live) as (reader, writer):
        writer.write(part)
        assert await reader.read() == b""


@pytest.mark.parametrize("part", [b"GET /heal", b"\r\n"])
async def test_a_second_request_on_a_connection_has_the_deadline_too(serve: Serve, part: bytes) -> None:
    async with serve(header_timeout_s=SOON_S) as live, connected(live) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.write(part)
        if part.strip():
            assert await answer_of(reader) == (408, "request_timeout")
        else:
            assert await reader.read() == b""


async def test_a_body_that_drips_is_refused_though_something_of_it_always_comes(serve: Serve) -> None:
    async with serve(body_timeout_s=1.0) as live, connected(live) as (reader, writer):
        writer.write(HEAD + b"content-length: 1000000\r\n\r\n")
        answer = asyncio.ensure_future(answer_of(reader))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.01)
        assert await answer == (408, "request_timeout")


async def test_a_body_that_waits_for_the_server_is_not_late(serve: Serve) -> None:
    slots = BodySlots(1)
    async with serve(body_timeout_s=SOON_S, slots=slots) as live, slots.slot() as held:
        await held.take()
        live.says("a")
        body = json.dumps({"messages": [user("hi")]}).encode().ljust(2_000_000)
        async with connected(live) as (reader, writer):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            for _ in range(3):  # meanwhile its deadline passes: those of others do, one after the other
                async with connected(live) as (other, half):
                    half.write(HEAD + b"content-length: 9\r\n\r\n{")
                    assert await answer_of(other) == (408, "request_timeout")
            held.give_up()
            assert (await reader.readline()).split()[1] == b"200"


async def test_a_client_that_reads_slowly_gets_its_whole_answer(serve: Serve) -> None:
    async with serve(header_timeout_s=SOON_S, body_timeout_s=SOON_S) as live:
        script = live.says("a" * 200, paused=True)
        body = json.dumps({"messages": [user("hi")], "stream": True}).encode()
        async with connected(live) as (reader, writer):
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            await live.engine.begun(1)
            for _ in range(2):  # others come, and are refused, meanwhile
                async with connected(live) as (other, half):
                    half.write(b"G")
                    assert await answer_of(other) == (408, "request_timeout")
            live.engine.step(2 * len(script.ids))
            answer = b""
            while not answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                answer += await reader.readexactly(1)


async def test_a_body_that_is_whole_after_its_early_answer_leaves_the_connection_in_use(serve: Serve) -> None:
    async with serve(max_body_bytes=1024) as live, connected(live) as (reader, writer):
        health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        writer.write(HEAD + b"content-length: 300000\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split()[1] == b"413"
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.write(b"x" * 300_000 + health)
        assert (await reader.readline()).split()[1] == b"200"


async def test_bytes_that_are_no_request_are_refused_at_once_in_our_shape(live: Live) -> None:
    for garbage in (b"\x16\x03\x01\x02", b"GET / HTTP/1.1\nhost: x\n\n", b"NONSENSE / HTTP/1.1\r\n\r\n"):
        async with connected(live) as (reader, writer):
            writer.write(garbage)
            assert await answer_of(reader) == (400, "invalid_request")


async def test_an_upgrade_is_not_made_and_the_request_is_answered(live: Live) -> None:
    async with connected(live) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nx")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"status":"ok"' in answer


OFFERS = [
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    b"Upgrade: websocket\r\nConnection: keep-alive, UPGRADE\r\n",
    b"proxy-connection: upgrade\r\nupgrade: h2c\r\n",
]
FRAMED = {
    "length": (b"content-length: 16\r\n", b'{"tokens":[1,2]}'),
    "chunks": (b"transfer-encoding: chunked\r\n", b'6\r\n{"toke\r\na;x=y\r\nns":[1,2]}\r\n0\r\nt: v\r\n\r\n'),
}


@pytest.mark.parametrize("framing", FRAMED)
@pytest.mark.parametrize("offer", OFFERS)
async def test_an_offer_to_upgrade_is_declined_and_the_request_is_served_with_its_body(
    live: Live, offer: bytes, framing: str
) -> None:
    header, body = FRAMED[framing]
    head = b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + offer + header
    plain = (await live.call("POST", "/detokenize", {"tokens": [1, 2]})).body
    for pieces in ([head + b"\r\n" + body], [head, b"\r\n", body[:7], body[7:]], [head + b"\r\n" + body[:1], body[1:]]):
        async with connected(live) as (reader, writer):
            for _ in range(2):  # the connection stays, and what follows is HTTP
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                assert await reader.readexactly(len(plain)) == plain


@pytest.mark.parametrize("framing", FRAMED)
async def test_a_body_that_was_offered_over_another_protocol_is_held_to_the_same_limits(
    serve: Serve, framing: str
) -> None:
    header, body = FRAMED[framing]
    async with serve(max_body_bytes=8) as live, connected(live) as (reader, writer):
        writer.write(b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(OFFERS[0] + header + b"\r\n" + body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("framing", FRAMED)
async def test_a_request_behind_an_offer_is_one_that_is_pipelined(live: Live, framing: str) -> None:
    header, body = FRAMED[framing]
    async with connected(live) as (reader, writer):
        writer.write(b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(OFFERS[0] + header + b"\r\n" + body + b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b'"status":"ok"' not in await reader.read()


async def test_connect_is_refused_with_a_body_or_without(live: Live) -> None:
    for head in (b"CONNECT a:1 HTTP/1.1\r\n", b"CONNECT / HTTP/1.1\r\n", b"CONNECT / HTTP/1.1\r\n" + OFFERS[0]):
        for length in (b"", b"content-length: 2\r\n"):
            async with connected(live) as (reader, writer):
                writer.write(head + b"host: localhost\r\n" + length + b"\r\nab")
                assert int((await reader.read()).split()[1]) in (400, 404, 405)


REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n" + b"a: b\r\n" * 99 + b"\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\nb: " + b"x" * 70_000 + b"\r\n\r\n",
    b"GET /health?" + b"x" * 9000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"transfer-encoding: chunked\r\n\r\n6\r\n{\"toke\r\n8\r\nns\":[1]}\r\n0\r\n\r\n",
]  # fmt: skip


async def status_of(live: Live, pieces: list[bytes]) -> bytes:
    async with connected(live) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        return (await reader.read()).split()[1]


@pytest.mark.parametrize("index", range(len(REQUESTS)))
async def test_however_a_request_is_cut_its_answer_has_the_same_status(live: Live, index: int) -> None:
    request, loop = REQUESTS[index], asyncio.get_running_loop()
    whole = await status_of(live, [request])

    @settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(cuts=st.lists(st.integers(0, len(request)), max_size=6).map(sorted))
    def cut_anywhere(cuts: list[int]) -> None:
        pieces = [request[a:b] for a, b in zip([0, *cuts], [*cuts, len(request)], strict=True)]
        assert asyncio.run_coroutine_threadsafe(status_of(live, pieces), loop).result() == whole

    await asyncio.to_thread(cut_anywhere)
    assert whole == [b"200", b"431", b"431", b"414", b"200"][index]
