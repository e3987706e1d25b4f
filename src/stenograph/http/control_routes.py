"""Every route except the chats, bound to its path: sessions, models, tokens, health, metrics. Starlette."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict, TypeVar, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from stenograph.core.errors import (
    MethodNotAllowed,
    RouteNotFound,
    SessionNotFound,
    StenographError,
    TokenizationFailed,
    UnexpectedFailure,
)
from stenograph.core.json_types import Count, Hex32, TokenIds
from stenograph.core.loaded import entry
from stenograph.dialects.common.errors import refusal_of
from stenograph.dialects.sessions import Detokenize, Tokenize, decode_detokenize, decode_tokenize
from stenograph.engine.base import EngineState, ShownEngine
from stenograph.http.binding import LaterRoutes, bound
from stenograph.http.create_route import CreateRoute
from stenograph.http.front_page import FrontPage, front_page
from stenograph.http.part import Core, Part
from stenograph.http.proxy_route import PROXY_METHODS, ProxyRoute
from stenograph.http.responses import json_in_pieces, json_response
from stenograph.http.route import (
    JSON,
    STORED,
    TEXT,
    All,
    Asking,
    Needs,
    in_json,
    one_answer,
    route,
    rows_of,
    session_paths,
    tag_seen_by,
)
from stenograph.http.wire import ClientGone, count_error, read_json
from stenograph.offload.body_slots import LARGE_BODY_BYTES, BodySlots
from stenograph.offload.pool import INLINE_BELOW_BYTES

if TYPE_CHECKING:
    from stenograph.http.late_routes import Late

T = TypeVar("T")

LATE = "stenograph.http.late_routes:Late"


class Health(TypedDict):
    """The server is alive."""

    status: Literal["ok"]
    instance_id: Hex32
    session_server_instance_id: Hex32


class WireEngineStatus(ShownEngine):
    """One engine. `name` is its address or its kind. `detail` is a line for the operator, such as why it is not ready.
    `num_running` counts this server's turns there, or is null if they are not counted."""

    state: EngineState
    num_running: Count | None


class Readiness(TypedDict):
    """The state of each engine, unless a tenant or, where there are tenants, nobody asks; `ready` if one is usable,
    and so is the store, where there is one, and turns are let in: not while generation is `paused` or new weights
    come."""

    ready: bool
    paused: bool
    engines: Sequence[WireEngineStatus]


