"""Every route and method of /openapi.json, with the errors that it may end with. Pure: facts of a server to
`Operation`s. A test compares them with the routes that are really bound.

Owns the documentation of a route. schemas.py owns the shape of a body, and document.py writes the document.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from stenograph.core.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    Draining,
    EngineUnavailable,
    HistoryMismatch,
    IdempotencyMismatch,
    InvalidRequest,
    LimitExceeded,
    PreviousResponseNotFound,
    RouteNotFound,
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
from stenograph.dialects.anthropic.dialect import COUNT_TOKENS_PATH, MESSAGES_PATH, CountedTokens
from stenograph.dialects.anthropic.errors import MessagesErrorBody
from stenograph.dialects.anthropic.fields import WireMessagesRequest
from stenograph.dialects.anthropic.reply import FINISH_HEADER, MessagesReply
from stenograph.dialects.gemini.dialect import COUNT, GENERATE, STREAM, TokenCount
from stenograph.dialects.gemini.errors import GeminiErrorBody
from stenograph.dialects.gemini.fields import WireGenerateRequest
from stenograph.dialects.openai.chat_fields import WireChatRequest
from stenograph.dialects.openai.chat_reply import ChatCompletion, ChatCompletionChunk
from stenograph.dialects.openai.completions_fields import WireCompletionRequest
from stenograph.dialects.openai.completions_reply import TextCompletion
from stenograph.dialects.openai.dialect import CHAT_PATH, COMPLETIONS_PATH
from stenograph.dialects.openai.errors import ErrorBody
from stenograph.dialects.responses.fields import WireResponsesRequest
from stenograph.dialects.responses.reply import ResponseBody
from stenograph.dialects.responses.request import RESPONSES_PATH
from stenograph.dialects.responses.stream import ResponseEvent
from stenograph.dialects.sessions import AbortRequest, CreateSession, Detokenize, Nothing, SamplesRequest, Tokenize
from stenograph.export.arrow import MEDIA_TYPE as ARROW
from stenograph.export.ledger_rows import LedgerPage
from stenograph.export.records import SessionView
from stenograph.http.control_routes import Health, ModelList, Readiness, Text, Tokens
from stenograph.http.front_page import FrontPage
from stenograph.http.openapi.gemini_schemas import GEMINI_REPLIES
from stenograph.http.openapi.schemas import Described, Schema, ref
from stenograph.http.proxy_route import OWN_PATHS, PROXY_METHODS
from stenograph.http.session_routes import MAX_PAGE, Aborted, DriftReports, JsonSamples, OpenedSession, SessionPage
from stenograph.http.turn_route import REMAINING, SESSION_REMAINING

Errors = tuple[type[StenographError], ...]

JSON = "application/json"
TURN_PATHS = (CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, COUNT_TOKENS_PATH, RESPONSES_PATH)
ID: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
ANY: dict[str, Schema] = {"*/*": {}}

_TURN: Errors = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `body` and `reply` are the types of a request and of its 200 in JSON.

    `answers` are further ones without an error, by status; `links` the operations that a reply's `session_id` leads
    to. `errors` and `parameters` leave out those that follow from the path and from a body in JSON. `error_body` is the
    shape of its errors.
    """

    method: str
    path: str
    id: str
    summary: str
    reply: type | None = None
    body: type | None = None
    answers: Mapping[str, Schema] = field(default_factory=dict[str, Schema])
    links: tuple[str, ...] = ()
    errors: Errors = ()
    parameters: tuple[Schema, ...] = ()
    error_body: type = ErrorBody

    @property
    def name(self) -> str:
        """As docs/http-api.md names it: `POST /sessions`."""
        return f"{self.method} {self.path}"


def operations(described: Described) -> Iterator[Operation]:
    """Every method of every path that the server has, `HEAD` aside."""
    yield from _PROBES
    yield from _TOKENS
    yield from _SESSIONS
    yield from _turns(described)
    yield from _messages()
    yield from _HELD
    yield from _GEMINI
    yield from _forwarded(described) if described.forwards else _answered_locally(described)


# --- building blocks ------------------------------------------------------------------------------------------------


def in_json(kind: type) -> dict[str, Schema]:
    """JSON content with the schema of a type."""
    return {JSON: {"schema": {"$ref": ref(kind)}}}


def _operation(name: str, id_: str, summary: str, reply: type | None = None, **more: Any) -> Operation:
    method, path = name.split()
    return Operation(method=method, path=path, id=id_, summary=summary, reply=reply, **more)


def _ok(description: str, content: Schema) -> dict[str, Schema]:
    """The one answer of an operation whose reply is not JSON alone."""
    return {"200": {"description": description, "content": content}}


