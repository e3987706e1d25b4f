"""The seam to the part that makes traces: routes in place of the core's own."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from starlette.types import Receive, Scope, Send

from stenograph.dialects.base import CountDialect, Dialect
from stenograph.http.count_route import CountRoute
from stenograph.http.turn_route import RequestPath, TurnRoute


class DialectRoute(Protocol):
    """The requests of one dialect."""

    @property
    def dialect(self) -> Dialect | CountDialect:
        """Its requests and replies, and their paths."""
        ...

    def handle(self, scope: Scope, receive: Receive, send: Send, path: RequestPath, /) -> Awaitable[None]:
        """Serve one request, which came to `path`."""
        ...


class RouteTracing(Protocol):
    """Makes traces of requests."""

    def routes(self, turns: Sequence[TurnRoute | CountRoute]) -> Sequence[DialectRoute]:
        """Routes, of which those that make turns have traces."""
        ...

    async def aclose(self) -> None:
        """Send the spans that wait, for as long as a stop may take."""
        ...
