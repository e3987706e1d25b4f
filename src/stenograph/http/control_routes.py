"""Every route except the chats, bound to its path: sessions, models, tokens, health, metrics. Starlette."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stenograph.core.errors import (
    MethodNotAllowed,
    RouteNotFound,
    StenographError,
    UnexpectedFailure,
)
from stenograph.core.json_types import Count, Hex32, TokenIds
from stenograph.core.loaded import entry
from stenograph.dialects.base import Refuse
from stenograph.dialects.sessions import decode_detokenize, decode_tokenize
from stenograph.engine.base import Engine, EngineState
from stenograph.http.auth import Doorman
from stenograph.http.bulk_parts import SessionParts
from stenograph.http.bulk_routes import BulkRoutes
from stenograph.http.engine_routes import EngineRoutes
from stenograph.http.front_page import front_page
from stenograph.http.metrics import Metrics
from stenograph.http.processes import Moments
from stenograph.http.proxy_route import PROXY_METHODS, ProxyRoute
from stenograph.http.response_route import HeldResponses
from stenograph.http.session_routes import SessionRoutes
from stenograph.http.storage import BackupRoute
from stenograph.http.waste_route import WasteRoute
from stenograph.http.weight_routes import WeightRoutes
from stenograph.http.wire import ClientGone, count_error, json_in_pieces, json_response, read_json
from stenograph.offload.body_slots import LARGE_BODY_BYTES, BodySlots
from stenograph.offload.pool import INLINE_BELOW_BYTES

T = TypeVar("T")

Endpoint = Callable[[Request], Awaitable[Response]]

CONSOLE = "stenograph.http.console_routes:console_endpoints"


class Health(TypedDict):
    """The server is alive."""

    status: Literal["ok"]
    instance_id: Hex32
    session_server_instance_id: Hex32


class WireEngineStatus(TypedDict):
    """One engine. `name` is its address or its kind. `detail` is a line for the operator, such as why it is not ready.
    `num_running` counts this server's turns there, or is null if they are not counted."""

    engine: str
    name: str
    state: EngineState
    detail: str
    num_running: Count | None