def _parameter(where: str, name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": where, "description": description, "schema": schema}


# --- the routes -----------------------------------------------------------------------------------------------------

_TEXT: Schema = {"type": "string"}

_PROBES = (
    _operation(
        "GET /",
        "getFrontPage",
        "Get links to the server's pages",
        answers=_ok(
            "A page for a browser, which accepts `text/html`; JSON for other clients.",
            {**in_json(FrontPage), "text/html": {"schema": _TEXT}},
        ),
    ),
    _operation("GET /health", "getHealth", "Check whether the server is alive", Health),
    _operation(
        "GET /ready",
        "getReadiness",
        "Check whether an engine is usable",
        Readiness,
        answers={"503": {"description": "No engine is usable.", "content": in_json(Readiness)}},
    ),
    _operation(
        "GET /metrics",
        "getMetrics",
        "Get the metrics",
        answers=_ok("The metrics in Prometheus' text format.", {"text/plain": {"schema": _TEXT}}),
    ),
    _operation(
        "GET /openapi.json",
        "getOpenApi",
        "Get this document",
        answers=_ok("The document, in OpenAPI 3.1.", {JSON: {"schema": {"type": "object"}}}),
    ),
)

_TOKENS = (
    _operation("GET /v1/models", "listModels", "List the one model", ModelList, errors=(SessionNotFound,)),
    _operation("POST /tokenize", "tokenize", "Tokenize a text", Tokens, body=Tokenize, errors=(TokenizationFailed,)),
    _operation(
        "POST /detokenize", "detokenize", "Detokenize tokens", Text, body=Detokenize, errors=(TokenizationFailed,)
    ),
)

_ON_OPENED = (
    "getSession", "chatOnSession", "completeOnSession", "getSamples", "getDrift", "getLedger", "abortSession",
    "deleteSession",
)  # fmt: skip
_LIMIT: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 100}
_PAGE = (
    _parameter("query", "limit", "The most sessions that a page has.", _LIMIT),
    _parameter("query", "after", "The page begins after this session.", ID),
)
_FULL_OR_DELTA: Schema = {"type": "string", "enum": ["full", "delta"], "default": "full"}
_RECORDS = _parameter("query", "records", "`delta` leaves out what earlier records contain.", _FULL_OR_DELTA)
_STRAND = _parameter(
    "query", "strand", "The strand whose line is shown, the main one's by default.", {"type": "integer", "minimum": 0}
)
_LEDGER_PAGE = (
    _parameter("query", "limit", "The most requests that a page has.", {**_LIMIT, "default": MAX_PAGE}),
    _parameter("query", "after", "The page begins after this number.", {"type": "integer", "minimum": 0}),
)

_SESSIONS = (
    _operation(
        "POST /sessions",
        "openSession",
        "Open a session",
        OpenedSession,
        body=CreateSession,
        links=_ON_OPENED,
        errors=(LimitExceeded, Draining),
    ),
    _operation(
        "GET /sessions",
        "listSessions",
        "List sessions, oldest first",
        SessionPage,
        parameters=_PAGE,
        errors=(InvalidRequest, SessionNotFound),
    ),
    _operation(
        "GET /sessions/{id}",
        "getSession",
        "Get a session's records and metadata",
        SessionView,
        parameters=(_RECORDS, _STRAND),
        errors=(InvalidRequest, TokenizationFailed),
    ),
    _operation(
        "DELETE /sessions/{id}",
        "deleteSession",
        "Delete a session",
        answers={"204": {"description": "The session is deleted."}},
    ),
    _operation(
        "POST /sessions/{id}/samples",
        "getSamples",
        "Get a session's training samples",
        body=SamplesRequest,
        answers=_ok(
            "The samples in the requested `format`: safetensors, Arrow, or JSON.",
            {"application/octet-stream": {}, ARROW: {}, **in_json(JsonSamples)},
        ),
        errors=(SamplesInconsistent, TokenizationFailed),
    ),
    _operation(
        "GET /sessions/{id}/drift", "getDrift", "Get the drift of each line", DriftReports, errors=(TokenizationFailed,)
    ),
    _operation(
        "GET /sessions/{id}/ledger",
        "getLedger",
        "Get the chats and completions that named the session",
        LedgerPage,
        parameters=_LEDGER_PAGE,
        errors=(InvalidRequest,),
    ),
    _operation("POST /sessions/{id}/abort", "abortSession", "End the session's running turns", Aborted, body=Nothing),
    _operation("POST /abort_request", "abortAll", "End every running turn", Aborted, body=AbortRequest),
)

