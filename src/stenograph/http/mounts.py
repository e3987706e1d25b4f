"""The ASGI application: a turn's request goes straight to its dialect's route, every other through Starlette."""

import os
import re
from collections.abc import Awaitable, Sequence
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from stenograph.core.errors import MethodNotAllowed, StenographError, UpgradeRequired
from stenograph.dialects.base import Refusal, Refuse
from stenograph.http.count_route import CountRoute
from stenograph.http.metrics import Metrics
from stenograph.http.nodes import Nodes
from stenograph.http.traces.tracing import TracedRoute, Tracing
from stenograph.http.turn_route import RequestPath, TurnRoute
from stenograph.http.wire import count_error, header_value, send_refusal

TRUSTED_PROXIES = "FORWARDED_ALLOW_IPS"
"""The variable with the addresses whose `x-forwarded-proto` and `x-forwarded-for` are believed, as uvicorn has it."""
_OURS = "stenograph.ours"
"""In a scope: no other node has the request's session."""


class App:
    """Dialects at their paths, each also below `/sessions/{id}`, and all other routes.

    `refuse` writes the errors of requests that come to no dialect.
    """

    def __init__(
        self,
        *,
        turns: Sequence[TurnRoute | CountRoute],
        control: ASGIApp,
        metrics: Metrics,
        refuse: Refuse,
        nodes: Nodes | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`nodes` answers the requests for sessions that other nodes have; None if there are none. `tracing` makes
        traces of the requests that make turns; None: nothing does."""
        routes = turns if tracing is None else tracing.routes(turns)
        self._mounts = [(_pattern(path), turn) for turn in routes for path in turn.dialect.paths]
        trusted = os.environ.get(TRUSTED_PROXIES, "127.0.0.1,::1")
        behind: Any = ProxyHeadersMiddleware(cast("Any", control), trusted)  # uvicorn has types of its own for ASGI
        self._control: ASGIApp = behind
        """Some routes show addresses, of which a proxy before the server knows more."""
        self._tracing = tracing
        self.nodes = nodes
        self.metrics = metrics
        self.refuse = refuse

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self.nodes is not None and _OURS not in scope:
            return self._somewhere(self.nodes, scope, receive, send)
        found = self._find(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            return self._control(_with_one_v1(scope), receive, send)
        turn, parts = found
        if scope["method"] == "POST":
            return turn.handle(scope, receive, send, parts)
        error: StenographError = MethodNotAllowed(scope["method"], scope["path"], allowed=("POST",))
        if (header_value(scope, b"upgrade") or "").lower() == "websocket":
            error = UpgradeRequired(f"{scope['path']} opens no websocket: send the request by POST.")
        count_error(self.metrics, error)
        return send_refusal(send, turn.dialect.refusal(error, None))

    async def _somewhere(self, nodes: Nodes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the node that has the request's session, or here."""
        if not await nodes.answered(scope, receive, send, self.refuse_at):
            scope[_OURS] = True
            await self(scope, receive, send)

    async def aclose(self) -> None:
        """Close the connections to other nodes, and send the spans that wait."""
        if self.nodes is not None:
            await self.nodes.aclose()
        if self._tracing is not None:
            await self._tracing.aclose()

    def refuse_at(self, path: str, error: StenographError) -> Refusal:
        """An error of a request that nothing else reads, in the words of whoever serves its path."""
        found = self._find(path)
        return self.refuse(error) if found is None else found[0].dialect.refusal(error, None)

    def _find(self, path: str) -> tuple[TurnRoute | TracedRoute | CountRoute, RequestPath] | None:
        """The dialect's route for this path, and the path's parts."""
        for pattern, turn in self._mounts:
            if found := pattern.fullmatch(path):
                at = found.groupdict()
                return turn, RequestPath(session_id=at.pop(_SESSION), route=at.pop(_ROUTE), at=at)
        return None


def _pattern(path: str) -> "re.Pattern[str]":
    return re.compile(f"(?:/sessions/(?P<{_SESSION}>[^/]+))?(?:/v1(?=/v1))?(?P<{_ROUTE}>{path})/?")


def _with_one_v1(scope: Scope) -> Scope:
    """A request to `/v1/v1/…` as one to `/v1/…`: some clients add `/v1` to an address, and some people did before."""
    if scope["type"] != "http" or (found := _TWO_V1.match(scope["path"])) is None:
        return scope
    path = found["before"] + scope["path"][found.end() :]
    return {**scope, "path": path, "raw_path": path.encode()}


_SESSION, _ROUTE = "session_of_path", "route_of_path"
"""Names of groups, which no dialect has."""
_TWO_V1 = re.compile(r"(?P<before>(?:/sessions/[^/]+)?)/v1(?=/v1/)")
