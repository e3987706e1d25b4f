"""The connection of another worker: with its own questions, and with requests of clients passed on.

It greets with a byte: a socket outlives its worker, so a connection alone says nothing. A header of a request passed on
names its client. A byte between two requests says: the last answer has left for the client, its last byte included.
A client's hanging up closes the connection.
"""

import asyncio
from typing import Any

from starlette.types import Scope

from stenograph.http.connection import Bytes, ClientConnection
from stenograph.http.served_request import RequestHead
from stenograph.http.wire import headers_of

GREETING = b"+"
DELIVERED = b"\x06"
"""Never the first byte of a request."""
CLIENT = b"x-stenograph-client"
"""Header with the addresses of a client and of its connection here, by spaces; "-" where they are not known."""

_PEER, _PASSED_ON = "stenograph.peer", "stenograph.passed_on"
_FOR_EVER_S = 10.0**9


def client_named(scope: Scope) -> bytes:
    """The value of `CLIENT` for a client's request."""
    client, server = scope["client"], scope["server"]
    if client is None or server is None:
        return b"-"
    return f"{client[0]} {client[1]} {server[0]} {server[1] or 0}".encode()


def is_passed_on(scope: Scope) -> bool:
    """Whether another worker of the server passes a client's request on."""
    return _PASSED_ON in scope.get("extensions", {})


def is_workers_own(scope: Scope) -> bool:
    """Whether a worker of the server asks on its own behalf: not to pass on a client's request."""
    return _PEER in scope.get("extensions", {})


class PeerConnection(ClientConnection):
    """A worker's requests, its clients' among them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.keep_alive_s = _FOR_EVER_S  # the other worker closes it
        self._head = RequestHead(CLIENT)
        self._has_left: asyncio.Future[bool] | None = None
        """Of a client's request."""
        self._shuts_down = False

    def __repr__(self) -> str:
        return f"<PeerConnection of {self.client}>"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(GREETING)

    def _take_head(self, data: bytes) -> Bytes:
        """Take bytes of a head. Before it, in one read with the rest of a body answered early, there may
        be word that the last answer has left."""
        if data[:1] != DELIVERED:
            return super()._take_head(data)
        if self._has_left is not None and not self._has_left.done():
            self._has_left.set_result(True)
        if self._shuts_down:
            self.transport.close()
        elif len(data) == 1:
            self._rest()  # no head has begun
        return data[1:]

    def _begin(self, scope: Scope, *, keeps_connection: bool) -> None:
        named = headers_of(scope).pop(CLIENT, None)
        scope["extensions"] = {**self.extensions, _PEER if named is None else _PASSED_ON: {}}
        self._has_left = None if named is None else self.loop.create_future()
        if named is not None:
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != CLIENT]
            if named != b"-":
                client, client_port, server, server_port = named.decode().split(" ")
                scope["client"], scope["server"] = (client, int(client_port)), (server, int(server_port))
        super()._begin(scope, keeps_connection=keeps_connection)

    def _close_answered(self) -> None:
        """Close, unless it is a client's: the other worker reads that the answer is the last, reports its departure,
        and closes then."""
        if self._has_left is None:
            super()._close_answered()

    def shutdown(self) -> None:
        self._shuts_down = self._has_left is not None and not self._has_left.done()
        if self._shuts_down and self.request is not None:
            self.request.keeps_connection = False
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._has_left is not None and not self._has_left.done():
            self._has_left.set_result(False)
        super().connection_lost(exc)

    async def has_left(self) -> bool:
        return await (super().has_left() if self._has_left is None else self._has_left)
