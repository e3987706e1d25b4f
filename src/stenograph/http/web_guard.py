"""Refuses the requests of other sites' web pages before anything else reads them. Knows no keys and no routes.

A browser sends any page's requests to a server on its own machine. `Origin` names the page; with DNS rebinding, where
an attacker's name comes to mean this machine, the page looks like the server's own, and `Host` is that name.
"""

import ipaddress
from collections.abc import Awaitable, Iterable, Sequence
from functools import lru_cache

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from stenograph.core.errors import Forbidden
from stenograph.dialects.base import Refuse
from stenograph.http.metrics import Metrics
from stenograph.http.proxy_route import PROXY_METHODS
from stenograph.http.settings import Settings
from stenograph.http.turn_route import OUR_HEADERS
from stenograph.http.wire import count_error, send_refusal

Headers = Iterable[tuple[bytes, bytes]]

_SHOWN_CHARS = 80


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
        """ASGI, for HTTP. It does not stand in the way of what it lets pass."""
        try:
            origin = self.allowed_origin(scope["headers"])
        except Forbidden as error:
            count_error(self._metrics, error)
            return send_refusal(send, self._refuse(error))
        return (self._app if origin is None else self._to_pages)(scope, receive, send)

    def allowed_origin(self, headers: Headers) -> bytes | None:
        """The page of another, allowed site that a request comes from; None if it comes from no other site.

        Raises Forbidden for a Host or an Origin that is not allowed.
        """
        hosts: list[bytes] = []
        origin: bytes | None = None
        for name, value in headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origin = value
        for host in hosts if self._asks_host else ():
            named = _host_name(host)
            if named not in self._hosts and not _is_loopback(named):
                raise Forbidden(
                    f"The Host header names {named[:_SHOWN_CHARS]!r}, which is not a name of this machine."
                    " If it is yours, start the server with --allow-host and that name."
                )
        if origin is None or _is_own(origin, hosts):
            return None
        if origin.lower() not in self._origins:
            shown = origin[:_SHOWN_CHARS].decode("latin-1")
            raise Forbidden(
                f"The request comes from a web page of another site, {shown!r}. If it is yours, start the server with"
                " --allow-origin and that address."
            )
        return origin


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
