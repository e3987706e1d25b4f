"""Connections to an engine behind TLS, by aiohttp: the one place that speaks it, and that translates what it raises.

aiohttp parses what comes on an idle connection and gives it to the next request as its reply. Here such bytes close
the connection, as in `connections`, which has the rule's reason. Owns no retry; knows no engine.

Doubled `server` and `date` headers are fine, except in Python's development mode, where aiohttp's parser is strict.
"""

import asyncio
import functools
import select
from base64 import b64encode
from collections.abc import Callable

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.tracing import Trace
from yarl import URL

from stenograph.core.errors import UpstreamUnreachable
from stenograph.engine.http.exchange import KEEPALIVE_S, MAX_LINE_BYTES, Pairs, not_connected, unreachable

READ_BUFFER_BYTES = 2**15
"""Small, so that a reply that nobody reads yet waits in the engine's socket."""
_BROKEN = (aiohttp.ClientError, HttpProcessingError, OSError)
"""Errors that aiohttp raises for a connection; TimeoutError is a subclass of OSError."""
_STORIES: tuple[tuple[type[Exception], str], ...] = (
    (aiohttp.ConnectionTimeoutError, "The engine could not be reached in time"),
    (aiohttp.ClientResponseError, "The engine answered what is not HTTP"),
    (HttpProcessingError, "The engine answered what is not HTTP"),
    (aiohttp.ClientPayloadError, "The engine's reply was cut"),
    (Exception, "The connection to the engine broke"),
)


class AiohttpConnections:
    """A pool for one address, http or https."""

    def __init__(self, url: URL, connect_timeout_s: float, *, reuses: bool) -> None:
        """`reuses` False: each connection carries one request."""
        self._origin = str(url.origin())
        self._credentials = None if url.user is None else f"{url.user}:{url.password or ''}"
        self._connect_timeout_s = connect_timeout_s
        self._reuses = reuses
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<AiohttpConnections {self._origin} {'closed' if self._session is None else 'open'}>"

    def open(self) -> None:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=QuietConnector(reuses=self._reuses),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=None if self._credentials is None else {"authorization": _basic(self._credentials)},
            max_field_size=MAX_LINE_BYTES,
            max_line_size=MAX_LINE_BYTES,
            read_bufsize=READ_BUFFER_BYTES,
            skip_auto_headers=("Content-Type", "User-Agent"),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=self._connect_timeout_s, sock_connect=self._connect_timeout_s
            ),
            trust_env=False,
        )

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(self, method: str, target: str, headers: Pairs, body: bytes) -> "AiohttpExchange":
        assert self._session is not None, "a transport is open while it is used"
        try:
            response = await self._session.request(
                method,
                URL(self._origin + target, encoded=True),
                data=body or None,
                headers=tuple(headers),
                allow_redirects=False,
            )
        except _BROKEN as error:
            raise _translated(error, reply_began=False) from error
        return AiohttpExchange(response)


def _basic(credentials: str) -> str:
    """The value of `Authorization` for a name and a password. Source: RFC 7617, section 2."""
    return f"Basic {b64encode(credentials.encode()).decode()}"


class AiohttpExchange:
    """A reply of aiohttp's."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._num_wanted = 0
        self.num_pending = 0

    def __repr__(self) -> str:
        return f"<AiohttpExchange {self._response.status}>"

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Pairs:
        return [(name.lower(), value) for name, value in self._response.headers.items()]

    @property
    def num_expected(self) -> int | None:
        if self._response.method == "HEAD" or self._response.status in (101, 204, 304):
            return 0
        return self._response.content_length

    async def piece(self) -> bytes:
        try:
            return await self._response.content.readany()
        except _BROKEN as error:
            raise _translated(error, reply_began=True) from error

    async def pieces(self, num_bytes: int) -> list[bytes]:
        taken: list[bytes] = []
        self.num_pending, self._num_wanted = 0, num_bytes
        while self.num_pending < self._num_wanted and (piece := await self.piece()):
            taken.append(piece)
            self.num_pending += len(piece)
        return taken

    def hand_over(self) -> None:
        self._num_wanted = 1

    def leave(self) -> None:
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


def _translated(error: Exception, *, reply_began: bool) -> UpstreamUnreachable:
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
        return not_connected(str(error.host), error.port or 0, error.os_error)
    text = next(text for kind, text in _STORIES if isinstance(error, kind))
    return unreachable(text, error, reply_began=reply_began)


class QuietConnector(aiohttp.TCPConnector):
    """A pool of connections on which an engine speaks only when it was asked. `reuses` False: each is used once.

    Make it inside the loop. Sets `_factory`, aiohttp's maker of protocols, for which there is no public way.
    """

    def __init__(self, *, reuses: bool) -> None:
        kept_s = KEEPALIVE_S if reuses else None
        # The type of one of aiohttp's other arguments is not whole.
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            limit=0, keepalive_timeout=kept_s, force_close=not reuses
        )
        make: Callable[..., ResponseHandler] = _Line
        self._factory = functools.partial(make, loop=asyncio.get_running_loop())

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's own signature
    ) -> Connection:
        """A connection for one request. Raises what aiohttp raises."""
        while True:
            connection = await super().connect(req, traces, timeout)
            line = connection.protocol
            assert isinstance(line, _Line), "every connection is of our own making"
            if line.was_idle and line.has_spoken():
                connection.close()
                continue
            line.is_idle = False
            connection.add_callback(line.rest)
            return connection


class _Line(ResponseHandler):
    """One connection. Bytes that come while it is idle close it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.is_idle = False
        self.was_idle = False

    def rest(self) -> None:
        """Its request is over: nobody waits for anything any more."""
        self.is_idle = self.was_idle = True

    def has_spoken(self) -> bool:
        """Whether anything has come that nobody asked for, also what waits in the kernel. An end counts as well."""
        transport = self.transport
        if self.should_close or transport is None:
            return True
        looked = select.poll()
        looked.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(looked.poll(0))

    def data_received(self, data: bytes) -> None:
        if self.is_idle and data:  # without data aiohttp calls itself, to go on with what it holds
            self.close()
        else:
            super().data_received(data)