class Model(TypedDict):
    """A model in OpenAI's shape; `max_model_len` counts prompt and completion; null if the engine decides."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    """The one model."""

    object: Literal["list"]
    data: Sequence[Model]


class Tokens(TypedDict):
    """A text as tokens."""

    tokens: TokenIds
    count: Count
    max_model_len: int | None


class Text(TypedDict):
    """Tokens as text, control tokens included."""

    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRoutes:
    """The routes of one server. Methods are endpoints; `app` binds them and those of sessions to paths. `openapi` makes
    its document, once."""

    core: Core
    create: CreateRoute
    late: "Callable[[], Late]"
    body_slots: BodySlots
    started_at: int
    openapi: Callable[[], bytes]

    def app(self) -> Starlette:
        """The Starlette application."""
        app = Starlette(
            routes=[
                *bound((self, self.create), self.core.authenticator),
                *(LaterRoutes(part.below, partial(self._routes_of, part)) for part in self.core.parts if part.below),
                LaterRoutes("", self._late_routes),
            ],
            exception_handlers={
                StenographError: self._answer_error,
                HTTPException: self._answer_http_exception,
                ClientGone: _answer_nobody,
                Exception: self._answer_bug,
            },
        )
        app.router.redirect_slashes = False  # a redirect is no answer in our shape
        return app

    async def _routes_of(self, part: Part) -> Sequence[StarletteRoute]:
        """The routes of a part with a path of its own. It is imported on a thread."""
        for name in (LATE, part.groups):
            await asyncio.to_thread(entry, name)
        return bound(self.late().groups_of(part), self.core.authenticator)

    async def _late_routes(self) -> Sequence[StarletteRoute]:
        """Every other route, together since they know each other's methods, and behind them the proxy. Late modules are
        imported on a thread, and not the pool's: an abort would wait for the rendering of turns."""
        parts = [part for part in self.core.parts if part.groups and not part.below]
        for name in (LATE, *(part.groups for part in parts)):
            await asyncio.to_thread(entry, name)
        late = (self.late().own_groups(), *map(self.late().groups_of, parts))
        groups = (self, self.create, *(group for groups in late for group in groups))
        proxy = self._proxy(session_paths(row for group in groups for row, _ in rows_of(type(group))))
        return (
            *bound(groups, self.core.authenticator),
            StarletteRoute("/sessions/{id}/{path:path}", proxy.of_session, methods=PROXY_METHODS),
            StarletteRoute("/v1/{path:path}", proxy.of_server, methods=PROXY_METHODS),
        )

    def _proxy(self, own_paths: Mapping[str, Collection[str]]) -> ProxyRoute:
        """The route to pass requests on to the engine, with this server's answers in its place."""
        return ProxyRoute(
            manager=self.core.manager,
            authenticator=self.core.authenticator,
            engine=self.core.services.engine,
            allowed=self.core.settings.proxy_allow,
            own_paths=own_paths,
            local={
                ("GET", "v1/models"): self._models,
                ("POST", "tokenize"): self._tokenize,
                ("POST", "detokenize"): self._detokenize,
            },
            max_body_bytes=self.core.settings.max_body_bytes,
            timeout_s=self.core.settings.request_timeout_s,
            holds_responses=self.core.spoken.held is not None,
        )

    @route(
        "GET /",
        "getFrontPage",
        "Get links to the server's pages",
        answers=one_answer(
            "A page for a browser, which accepts `text/html`; JSON for other clients.",
            {**in_json(FrontPage), "text/html": {"schema": TEXT}},
        ),
        shapes=(FrontPage,),
        needs=Needs.NOTHING,
    )
    async def _front_page(self, request: Request) -> Response:
        return front_page(request)

    @route(
        "GET /health",
        "getHealth",
        "Check whether the server is alive",
        Health,
        needs=Needs.NOTHING,
    )
    async def _health(self, request: Request) -> Response:
        instance_id = self.core.processes.instance_id
        health: Health = {"status": "ok", "instance_id": instance_id, "session_server_instance_id": instance_id}
        return json_response(health)

    @route(
        "GET /ready",
        "getReadiness",
        "Check whether an engine is usable",
        Readiness,
        answers={"503": {"description": "No engine is usable.", "content": in_json(Readiness)}},
        needs=Needs.NOTHING,
        who=All(merge="stenograph.http.merging:readiness", ask=Asking.READINESS),
    )
    async def _ready(self, request: Request) -> Response:
        storage = self.core.manager.sessions.storage
        is_writable = storage is None or storage.store.failure is None
        paused = self.core.services.weights.is_held
        ready = is_writable and not paused and self.core.services.engine.health().state is EngineState.READY
        statuses = () if tag_seen_by(request.scope) else self.core.services.engine.statuses()
        engines = cast("list[WireEngineStatus]", [status.shown() for status in statuses])
        readiness: Readiness = {"ready": ready, "paused": paused, "engines": engines}
        return json_response(readiness, status=200 if ready else 503)

    @route(
        "GET /metrics",
        "getMetrics",
        "Get the metrics",
        answers=one_answer("The metrics in Prometheus' text format.", {"text/plain": {"schema": TEXT}}),
        needs=Needs.NOTHING,
        who=All(merge="stenograph.http.merging:exposition", ask=Asking.WHOEVER),
    )
    async def _metrics(self, request: Request) -> Response:
        # Writing it out takes milliseconds, and no session's state.
        body, content_type = await self.core.services.pool.run(
            self.core.metrics.exposition, num_bytes=INLINE_BELOW_BYTES
        )
        return Response(body, headers={"content-type": content_type})

    @route(
        "GET /openapi.json",
        "getOpenApi",
        "Get this document",
        answers=one_answer("The document, in OpenAPI 3.1.", {JSON: {"schema": {"type": "object"}}}),
        needs=Needs.NOTHING,
    )
    async def _openapi(self, request: Request) -> Response:
        # The first time, it is made.
        body = await self.core.services.pool.run(self.openapi, num_bytes=INLINE_BELOW_BYTES)
        return Response(body, media_type="application/json")

    @route(
        "GET /v1/models",
        "listModels",
        "List the one model",
        ModelList,
        errors=(SessionNotFound, *STORED),
        needs=Needs.TOKEN,
    )
    async def _models(self, request: Request) -> Response:
        if "id" not in request.path_params:
            await self.core.authenticator.session_of(request.scope, wakes=False)  # 404 for a header that names none
        model: Model = {
            "id": self.core.model,
            "object": "model",
            "created": self.started_at,
            "owned_by": "stenograph",
            "max_model_len": self.core.services.engine.capabilities.max_context_tokens,
        }
        models: ModelList = {"object": "list", "data": [model]}
        return json_response(models)

    @route(
        "POST /tokenize",
        "tokenize",
        "Tokenize a text",
        Tokens,
        body=Tokenize,
        errors=(TokenizationFailed,),
    )
    async def _tokenize(self, request: Request) -> Response:
        wire = await self._decoded(request, decode_tokenize)
        encode = self.core.services.renderer.tokenizer.encode
        ids = await self.core.services.pool.run(lambda: encode(wire.prompt), num_bytes=len(wire.prompt))
        limit = self.core.services.engine.capabilities.max_context_tokens
        tokens: Tokens = {"count": len(ids), "max_model_len": limit, "tokens": ids}
        return json_in_pieces(self.core.services.share, tokens)

    @route(
        "POST /detokenize",
        "detokenize",
        "Detokenize tokens",
        Text,
        body=Detokenize,
        errors=(TokenizationFailed,),
    )
    async def _detokenize(self, request: Request) -> Response:
        tokenizer = self.core.services.renderer.tokenizer
        ids = await self._decoded(request, lambda body: decode_detokenize(body, vocab_size=tokenizer.vocab_size))
        text = await self.core.services.pool.run(lambda: tokenizer.decode(ids), num_bytes=ids.itemsize * len(ids))
        body: Text = {"prompt": text}
        return json_in_pieces(self.core.services.share, body)

    async def _decoded(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """The request's body, decoded on a worker if it is large, one at a time."""
        body = await read_json(
            request.scope, request.receive, max_bytes=self.core.settings.max_body_bytes, body_slots=self.body_slots
        )
        if len(body) < LARGE_BODY_BYTES:
            return decode(body)
        async with self.body_slots.decoding():
            return await self.core.services.pool.run(lambda: decode(body), num_bytes=len(body))

    def _error_response(self, error: StenographError) -> Response:
        count_error(self.core.metrics, error)
        refusal = refusal_of(self.core.settings.compat)(error)
        return Response(refusal.content, status_code=refusal.status, headers=dict(refusal.headers))

    async def _answer_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, StenographError)
        return self._error_response(error)

    async def _answer_http_exception(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            allowed = _methods_of(request)
            return self._error_response(MethodNotAllowed(request.method, request.url.path, allowed=allowed))
        return self._error_response(RouteNotFound(f"There is no route {request.url.path}."))

    async def _answer_bug(self, request: Request, error: Exception) -> Response:
        return self._error_response(UnexpectedFailure("The server failed on this request."))


def _methods_of(request: Request) -> set[str]:
    """The methods of a path: Starlette's own `allow` has those of one route only. Proxied routes count only if nothing
    else is there."""
    routes = [
        one for route in request.app.routes for one in (route.routes if isinstance(route, LaterRoutes) else [route])
    ]
    found = [one for one in routes if isinstance(one, StarletteRoute) and one.path_regex.match(request.scope["path"])]
    own = [route for route in found if not route.path.endswith("/{path:path}")]
    return {method for route in own or found for method in route.methods or ()}


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
