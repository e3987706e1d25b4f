"""Forwards the paths of an allow-list to the engine, unrecorded.

If the engine is not a server, this server answers those of the paths that it can, and refuses the others.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import Forbidden, MethodNotAllowed, RouteNotFound, UpstreamTimeout
from stenograph.engine.base import Engine
from stenograph.http.auth import KEY_QUERY, Authenticator
from stenograph.http.wire import ClientGone, delivery_of, header_bytes, read_body
from stenograph.session.manager import SessionManager

if TYPE_CHECKING:
    from stenograph.engine.http.transport import HttpReply

MODELS = "v1/models"
PROXY_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

_NOT_FORWARDED = frozenset(
    {
        "accept-encoding", "authorization", "connection", "content-length", "cookie", "host", "idempotency-key",
        "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
        "x-session-id", "x-smg-routing-key",
    }
)  # fmt: skip
"""Request headers between the client and this server: credentials, and the body's framing."""


def _may_be_forwarded(name: str) -> bool:
    return name not in _NOT_FORWARDED and not name.endswith(("api-key", "-token"))


_PART = re.compile(r"\{\w+\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyRoute:
    """The raw proxy of one server. `local` answers for engines without forwarding. `own_paths` are this server's own
    paths of a session, with their methods: another method is 405, even if the allow-list has the path."""

    manager: SessionManager
    authenticator: Authenticator
    engine: Engine
    allowed: tuple[str, ...]
    own_paths: Mapping[str, Collection[str]]
    local: Mapping[tuple[str, str], Callable[[Request], Awaitable[Response]]]
    max_body_bytes: int
    timeout_s: float
    holds_responses: bool

    async def of_session(self, request: Request) -> Response:
        """`/sessions/{id}/{path}`. Raises as `_check`, then SessionNotFound, then as `_pass_on`."""
        path = request.path_params["path"].rstrip("/")
        self._check(request, path)
        session = await self.manager.sessions.peek(request.path_params["id"])
        for own, methods in self.own_paths.items():
            if re.fullmatch(_PART.sub("[^/]+", own), path):
                raise MethodNotAllowed(request.method, request.url.path, allowed=methods)
        self._check_not_held(request, path)
        return await self._pass_on(request, path, affinity_key=session.id)

    async def of_server(self, request: Request) -> Response:
        """`/v1/{path}`, where a header may name the session. Raises as `of_session`."""
        path = "v1/" + request.path_params["path"].rstrip("/")
        self._check(request, path)
        session = await self.authenticator.session_of(request.scope, wakes=False)
        self._check_not_held(request, path)
        return await self._pass_on(request, path, affinity_key=None if session is None else session.id)

    def _check_not_held(self, request: Request, path: str) -> None:
        """Raise MethodNotAllowed for another method on a held response."""
        if self.holds_responses and re.fullmatch("v1/responses/[^/]+", path):
            raise MethodNotAllowed(request.method, request.url.path, allowed=("GET", "HEAD"))

    def _check(self, request: Request, path: str) -> None:
        """Raise Unauthorized and Forbidden: of these routes a session's token is good for the list of models alone."""
        if path == MODELS and request.method in ("GET", "HEAD"):
            self.authenticator.check_agent(request.scope)
        else:
            self.authenticator.check_key(request.scope)

    async def _pass_on(self, request: Request, path: str, *, affinity_key: str | None) -> Response:
        """Raises Forbidden for a path outside the list, RouteNotFound for one unknown to this engine."""
        if path not in self.allowed:
            raise Forbidden(
                f"{path[:80]!r} is neither a route of this server nor passed on to the engine (--proxy-allow)."
            )
        if not self.engine.forwards:
            endpoint = self.local.get(("GET" if request.method == "HEAD" else request.method, path))
            if endpoint is None:
                if methods := {method for method, local in self.local if local == path}:
                    raise MethodNotAllowed(request.method, request.url.path, allowed=_with_head(methods))
                raise RouteNotFound(f"The engine {self.engine.capabilities.engine} has no {request.method} {path}.")
            return await endpoint(request)
        headers = [(name, value) for name, value in request.headers.items() if _may_be_forwarded(name)]
        if affinity_key is not None:
            headers += [("x-smg-routing-key", affinity_key), ("x-session-id", affinity_key)]
        body = await read_body(request.scope, request.receive, max_bytes=self.max_body_bytes)
        # The target is the list's own spelling: nothing that a client encodes in a path goes further than this.
        query = query_without_key(request.scope["query_string"])
        target = f"/{path}" + (f"?{query}" if query else "")
        answer = await self._exchange(self.engine.forward(request.method, target, headers, body), request)
        response = Response(answer.body, status_code=answer.status)
        response.raw_headers = [
            *(header_bytes(name, value) for name, value in answer.headers),
            header_bytes("content-type", answer.content_type),
        ]
        if request.method != "HEAD":  # whose answer tells the length of a body that does not come
            response.raw_headers.append((b"content-length", str(len(answer.body)).encode()))
        return response

    async def _exchange(self, work: Coroutine[None, None, "HttpReply"], request: Request) -> "HttpReply":
        """Wait for the engine, as long as the client waits and no longer than a turn may take.

        Raises ClientGone, UpstreamTimeout, and as the engine's `forward`.
        """
        forwarding = asyncio.get_running_loop().create_task(work, name="forward")
        link = delivery_of(request.scope)
        try:
            link.when_gone(forwarding.cancel)
            await asyncio.wait({forwarding}, timeout=self.timeout_s)
            if not forwarding.done():
                raise UpstreamTimeout(f"The engine did not answer within {self.timeout_s:g} s.")
        finally:
            link.when_gone(None)
            forwarding.cancel()
            await asyncio.wait({forwarding})
        if forwarding.cancelled():
            raise ClientGone
        return forwarding.result()


def _with_head(methods: set[str]) -> set[str]:
    return {*methods, "HEAD"} if "GET" in methods else methods


def query_without_key(query: bytes) -> str:
    """A query as it came, but for the keys in it: neither an engine nor a log is to see one."""
    return "&".join(part for part in query.decode("latin-1").split("&") if not _is_key(part))


def keys_in_query(query: bytes) -> str:
    """The keys in a query, as they came."""
    return "&".join(part for part in query.decode("latin-1").split("&") if _is_key(part))


def _is_key(part: str) -> bool:
    return any(name == KEY_QUERY for name, _ in parse_qsl(part, keep_blank_values=True))
