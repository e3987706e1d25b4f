"""A request passed on is a request of its own: each side has its framing, its connection, and its faults.

The other process is played by hand, on a real socket: a worker's, or another server's address.
"""

import asyncio
import itertools
import json
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from standins.scripted_engine import ScriptedEngine
from stenograph.cluster.peer_connection import DELIVERED, GREETING, PeerConnection
from stenograph.text.renderer import Renderer

from .conftest import assistant, user
from .test_nodes import MakeNode, Node, node, tables
from .tls import server_tls, trusted
from .workers_kit import places, serving

__all__ = ["node", "tables", "trusted"]

pytestmark = pytest.mark.timeout(600)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ELSEWHERE = "/sessions/01" + "0" * 30
"""A path of worker 1's."""


async def read_head(reader: asyncio.StreamReader) -> tuple[bytes, dict[bytes, bytes]]:
    """A first line, and headers."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    return first, {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}


async def read_body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
    """The body behind a head, whatever its framing."""
    if headers.get(b"transfer-encoding") != b"chunked":
        return await reader.readexactly(int(headers.get(b"content-length", b"0")))
    pieces: list[bytes] = []
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass
    return b"".join(pieces)


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body) if body else b""


@dataclass(slots=True)
class Behind:
    """A real worker at `port`, and the other process behind it, which a test plays."""

    port: int
    num_connections: int = 0
    heads: list[tuple[bytes, dict[bytes, bytes]]] = field(default_factory=list[tuple[bytes, dict[bytes, bytes]]])
    bodies: list[bytes] = field(default_factory=list[bytes])

    async def connected(self) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self.port)


@asynccontextmanager
async def behind(
    renderer: Renderer, tmp_path: Path, answer: Callable[[Behind, Streams], Awaitable[None]], **settings: float
) -> AsyncGenerator[Behind]:
    """Worker 0 of two, whose worker 1 answers each request by `answer`, after the greeting."""
    here, other = places(tmp_path, 2)
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size)
    async with serving(here, engine, renderer, patience_s=5.0, **settings) as (url, _, _):
        played = Behind(urlsplit(url).port or 0)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            played.num_connections += 1
            writer.write(GREETING)
            try:
                while not reader.at_eof():
                    await answer(played, (reader, writer))
            except (OSError, EOFError, ValueError):
                pass
            finally:
                writer.close()

        async with await asyncio.start_unix_server(serve, sock=other.listener):
            yield played
    here.listener.close()


async def echo(played: Behind, streams: Streams) -> None:
    """Answer with the body received, in chunks; skips the word of a delivery."""
    reader, writer = streams
    first, headers = await read_head(reader)
    played.heads.append((first.lstrip(DELIVERED), headers))
    body = await read_body(reader, headers)
    played.bodies.append(body)
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: x-hop\r\nx-hop: 1\r\nkeep-alive: max=9\r\nx-kept: 1\r\n")
    writer.write(
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(played.bodies[-1]), played.bodies[-1])
    )


async def test_a_connection_outlives_a_chunked_body_that_is_passed_on(renderer: Renderer, tmp_path: Path) -> None:
    async with behind(renderer, tmp_path, echo) as played:
        reader, writer = await played.connected()
        for body in (b"one", b"and two", b""):
            writer.write(b"POST %b/x HTTP/1.1\r\nhost: localhost\r\n" % ELSEWHERE.encode())
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            writer.write(
                (b"%x;ext=1\r\n%b\r\n" % (len(body), body) if body else b"") + b"0\r\nx-trailer: 1\r\n\r\n\r\n"
            )
            first, headers = await read_head(reader)
            assert first == b"HTTP/1.1 200 OK"
            assert await read_body(reader, headers) == body
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")  # served here, on the same connection
        assert (await read_head(reader))[0] == b"HTTP/1.1 200 OK"
        writer.close()
        assert played.bodies == [b"one", b"and two", b""]
        assert played.num_connections == 1, "and so does the way"


async def test_headers_about_one_connection_are_not_passed_on_either_way(renderer: Renderer, tmp_path: Path) -> None:
    async with behind(renderer, tmp_path, echo) as played:
        reader, writer = await played.connected()
        writer.write(b"POST %b/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n" % ELSEWHERE.encode())
        writer.write(
            b"te: trailers\r\nupgrade: h2c\r\nconnection: Upgrade, X-Mine, close\r\nx-mine: 1\r\nx-kept: 2\r\n"
        )
        writer.write(b"x-kept: 2\r\nkeep-alive: 3\r\nproxy-connection: close\r\nx-stenograph-client: 1 1 1 1\r\n\r\nhi")
        first, headers = await read_head(reader)
        assert (first, headers[b"connection"], headers[b"x-kept"]) == (b"HTTP/1.1 200 OK", b"close", b"1")
        assert not headers.keys() & {b"x-hop", b"keep-alive"}
        assert await read_body(reader, headers) == b"hi"
        assert await reader.read() == b""
        writer.close()
        ((first, sent),) = played.heads
        assert first == b"POST %b/x HTTP/1.1" % ELSEWHERE.encode()
        assert sent.pop(b"x-stenograph-client").startswith(b"127.0.0.1 ")
        assert sent == {b"host": b"localhost", b"content-length": b"2", b"x-kept": b"2"}


@pytest.mark.parametrize("keeps", [b"", b"connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_gets_an_answer_that_it_can_read(
    keeps: bytes, renderer: Renderer, tmp_path: Path
) -> None:
    async with behind(renderer, tmp_path, echo) as played:
        reader, writer = await played.connected()
        writer.write(b"POST %b/x HTTP/1.0\r\n%bcontent-length: 2\r\n\r\nhi" % (ELSEWHERE.encode(), keeps))
        _, headers = await read_head(reader)
        assert b"transfer-encoding" not in headers
        assert await reader.read() == b"hi", "it ends with the connection"
        writer.close()
        assert played.heads[0][0].endswith(b" HTTP/1.1"), "the other process is spoken to in our own version"


async def test_a_malformed_body_ends_its_own_connection_only(renderer: Renderer, tmp_path: Path) -> None:
    async with behind(renderer, tmp_path, echo) as played:
        good = await played.connected()
        bad_reader, bad = await played.connected()
        bad.write(
            b"POST %b/x HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n" % ELSEWHERE.encode()
        )
        bad.write(b"hiNOT A CHUNK\r\n")
        first, headers = await read_head(bad_reader)
        assert (first.split()[1], headers[b"connection"]) == (b"400", b"close")
        bad.close()
        good[1].write(b"POST %b/x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nok" % ELSEWHERE.encode())
        assert await read_body(good[0], (await read_head(good[0]))[1]) == b"ok"
        good[1].close()


@pytest.mark.parametrize(
    ("framing", "wrong", "status"),
    [(b"content-length: 100000", b"", b"408"), (b"transfer-encoding: chunked", b"NOT A CHUNK\r\n", b"400")],
)
async def test_a_client_s_mistake_in_its_body_is_not_counted_as_its_worker_s(
    framing: bytes, wrong: bytes, status: bytes, renderer: Renderer, tmp_path: Path
) -> None:
    begun = asyncio.Event()

    async def answer(_: Behind, streams: Streams) -> None:
        await read_head(streams[0])
        begun.set()
        await streams[0].read()

    async with behind(renderer, tmp_path, answer, body_timeout_s=0.5) as played:
        reader, writer = await played.connected()
        writer.write(b"POST %b/x HTTP/1.1\r\nhost: localhost\r\n%b\r\n\r\nabc" % (ELSEWHERE.encode(), framing))
        await begun.wait()
        writer.write(wrong)
        assert (await read_head(reader))[0].split()[1] == status
        writer.close()
        reader, writer = await played.connected()
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        metrics = await reader.read()
        writer.close()
        assert b'\nstenograph_forwards_failed_total{worker="0"} 0.0\n' in metrics
        assert b'code="worker_unavailable"} 0.0\n' in metrics


@pytest.mark.parametrize(
    "body",
    [
        b"content-length: 2\r\n\r\nhi",
        b"content-length: 70000\r\n\r\n" + b"b" * 69_998 + b"hi",
        b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    ],
)
async def test_the_word_of_a_delivery_goes_with_the_answer_s_last_byte(
    body: bytes, renderer: Renderer, tmp_path: Path
) -> None:
    """The word is there in the very callback in which the client's socket has the answer."""
    loop, (here, other) = asyncio.get_running_loop(), places(tmp_path, 2)
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size)
    said: asyncio.Future[bytes] = loop.create_future()
    async with serving(here, engine, renderer, patience_s=5.0) as (url, _, _):
        client = socket.create_connection(("127.0.0.1", urlsplit(url).port or 0))
        client.setblocking(False)
        sending = loop.create_task(
            loop.sock_sendall(client, b"POST %b/x HTTP/1.1\r\nhost: localhost\r\n" % ELSEWHERE.encode() + body)
        )
        worker, _ = await loop.sock_accept(other.listener)
        worker.setblocking(False)

        def heard() -> None:
            loop.remove_reader(client)
            with suppress(BlockingIOError):
                said.set_result(worker.recv(1))
                return
            said.set_result(b"")

        await loop.sock_sendall(worker, GREETING)
        received = b""
        while not received.endswith(body[-2:]):
            received += await loop.sock_recv(worker, 65_536)
        await sending
        loop.add_reader(client, heard)
        await loop.sock_sendall(worker, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        assert await said == DELIVERED
        for one in (client, worker, other.listener):
            one.close()
    here.listener.close()


async def test_what_comes_unasked_spoils_a_way(renderer: Renderer, tmp_path: Path) -> None:
    spoiled = asyncio.Event()

    async def answer(played: Behind, streams: Streams) -> None:
        reader, writer = streams
        await echo(played, streams)
        assert await reader.readexactly(1) == DELIVERED
        if played.num_connections == 1:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother")
            assert await reader.read() == b""
            spoiled.set()

    async with behind(renderer, tmp_path, answer) as played:
        reader, writer = await played.connected()
        for body in (b"one", b"two"):
            writer.write(b"POST %b/x HTTP/1.1\r\nhost: localhost\r\n" % ELSEWHERE.encode())
            writer.write(b"content-length: 3\r\n\r\n" + body)
            assert await read_body(reader, (await read_head(reader))[1]) == body
            await spoiled.wait()
        writer.close()
        assert played.num_connections == 2


@pytest.mark.parametrize("num_bytes", [2, 100_000])
@pytest.mark.parametrize(
    "framing", [b"content-length: 2\r\n\r\nhi", b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"]
)
async def test_an_answer_to_a_client_that_has_just_left_is_not_delivered(
    framing: bytes, num_bytes: int, renderer: Renderer, tmp_path: Path
) -> None:
    """The answer and the client's end come in one turn of the loop."""
    said = asyncio.get_running_loop().create_future()

    async def answer(played: Behind, streams: Streams) -> None:
        reader, writer = streams
        await read_body(reader, (await read_head(reader))[1])
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing)
        client.close()
        said.set_result(await reader.read(1))

    async with behind(renderer, tmp_path, answer) as played:
        client = socket.create_connection(("127.0.0.1", played.port))
        head = b"POST %b/x HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (ELSEWHERE.encode(), num_bytes)
        await asyncio.to_thread(client.sendall, head + b"b" * num_bytes)
        assert await said == b"", "no word of a delivery, but a hang-up"


async def head_times_out(url: str) -> None:
    """Begin a head that never ends, and wait until the server gives it up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
    writer.write(b"G")
    assert (await reader.read()).startswith(b"HTTP/1.1 408")
    writer.close()


async def test_a_way_at_rest_outlives_the_deadline_of_a_head(renderer: Renderer, tmp_path: Path) -> None:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size)
    here, other = places(tmp_path, 2)
    async with (
        serving(here, engine, renderer, patience_s=5.0) as (url, _, _),
        serving(other, engine, renderer, header_timeout_s=0.2) as (owner, _, server),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        made: list[set[object]] = []
        for _ in range(2):
            writer.write(b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % ELSEWHERE.encode())
            first, headers = await read_head(reader)
            await read_body(reader, headers)
            assert first.split()[1] == b"404"
            for _ in range(2):  # the second begins when the way is at rest for sure
                await head_times_out(owner)
            made.append({one for one in server.server_state.connections if isinstance(one, PeerConnection)})
        writer.close()
        assert made[0]
        assert made[0] == made[1]


# --- whatever the other process does


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one request is answered."""

    framing: str
    cuts: list[int]
    early: bool
    stray: bytes
    """Bytes behind the answer that nobody asked for."""
    ends_at: int | None
    """The connection is reset after so many bytes of the answer."""


PLANS = st.builds(
    Plan,
    framing=st.sampled_from(["length", "chunked", "eof", "interim"]),
    cuts=st.lists(st.integers(0, 200), max_size=4).map(sorted),
    early=st.booleans(),
    stray=st.sampled_from([b"", b"", b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother", b"\x00"]),
    ends_at=st.none() | st.none() | st.integers(0, 200),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How one request is sent."""

    framing: str
    cuts: list[int]
    leaves_at: int | None
    """The client resets its connection after so many bytes."""


SENDINGS = st.builds(
    Sending,
    framing=st.sampled_from(["length", "chunked", "none"]),
    cuts=st.lists(st.integers(0, 250), max_size=3).map(sorted),
    leaves_at=st.none() | st.none() | st.integers(0, 250),
)
Step = tuple[Plan, Sending]


def answer_by(plan: Plan, tag: bytes) -> bytes:
    if plan.framing == "chunked":
        return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\n<%b\r\n%x\r\n%b>\r\n0\r\n\r\n" % (
            tag[:2],
            len(tag) - 1,
            tag[2:],
        )
    if plan.framing == "eof":
        return b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n<%b>" % tag
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" if plan.framing == "interim" else b""
    return interim + b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n<%b>" % (len(tag) + 2, tag)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


async def sent(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    for piece in pieces[:-1]:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(pieces[-1])


async def test_every_answer_is_its_request_s_own_or_an_error_in_time(renderer: Renderer, tmp_path: Path) -> None:
    plans: dict[bytes, Plan] = {}
    tags = itertools.count()

    async def play(_: Behind, streams: Streams) -> None:
        reader, writer = streams
        first, headers = await read_head(reader)
        (tag,) = re.findall(rb"tag=([0-9]{6})", first)
        plan, answer = plans[tag], answer_by(plans[tag], tag)
        if not plan.early:
            await read_body(reader, headers)
        if plan.ends_at is not None:
            await sent(writer, pieces_of(answer[: plan.ends_at], plan.cuts))
            writer.transport.abort()
            raise ConnectionAbortedError
        await sent(writer, pieces_of(answer, plan.cuts))
        if plan.framing == "eof":
            writer.close()
            raise ConnectionAbortedError
        writer.write(plan.stray)
        if plan.early:
            await read_body(reader, headers)

    async def ask(streams: Streams, plan: Plan, sending: Sending) -> bool:
        """Whether the connection can be used again."""
        reader, writer = streams
        tag = b"%06d" % next(tags)
        plans[tag] = plan
        head = b"POST %b/x?tag=%b HTTP/1.1\r\nhost: localhost\r\n" % (ELSEWHERE.encode(), tag)
        if sending.framing == "length":
            head += b"content-length: 40\r\n\r\n" + b"b" * 40
        elif sending.framing == "chunked":
            head += b"transfer-encoding: chunked\r\n\r\n14\r\n%b\r\n14\r\n%b\r\n0\r\n\r\n" % (b"b" * 20, b"c" * 20)
        else:
            head += b"\r\n"
        if sending.leaves_at is not None:
            await sent(writer, pieces_of(head[: sending.leaves_at], sending.cuts))
            writer.transport.abort()
            return False
        await sent(writer, pieces_of(head, sending.cuts))
        whole = answer_by(plan, tag)
        try:
            first, headers = await read_head(reader)
            body = await read_body(reader, headers)
        except (asyncio.IncompleteReadError, OSError):
            assert plan.ends_at is not None, "an answer that came is passed on whole"
            assert plan.ends_at < len(whole)
            return False
        if first.split()[1] == b"200":
            is_open_end = plan.framing == "eof" and plan.ends_at is not None
            assert body == b"<%b>" % tag or (is_open_end and (b"<%b>" % tag).startswith(body))
        else:
            assert json.loads(body)["error"]["code"] == "worker_unavailable"
            assert plan.ends_at is not None
            assert plan.ends_at < whole.rindex(b"\r\n\r\n<" if plan.framing != "chunked" else b"\r\n\r\n3") + 4
        return headers.get(b"connection") != b"close"

    async with behind(renderer, tmp_path, play) as played:
        loop = asyncio.get_running_loop()

        async def talk(steps: list[Step]) -> None:
            streams = await played.connected()
            for plan, sending in steps:
                if not await ask(streams, plan, sending):
                    streams[1].close()
                    streams = await played.connected()
            streams[1].close()

        @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(st.lists(st.lists(st.tuples(PLANS, SENDINGS), min_size=1, max_size=4), min_size=1, max_size=3))
        def any_talk(talks: list[list[Step]]) -> None:
            async def together() -> None:
                await asyncio.gather(*map(talk, talks))

            asyncio.run_coroutine_threadsafe(together(), loop).result()

        await asyncio.to_thread(any_talk)


# --- to another server


@pytest.mark.parametrize("at", ["http://[x", "http://127.0.0.1:x", "http://127.0.0.1:99999", "nothing", "http://"])
async def test_a_malformed_address_in_the_database_is_an_error_at_once(at: str, node: MakeNode) -> None:
    async with node() as other, node(at=at) as owner:
        session = await owner.live.open()
        refused = await other.live.chat(session, user("hello"))
        assert (refused.status, refused.json()["error"]["code"]) == (503, "session_elsewhere")
        listed = await other.live.call("POST", "/samples", {"sessions": [session]})
        assert listed.status == 200
        assert b"does not answer" in listed.body
        every = await other.live.call("POST", "/abort_request", {"abort_all": True})
        assert (every.status, every.json()["error"]["code"]) == (503, "worker_unavailable")
        assert (await other.live.call("GET", "/health")).status == 200


async def test_another_server_is_reached_by_tls_and_its_certificate_is_checked(
    node: MakeNode, trusted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the owner stands what speaks TLS for it, as in a cluster with certificates."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ahead = await asyncio.open_connection("127.0.0.1", urlsplit(nodes[0].live.url).port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, ahead[1]), copy(ahead[0], writer), return_exceptions=True)

    nodes: list[Node] = []
    tls = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_tls())
    port = tls.sockets[0].getsockname()[1]
    async with tls, node(at=f"https://localhost:{port}") as owner, node() as other:
        nodes.append(owner)
        session = await owner.live.open()
        for turn, said in enumerate(("one", "two")):
            owner.live.says(said)
            history = [user("hello"), *([assistant("one"), user("on")] if turn else [])]
            answer = await other.live.chat(session, *history, stream=bool(turn))
            assert answer.status == 200, answer.body
        samples = await other.live.call("POST", "/samples", {"sessions": [session]})
        assert samples.status == 200
        assert session.encode() in samples.body
        monkeypatch.delenv("SSL_CERT_FILE")
        async with node() as stranger:
            refused = await stranger.live.chat(session, user("hello"))
            assert (refused.status, refused.json()["error"]["code"]) == (503, "session_elsewhere")
