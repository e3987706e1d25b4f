"""Binds rows of routes to their endpoints, behind the check of each one's key."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Router
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from stenograph.http.auth import Authenticator
from stenograph.http.route import Handler, Needs, Route, rows_of

CHECKS: Mapping[Needs, Callable[[Authenticator, Scope], object]] = {
    Needs.NOTHING: lambda authenticator, scope: authenticator.check_open(scope),
    Needs.TOKEN: lambda authenticator, scope: authenticator.check_agent(scope),
    Needs.KEY: lambda authenticator, scope: authenticator.check_key(scope),
    Needs.ADMIN: lambda authenticator, scope: authenticator.check_admin(scope),
}
"""The check of each credential. Raises Unauthorized and Forbidden."""


def bound(groups: Iterable[object], authenticator: Authenticator) -> list[StarletteRoute]:
    """The routes of these objects. A path with others in its range stands behind them, and `HEAD` before `GET`."""
    rows = [(row, getattr(group, name)) for group in groups for row, name in rows_of(type(group))]
    rows.sort(key=lambda pair: (pair[0].path.endswith(":path}"), pair[0].method != "HEAD"))
    return [
        StarletteRoute(row.path, _keyed(row, endpoint, authenticator), methods=[row.method]) for row, endpoint in rows
    ]


def _keyed(row: Route, endpoint: Handler, authenticator: Authenticator) -> Handler:
    if row.needs is Needs.NOTHING and not authenticator.checks_open:
        return endpoint
    check = partial(CHECKS[row.needs], authenticator)

    async def checked(request: Request) -> Response:
        check(request.scope)
        return await endpoint(request)

    return checked if authenticator.noted is None else authenticator.noted(row.id, checked)


class LaterRoutes(BaseRoute):
    """The routes at and below a path, made when the first request comes to one."""

    def __init__(self, path: str, make: Callable[[], Awaitable[Sequence[StarletteRoute]]]) -> None:
        self.path = path
        self.routes: Sequence[StarletteRoute] = ()
        self._make = make
        self._router: Router | None = None

    def __repr__(self) -> str:
        return f"<LaterRoutes {self.path} {len(self.routes)}>"

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        path: str = scope["path"]
        is_here = scope["type"] == "http" and (path == self.path or path.startswith(f"{self.path}/"))
        return (Match.FULL if is_here else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._router or await self.made())(scope, receive, send)

    async def made(self) -> Router:
        """The router of the routes. Raises as `_make` does."""
        routes = await self._make()
        if self._router is None:  # nobody else has made them meanwhile
            self.routes, self._router = routes, Router(routes, redirect_slashes=False)
        return self._router
