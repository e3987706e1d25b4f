"""The ASGI application: a turn's request goes straight to its dialect's route, every other through Starlette.

Before it stands the guard against other sites' web pages, without knowledge of keys or routes. A browser sends any
page's requests to a server on its own machine. `Origin` names the page; with DNS rebinding, where an attacker's name
comes to mean this machine, the page looks like the server's own, and `Host` is that name.
"""

import ipaddress
import os
import re
from collections.abc import Awaitable, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from stenograph.core.errors import Forbidden, MethodNotAllowed, StenographError, UpgradeRequired
from stenograph.dialects.base import CountDialect, Dialect, Refusal, Refuse
from stenograph.http.count_route import CountRoute
from stenograph.http.metrics import Metrics
from stenograph.http.proxy_route import PROXY_METHODS
from stenograph.http.settings import Settings
from stenograph.http.turn_route import OUR_HEADERS, RequestPath, TurnRoute
from stenograph.http.wire import count_error, header_value, send_refusal

TRUSTED_PROXIES = "FORWARDED_ALLOW_IPS"
"""The variable with the addresses trusted for `x-forwarded-proto` and `x-forwarded-for`, as uvicorn has it."""

_SHOWN_CHARS = 80

MAX_KEPT_PATHS = 1024
"""Most paths with a kept route; none is longer than 8 KiB."""


class WebGuard:
    """One server's application behind the check.

    Pages of `--allow-origin` get CORS headers on every answer, and answers to their preflights.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, refuse: Refuse) -> None:
        self._app = app
        self._metrics = metrics
        self._refuse = refuse
        self._asks_host = _is_loopback(settings.host) or bool(settings.allow_host)
        self._hosts = frozenset(settings.allow_host)
        self._origins = frozenset(origin.encode() for origin in settings.allow_origin)
        self._to_pages = CORSMiddleware(
            app,
            allow_origins=settings.allow_origin,
            allow_methods=PROXY_METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=sorted(OUR_HEADERS | {"allow", "retry-after", "x-should-retry"}),
        )

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI, for HTTP. It stays out of the way of allowed requests, and refuses any other Host or Origin."""
        is_from_page, refused = self.judged(scope)
        if refused is not None:
            count_error(self._metrics, refused)
            return send_refusal(send, self._refuse(refused))
        return (self._to_pages if is_from_page else self._app)(scope, receive, send)

    def judged(self, scope: Scope) -> tuple[bool, Forbidden | None]:
        """Whether a request comes from a page of another site, and why it is refused, if it is."""
        hosts: list[bytes] = []
        origin: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
        for host in hosts if self._asks_host else ():
            named = _host_name(host)
            if named not in self._hosts and not _is_loopback(named):
                return False, Forbidden(
                    f"The Host header names {named[:_SHOWN_CHARS]!r}, which is not a name of this machine."
                    " If it is yours, start the server with --allow-host and that name."
                )
        if origin is None or _is_own(origin, hosts):
            return False, None
        if origin.lower() in self._origins:
            return True, None
        shown = origin[:_SHOWN_CHARS].decode("latin-1")
        return True, Forbidden(
            f"The request comes from a web page of another site, {shown!r}. If it is yours, start the server with"
            " --allow-origin and that address."
        )


class DialectRoute(Protocol):
    """The requests of one dialect."""

    @property
    def dialect(self) -> Dialect | CountDialect:
        """Its requests and replies, and their paths."""
        ...

    def handle(self, scope: Scope, receive: Receive, send: Send, path: RequestPath, /) -> Awaitable[None]:
        """Serve one request to `path`."""
        ...


class RouteTracing(Protocol):
    """Makes traces of requests: routes in place of the core's own."""

    def routes(self, turns: Sequence[TurnRoute | CountRoute]) -> Sequence[DialectRoute]:
        """Routes, with traces for those of turns."""
        ...

    async def aclose(self) -> None:
        """Send the waiting spans, for as long as a stop may take."""
        ...


class App:
    """Dialects at their paths, each also below `/sessions/{id}`, and all other routes.

    `refuse` writes the errors of requests outside all dialects.
    """

    def __init__(
        self,
        *,
        turns: Sequence[TurnRoute | CountRoute],
        control: ASGIApp,
        metrics: Metrics,
        refuse: Refuse,
        tracing: RouteTracing | None = None,
    ) -> None:
        """`tracing` makes traces of turns."""
        routes: Sequence[DialectRoute] = turns if tracing is None else tracing.routes(turns)
        self._mounts = [(_pattern(path), turn) for turn in routes for path in turn.dialect.paths]
        self._found = lru_cache(maxsize=MAX_KEPT_PATHS)(self._find)
        """All turns of a session come to one path."""
        trusted = os.environ.get(TRUSTED_PROXIES, "127.0.0.1,::1")
        behind: Any = ProxyHeadersMiddleware(cast("Any", control), trusted)  # uvicorn has types of its own for ASGI
        self._control: ASGIApp = behind
        """Some routes show addresses; a proxy before the server knows more of them."""
        self._tracing = tracing
        self.metrics = metrics
        self.refuse = refuse

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        found = self._found(scope["path"]) if scope["type"] == "http" else None
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

    async def aclose(self) -> None:
        """Send the waiting spans."""
        if self._tracing is not None:
            await self._tracing.aclose()

    def refuse_at(self, path: str, error: StenographError) -> Refusal:
        """An error of a request read by nothing else, in the words of its path's dialect, if it has one."""
        found = self._found(path)
        return self.refuse(error) if found is None else found[0].dialect.refusal(error, None)

    def _find(self, path: str) -> tuple[DialectRoute, RequestPath] | None:
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
"""Names of pattern groups, unused in the dialects' paths."""
_TWO_V1 = re.compile(r"(?P<before>(?:/sessions/[^/]+)?)/v1(?=/v1/)")


@lru_cache(maxsize=256)
def _host_name(host: bytes) -> str:
    """The name or address of a Host header, in lower case, without port, brackets and the root's dot."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


@lru_cache(maxsize=256)
def _is_loopback(name: str) -> bool:
    """True for a name that can only mean this machine. Source: RFC 6761, section 6.3, for `localhost`."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_own(origin: bytes, hosts: Sequence[bytes]) -> bool:
    """True for a page of this server: same name and port. Ignores the scheme, because TLS ends before this server."""
    scheme, _, address = origin.lower().partition(b"://")
    return scheme in (b"http", b"https") and [address] == [host.lower() for host in hosts]
