"""Sends a whole answer at once, and detects that a client has left, and that an answer has: its last byte is out of the
transport's write buffer while the connection lives.

ASGI's `send` returns when the bytes are handed to the transport, of which megabytes may wait there for a client that
reads nothing; and of a lost connection it tells only a task that waits for it. A handler finds the connection in its
scope, under ASGI's `extensions`. Knows nothing of what is sent, and reads nothing.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol, cast

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from stenograph.http.served_request import Flow, ServedRequest

_EXTENSION = "stenograph.delivery"

Headers = Iterable[tuple[str, str]]

JOINED_BYTES = 64 * 1024
"""A longer body is not copied behind its head."""


class ClientLink(Protocol):
    """A client's connection, as the handler of its request knows it."""

    @property
    def is_gone(self) -> bool:
        """Whether nothing that is written gets to the client any more."""
        ...

    async def answer(self, send: Send, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole answer to a request that is not HEAD, with its length: head and body in one write."""
        ...

    async def has_left(self) -> bool:
        """Wait, after the last write, until its last byte has left; False if the connection broke first."""
        ...

    def cut(self) -> None:
        """Break the connection, so that the client sees that the answer is not whole."""
        ...

    def when_gone(self, on_gone: Callable[[], None] | None) -> None:
        """Set what is called once when the connection is lost, at once if it is lost already; None calls nothing."""
        ...


class DeliveryConnection(asyncio.Protocol):
    """A connection that calls a handler when it is lost, and knows when what was written to it has left.

    `request` is the one that it serves, or has served last; the server closes its connections by `shutdown`.
    """

    transport: asyncio.Transport
    flow: Flow

    def __init__(self, server_state: ServerState) -> None:
        self.server_state = server_state
        self.request: ServedRequest | None = None
        self.server: tuple[str, int | None] | None = None
        self.client: tuple[str, int] | None = None
        self.extensions: dict[str, dict[str, object]] = {_EXTENSION: {"connection": self}}
        """As a handler finds it in its scope."""
        self._is_lost = False
        self._is_gone = False
        self._on_gone: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class is no subclass of it
        self.flow = Flow(self.transport, self._reading_resumed)
        self.server = get_local_addr(self.transport)
        self.client = get_remote_addr(self.transport)
        self.server_state.connections.add(cast("HttpToolsProtocol", self))

    def connection_lost(self, exc: Exception | None) -> None:
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

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    def cut(self) -> None:
        self.transport.abort()

    def eof_received(self) -> None:
        """The client sends no more, and so the connection is closed."""

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

    def _reading_resumed(self) -> None:
        """The request's body is read on."""

    def when_gone(self, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone
        if on_gone is None:
            return
        if self.flow.read_paused:
            self.flow.resume_reading()  # after a large body nothing is read, not even the connection's end
        if self._is_gone:
            on_gone()

    async def answer(self, send: Send, status: int, body: bytes, headers: Headers) -> None:
        request = self.request
        if request is None or send != request.send:  # a page of another site needs headers that are added on the way
            await send_whole(send, status, body, headers)
            return
        if self.flow.write_paused and not request.disconnected:
            await self.flow.drain()
        if request.disconnected:
            return
        head = request.begin_answer(status, headers, len(body))
        if len(body) <= JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        request.end_answer()

    async def has_left(self) -> bool:
        if not self._is_lost and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(high=0)  # writing is paused now, and resumed when nothing is left
            await self.flow.drain()
            if not self.transport.is_closing():
                self.transport.set_write_buffer_limits()
        return not self._is_lost


def header_bytes(name: str, value: str) -> tuple[bytes, bytes]:
    """A header to send. An engine's came as any bytes, was read as UTF-8 with surrogates, and goes out as it came."""
    return name.encode("ascii"), value.encode("utf-8", "surrogateescape")


async def send_whole(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Send an answer at once, with its length."""
    raw = [header_bytes(name, value) for name, value in headers]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class _AnotherServers:
    """The connection of a server that tells nothing of it: everything has left at once, and no client is gone."""

    async def answer(self, send: Send, status: int, body: bytes, headers: Headers) -> None:
        await send_whole(send, status, body, headers)

    async def has_left(self) -> bool:
        return True

    @property
    def is_gone(self) -> bool:
        return False

    def cut(self) -> None:
        raise ConnectionAbortedError

    def when_gone(self, on_gone: Callable[[], None] | None) -> None:
        """Nothing is ever called."""


_ANOTHERS = {"connection": _AnotherServers()}


def delivery_of(scope: Scope) -> ClientLink:
    """The connection that a request came on."""
    return cast("ClientLink", scope.get("extensions", {}).get(_EXTENSION, _ANOTHERS)["connection"])
