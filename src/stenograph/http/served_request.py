"""One request of a connection: its head, and as ASGI its body in pieces, its answer, and an application's mistakes.

Owns the limits of a head, the state of a request from there to the last byte of its answer, and the flow control of
both directions. Knows no route, no deadline and no client that leaves: connection.py has these. Source: ASGI's HTTP
specification, version 2.3.
"""

import asyncio
import http
import logging
import re
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from starlette.types import ASGIApp, Message, Scope

from stenograph.core.errors import HeadersTooLarge, InvalidRequest, UriTooLong
from stenograph.http.auth import PASSED_ON
from stenograph.http.wire import Headers

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
"""Request line, header lines and the blank line."""
MAX_HEADERS = 100
SPARE_HEADERS, SPARE_BYTES = 3, 1024
"""Besides, where another process passes a request on: its own headers, and each header written anew."""
MAX_URL_BYTES = 8 * 1024
"""The target of the request line: path and query."""

_START_BYTES = 64
"""The target begins within so many bytes, or these are not HTTP."""
_START = re.compile(rb"[A-Z-]{1,31} {1,31}(?=[^ \r\n])")
_TARGET_END = re.compile(rb"[ \n]")
_FIRST_LINE = re.compile(rb"%b[^ \n]{0,%d}[ \n]" % (_START.pattern, MAX_URL_BYTES))
"""A method and a whole target within its limit."""
_HEAD_END = re.compile(rb"\n\r?\n")

MOST_UNTAKEN_BYTES = 64 * 1024
"""Most bytes of a body waiting for their reader before reading pauses."""

JOINED_BYTES = 64 * 1024
"""A longer body of an answer is not copied behind its head."""

HEADER_LINE: Callable[[tuple[bytes, bytes]], bytes] = b"%b: %b\r\n".__mod__
"""A header as it is sent."""
_BAD_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


_PHRASES = {one.value: one.phrase for one in http.HTTPStatus}
STATUS_LINES = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)}


class RequestHead:
    """Collects one head after the other, within limits. After an error it takes nothing more.

    A verdict depends on the bytes alone, however they are cut, and all of them cost time linear in the bytes: the
    parser appends each piece of a field to the earlier ones, so it sees a head only when it is whole.
    """

    __slots__ = ("_kept", "_mark", "_num_lines", "_target_at", "_target_seen")

    def __init__(self, mark: bytes = PASSED_ON) -> None:
        """`mark` is the second header of a request that another process passes on."""
        self._mark = mark
        self._kept = bytearray()
        self._reset()

    def _reset(self) -> None:
        self._kept = bytearray()
        self._num_lines = 0
        self._target_at: int | None = None
        self._target_seen: int | None = 0
        """So far the target has no end; None when its end was found."""

    def __repr__(self) -> str:
        return f"<RequestHead {len(self._kept)} bytes, {self._num_lines} lines>"

    @property
    def is_begun(self) -> bool:
        """True once some bytes of a head have come."""
        return bool(self._kept)

    def feed(self, data: bytes) -> tuple[bytes, memoryview] | None:
        """Take the next bytes: a whole head and a view of the bytes after it, or None while it is not whole.

        Blank lines before a head are dropped (RFC 9112, section 2.2). Raises UriTooLong, HeadersTooLarge, and
        InvalidRequest if the bytes cannot become a head.
        """
        num_seen = len(self._kept)
        if num_seen:
            self._kept += data
            text: bytes | bytearray = self._kept
        else:
            text = data.lstrip(b"\r\n")
            if not text:
                return None
        found = _HEAD_END.search(text, max(0, num_seen - 2))
        end = len(text) if found is None else found.end()
        if num_seen or _FIRST_LINE.match(text) is None:
            self._check_target(text, end)
        num_lines = self._num_lines + text.count(b"\n", num_seen, end) - (found is not None)
        if end > MAX_HEAD_BYTES or num_lines > MAX_HEADERS + 1:
            self._check_spare(text, end, num_lines)
        if found is None:
            if not num_seen:
                self._kept += text
            self._num_lines = num_lines
            return None
        if num_seen:
            self._reset()
        return bytes(text[:end]), memoryview(text)[end:]

    def _check_spare(self, text: bytes | bytearray, num_bytes: int, num_lines: int) -> None:
        """Raise HeadersTooLarge beyond the limits of a client's head, or of one that is passed on."""
        begin = bytes(text[:MAX_HEAD_BYTES]).split(b"\n", 2)
        if (
            not begin[-1].startswith(self._mark + b":")
            or num_bytes > MAX_HEAD_BYTES + SPARE_BYTES
            or num_lines > MAX_HEADERS + 1 + SPARE_HEADERS
        ):
            raise HeadersTooLarge(
                f"The request's head has more than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS} headers."
                " Send fewer or shorter headers."
            )

    def _check_target(self, text: bytes | bytearray, end: int) -> None:
        """Raise UriTooLong, or InvalidRequest without a target. Looks at no byte of a target twice."""
        if self._target_seen is None:
            return
        if self._target_at is None:
            start = _START.match(text)
            if start is None:
                if not b"A" <= text[:1] <= b"Z" or end >= _START_BYTES:
                    raise InvalidRequest("The request is not HTTP/1.1: it does not begin with a method and a target.")
                return
            self._target_at = self._target_seen = start.end()
        longest = self._target_at + MAX_URL_BYTES
        if _TARGET_END.search(text, self._target_seen, longest + 1) is not None:
            self._target_seen = None
        elif end > longest:
            raise UriTooLong(f"The request's path and query have more than {MAX_URL_BYTES} bytes.")
        else:
            self._target_seen = end