_SESSION_HEADER = _parameter(
    "header",
    "X-Session-Id",
    "The session, where the path names none. docs/http-api.md says what happens without it.",
    ID,
)
_RETRIES = (
    _parameter(
        "header",
        "Idempotency-Key",
        "A retry sends the key of its first request. It joins that request's turn, or gets its reply again.",
        {"type": "string"},
    ),
    _parameter(
        "header",
        "x-stainless-retry-count",
        "If above 0, a request with the same body as the last one is its retry. Anything but digits counts as 0.",
        {"type": "string"},
    ),
)
_TURN_HEADERS: dict[str, Schema] = {
    "x-request-id": {"required": True, "schema": ID},
    "server-timing": {
        "description": "The duration of each of the turn's stages, in milliseconds.",
        "required": True,
        "schema": {"type": "string"},
    },
    REMAINING: {
        "description": "Tokens left in the model's context after the turn; for a stream, before sampling begins.",
        "schema": {"type": "integer"},
    },
    SESSION_REMAINING: {
        "description": "Tokens left of the session's `max_total_tokens`, if it has that limit.",
        "schema": {"type": "integer"},
    },
}


def _turns(described: Described) -> Iterator[Operation]:
    """OpenAI chat, completions and responses: each on the session of its path, and on that of a header."""
    chat = _turn_answers(described, ChatCompletion, ChatCompletionChunk)
    completion = _turn_answers(described, TextCompletion, TextCompletion)
    for what, id_, path, body, answers in (
        ("chat", "chat", CHAT_PATH, WireChatRequest, chat),
        ("completions", "complete", COMPLETIONS_PATH, WireCompletionRequest, completion),
        ("responses", "respond", RESPONSES_PATH, WireResponsesRequest, _response_answers(described)),
    ):
        on_session = _operation(
            f"POST /sessions/{{id}}{path}",
            f"{id_}OnSession",
            f"OpenAI {what} on a session",
            parameters=_RETRIES,
            body=body,
            answers=answers,
            errors=(*_TURN, PreviousResponseNotFound) if path == RESPONSES_PATH else _TURN,
        )
        yield on_session
        yield replace(
            on_session,
            path=path,
            id=id_,
            summary=f"OpenAI {what} on the session that a header names, or none",
            parameters=(_SESSION_HEADER, *_RETRIES),
        )


def _messages() -> Iterator[Operation]:
    """Anthropic's Messages and the counting of tokens: each on the session of its path, and on that of a header."""
    aborted: Schema = {"description": "`abort` of a reply that was aborted.", "schema": {"const": "abort"}}
    reply: Schema = {
        "description": "The reply. A stream has Anthropic's events, `message_stop` the last. One that fails ends with"
        " the event `error`, a `MessagesErrorBody`.",
        "headers": {**_TURN_HEADERS, FINISH_HEADER: aborted},
        "content": {**in_json(MessagesReply), "text/event-stream": {}},
    }
    turn = _operation(
        f"POST /sessions/{{id}}{MESSAGES_PATH}",
        "messageOnSession",
        "Anthropic Messages on a session",
        parameters=_RETRIES,
        body=WireMessagesRequest,
        answers={"200": reply},
        errors=_TURN,
        error_body=MessagesErrorBody,
    )
    count = _operation(
        f"POST /sessions/{{id}}{COUNT_TOKENS_PATH}",
        "countTokensOnSession",
        "Count the tokens of a request to Messages on a session",
        CountedTokens,
        body=WireMessagesRequest,
        errors=(UnrenderableMessage, SessionNotFound, TokenizationFailed),
        error_body=MessagesErrorBody,
    )
    for one, path, id_ in ((turn, MESSAGES_PATH, "message"), (count, COUNT_TOKENS_PATH, "countTokens")):
        yield one
        yield replace(
            one,
            path=path,
            id=id_,
            summary=f"{one.summary.removesuffix(' on a session')} on the session that a header names, or none",
            parameters=(_SESSION_HEADER, *one.parameters),
        )


_MODEL = _parameter("path", "model", "Any name: there is one model.", {"type": "string", "minLength": 1})
_SSE = _parameter("query", "alt", "`sse` for events; else the stream is a JSON list.", {"enum": ["sse", "json"]})


