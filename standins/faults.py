"""HTTP/1.1 over a real socket that can break every promise: the server side of a connection, and its faults.

A complete small server for bodies with a content-length, kept alive between requests. Nothing in it waits for time.
"""

import asyncio
import enum
import gzip
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

Pairs = tuple[tuple[str, str], ...]


class Fault(enum.StrEnum):
    """Faults and oddities of a reply. HELD ones continue when the test releases them."""

    NONE = "none"
    HELD_HEADERS = "held_headers"
    """Nothing is sent until released."""
    HELD_BODY = "held_body"
    """Headers and half of the body are sent, the rest when released."""
    HANG = "hang"
    """Nothing is ever sent, released or not."""
    CLOSED = "closed"
    """The connection is closed before the first byte."""
    RESET = "reset"
    """The connection is reset before the first byte."""
    RESET_IN_BODY = "reset_in_body"
    """The connection is reset after half of the body, once released."""
    CUT_BODY = "cut_body"
    """The connection is closed after half of the body."""
    CUT_CHUNK = "cut_chunk"
    """The body comes in chunks, and the connection is closed within one."""
    LONG_LENGTH = "long_length"
    """The content-length promises one byte more than comes before the close."""
    SHORT_LENGTH = "short_length"
    """The content-length promises half of what comes."""
    BAD_CHUNK = "bad_chunk"
    """A chunk's size is no number."""
    CHUNKED = "chunked"
    """Correct, in chunks of 7 bytes."""
    GZIP = "gzip"
    """Compressed, whatever was asked for."""
    DEFLATE = "deflate"
    RAW_DEFLATE = "raw_deflate"
    """As many servers understand `deflate`: without the zlib header."""
    FALSE_GZIP = "false_gzip"
    """Says gzip, and is not."""
    CUT_GZIP = "cut_gzip"
    """A gzip body without its end, under a content-length that is right."""
    UNKNOWN_ENCODING = "unknown_encoding"
    """Says `br`."""
    DOUBLED_HEADERS = "doubled_headers"
    """Two `server` and two `date` headers."""
    GARBAGE = "garbage"
    """Not HTTP."""
    UNFRAMED = "unframed"
    """Correct: the body ends where the connection does."""


