"""What the core asks of the part that makes traces: routes in place of its own. Without the part it serves those."""

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
        """What it speaks, and at which paths."""
        ...

    def handle(self, scope: Scope, receive: Receive, send: Send, path: RequestPath, /) -> Awaitable[None]:
        """Serve one request, which came to `path`."""
        ...


class Tracing(Protocol):
    """Makes traces of requests."""

    def routes(self, turns: Sequence[TurnRoute | CountRoute]) -> Sequence[DialectRoute]:
        """Routes, of which those that make turns have traces."""
        ...

    async def aclose(self) -> None:
        """Send the spans that wait, for as long as a stop may take."""
        ...
