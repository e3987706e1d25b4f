"""One client connection: HTTP/1.1 by httptools, within limits and deadlines, one request at a time.

- A head is collected first, within the limits of `RequestHead`, and parsed when it is whole.
- A head and a body have deadlines. A connection has one timer at most: it is armed when a read leaves a request half
  sent or an answer whole, and runs on for the requests after it: a request costs none. Bytes left unread by the server
  do not count against the client.
- A pipelined request would hide a hang-up: a handler that queues it reads no further and never sees the client leave,
  and a turn would be sampled to its end for nobody. No client of these routes pipelines; a pipelining one is hung up
  on.

Refusals have the usual shape (docs/errors.md). A slow reader of a reply is not refused here.
"""

import asyncio
import enum
import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from stenograph.core.errors import HeadersTooLarge, InvalidRequest, RequestTimeout, StenographError
from stenograph.dialects.base import Refuse
from stenograph.http.metrics import Metrics
from stenograph.http.served_request import (
    HEADER_LINE,
    MAX_HEAD_BYTES,
    STATUS_LINES,
    Flow,
    RequestHead,
    ServedRequest,
)
from stenograph.http.settings import Settings
from stenograph.http.wire import HEADERS_BY_NAME, LINK_EXTENSION, Headers, count_error, has_body, send_whole

LEAST_BODY_BYTES_PER_S = 1024
"""The least rate of a body, over each `body_timeout_s`; a slower one is refused."""

KEEP_ALIVE_S = 20.0
"""Seconds to keep a connection between two requests: longer than clients keep theirs (httpx 5 s, aiohttp 15), so none
is closed under a request on its way."""

LINGER_S = 2.0
LINGER_BYTES = 2**20
"""The time and bytes for which a refused client may go on sending: a socket closed with bytes unread is reset, and the
client would not see why."""

Bytes = bytes | memoryview
"""Bytes received; those after a head are not copied."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}

_OFFER = re.compile(rb"(?<=\n)((?:proxy-)?connection:)([^\r\n]*)", re.IGNORECASE)
"""The header with a client's offer of another protocol. llhttp takes both names."""


def connections_of(
    settings: Settings, metrics: Metrics, refuse: Refuse, kind: "type[ClientConnection] | None" = None
) -> type[asyncio.Protocol]:
    """Makes a server's connections, of a `kind`. It is uvicorn's `http`: uvicorn only calls it."""
    on_refused = functools.partial(count_error, metrics)
    made = functools.partial(kind or ClientConnection, settings=settings, refuse=refuse, on_refused=on_refused)
    return cast("type[asyncio.Protocol]", made)


class RequestPhase(enum.Enum):
    """The part of a request to which the next bytes belong."""

    HEAD = enum.auto()
    BODY = enum.auto()
    ANSWER = enum.auto()
    """The request is whole; its answer may have been sent."""
    LAST_ANSWER = enum.auto()
    """The same, and the bytes after it are not HTTP."""
    REFUSED = enum.auto()
    """The client was answered with an error, or hung up on."""


_HEAD, _BODY, _ANSWER = RequestPhase.HEAD, RequestPhase.BODY, RequestPhase.ANSWER
"""Looked at twenty times a request. To find a member of an enum takes Python 3.11 seven times as long."""