class Flow:
    """Pauses a transport's reading, and lets writers wait while it takes no more bytes."""

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


class ServedRequest(Struct, kw_only=True, eq=False):
    """A request and its answer."""

    scope: Scope
    transport: asyncio.Transport
    flow: Flow
    default_headers: Sequence[tuple[bytes, bytes]]
    keeps_connection: bool
    awaits_continue: bool
    """The client sends its body once it is told to."""
    on_answered: Callable[[], None]
    """Called when the answer's last byte is written; it closes the connection unless it is kept."""
    disconnected: bool = False
    """The client has left, or was answered in the application's place."""
    has_begun_answer: bool = False
    is_answered: bool = False
    is_whole: bool = False
    """Whether all of its body has come."""
    num_untaken: int = 0
    """Bytes of the body not yet taken."""
    _pieces: list[bytes] = []
    _has_news: bool = False
    _event: asyncio.Event | None = None
    _is_chunked: bool | None = None
    _num_left: int = 0
    """Bytes still missing from the answer's announced length."""

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
            self.flow.pause_reading()
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

    def end_answer(self) -> None:
        """The answer's last byte is written."""
        self.is_answered = True
        if self._event is not None:
            self._event.set()
        self.on_answered()

    # -- the application's side

    async def run(self, app: ASGIApp) -> None:
        """Have it answered. If an application fails, or does not answer, this is our bug: 500, or a cut answer."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            log.exception("the application failed on %s %s", self.scope["method"], self.scope["path"])
        except BaseException:
            self.transport.close()
            raise
        if self.is_answered or self.disconnected:
            return
        if self.has_begun_answer:
            self.transport.close()
            return
        self.keeps_connection = False
        await self.answer(500, b"Internal Server Error", [("content-type", "text/plain")])

    async def answer(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole answer, unless the client has left: head and body in one write. Not for HEAD."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        assert not self.has_begun_answer, "a request is answered once"
        lines = [f"content-length: {len(body)}", *map(": ".join, headers)]
        if not self.keeps_connection:
            lines.append("connection: close")
        text = "\r\n".join(lines)
        assert text.count("\n") == text.count("\r") == len(lines) - 1, "no header has a line break"
        self.has_begun_answer, self.awaits_continue = True, False
        every = b"".join(map(HEADER_LINE, self.default_headers))
        head = b"%b%b%b\r\n\r\n" % (STATUS_LINES[status], every, text.encode("utf-8", "surrogateescape"))
        if len(body) <= JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        self.end_answer()

    async def receive(self) -> Message:
        """ASGI: the next bytes of the body, or word that the client has left or the answer has been sent."""
        if self.awaits_continue and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
            self.awaits_continue = False
            self.flow.resume_reading()
        elif self.flow.read_paused and not self.is_answered:
            self.flow.resume_reading()
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
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        expected = "http.response.body" if self.has_begun_answer else "http.response.start"
        if self.is_answered or message["type"] != expected:
            raise RuntimeError(f"{message['type']!r} was sent, where {expected!r} was due or nothing")
        if self.has_begun_answer:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            head = self._head(message["status"], message.get("headers", ()))
            self.has_begun_answer, self.awaits_continue = True, False
            self.transport.write(head)

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
            lines.append(HEADER_LINE((name, value)))
        if not self.keeps_connection and not says_close:
            lines.append(b"connection: close\r\n")
        is_framed = self._is_chunked is not None or self.scope["http_version"] == "1.0"  # ended by the connection's end
        if not is_framed and self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._num_left = 0
        elif self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self.transport.write(chunk + b"0\r\n\r\n" if is_last else chunk)
        elif self._is_chunked is None:
            self.transport.write(body)
        else:
            self._num_left -= len(body)
            if self._num_left < 0:
                raise RuntimeError("the answer is longer than its content-length")
            self.transport.write(body)
        if is_last:
            if self._num_left:
                raise RuntimeError("the answer is shorter than its content-length")
            self.end_answer()
