"""Sends a whole answer at once, and detects that a client has left, and that an answer has: its last byte is out of the
transport's write buffer while the connection lives.

uvicorn's `send` returns when the bytes are handed to the transport, of which megabytes may wait there for a client that
reads nothing; and of a lost connection it tells only a task that waits for it. A handler finds the connection in its
scope, under ASGI's `extensions`. Knows nothing of what is sent.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, cast

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_EXTENSION = "stenograph.delivery"

JOINED_BYTES = 64 * 1024
"""A longer body is not copied behind its head."""


class ClientLink(Protocol):
    """A client's connection, as the handler of its request knows it."""

    @property
    def is_gone(self) -> bool:
        """Whether nothing that is written gets to the client any more."""
        ...

    async def answer(self, send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
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


class DeliveryConnection(HttpToolsProtocol):
    """A connection that calls a handler when it is lost, and knows when what was written to it has left."""

    _is_lost = False
    _is_gone = False
    _on_gone: Callable[[], None] | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {_EXTENSION: {"connection": self}}

    def connection_lost(self, exc: Exception | None) -> None:
        # Lost without an error are connections that were closed, which is after the last byte, or aborted.
        self._is_lost = exc is not None or self.flow.write_paused
        super().connection_lost(exc)
        self._is_gone = True
        if self._on_gone is not None:
            self._on_gone()

    @property
    def is_gone(self) -> bool:
        return self.transport.is_closing()

    def cut(self) -> None:
        self.transport.abort()

    def when_gone(self, on_gone: Callable[[], None] | None) -> None:
        self._on_gone = on_gone
        if on_gone is None:
            return
        self.flow.resume_reading()  # after a large body nothing is read, not even the connection's end
        if self._is_gone:
            on_gone()

    async def answer(self, send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        cycle = self.cycle
        if send != cycle.send:  # the headers that a page of another site needs are added on the way
            await _send_whole(send, status, body, headers)
            return
        # As the cycle's `send` does, which writes the head before it has seen a body.
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if cycle.disconnected:
            return
        assert not cycle.response_started, "a request is answered once"
        lines = [b"%b: %b\r\n" % pair for pair in self.server_state.default_headers]
        lines += [b"%b: %b\r\n" % pair for pair in headers]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        head = b"%bcontent-length: %d\r\n%b\r\n" % (STATUS_LINE[status], len(body), b"".join(lines))
        assert head.count(b"\n") == head.count(b"\r") == len(lines) + 3, "no header has a line break"
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        if len(body) <= JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.writelines((head, body))
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    async def has_left(self) -> bool:
        if not self._is_lost and self.transport.get_write_buffer_size():
            self.transport.set_write_buffer_limits(high=0)  # writing is paused now, and resumed when nothing is left
            await self.flow.drain()
            if not self.transport.is_closing():
                self.transport.set_write_buffer_limits()
        return not self._is_lost


async def _send_whole(send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    raw = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


class _AnotherServers:
    """The connection of a server that tells nothing of it: everything has left at once, and no client is gone."""

    async def answer(self, send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        await _send_whole(send, status, body, headers)

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