class ClientConnection(asyncio.Protocol):
    """A connection with one request at a time, and what the handlers of its requests know of it (`ClientLink`).

    `request` is the current one, or the last. Written bytes have left when the last is out of the transport's write
    buffer while the connection lives. `refuse` writes an error, and `on_refused` hears of each error answered here.
    """

    transport: asyncio.Transport
    flow: Flow
    keep_alive_s = KEEP_ALIVE_S

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        settings: Settings,
        refuse: Refuse,
        on_refused: Callable[[StenographError], None],
    ) -> None:
        del app_state  # of a lifespan, which there is none of
        if not config.loaded:
            config.load()
        self.server_state = server_state
        self.request: ServedRequest | None = None
        self.server: tuple[str, int | None] | None = None
        self.client: tuple[str, int] | None = None
        self.extensions: dict[str, dict[str, object]] = {LINK_EXTENSION: {"connection": self}}
        """As a handler finds it in its scope."""
        self._is_lost = self._is_gone = False
        self._on_gone: Callable[[], object] | None = None
        self.loop = _loop or asyncio.get_running_loop()
        self._app: ASGIApp = cast("Any", config).loaded_app  # uvicorn has types of its own for ASGI
        self._parser: httptools.HttpRequestParser | None
        self._renew_parser()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._header_timeout_s, self._body_timeout_s = settings.header_timeout_s, settings.body_timeout_s
        self._refuse_with = refuse
        self._on_refused = on_refused
        self._phase = _HEAD
        self._head = RequestHead()
        self._head_since = 0.0
        self._num_left: int | None = 0
        """Bytes of the body still to come; None for a chunked one."""
        self._num_framing = 0
        """Bytes of a chunked body since its last piece."""
        self._read_at = self._window_at = 0.0
        self._num_in_window = 0
        self._is_unread = False
        """The client waits for us: bytes stay in its socket, or it was not yet told to send its body."""
        self._num_discarded = 0
        self._idle_since: float | None = None
        """Set between two requests."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ClientConnection {self.client} {self._phase.name}>"

    def _renew_parser(self) -> None:
        """Take a parser at the start of a head."""
        self._parser = httptools.HttpRequestParser(self)
        # An answer may be sent before a request is whole, and the parser is to take the rest of it.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass of it
        self.flow = Flow(self.transport, self._reading_resumed)
        self.server = get_local_addr(self.transport)
        self.client = get_remote_addr(self.transport)
        self.server_state.connections.add(cast("HttpToolsProtocol", self))
        self._head_since = self.loop.time()
        self._arm(self._head_since + self._header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._phase = RequestPhase.REFUSED
        # Lost without an error are connections that were closed, which is after the last byte, or aborted.
        self._is_lost = exc is not None or self.flow.write_paused
        self.server_state.connections.discard(cast("HttpToolsProtocol", self))
        if self.request is not None:
            self.request.disconnect()
        self.flow.resume_writing()
        self.transport.close()
        self._is_gone = True
        if self._on_gone is not None:
            self._on_gone()
        self._parser = None  # it has bound methods of this object

    def data_received(self, data: bytes) -> None:
        self._idle_since = None
        rest: Bytes = data
        while rest:
            phase = self._phase
            if phase is _HEAD:
                rest = self._take_head(bytes(rest))
            elif phase is _BODY:
                rest = self._take_body(rest)
            elif phase is _ANSWER and self.request is not None and self.request.is_answered:
                self._phase, self._head_since = _HEAD, self.loop.time()
            else:
                self._take_unasked(rest)
                return

    def _take_head(self, data: bytes) -> Bytes:
        """Take bytes of a head; return those after it."""
        try:
            taken = self._head.feed(data)
        except StenographError as error:
            self._refuse(error)
            return b""
        if taken is None:
            self._arm(self._head_since + self._header_timeout_s)
            return b""
        head, rest = taken
        self._feed(head)
        if self._phase is _HEAD:
            self._refuse(InvalidRequest("The request is not HTTP/1.1."))
        elif self._phase is _BODY and (self._num_left is None or len(rest) < self._num_left):
            self._body_flows(0)
        return rest

    def _take_body(self, data: Bytes) -> Bytes:
        """Take bytes of a body; return those after it. A chunked one takes all bytes: only the parser knows its end."""
        if self._num_left is None:
            self._num_framing += len(data)
            self._feed(data)
            rest: Bytes = b""
            if self._num_framing > MAX_HEAD_BYTES and self._phase is _BODY:
                self._refuse(HeadersTooLarge(f"A chunk's size or trailer has more than {MAX_HEAD_BYTES} bytes."))
        else:
            data, rest = data[: self._num_left], data[self._num_left :]
            self._num_left -= len(data)
            self._feed(data)
        if self._phase is _BODY:
            self._body_flows(len(data))
        return rest

    def _take_unasked(self, data: Bytes) -> None:
        """Take bytes outside any served request: a pipelined one, or bytes after a refused one."""
        if self._phase is _ANSWER and bytes(data).strip(b"\r\n"):
            self._hang_up()
        elif self._phase is RequestPhase.REFUSED:
            self._num_discarded += len(data)
            if self._num_discarded > LINGER_BYTES:
                self.transport.close()

    def _feed(self, data: Bytes) -> None:
        assert self._parser is not None, "bytes come only while the connection is there"
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # To another protocol, which we do not speak: the request is answered, and nothing after it is HTTP.
            if self._phase is _HEAD:
                self._decline_offer(bytes(data))
            else:
                self._phase = RequestPhase.LAST_ANSWER
                assert self.request is not None, "its head is whole"
                self.request.keeps_connection = False
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"The request is not HTTP/1.1: {error}."))

    def _decline_offer(self, head: bytes) -> None:
        """Read the head of a request with a body again, without its offer to upgrade. A server may ignore the offer,
        and the parser gives no body after one. Source: RFC 9110, section 7.8. `CONNECT` stays refused."""
        declined = _OFFER.sub(lambda found: found[1] + found[2].lower().replace(b"upgrade", b"x"), head)
        if declined != head:
            self._renew_parser()
            self._feed(declined)

    def on_message_begin(self) -> None:
        if self._phase is _HEAD:
            self._url, self._headers = b"", []
        else:  # after a chunked body, in one read with it
            self._hang_up()

    def on_url(self, url: bytes) -> None:
        if self._phase is _HEAD:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _HEAD:  # trailers are dropped
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._phase is not _HEAD:
            return
        parser, headers = self._parser, dict(self._headers)
        assert parser is not None, "its callback"
        if parser.should_upgrade() and has_body(headers):
            return  # it is read again
        self._phase = _BODY
        length = headers.get(b"content-length")
        self._num_left, self._num_framing = None if length is None else int(length), 0
        self._is_unread = b"expect" in headers and headers[b"expect"].lower() == b"100-continue"
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        self._begin(
            {
                "type": "http",
                "asgi": _ASGI,
                "http_version": parser.get_http_version(),
                "method": parser.get_method().decode("ascii"),
                "scheme": "http",
                "path": unquote(path) if "%" in path else path,
                "raw_path": url.path,
                "query_string": url.query or b"",
                "root_path": "",
                "headers": self._headers,
                HEADERS_BY_NAME: headers,
                "server": self.server,
                "client": self.client,
                "extensions": self.extensions,
            },
            keeps_connection=parser.should_keep_alive(),
        )

    def _begin(self, scope: Scope, *, keeps_connection: bool) -> None:
        """Begin to serve a request."""
        self.request = request = ServedRequest(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            default_headers=self.server_state.default_headers,
            keeps_connection=scope["http_version"] != "1.0" and keeps_connection,
            awaits_continue=self._is_unread,
            on_answered=self._answered,
        )
        task = self.loop.create_task(request.run(self._app))
        tasks = self.server_state.tasks  # the server's shutdown awaits them, and cancels them at last
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def on_body(self, body: bytes) -> None:
        if self._phase is _BODY and self.request is not None:
            self._num_framing = 0
            self.request.body_came(body)
            self._is_unread |= self.flow.read_paused

    def on_message_complete(self) -> None:
        if self._phase is _BODY and self.request is not None:
            self._phase = _ANSWER
            self.request.body_ended()
            if self.request.is_answered:
                self._rest()

    def _answered(self) -> None:
        """The answer to the request is written."""
        self.server_state.total_requests += 1
        if self.request is not None and not self.request.keeps_connection:
            self._close_answered()
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        self._rest()

    def _close_answered(self) -> None:
        """Close after an answer announced as the last."""
        self.transport.close()

    def _rest(self) -> None:
        """Close the connection if the next request does not begin in time."""
        self._idle_since = now = self.loop.time()
        self._arm(now + self.keep_alive_s)

    def _body_flows(self, num_bytes: int) -> None:
        """Note the arrival of bytes of a body, not yet whole."""
        self._read_at = self.loop.time()
        if not num_bytes:
            self._window_at, self._num_in_window = self._read_at, 0
        self._num_in_window += num_bytes
        self._arm(self._window_at + self._body_timeout_s)

    def _reading_resumed(self) -> None:
        if self._is_unread and self._phase is _BODY:
            self._is_unread = False
            self._body_flows(0)

    def _arm(self, due: float) -> None:
        """Arm the timer for `due`, unless it runs earlier."""
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if self._idle_since is not None:
            self._check_idle(self._idle_since + self.keep_alive_s)
        elif self._phase is _HEAD:
            self._check_head()
        elif self._phase is _BODY:
            self._check_body()
        elif self._phase is RequestPhase.REFUSED:
            self.transport.close()

    def _check_head(self) -> None:
        timeout_s = self._header_timeout_s
        if self.loop.time() < self._head_since + timeout_s:
            self._arm(self._head_since + timeout_s)
        elif self._head.is_begun:
            self._refuse(RequestTimeout(f"The request's head took longer than {timeout_s:g} s (--header-timeout)."))
        else:
            self._hang_up()

    def _check_idle(self, until: float) -> None:
        if self.loop.time() < until:
            self._arm(until)
        else:
            self._hang_up()

    def _check_body(self) -> None:
        now, timeout_s = self.loop.time(), self._body_timeout_s
        if self._is_unread:
            self._read_at = self._window_at = now
            self._num_in_window = 0
        elif now >= self._read_at + timeout_s:
            self._refuse(RequestTimeout(f"No byte of the request's body arrived for {timeout_s:g} s (--body-timeout)."))
            return
        elif now >= self._window_at + timeout_s:
            if self._num_in_window < LEAST_BODY_BYTES_PER_S * timeout_s:
                self._refuse(
                    RequestTimeout(
                        f"The request's body arrived more slowly than {LEAST_BODY_BYTES_PER_S} bytes/s"
                        f" for {timeout_s:g} s (--body-timeout)."
                    )
                )
                return
            self._window_at, self._num_in_window = now, 0
        self._arm(min(self._read_at, self._window_at) + timeout_s)

    def _hang_up(self) -> None:
        self._phase = RequestPhase.REFUSED
        self.transport.close()

    def _refuse(self, error: StenographError) -> None:
        """Answer with an error, if its request has no answer yet, and close."""
        request = self.request
        is_answered = self._phase is _BODY and request is not None and request.has_begun_answer
        self._phase = RequestPhase.REFUSED
        if request is not None:
            request.disconnect()
        if is_answered or self.transport.is_closing():
            self.transport.close()
            return
        self._on_refused(error)
        refusal = self._refuse_with(error)
        headers = [*refusal.headers, ("content-length", str(len(refusal.content))), ("connection", "close")]
        lines = [STATUS_LINES[refusal.status]]
        lines += map(HEADER_LINE, self.server_state.default_headers)
        lines += [f"{name}: {value}\r\n".encode("ascii") for name, value in headers]
        self.transport.write(b"".join([*lines, b"\r\n", refusal.content]))
        self.transport.write_eof()
        self._arm(self.loop.time() + LINGER_S)

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing() or (self.request is not None and self.request.disconnected)

    def cut(self) -> None:
        self.transport.abort()

    def pause_writing(self) -> None:
        self.flow.pause_writing()

    def resume_writing(self) -> None:
        self.flow.resume_writing()

    def shutdown(self) -> None:
        """Close it once its request is answered, or now. The server calls it when it ends."""
        if self.request is None or self.request.is_answered:
            self.transport.close()
        else:
            self.request.keeps_connection = False

    def when_gone(self, on_gone: Callable[[], object] | None) -> None:
        self._on_gone = on_gone
        if on_gone is None:
            return
        if self.flow.read_paused:
            self.flow.resume_reading()  # after a large body nothing is read, not even the connection's end
        if self._is_gone:
            on_gone()

    def answer(self, send: Send, status: int, body: bytes, headers: Headers) -> Awaitable[None]:
        request = self.request
        if request is None or send != request.send:  # a page of another site needs headers that are added on the way
            return send_whole(send, status, body, headers)
        return request.answer(status, body, headers)

    async def finish(self, last_write: Awaitable[None]) -> bool:
        await asyncio.sleep(0)
        was_gone = self._is_gone
        await last_write
        return not (was_gone or self._is_gone) and await self.has_left()

    async def has_left(self) -> bool:
        if not self._is_lost and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(high=0)  # writing is paused now, and resumed when nothing is left
            await self.flow.drain()
            if not self.transport.is_closing():
                self.transport.set_write_buffer_limits()
        return not self._is_lost