class Readiness(TypedDict):
    """The state of each engine; `ready` if one is usable, and so is the store, where there is one, and turns are let
    in: not while generation is `paused` or new weights come."""

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

    sessions: SessionRoutes
    parts: SessionParts
    moments: Callable[[], Moments]
    backup: BackupRoute
    weights: WeightRoutes
    engines: EngineRoutes
    responses: HeldResponses | None
    doorman: Doorman
    metrics: Metrics
    engine: Engine
    body_slots: BodySlots
    model: str
    started_at: int
    instance_id: str
    max_body_bytes: int
    proxy_allow: tuple[str, ...]
    timeout_s: float
    openapi: Callable[[], bytes]
    refuse: Refuse

    def app(self) -> Starlette:
        """The Starlette application."""
        keyed, agents, sessions, proxy = self._with_key, self._for_agents, self.sessions, self._proxy()
        bulk = BulkRoutes(sessions=sessions, parts=self.parts)
        app = Starlette(
            routes=[
                Route("/", front_page, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/ready", self._ready, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/openapi.json", self._openapi, methods=["GET"]),
                Route("/v1/models", agents(self._models), methods=["GET"]),
                Route("/tokenize", keyed(self._tokenize), methods=["POST"]),
                Route("/detokenize", keyed(self._detokenize), methods=["POST"]),
                *self._admin_routes(),
                *self._console_routes(),
                Route("/model_info", keyed(self.weights.model_info), methods=["GET"]),
                Route("/abort_request", keyed(sessions.abort_all), methods=["POST"]),
                Route("/sessions", keyed(sessions.create), methods=["POST"]),
                Route("/sessions", keyed(sessions.list_sessions), methods=["GET"]),
                Route("/sessions", keyed(bulk.delete), methods=["DELETE"]),
                Route("/samples", keyed(bulk.samples), methods=["POST"]),
                Route("/waste", keyed(WasteRoute(sessions=sessions).get), methods=["GET"]),
                Route("/sessions/{id}", agents(sessions.greet), methods=["HEAD"]),
                Route("/sessions/{id}/api/hello", agents(sessions.greet), methods=["HEAD"]),
                Route("/sessions/{id}", keyed(sessions.get), methods=["GET"]),
                Route("/sessions/{id}", keyed(bulk.delete_one), methods=["DELETE"]),
                Route("/sessions/{id}/samples", keyed(sessions.samples), methods=["POST"]),
                Route("/sessions/{id}/drift", keyed(sessions.drift), methods=["GET"]),
                Route("/sessions/{id}/ledger", keyed(sessions.ledger), methods=["GET"]),
                Route("/sessions/{id}/why", keyed(sessions.why), methods=["GET"]),
                Route("/sessions/{id}/outcome", keyed(sessions.put_outcome), methods=["PUT"]),
                Route("/sessions/{id}/outcome", keyed(sessions.get_outcome), methods=["GET"]),
                Route("/sessions/{id}/abort", keyed(sessions.abort), methods=["POST"]),
                *self._held_routes(),
                Route("/sessions/{id}/{path:path}", proxy.of_session, methods=PROXY_METHODS),
                Route("/v1/{path:path}", proxy.of_server, methods=PROXY_METHODS),
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

    def _admin_routes(self) -> list[Route]:
        """The routes of whoever runs the server: who may chat may not change the policy."""
        admin, weights, engines = self._for_admins, self.weights, self.engines
        return [
            Route("/backup", admin(self.backup.backup), methods=["POST"]),
            Route("/update_weights_from_disk", admin(weights.update_from_disk), methods=["POST"]),
            Route("/pause_generation", admin(weights.pause), methods=["POST"]),
            Route("/continue_generation", admin(weights.resume), methods=["POST"]),
            Route("/flush_cache", admin(weights.flush), methods=["POST"]),
            Route("/update_weight_version", admin(weights.name), methods=["POST"]),
            Route("/engines", admin(engines.list_engines), methods=["GET"]),
            Route("/engines", admin(engines.add), methods=["POST"]),
            Route("/engines/{name:path}", admin(engines.remove), methods=["DELETE"]),
        ]

    def _held_routes(self) -> list[Route]:
        """The replies that sessions hold, where a dialect asks for them again."""
        if self.responses is None:
            return []
        get = self._for_agents(self.responses.get)
        return [
            Route("/sessions/{id}/v1/responses/{response}", get, methods=["GET"]),
            Route("/v1/responses/{response}", get, methods=["GET"]),
        ]

    def _console_routes(self) -> list[Route]:
        """The page, which is for everybody, and its data. The console is imported on a thread when it is first used."""
        made: list[Mapping[str, Endpoint]] = []

        def load() -> Mapping[str, Endpoint]:
            found: Mapping[str, Endpoint] = entry(CONSOLE)(self.sessions, self.parts, self.moments())
            return found

        def page(name: str) -> Endpoint:
            async def answered(request: Request) -> Response:
                if not made:
                    made.append(await self.sessions.pool.run(load, num_bytes=INLINE_BELOW_BYTES))
                return await made[0][name](request)

            return answered

        def data(name: str) -> Endpoint:
            return self._with_key(page(name))

        return [
            Route("/console", page("page"), methods=["GET"]),
            Route("/console/api/now", data("now"), methods=["GET"]),
            Route("/console/api/group", data("group"), methods=["GET"]),
            Route("/console/api/groups", data("groups"), methods=["GET"]),
            Route("/console/api/vocabulary/{hash}", data("vocabulary"), methods=["GET"]),
            Route("/console/api/sessions/{id}", data("session"), methods=["GET"]),
            Route("/console/api/sessions/{id}/turns", data("turns"), methods=["GET"]),
            Route("/console/api/sessions/{id}/drift", data("drift"), methods=["GET"]),
            Route("/console/api/sessions/{id}/tokens", data("tokens"), methods=["GET"]),
            Route("/console/{file:path}", page("file"), methods=["GET"]),
        ]

    def _proxy(self) -> ProxyRoute:
        """The route of what is passed on to the engine, and of what this server answers in its place."""
        return ProxyRoute(
            manager=self.sessions.manager,
            doorman=self.doorman,
            engine=self.engine,
            allowed=self.proxy_allow,
            local={
                ("GET", "v1/models"): self._models,
                ("POST", "tokenize"): self._tokenize,
                ("POST", "detokenize"): self._detokenize,
            },
            max_body_bytes=self.max_body_bytes,
            timeout_s=self.timeout_s,
            holds_responses=self.responses is not None,
        )

    async def _health(self, request: Request) -> Response:
        instance_id = self.instance_id
        health: Health = {"status": "ok", "instance_id": instance_id, "session_server_instance_id": instance_id}
        return json_response(health)

    async def _ready(self, request: Request) -> Response:
        shelf = self.sessions.manager.shelf
        is_writable = shelf is None or shelf.store.failure is None
        paused = self.weights.sync.weights.is_held
        ready = is_writable and not paused and self.engine.health().state is EngineState.READY
        engines: list[WireEngineStatus] = [
            {
                "engine": status.engine,
                "name": status.name,
                "state": status.health.state,
                "detail": status.health.detail or status.note,
                "num_running": status.num_running,
            }
            for status in self.engine.statuses()
        ]
        readiness: Readiness = {"ready": ready, "paused": paused, "engines": engines}
        return json_response(readiness, status=200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        # Writing it out takes milliseconds, and no session's state.
        body, content_type = await self.sessions.pool.run(self.metrics.exposition, num_bytes=INLINE_BELOW_BYTES)
        return Response(body, headers={"content-type": content_type})

    async def _openapi(self, request: Request) -> Response:
        # The first time, it is made.
        body = await self.sessions.pool.run(self.openapi, num_bytes=INLINE_BELOW_BYTES)
        return Response(body, media_type="application/json")

    async def _models(self, request: Request) -> Response:
        if "id" not in request.path_params:
            await self.doorman.session_of(request.scope, wakes=False)  # 404 for a header that names none
        model: Model = {
            "id": self.model,
            "object": "model",
            "created": self.started_at,
            "owned_by": "stenograph",
            "max_model_len": self.engine.capabilities.max_context_tokens,
        }
        models: ModelList = {"object": "list", "data": [model]}
        return json_response(models)

    async def _tokenize(self, request: Request) -> Response:
        wire = await self._decoded(request, decode_tokenize)
        encode = self.sessions.renderer.tokenizer.encode
        ids = await self.sessions.pool.run(lambda: encode(wire.prompt), num_bytes=len(wire.prompt))
        limit = self.engine.capabilities.max_context_tokens
        tokens: Tokens = {"count": len(ids), "max_model_len": limit, "tokens": ids}
        return json_in_pieces(self.sessions.share, tokens)

    async def _detokenize(self, request: Request) -> Response:
        tokenizer = self.sessions.renderer.tokenizer
        ids = await self._decoded(request, lambda body: decode_detokenize(body, vocab_size=tokenizer.vocab_size))
        text = await self.sessions.pool.run(lambda: tokenizer.decode(ids), num_bytes=ids.itemsize * len(ids))
        body: Text = {"prompt": text}
        return json_in_pieces(self.sessions.share, body)

    async def _decoded(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """The request's body, decoded on a worker if it is large, one at a time."""
        body = await read_json(
            request.scope, request.receive, max_bytes=self.max_body_bytes, body_slots=self.body_slots
        )
        if len(body) < LARGE_BODY_BYTES:
            return decode(body)
        async with self.body_slots.decoding():
            return await self.sessions.pool.run(lambda: decode(body), num_bytes=len(body))

    def _for_agents(self, endpoint: Endpoint) -> Endpoint:
        """An endpoint that a session's token is good for, beside the keys."""

        async def checked(request: Request) -> Response:
            self.doorman.check_agent(request.scope)
            return await endpoint(request)

        return checked

    def _with_key(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            self.doorman.check_key(request.scope)
            return await endpoint(request)

        return checked

    def _for_admins(self, endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            self.doorman.check_admin(request.scope)
            return await endpoint(request)

        return checked

    def _error_response(self, error: StenographError) -> Response:
        count_error(self.metrics, error)
        refusal = self.refuse(error)
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
    app: Starlette = request.app
    found = [r for r in app.routes if isinstance(r, Route) and r.path_regex.match(request.scope["path"])]
    own = [route for route in found if not route.path.endswith("/{path:path}")]
    return {method for route in own or found for method in route.methods or ()}


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
