"""One request that a connection serves, as ASGI: its body in pieces, its answer, and what an application may do wrong.

Owns the state of a request from its head to the last byte of its answer, and the flow control of both directions.
Knows no route and no deadline: connection.py has those. Source: ASGI's HTTP specification, version 2.3.
"""

import asyncio
import http
import logging
import re
from collections.abc import Callable, Iterable, Sequence

from starlette.types import ASGIApp, Message, Scope

log = logging.getLogger(__name__)

MOST_UNTAKEN_BYTES = 64 * 1024
"""Most bytes of a body that wait for their reader before reading pauses."""

_BAD_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def _status_line(status: int) -> bytes:
    known = {one.value: one.phrase for one in http.HTTPStatus}
    return f"HTTP/1.1 {status} {known.get(status, '')}\r\n".encode()


STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


class Flow:
    """Pauses a transport's reading, and lets writers wait while it does not take what is written."""

    __slots__ = ("_on_resumed", "_transport", "_writable", "read_paused", "write_paused")

    def __init__(self, transport: asyncio.Transport, on_resumed: Callable[[], None]) -> None:
        """`on_resumed` is called when reading goes on."""
        self._transport = transport
        self._on_resumed = on_resumed
        self._writable: asyncio.Event | None = None
        self.read_paused = False
        self.write_paused = False

    def __repr__(self) -> str:
        return f"<Flow read_paused={self.read_paused} write_paused={self.write_paused}>"

    async def drain(self) -> None:
        """Wait until the transport takes more, or is closed."""
        while self.write_paused:
            self._writable = self._writable or asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Read nothing more for now."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()
        self._on_resumed()

    def pause_writing(self) -> None:
        """The transport takes no more."""
        self.write_paused = True

    def resume_writing(self) -> None:
        """The transport takes more, or it is closed and nobody is to wait for it."""
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None


