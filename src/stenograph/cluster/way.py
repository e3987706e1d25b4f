"""A connection to another process: one request after the other, each message in pieces.

The answer is read as an engine's is. What comes unasked, its end included, spoils a connection: no request gets
another's bytes.
"""

import asyncio
import select
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import AnyStr, cast
from urllib.parse import urlsplit

from stenograph.cluster.peer_connection import CLIENT, DELIVERED, GREETING
from stenograph.engine.http.response import NotHttp, ReplyCut, ResponseReader

Headers = Sequence[tuple[bytes, bytes]]

FAILURES = (OSError, ValueError, NotHttp, ReplyCut)
"""Failures of a connection, of an address (ValueError), of the bytes. A time-out is an OSError."""

MOST_UNTAKEN_BYTES = 2**16
"""Most untaken bytes of an answer before reading pauses."""

_NAMES = "connection content-length expect keep-alive proxy-connection te trailer transfer-encoding upgrade"
_OF_ONE_CONNECTION = frozenset((*_NAMES.split(), *_NAMES.encode().split(), CLIENT))
"""About one connection or the framing of one message (RFC 9110, section 7.6.1); and a worker's own word of a client."""


def end_to_end(headers: Sequence[tuple[AnyStr, AnyStr]]) -> list[tuple[AnyStr, AnyStr]]:
    """Headers to pass on, names in lower case: not those about one connection, nor those named by `Connection`."""
    kept = [pair for pair in headers if pair[0] not in _OF_ONE_CONNECTION]
    if len(kept) < len(headers):
        named: set[str | bytes] = set()
        for name, value in headers:
            if name in ("connection", b"connection"):
                names = value.split(",") if isinstance(value, str) else value.split(b",")
                named.update(one.strip().lower() for one in names)
        kept = [pair for pair in kept if pair[0] not in named]
    return kept


class PeerWay(asyncio.Protocol):
    """One connection. Its methods raise `FAILURES`."""

    def __init__(self, host: bytes | None = None) -> None:
        """`host` names the other server in its requests; None: a worker, which announces itself with a byte."""
        self._host = host
        self._is_greeted = host is not None
        self._transport: asyncio.Transport | None = None
        self._looked = select.poll()
        self._fault: Exception | None = None
        self._news, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._is_paused = self._is_chunked = self._is_sent = self._is_resting = False
        self.answer = ResponseReader()
        self.rests_since = 0.0

    def __repr__(self) -> str:
        return f"<PeerWay {self.answer!r}>"

    @classmethod
    async def to(cls, at: Path | str, trusted: Callable[[], ssl.SSLContext]) -> "PeerWay":
        """Connect to a server's address, or to a worker's socket. `trusted` has the certificates for https."""
        loop = asyncio.get_running_loop()
        if isinstance(at, str):
            url = urlsplit(at)
            tls = trusted() if url.scheme == "https" else None
            port, host = url.port or (80 if tls is None else 443), url.netloc.encode()
            return (await loop.create_connection(lambda: cls(host), url.hostname or "", port, ssl=tls))[1]
        _, way = await loop.create_unix_connection(cls, str(at))
        try:
            while not way._is_greeted:
                await way._heard()
        except BaseException:
            way.cut()
            raise
        return way

    def begin(self, method: str, target: bytes, headers: Headers, *, num_bytes: int | None) -> None:
        """Send the head of a request, under the other server's name. `num_bytes` is the length of its body; None: not
        known yet."""
        self._is_chunked, self._is_sent, self._is_resting = num_bytes is None, num_bytes == 0, False
        self.answer.begin(is_head=method == "HEAD")
        host = self._host or dict(headers).get(b"host", b"localhost")
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"host: %b" % host]
        lines += [b"%b: %b" % pair for pair in headers if pair[0] != b"host"]
        if num_bytes != 0:
            lines.append(b"transfer-encoding: chunked" if num_bytes is None else b"content-length: %d" % num_bytes)
        self._write(b"\r\n".join([*lines, b"", b""]))

    async def send(self, body: bytes, *, is_last: bool) -> None:
        """Send the next bytes of the body."""
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            body = chunk + b"0\r\n\r\n" if is_last else chunk
        if body:
            self._write(body)
        self._is_sent = is_last
        await self._has_room.wait()

    async def head(self) -> None:
        """Wait for the answer's head."""
        while not self.answer.has_head:
            await self._heard()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The answer's body, as it comes."""
        while True:
            if pieces := self.answer.take():
                yield b"".join(pieces)
            elif self.answer.is_whole:
                return
            else:
                await self._heard()

    def delivered(self) -> None:
        """Tell a worker: the answer has left for the client. Does nothing once it is too late."""
        if self._is_sent and self._fault is None and self._transport is not None:
            self._transport.write(DELIVERED)

    def rest(self) -> bool:
        """Wait for the next request; False if there can be none: a message is not whole, or the answer is the last."""
        self.rests_since = asyncio.get_running_loop().time()
        self._is_resting = self._is_sent and self.answer.keeps_connection and self._fault is None
        return self._is_resting

    @property
    def has_spoken(self) -> bool:
        """Whether anything has come at rest, also bytes still in the kernel. An end counts as well."""
        if self._transport is None or self._transport.is_closing():
            return True
        return bool(self._looked.poll(0))

    def cut(self) -> None:
        """Break the connection; unsent bytes are dropped."""
        self._end(ConnectionAbortedError("the connection was cut"))
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close the connection, once a whole request is sent."""
        if self._transport is not None and self._is_sent:
            self._transport.close()
        else:
            self.cut()

    def _write(self, data: bytes) -> None:
        if self._fault is not None or self._transport is None:
            raise self._fault or ConnectionResetError("the connection is closed")
        self._transport.write(data)

    async def _heard(self) -> None:
        """Wait until something comes."""
        if self._fault is not None:
            raise self._fault
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        self._news.clear()
        await self._news.wait()

    def _end(self, fault: Exception) -> None:
        self._fault = self._fault or fault
        self._news.set()
        self._has_room.set()

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass
        self._looked.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if not self._is_greeted and data.startswith(GREETING):
            self._is_greeted, data = True, data[len(GREETING) :]
        try:
            if data and (self._is_resting or not self._is_greeted):
                raise NotHttp(f"{data[:20]!r} came unasked")
            if data:
                self.answer.feed(data)
        except NotHttp as error:
            self._end(error)
            self.cut()
        if self.answer.num_pending > MOST_UNTAKEN_BYTES and self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> None:
        try:
            self.answer.end()
        except ReplyCut as error:
            self._end(error)
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc or ConnectionResetError("the connection was closed"))
        self._transport = None

    def pause_writing(self) -> None:
        self._has_room.clear()

    def resume_writing(self) -> None:
        self._has_room.set()