class Reset(Exception):
    """Ends a connection by a reset instead of a close. Raised in a handler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request as it came. `headers` have lower-case names."""

    method: str
    path: str
    headers: Pairs
    body: bytes

    def header(self, name: str) -> str | None:
        """The first header of this name."""
        return next((value for other, value in self.headers if other == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply and what goes wrong with it. `headers` come besides content-type, content-length, server and date.

    `cut_at`: the connection is closed after so many bytes of the body, or, in a stream, of its events.
    """

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    headers: Pairs = ()
    fault: Fault = Fault.NONE
    cut_at: int | None = None


Handler = Callable[["FaultyConnection", HttpRequest], Awaitable[None]]


@dataclass(slots=True)
class _Inbox:
    """Bytes that came and were not read; `news` is set when there are more, or no more."""

    data: bytearray = field(default_factory=bytearray)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False


class FaultyConnection(asyncio.Protocol):
    """One client's connection: requests one by one through `handle`, in a task that its server owns.

    A client that closes it cancels the handler at once.
    """

    def __init__(self, handle: Handler, tasks: "set[asyncio.Task[None]]") -> None:
        self._handle = handle
        self._tasks = tasks
        self._inbox = _Inbox()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="stand-in-connection")
        self._tasks.add(self._task)
        self._task.add_done_callback(self._tasks.discard)

    def data_received(self, data: bytes) -> None:
        self._inbox.data += data
        self._inbox.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inbox.ended = True
        self._inbox.news.set()
        if self._task is not None:
            self._task.cancel()

    def write(self, data: bytes) -> None:
        """Send bytes, whatever they are."""
        assert self._transport is not None
        self._transport.write(data)

    @property
    def is_lost(self) -> bool:
        """Whether the client has gone."""
        return self._inbox.ended

    def end(self) -> None:
        """Close it when what was written is sent; the handler returns soon."""
        assert self._transport is not None
        self._transport.close()

    def reset(self) -> None:
        """End the connection by RST: no close that a client could take for the end of a body."""
        assert self._transport is not None
        sock: socket.socket = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    async def _serve(self) -> None:
        assert self._transport is not None
        try:
            while (request := await self._read_request()) is not None:
                await self._handle(self, request)
        except Reset:
            self.reset()
        finally:
            self._transport.close()

    async def _read_request(self) -> HttpRequest | None:
        """The next request; None where the connection ends, or has no request that we understand."""
        head = await self._take_until(b"\r\n\r\n")
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        headers = tuple((name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines))
        num_bytes = int(dict(headers).get("content-length", "0"))
        while len(self._inbox.data) < num_bytes:
            if not await self._more():
                return None
        body = bytes(self._inbox.data[:num_bytes])
        del self._inbox.data[:num_bytes]
        return HttpRequest(method=method, path=path, headers=headers, body=body)

    async def _take_until(self, end: bytes) -> bytes | None:
        while (at := self._inbox.data.find(end)) < 0:
            if not await self._more():
                return None
        taken = bytes(self._inbox.data[:at])
        del self._inbox.data[: at + len(end)]
        return taken

    async def _more(self) -> bool:
        self._inbox.news.clear()
        if self._inbox.ended:
            return False
        await self._inbox.news.wait()
        return not self._inbox.ended


async def send(connection: FaultyConnection, answer: Answer, hold: Callable[[], Awaitable[None]]) -> bool:
    """Send `answer` with its fault; `hold` returns when the test releases it. Tells whether the connection goes on."""
    fault, (head, body) = answer.fault, _encode(answer)
    half = len(body) // 2
    if not await _begins(connection, fault, hold):
        return False
    if answer.cut_at is not None:
        connection.write(head + body[: answer.cut_at])
        return False
    match fault:
        case Fault.HELD_BODY | Fault.RESET_IN_BODY:
            connection.write(head + body[:half])
            await hold()
            if fault is Fault.RESET_IN_BODY:
                raise Reset
            connection.write(body[half:])
            return True
        case Fault.CUT_BODY | Fault.CUT_CHUNK:
            connection.write(head + body[:half])
            return False
        case _:
            pass
    connection.write(head + body)
    return fault not in (Fault.LONG_LENGTH, Fault.SHORT_LENGTH, Fault.BAD_CHUNK, Fault.UNFRAMED)


async def send_events(
    connection: FaultyConnection, answer: Answer, events: AsyncIterator[bytes], hold: Callable[[], Awaitable[None]]
) -> bool:
    """Send a stream of events, each as it comes: their data is `events`, and the rest of the reply is `answer`'s.

    Of the faults, those before the first byte are known here, UNFRAMED, RESET_IN_BODY (after the first event) and
    `cut_at`. Tells whether the connection goes on.
    """
    fault, is_framed = answer.fault, answer.fault is not Fault.UNFRAMED
    if not await _begins(connection, fault, hold):
        return False
    connection.write(_head(answer, "transfer-encoding: chunked" if is_framed else "connection: close", ()))
    num_left = answer.cut_at
    async for data in events:
        event = b"data: " + data + b"\n\n"
        framed = b"%x\r\n%b\r\n" % (len(event), event) if is_framed else event
        if num_left is not None and num_left < len(event):
            connection.write(framed[: framed.index(event) + num_left])
            return False
        num_left = None if num_left is None else num_left - len(event)
        connection.write(framed)
        if fault is Fault.RESET_IN_BODY:
            await hold()
            raise Reset
    if is_framed:
        connection.write(b"0\r\n\r\n")
    return is_framed


async def _begins(connection: FaultyConnection, fault: Fault, hold: Callable[[], Awaitable[None]]) -> bool:
    """Play the faults before the first byte; return whether any byte will follow."""
    match fault:
        case Fault.CLOSED:
            return False
        case Fault.RESET:
            raise Reset
        case Fault.GARBAGE:
            connection.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
            return False
        case Fault.HANG:
            await asyncio.get_running_loop().create_future()
        case Fault.HELD_HEADERS:
            await hold()
        case _:
            pass
    return True


def _encode(answer: Answer) -> tuple[bytes, bytes]:
    """Head and body as they go on the wire."""
    body, extra = _encoded_body(answer.body, answer.fault)
    length = len(body)
    match answer.fault:
        case Fault.CHUNKED | Fault.CUT_CHUNK:
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in _pieces(body)) + b"0\r\n\r\n"
        case Fault.BAD_CHUNK:
            body = b"zz\r\n" + body
        case Fault.LONG_LENGTH:
            length += 1
        case Fault.SHORT_LENGTH:
            length //= 2
        case _:
            pass
    if answer.fault is Fault.UNFRAMED:
        return _head(answer, "connection: close", extra), body
    chunked = answer.fault in (Fault.CHUNKED, Fault.CUT_CHUNK, Fault.BAD_CHUNK)
    return _head(answer, "transfer-encoding: chunked" if chunked else f"content-length: {length}", extra), body


def _head(answer: Answer, framing: str, extra: Pairs) -> bytes:
    times = 2 if answer.fault is Fault.DOUBLED_HEADERS else 1
    lines = [
        f"HTTP/1.1 {answer.status} {_phrase(answer.status)}",
        *["server: stand-in", "date: Thu, 01 Jan 1970 00:00:00 GMT"] * times,
        *([f"content-type: {answer.content_type}"] if answer.content_type else []),
        framing,
        *(f"{name}: {value}" for name, value in (*extra, *answer.headers)),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


_ENCODED: dict[Fault, tuple[str, Callable[[bytes], bytes]]] = {
    Fault.GZIP: ("gzip", lambda body: gzip.compress(body, mtime=0)),
    Fault.CUT_GZIP: ("gzip", lambda body: gzip.compress(body, mtime=0)[:-4]),
    Fault.FALSE_GZIP: ("gzip", lambda body: body),
    Fault.DEFLATE: ("deflate", zlib.compress),
    Fault.RAW_DEFLATE: ("deflate", lambda body: zlib.compress(body, wbits=-15)),
    Fault.UNKNOWN_ENCODING: ("br", lambda body: body),
}


def _encoded_body(body: bytes, fault: Fault) -> tuple[bytes, Pairs]:
    if fault not in _ENCODED:
        return body, ()
    name, encode = _ENCODED[fault]
    return encode(body), (("content-encoding", name),)


def _pieces(body: bytes, size: int = 7) -> list[bytes]:
    return [body[start : start + size] for start in range(0, len(body), size)]


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"
