"""The connection of another worker, to pass a client's request on: the client's connection, one step further away.

It begins with a line naming the client (the PROXY protocol, version 1), is greeted with one byte, and carries the
client's requests and their answers as they are. Between two requests one byte says: the last answer has left for
the client, its last byte included. A client's hanging up closes the connection. A connection without the line is
another worker's own: it asks on its own behalf.
"""

import asyncio
import re
from typing import Any

from starlette.types import Scope

from stenograph.http.connection import Bytes, ClientConnection

GREETING = b"+"
DELIVERED = b"\x06"
"""Never the first byte of a request."""

_PEER, _PASSED_ON = "stenograph.peer", "stenograph.passed_on"
_CLIENT = re.compile(rb"PROXY (?:UNKNOWN|TCP[46] (\S+) (\S+) ([0-9]+) ([0-9]+))\r\n")
_MAX_LINE_BYTES = 107
"""Source: the PROXY protocol, section 2.1."""
_FOR_EVER_S = 10.0**9


def client_line(client: tuple[str, int] | None, server: tuple[str, int | None] | None) -> bytes:
    """The line with a client and the address it came to."""
    if client is None or server is None:
        return b"PROXY UNKNOWN\r\n"
    family = "TCP6" if ":" in client[0] else "TCP4"
    return f"PROXY {family} {client[0]} {server[0]} {client[1]} {server[1] or 0}\r\n".encode()


def is_passed_on(scope: Scope) -> bool:
    """Whether another worker of the server passes a client's request on."""
    return _PASSED_ON in scope.get("extensions", {})


def is_workers_own(scope: Scope) -> bool:
    """Whether a worker of the server asks on its own behalf: not to pass on a client's request."""
    return _PEER in scope.get("extensions", {})


class PeerConnection(ClientConnection):
    """A client's requests, as another worker passes them on."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.keep_alive_s = _FOR_EVER_S  # the other worker closes it, with its client's
        self._line: bytes | None = b""
        self._is_clients = False
        self._has_left: asyncio.Future[bool] | None = None
        self._shuts_down = False

    def __repr__(self) -> str:
        return f"<PeerConnection of {self.client}>"

    def data_received(self, data: bytes) -> None:
        if self._line is not None:
            data = self._take_line(self._line + data)
        if data:
            super().data_received(data)

    def _take_head(self, data: bytes) -> Bytes:
        """Take bytes of a head. Before it, in one read with the rest of a body answered early, there may
        be word that the last answer has left."""
        if data[:1] != DELIVERED:
            return super()._take_head(data)
        if self._has_left is not None and not self._has_left.done():
            self._has_left.set_result(True)
        if self._shuts_down:
            self.transport.close()
        return data[1:]

    def _close_answered(self) -> None:
        """Close, unless it is a client's: the other worker reads that the answer is the last, reports its departure,
        and closes then."""
        if not self._is_clients:
            super()._close_answered()

    def shutdown(self) -> None:
        self._shuts_down = self._has_left is not None and not self._has_left.done()
        if self._shuts_down and self.request is not None:
            self.request.keeps_connection = False
        else:
            super().shutdown()

    def _take_line(self, data: bytes) -> bytes:
        """Take the optional line before the first request; give back the bytes after it."""
        if not b"PROXY ".startswith(data[:6]):
            self._line = None
            return data
        found = _CLIENT.match(data)
        if found is None:
            self._line = data
            if len(data) > _MAX_LINE_BYTES:
                self.transport.close()
            return b""
        self._line = None
        self._is_clients = True
        if found[1] is not None:
            self.client = (found[1].decode(), int(found[3]))
            self.server = (found[2].decode(), int(found[4]))
        self.transport.write(GREETING)
        return data[found.end() :]

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.extensions[_PASSED_ON if self._is_clients else _PEER] = {}
        self._has_left = self.loop.create_future() if self._is_clients else None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_left is not None and not self._has_left.done():
            self._has_left.set_result(False)
        super().connection_lost(exc)

    async def has_left(self) -> bool:
        return await (super().has_left() if self._has_left is None else self._has_left)
