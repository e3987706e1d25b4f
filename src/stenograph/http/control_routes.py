"""Every route but the chats: sessions, samples, aborts, models, tokens, health. Starlette."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stenograph.core.errors import (
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    StenographError,
    UnexpectedFailure,
)
from stenograph.core.types import token_ids
from stenograph.engine.base import Engine, EngineState
from stenograph.export.records import session_summary, session_view
from stenograph.export.safetensors import to_safetensors
from stenograph.export.samples import assemble, to_json
from stenograph.http.auth import Doorman
from stenograph.http.wire import ClientGone, read_body
from stenograph.offload.pool import CpuPool
from stenograph.protocol.openai_errors import error_body, error_headers
from stenograph.protocol.sessions import (
    SamplesRequest,
    decode_abort,
    decode_create,
    decode_detokenize,
    decode_samples,
    decode_tokenize,
)
from stenograph.render.tokenizer import Tokenizer
from stenograph.session.history import CommittedTurn
from stenograph.session.manager import Session, SessionManager, SessionOptions
from stenograph.session.matching import MatcherName

MAX_PAGE = 1000
"""Most sessions that one `GET /sessions` lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRoutes:
    """The routes of one server. Methods are endpoints; `app` binds them to paths."""

    manager: SessionManager
    doorman: Doorman
    engine: Engine
    tokenizer: Tokenizer
    pool: CpuPool
    model: str
    started_at: int
    instance_id: str
    max_body_bytes: int

    def app(self) -> Starlette:
        """The Starlette application."""
        keyed = self._with_key
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/ready", self._ready, methods=["GET"]),
                Route("/v1/models", keyed(self._models), methods=["GET"]),
                Route("/tokenize", keyed(self._tokenize), methods=["POST"]),
                Route("/detokenize", keyed(self._detokenize), methods=["POST"]),
                Route("/abort_request", keyed(self._abort_all), methods=["POST"]),
                Route("/sessions", keyed(self._create), methods=["POST"]),
                Route("/sessions", keyed(self._list), methods=["GET"]),
                Route("/sessions/{id}", keyed(self._get), methods=["GET"]),
                Route("/sessions/{id}", keyed(self._delete), methods=["DELETE"]),
                Route("/sessions/{id}/samples", keyed(self._samples), methods=["POST"]),
                Route("/sessions/{id}/abort", keyed(self._abort), methods=["POST"]),
                Route("/sessions/{id}/v1/models", keyed(self._models_of_session), methods=["GET"]),
            ],
            exception_handlers={
                StenographError: _answer_error,
                HTTPException: _answer_http_exception,
                ClientGone: _answer_nobody,
                Exception: _answer_bug,
            },
        )

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok", "instance_id": self.instance_id, "session_server_instance_id": self.instance_id})

    async def _ready(self, request: Request) -> Response:
        health = self.engine.health()
        ready = health.state is EngineState.READY
        engine = {"engine": self.engine.capabilities.engine, "state": health.state, "detail": health.detail}
        return _json({"ready": ready, "engines": [engine]}, status=200 if ready else 503)

    async def _models(self, request: Request) -> Response:
        capabilities = self.engine.capabilities
        model = {
            "id": self.model,
            "object": "model",
            "created": self.started_at,
            "owned_by": "stenograph",
            "max_model_len": capabilities.max_context_tokens,
        }
        return _json({"object": "list", "data": [model]})

    async def _models_of_session(self, request: Request) -> Response:
        self._session(request)
        return await self._models(request)

    async def _tokenize(self, request: Request) -> Response:
        wire = decode_tokenize(await self._body(request))
        ids = await self.pool.run(lambda: self.tokenizer.encode(wire.prompt), num_bytes=len(wire.prompt))
        limit = self.engine.capabilities.max_context_tokens
        return _json({"count": len(ids), "max_model_len": limit, "tokens": ids.tolist()})

    async def _detokenize(self, request: Request) -> Response:
        wire = decode_detokenize(await self._body(request))
        if any(id_ >= self.tokenizer.vocab_size for id_ in wire.tokens):
            raise InvalidRequest(f"Token ids are below {self.tokenizer.vocab_size}.", param="/tokens")
        text = await self.pool.run(
            lambda: self.tokenizer.decode(token_ids(wire.tokens)), num_bytes=4 * len(wire.tokens)
        )
        return _json({"prompt": text})

    async def _create(self, request: Request) -> Response:
        wire = decode_create(await self._body(request))
        options = SessionOptions(
            matcher=_matcher(wire.matcher),
            metadata=wire.metadata or {},
            max_turns=wire.max_turns,
            max_total_tokens=wire.max_total_tokens,
            template_kwargs=wire.chat_template_kwargs or {},
        )
        session = self.manager.create(options)
        base = str(request.base_url).rstrip("/")
        return _json({"session_id": session.id, "base_url": f"{base}/sessions/{session.id}/v1"})

    async def _list(self, request: Request) -> Response:
        limit = request.query_params.get("limit", "100")
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4) or not 1 <= int(limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit must be a number from 1 to {MAX_PAGE}, got {limit[:20]!r}.", param="/limit")
        page = self.manager.page(limit=int(limit) + 1, after=request.query_params.get("after"))
        shown = page[: int(limit)]
        more = shown[-1].id if len(page) > len(shown) else None
        return _json({"sessions": [session_summary(session) for session in shown], "next": more})

    async def _get(self, request: Request) -> Response:
        return _json(session_view(self._session(request)))

    async def _delete(self, request: Request) -> Response:
        await self.manager.delete(request.path_params["id"])
        return Response(status_code=204)

    async def _abort(self, request: Request) -> Response:
        return _json({"aborted": await self.manager.abort(self._session(request).id)})

    async def _abort_all(self, request: Request) -> Response:
        decode_abort(await self._body(request))
        return _json({"aborted": await self.manager.abort(None)})

    async def _samples(self, request: Request) -> Response:
        wire = decode_samples(await self._body(request))
        session = self._session(request)
        line = tuple(session.history.turns)
        content, media_type = await self.pool.run(
            lambda: self._encode_samples(line, session.options.metadata, wire),
            num_bytes=8 * sum(turn.num_tokens for turn in line),
        )
        return Response(content, media_type=media_type)

    def _encode_samples(
        self, line: Sequence[CommittedTurn], metadata: Mapping[str, object], wire: SamplesRequest
    ) -> tuple[bytes, str]:
        """The samples of a line and their media type. Touches no session: it runs on a worker."""
        merged = {**metadata, **(wire.metadata or {})}
        samples = (
            [assemble(line, decode=self.tokenizer.decode, max_seq_len=wire.max_seq_len, metadata=merged)]
            if line
            else []
        )
        empty_reason = None if samples else "the session has no committed turn"
        if wire.format != "json":
            payload = to_safetensors(samples, session_metadata=metadata, empty_reason=empty_reason)
            return payload, "application/octet-stream"
        token_text = self.tokenizer.token_text if wire.token_texts else None
        body = {
            "samples": [to_json(sample, token_text=token_text) for sample in samples],
            "session_metadata": metadata,
            "empty_reason": empty_reason,
        }
        return msgspec.json.encode(body), "application/json"

    def _session(self, request: Request) -> Session:
        return self.manager.get(request.path_params["id"])

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, max_bytes=self.max_body_bytes)

    def _with_key(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            self.doorman.check_key(request.scope["headers"])
            return await endpoint(request)

        return checked


def _matcher(name: str | None) -> MatcherName:
    if name is None:
        return MatcherName.HARNESS
    try:
        return MatcherName(name)
    except ValueError as error:
        known = ", ".join(MatcherName)
        raise InvalidRequest(f"matcher must be one of {known}, got {name!r}.", param="/matcher") from error


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def error_response(error: StenographError) -> Response:
    """An error as a Starlette response."""
    return Response(
        error_body(error),
        status_code=error.status,
        media_type="application/json",
        headers=dict(error_headers(error)),
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StenographError)
    return error_response(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return error_response(MethodNotAllowed(f"{request.method} is not a method of {request.url.path}."))
    return error_response(RouteNotFound(f"There is no route {request.url.path}."))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    return error_response(UnexpectedFailure("The server failed on this request."))
