"""The HTTP client of all loads: one keep-alive connection, one request at a time, little work for each byte.

A reply's body is kept, or handed to a reader as it comes (`unread` lets it go by). Knows no route.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

BUFFER_BYTES = 2**18
SHOWN_BYTES = 300
"""The bytes of an error's body that are shown."""
REQUEST_ID = b"x-request-id"


class RequestFailed(Exception):
    """A request brought no reply. `kind` is what such failures are counted by: status and code, where there are."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(slots=True)
class Failures:
    """Requests that brought no reply, counted by kind, and the first of them."""

    by_kind: Counter[str] = field(default_factory=Counter[str])
    first: str = ""

    def add(self, error: RequestFailed) -> None:
        """Count one."""
        self.by_kind[error.kind] += 1
        self.first = self.first or str(error)

    def report(self) -> dict[str, object]:
        """As a load reports them."""
        return {"errors": dict(self.by_kind), "first_error": self.first}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """A whole answer. `num_bytes` are all that came, head included; `body` is empty where a reader took it."""

    status: int
    num_bytes: int
    request_id: str
    body: bytes


BodyReader = Callable[[bytes, float], None]
"""Takes the next bytes of a body and their time, in monotonic seconds. Raises RequestFailed for what is no reply."""


def unread(data: bytes, now: float) -> None:
    """Lets a body go by: its bytes are counted, and that is all."""


class LoadConnection(asyncio.BufferedProtocol):
    """A keep-alive connection with one request under way at a time. All share `buffer`, as in `standin`."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[HttpAnswer] | None = None
        self._begin(None)

    def _begin(self, reader: BodyReader | None) -> None:
        self._reader = reader
        self._failure: RequestFailed | None = None
        self._is_whole = False
        self._num_bytes = self._status = 0
        self._request_id = ""
        self._body = bytearray()

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def request(self, parts: list[bytes], reader: BodyReader | None) -> "asyncio.Future[HttpAnswer]":
        """Send a request, whose answer's body goes to `reader`, or is kept: without one, and if it is an error."""
        assert self._transport is not None
        self._begin(reader)
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts)
        return self._waiting

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        del sizehint
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._num_bytes += nbytes
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            self.close()
            return
        if self._failure is not None and self._is_whole:
            self._fail(self._failure)
        elif self._is_whole and self._waiting is not None and not self._waiting.done():
            answer = HttpAnswer(
                status=self._status, num_bytes=self._num_bytes, request_id=self._request_id, body=bytes(self._body)
            )
            self._waiting.set_result(answer)

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    # -- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == REQUEST_ID:
            self._request_id = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._reader is None or self._status != 200:
            self._body += body
        elif self._failure is None:
            try:
                self._reader(body, time.monotonic())
            except RequestFailed as failure:
                self._failure = failure

    def on_message_complete(self) -> None:
        self._is_whole = True


class _ErrorCode(msgspec.Struct):
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _ErrorCode


def _error_kind(answer: HttpAnswer) -> str:
    """An error's status, and its code if its body has one."""
    try:
        code = msgspec.json.decode(answer.body, type=_Refusal).error.code
    except msgspec.DecodeError:
        code = None
    return f"{answer.status} {code}" if code else str(answer.status)


class LoadClient:
    """Requests on a connection of its own, which is opened when it is needed."""

    def __init__(self, host: str, port: int, buffer: memoryview) -> None:
        self._address = (host, port)
        self._host = f"{host}:{port}"
        self._buffer = buffer
        self._connection: LoadConnection | None = None

    async def connected(self) -> LoadConnection:
        """The connection. Raises RequestFailed."""
        if self._connection is None or not self._connection.is_open:
            try:
                _, self._connection = await asyncio.get_running_loop().create_connection(
                    lambda: LoadConnection(self._buffer), *self._address
                )
            except OSError as error:
                raise RequestFailed("connect", str(error)) from error
        return self._connection

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()

    async def asked(
        self,
        method: str,
        path: str,
        parts: list[bytes],
        reader: BodyReader | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> HttpAnswer:
        """Send a request and wait for the whole answer. Raises RequestFailed, also for a status that is no 2xx."""
        connection = await self.connected()
        more = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {sum(map(len, parts))}\r\n{more}\r\n"
        )
        try:
            answer = await connection.request([head.encode(), *parts], reader)
        except OSError as error:
            raise RequestFailed("connection", str(error)) from error
        except asyncio.CancelledError:
            connection.close()  # the rest of this answer is not the next one
            raise
        if not 200 <= answer.status < 300:
            raise RequestFailed(_error_kind(answer), answer.body[:SHOWN_BYTES].decode(errors="replace"))
        return answer


class _NewSession(msgspec.Struct):
    session_id: str


async def open_session(client: LoadClient) -> str:
    """Open a session at a server; returns its id. Raises RequestFailed."""
    answer = await client.asked("POST", "/sessions", [b"{}"])
    try:
        return msgspec.json.decode(answer.body, type=_NewSession).session_id
    except msgspec.DecodeError as error:
        raise RequestFailed("not a session", str(error)) from error


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL that has both."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