class ServedRequest:
    """A request and its answer. `on_answered` is called when the answer's last byte is written."""

    __slots__ = (
        *("_awaits_continue", "_event", "_flow", "_has_news", "_is_chunked", "_num_left", "_on_answered", "_pieces"),
        *("_transport", "default_headers", "disconnected", "has_begun_answer", "is_answered", "is_whole"),
        *("keeps_connection", "num_untaken", "scope"),
    )

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: Flow,
        *,
        default_headers: Sequence[tuple[bytes, bytes]],
        keeps_connection: bool,
        awaits_continue: bool,
        on_answered: Callable[[], None],
    ) -> None:
        """`awaits_continue`: the client sends its body once it is told to. `on_answered` closes the connection if it is
        not kept."""
        self.scope = scope
        self.default_headers = default_headers
        self.keeps_connection = keeps_connection
        self.disconnected = False
        """The client has left, or was answered in the application's place."""
        self.has_begun_answer = False
        self.is_answered = False
        self.is_whole = False
        """Whether all of its body has come."""
        self.num_untaken = 0
        """Bytes of the body that nobody has taken yet."""
        self._transport = transport
        self._flow = flow
        self._awaits_continue = awaits_continue
        self._on_answered = on_answered
        self._pieces: list[bytes] = []
        self._has_news = False
        self._event: asyncio.Event | None = None
        self._is_chunked: bool | None = None
        self._num_left = 0
        """Bytes that are missing from the length that its answer has announced."""

    def __repr__(self) -> str:
        return f"<ServedRequest {self.scope['method']} {self.scope['path']} answered={self.is_answered}>"

    # -- the connection's side

    def body_came(self, piece: bytes) -> None:
        """Take the next bytes of its body, unless nobody wants them any more."""
        if self.is_answered:
            return
        self._pieces.append(piece)
        self.num_untaken += len(piece)
        if self.num_untaken > MOST_UNTAKEN_BYTES:
            self._flow.pause_reading()
        self._has_news = True
        if self._event is not None:
            self._event.set()

    def body_ended(self) -> None:
        """All of its body has come."""
        self.is_whole = self._has_news = True
        if self._event is not None:
            self._event.set()

    def disconnect(self) -> None:
        """Nobody waits for its answer any more."""
        if not self.is_answered:
            self.disconnected = True
        if self._event is not None:
            self._event.set()

    def begin_answer(self, status: int, headers: Iterable[tuple[str, str]], num_bytes: int) -> bytes:
        """The head of an answer of so many bytes, which is written at once: it counts as answered from here on."""
        assert not self.has_begun_answer, "a request is answered once"
        lines = [f"content-length: {num_bytes}", *map(": ".join, headers)]
        if not self.keeps_connection:
            lines.append("connection: close")
        text = "\r\n".join(lines)
        assert text.count("\n") == text.count("\r") == len(lines) - 1, "no header has a line break"
        self.has_begun_answer, self._awaits_continue = True, False
        every = b"".join([b"%b: %b\r\n" % pair for pair in self.default_headers])
        return b"%b%b%b\r\n\r\n" % (STATUS_LINES[status], every, text.encode("utf-8", "surrogateescape"))

    def end_answer(self) -> None:
        """The answer's last byte is written."""
        self.is_answered = True
        if self._event is not None:
            self._event.set()
        self._on_answered()

    # -- the application's side

    async def run(self, app: ASGIApp) -> None:
        """Have it answered. An application that fails, or does not answer, is our bug: 500, or a cut answer."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed on %s %s", self.scope["method"], self.scope["path"])
        except BaseException:
            self._transport.close()
            raise
        if self.is_answered or self.disconnected:
            return
        if self.has_begun_answer:
            self._transport.close()
            return
        headers = (("content-type", "text/plain"), ("connection", "close"))
        body = b"Internal Server Error"
        self.keeps_connection = True  # as far as the head goes, which says it already
        self._transport.write(self.begin_answer(500, headers, len(body)) + body)
        self.keeps_connection = False
        self.end_answer()

    async def receive(self) -> Message:
        """ASGI: the next bytes of the body, or word that the client has left or the answer has been sent."""
        if self._awaits_continue and not self._transport.is_closing():
            self._transport.write(_CONTINUE)
            self._awaits_continue = False
            self._flow.resume_reading()
        elif self._flow.read_paused and not self.is_answered:
            self._flow.resume_reading()
        while not (self._has_news or self.disconnected or self.is_answered):
            event = self._event = self._event or asyncio.Event()
            await event.wait()
            event.clear()
        if self.disconnected or self.is_answered:
            return {"type": "http.disconnect"}
        self._has_news = False
        pieces, self._pieces, self.num_untaken = self._pieces, [], 0
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def send(self, message: Message) -> None:
        """ASGI: the head of the answer, or the next bytes of its body. Does nothing once the client has left."""
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.has_begun_answer else "http.response.start"
        if self.is_answered or message["type"] != expected:
            raise RuntimeError(f"{message['type']!r} was sent, where {expected!r} was due or nothing")
        if self.has_begun_answer:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            head = self._head(message["status"], message.get("headers", ()))
            self.has_begun_answer, self._awaits_continue = True, False
            self._transport.write(head)

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines = [STATUS_LINES[status]]
        says_close = False
        for given, value in (*self.default_headers, *headers):
            if _BAD_NAME.search(given) or _BAD_VALUE.search(value):
                raise RuntimeError(f"the header {given!r} cannot be sent")
            name = given.lower()
            if name == b"content-length" and self._is_chunked is None:
                self._num_left, self._is_chunked = int(value), False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self._num_left, self._is_chunked = 0, True
            elif name == b"connection" and b"close" in value.lower().replace(b" ", b"").split(b","):
                self.keeps_connection, says_close = False, True
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keeps_connection and not says_close:
            lines.append(b"connection: close\r\n")
        if self._is_chunked is None and self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._num_left = 0
        elif self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._transport.write(chunk + b"0\r\n\r\n" if is_last else chunk)
        else:
            self._num_left -= len(body)
            if self._num_left < 0:
                raise RuntimeError("the answer is longer than its content-length")
            self._transport.write(body)
        if is_last:
            if self._num_left:
                raise RuntimeError("the answer is shorter than its content-length")
            self.end_answer()