def _gemini() -> Iterator[Operation]:
    """Gemini's methods: each on the session of its path, and on that of a header. `/v1/models/…` is the same."""
    for prefix, suffix, where in (
        ("/sessions/{id}", "OnSession", "on a session"),
        ("", "", "on the session that a header names, or none"),
    ):
        ours = () if prefix else (_SESSION_HEADER,)
        for method in (GENERATE, STREAM):
            reply: Schema = {"headers": _TURN_HEADERS, **GEMINI_REPLIES[method]}
            yield _operation(
                f"POST {prefix}/v1beta/models/{{model}}:{method}",
                f"{method}{suffix}",
                f"Gemini's {method} {where}",
                body=WireGenerateRequest,
                parameters=({**_MODEL, "required": True}, *ours, *_RETRIES, *((_SSE,) if method == STREAM else ())),
                answers={"200": reply},
                errors=_TURN,
                error_body=GeminiErrorBody,
            )
        yield _operation(
            f"POST {prefix}/v1beta/models/{{model}}:{COUNT}",
            f"gemini{COUNT[:1].upper()}{COUNT[1:]}{suffix}",
            f"Gemini's {COUNT} {where}: the tokens of the prompt that the same request would have",
            TokenCount,
            body=WireGenerateRequest,
            parameters=({**_MODEL, "required": True}, *ours),
            errors=(UnrenderableMessage, SessionNotFound, TokenizationFailed, HistoryMismatch),
            error_body=GeminiErrorBody,
        )


_GEMINI = tuple(_gemini())


def _turn_answers(described: Described, whole: type, event: type) -> dict[str, Schema]:
    """A turn's reply. An engine that is a server may write it itself, or refuse in its own words."""
    reply: dict[str, Schema] = {JSON: {"schema": {"type": "object"}}} if described.forwards else in_json(whole)
    answers: dict[str, Schema] = {
        "200": {
            "description": f"The reply. A stream has events with a `{event.__name__}` each, then `[DONE]`."
            " A stream that fails ends with an `ErrorBody` instead of `[DONE]`.",
            "headers": _TURN_HEADERS,
            "content": {**reply, "text/event-stream": {}},
        }
    }
    if described.forwards:
        answers["200"]["content"] |= ANY
        answers["default"] = {"description": "The engine's own refusal of the turn.", "content": ANY}
    return answers


def _response_answers(described: Described) -> dict[str, Schema]:
    """A response, which this server writes, whatever the engine."""
    answers = _turn_answers(described, ResponseBody, ResponseEvent)
    reply = answers["200"]
    reply["description"] = (
        "The response. A stream has events with a `ResponseEvent` each, the last of them `response.completed`,"
        " `response.incomplete` or `response.failed`."
    )
    reply["content"] = {**in_json(ResponseBody), "text/event-stream": {}}
    return answers


_RESPONSE_ID = _parameter("path", "response", "The id of a response.", {"type": "string"}) | {"required": True}

_HELD = (
    _operation(
        "GET /sessions/{id}/v1/responses/{response}",
        "getResponse",
        "Get a response that the session holds",
        ResponseBody,
        parameters=(_RESPONSE_ID,),
        errors=(InvalidRequest, RouteNotFound),
    ),
    _operation(
        "GET /v1/responses/{response}",
        "getResponseOfHeader",
        "Get a response of the session that a header names",
        ResponseBody,
        parameters=(_RESPONSE_ID, _SESSION_HEADER),
        errors=(InvalidRequest, RouteNotFound, SessionNotFound),
    ),
)


def _forwarded(described: Described) -> Iterator[Operation]:
    """The allow-list's paths, which go to the engine as they come: on a session, those of `/v1/` also without one."""
    own = {operation.name for operation in (*_TOKENS, *_SESSIONS)}
    for entry in described.proxy_allow:
        prefixes = ("/sessions/{id}/", "/") if entry.startswith("v1/") else ("/sessions/{id}/",)
        for prefix, method in product(prefixes, PROXY_METHODS):
            path = prefix + entry
            if entry in OWN_PATHS or f"/{entry}" in TURN_PATHS or method == "HEAD" or f"{method} {path}" in own:
                continue
            yield Operation(
                method=method,
                path=path,
                id=_passed_id(method, path),
                summary=f"Forward to the engine's {entry}, unrecorded",
                parameters=(_SESSION_HEADER,) if prefix == "/" else (),
                answers={"default": {"description": "The engine's own answer.", "content": ANY}},
                errors=(InvalidRequest, SessionNotFound, BodyTooLarge, UpstreamUnreachable),
            )


def _answered_locally(described: Described) -> Iterator[Operation]:
    """The allow-list's paths on a session that this server answers itself, because its engine is no server."""
    for model in _TOKENS:
        path = "/sessions/{id}" + model.path
        if model.path.removeprefix("/") in described.proxy_allow:
            id_, summary = _passed_id(model.method, path), f"{model.summary}, as {model.path} does"
            yield replace(model, path=path, id=id_, summary=summary)


def _passed_id(method: str, path: str) -> str:
    return "pass_" + method.lower() + path.replace("{id}", "id").replace("/", "_").replace(".", "_")
