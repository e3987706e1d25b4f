"""Every route and method as /openapi.json shows it, and the errors that each may end with. Pure: facts of a server to
`Operation`s. A test compares them with the routes that are really bound.

Owns what is documented of a route beside its path; what a body looks like is openapi_schemas.py's business, and how all
of it is written openapi.py's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stenograph.core.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    Draining,
    EngineUnavailable,
    HistoryMismatch,
    IdempotencyMismatch,
    InvalidJson,
    InvalidRequest,
    LimitExceeded,
    SamplesInconsistent,
    SessionBusy,
    SessionInvariant,
    SessionNotFound,
    StenographError,
    TokenizationFailed,
    TruncatedGeneration,
    UnrenderableMessage,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from stenograph.core.settings import UnknownFields
from stenograph.export.arrow import MEDIA_TYPE as ARROW
from stenograph.http.openapi_schemas import REF, Schema
from stenograph.http.proxy_route import OWN_PATHS, PROXY_METHODS
from stenograph.http.turn_route import REMAINING, SESSION_REMAINING

Errors = tuple[type[StenographError], ...]

JSON = "application/json"
_ID: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
ANY: dict[str, Schema] = {"*/*": {}}

_READS_BODY: Errors = (InvalidJson, InvalidRequest, BodyTooLarge)
_CHAT: Errors = (
    *_READS_BODY,
    HistoryMismatch,
    UnrenderableMessage,
    ContextLengthExceeded,
    SessionNotFound,
    SessionBusy,
    TruncatedGeneration,
    IdempotencyMismatch,
    LimitExceeded,
    SessionInvariant,
    TokenizationFailed,
    UpstreamInvalid,
    UpstreamUnreachable,
    UpstreamTimeout,
    Draining,
    EngineUnavailable,
)
_PROXIED: Errors = (InvalidRequest, SessionNotFound, BodyTooLarge, UpstreamUnreachable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What of a server its document depends on.

    `matchers` are the names that a session may be opened with. `forwards`: the engine is a server, so that the
    allow-list's paths are passed on to it, and it may write replies itself; else `local` are the methods and paths of
    the list that are answered in its place.
    """

    has_keys: bool
    unknown_fields: UnknownFields
    matchers: tuple[str, ...]
    vocab_size: int
    proxy_allow: tuple[str, ...]
    forwards: bool
    local: tuple[tuple[str, str], ...] = (("GET", "v1/models"), ("POST", "tokenize"), ("POST", "detokenize"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `answers` are those without an error, by status, each with its content by media type."""

    method: str
    path: str
    id: str
    summary: str
    answers: Mapping[str, Schema]
    errors: Errors = ()
    parameters: tuple[Schema, ...] = ()
    body: Schema | None = None
    asks_key: bool = True

    @property
    def name(self) -> str:
        """As docs/http-api.md names it: `POST /sessions`."""
        return f"{self.method} {self.path}"


def operations(described: Described) -> Iterator[Operation]:
    """Every method of every path that the server has, `HEAD` aside."""
    yield from _PROBES
    yield from _TOKENS
    yield from _SESSIONS
    for on_session in (True, False):
        yield _chat(described, on_session=on_session)
    for on_session in (True, False):
        yield _completion(described, on_session=on_session)
    if described.forwards:
        yield from _forwarded(described)
    else:
        yield from _answered_locally(described)


# --- building blocks ------------------------------------------------------------------------------------------------


def _ref(name: str) -> Schema:
    return {"$ref": REF + name}


def _json(name: str, description: str, **more: Any) -> Schema:
    return {"description": description, "content": {JSON: {"schema": _ref(name)}}, **more}


def _body(name: str, *, required: bool = True) -> Schema:
    return {"required": required, "content": {JSON: {"schema": _ref(name)}}}


def _query(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _header(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "description": description, "schema": schema}


_PATH_ID: Schema = {"name": "id", "in": "path", "required": True, "description": "The session.", "schema": _ID}


def _links(*ids: str) -> Schema:
    """What can be done with a session that has just been opened."""
    return {id_: {"operationId": id_, "parameters": {"path.id": "$response.body#/session_id"}} for id_ in ids}


# --- the routes -----------------------------------------------------------------------------------------------------

_PROBES = (
    Operation(
        method="GET",
        path="/health",
        id="getHealth",
        summary="Whether the server is alive",
        answers={"200": _json("Health", "It is.")},
        asks_key=False,
    ),
    Operation(
        method="GET",
        path="/ready",
        id="getReadiness",
        summary="Whether an engine is usable",
        answers={"200": _json("Readiness", "One is."), "503": _json("Readiness", "None is.")},
        asks_key=False,
    ),
    Operation(
        method="GET",
        path="/metrics",
        id="getMetrics",
        summary="The metrics",
        answers={
            "200": {
                "description": "Prometheus' text format.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
        asks_key=False,
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        id="getOpenApi",
        summary="This document",
        answers={"200": {"description": "OpenAPI 3.1.", "content": {JSON: {"schema": {"type": "object"}}}}},
        asks_key=False,
    ),
)

_MODELS = _json("ModelList", "The one model.")
_TOKENIZED = _json("Tokens", "The text's tokens.")
_DETOKENIZED = _json("Text", "The tokens' text.")

_TOKENS = (
    Operation(
        method="GET",
        path="/v1/models",
        id="listModels",
        summary="The model",
        answers={"200": _MODELS},
        errors=(SessionNotFound,),
    ),
    Operation(
        method="POST",
        path="/tokenize",
        id="tokenize",
        summary="A text as tokens",
        body=_body("Tokenize"),
        answers={"200": _TOKENIZED},
        errors=(*_READS_BODY, TokenizationFailed),
    ),
    Operation(
        method="POST",
        path="/detokenize",
        id="detokenize",
        summary="Tokens as text",
        body=_body("Detokenize"),
        answers={"200": _DETOKENIZED},
        errors=(*_READS_BODY, TokenizationFailed),
    ),
)

_SESSIONS = (
    Operation(
        method="POST",
        path="/sessions",
        id="openSession",
        summary="Open a session",
        body=_body("CreateSession", required=False),
        answers={
            "200": _json(
                "OpenedSession",
                "It is open.",
                links=_links(
                    "getSession",
                    "chatOnSession",
                    "completeOnSession",
                    "getSamples",
                    "getDrift",
                    "abortSession",
                    "deleteSession",
                ),
            )
        },
        errors=(*_READS_BODY, LimitExceeded, Draining),
    ),
    Operation(
        method="GET",
        path="/sessions",
        id="listSessions",
        summary="Sessions, oldest first",
        parameters=(
            _query("limit", "Most sessions.", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
            _query("after", "The session that the page begins after.", _ID),
        ),
        answers={"200": _json("SessionPage", "A page of sessions.")},
        errors=(InvalidRequest, SessionNotFound),
    ),
    Operation(
        method="GET",
        path="/sessions/{id}",
        id="getSession",
        summary="A session's records and metadata",
        parameters=(
            _PATH_ID,
            _query(
                "records",
                "`delta` leaves out what stands in earlier records.",
                {"type": "string", "enum": ["full", "delta"], "default": "full"},
            ),
        ),
        answers={"200": _json("SessionView", "The session.")},
        errors=(InvalidRequest, SessionNotFound, TokenizationFailed),
    ),
    Operation(
        method="DELETE",
        path="/sessions/{id}",
        id="deleteSession",
        summary="Close a session and forget it",
        parameters=(_PATH_ID,),
        answers={"204": {"description": "It is gone."}},
        errors=(SessionNotFound,),
    ),
    Operation(
        method="POST",
        path="/sessions/{id}/samples",
        id="getSamples",
        summary="A session's training samples",
        parameters=(_PATH_ID,),
        body=_body("SamplesRequest", required=False),
        answers={
            "200": {
                "description": "The samples, in the `format` that was asked for: safetensors, Arrow, or JSON.",
                "content": {"application/octet-stream": {}, ARROW: {}, JSON: {"schema": _ref("JsonSamples")}},
            }
        },
        errors=(*_READS_BODY, SessionNotFound, SamplesInconsistent, TokenizationFailed),
    ),
    Operation(
        method="GET",
        path="/sessions/{id}/drift",
        id="getDrift",
        summary="The drift of each line",
        parameters=(_PATH_ID,),
        answers={"200": _json("DriftReports", "The reports.")},
        errors=(SessionNotFound, TokenizationFailed),
    ),
    Operation(
        method="POST",
        path="/sessions/{id}/abort",
        id="abortSession",
        summary="End the session's running turns",
        parameters=(_PATH_ID,),
        body=_body("Nothing", required=False),
        answers={"200": _json("Aborted", "They were told to.")},
        errors=(*_READS_BODY, SessionNotFound),
    ),
    Operation(
        method="POST",
        path="/abort_request",
        id="abortAll",
        summary="End every running turn",
        body=_body("AbortRequest"),
        answers={"200": _json("Aborted", "They were told to.")},
        errors=_READS_BODY,
    ),
)

_SESSION_HEADER = _header(
    "X-Session-Id", "The session of a request whose path names none. Without it, see docs/http-api.md.", _ID
)


_RETRIES = (
    _header(
        "Idempotency-Key",
        "A retry has its first request's: it joins that turn, or is given its reply again.",
        {"type": "string"},
    ),
    _header(
        "x-stainless-retry-count",
        "Above 0, a request with the last one's body is its retry; other than digits is 0.",
        {"type": "string"},
    ),
)
_TURN_HEADERS: dict[str, Schema] = {
    "x-request-id": {"required": True, "schema": _ID},
    "server-timing": {
        "description": "The turn's stages in milliseconds.",
        "required": True,
        "schema": {"type": "string"},
    },
    REMAINING: {
        "description": "How many tokens the model's context has left after the turn, of a stream before it draws.",
        "schema": {"type": "integer"},
    },
    SESSION_REMAINING: {
        "description": "The same of the session's max_total_tokens, where it has one.",
        "schema": {"type": "integer"},
    },
}


def _chat(described: Described, *, on_session: bool) -> Operation:
    """OpenAI chat. An engine that is a server may write the reply itself, or refuse in its own words."""
    return Operation(
        method="POST",
        path="/sessions/{id}/v1/chat/completions" if on_session else "/v1/chat/completions",
        id="chatOnSession" if on_session else "chat",
        summary="OpenAI chat on a session" if on_session else "OpenAI chat on the session that a header names, or none",
        parameters=(_PATH_ID if on_session else _SESSION_HEADER, *_RETRIES),
        body=_body("ChatRequest"),
        answers=_turn_answers(described, "ChatCompletion", "ChatCompletionChunk"),
        errors=_CHAT,
    )


def _completion(described: Described, *, on_session: bool) -> Operation:
    """OpenAI completions. An engine that is a server may refuse in its own words."""
    return Operation(
        method="POST",
        path="/sessions/{id}/v1/completions" if on_session else "/v1/completions",
        id="completeOnSession" if on_session else "complete",
        summary="OpenAI completions on a session"
        if on_session
        else "OpenAI completions on the session that a header names, or none",
        parameters=(_PATH_ID if on_session else _SESSION_HEADER, *_RETRIES),
        body=_body("CompletionRequest"),
        answers=_turn_answers(described, "TextCompletion", "TextCompletion"),
        errors=_CHAT,
    )


def _turn_answers(described: Described, whole: str, event: str) -> dict[str, Schema]:
    reply: Schema = {"type": "object"} if described.forwards else _ref(whole)
    answers: dict[str, Schema] = {
        "200": {
            "description": f"The reply; with `stream`, events with a `{event}` each, then `[DONE]`."
            " A failure in mid-stream is an event with an `ErrorBody`, and no `[DONE]`.",
            "headers": _TURN_HEADERS,
            "content": {JSON: {"schema": reply}, "text/event-stream": {}},
        }
    }
    if described.forwards:
        answers["200"]["content"] |= ANY
        answers["default"] = {"description": "What the engine refused the turn with.", "content": ANY}
    return answers


def _passed_paths(described: Described) -> Iterator[tuple[str, str, bool]]:
    """Paths of the allow-list where they are served: the entry, the whole path, whether it names a session."""
    for entry in described.proxy_allow:
        if entry not in OWN_PATHS:
            yield entry, f"/sessions/{{id}}/{entry}", True
            if entry.startswith("v1/"):
                yield entry, f"/{entry}", False


def _operation_id(method: str, path: str) -> str:
    return "pass_" + method.lower() + path.replace("{id}", "id").replace("/", "_").replace(".", "_")


def _forwarded(described: Described) -> Iterator[Operation]:
    """What goes to the engine as it comes."""
    own = {operation.name for operation in (*_TOKENS, *_SESSIONS)}
    for entry, path, on_session in _passed_paths(described):
        for method in PROXY_METHODS:
            if method == "HEAD" or f"{method} {path}" in own:
                continue
            yield Operation(
                method=method,
                path=path,
                id=_operation_id(method, path),
                summary=f"{entry} of the engine, unrecorded",
                parameters=(_PATH_ID,) if on_session else (_SESSION_HEADER,),
                body={"required": False, "content": ANY},
                answers={"default": {"description": "What the engine answers.", "content": ANY}},
                errors=_PROXIED,
            )


def _answered_locally(described: Described) -> Iterator[Operation]:
    """What this server answers in the place of an engine that is no server."""
    own = {(operation.method, operation.path.removeprefix("/")): operation for operation in _TOKENS}
    for entry, path, on_session in _passed_paths(described):
        for method, local in described.local:
            if local != entry or not on_session:
                continue
            model = own[method, entry]
            yield Operation(
                method=method,
                path=path,
                id=_operation_id(method, path),
                summary=f"{model.summary}, as {model.path} says",
                parameters=(_PATH_ID,),
                body=model.body,
                answers=model.answers,
                errors=(*model.errors, SessionNotFound),
            )
