"""The turns' operations in /openapi.json, of every dialect, with each one's possible errors. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from stenograph.core.errors import (
    BudgetSpent,
    ContextLengthExceeded,
    Draining,
    EngineUnavailable,
    HistoryMismatch,
    IdempotencyMismatch,
    LimitExceeded,
    ModelMismatch,
    Paused,
    PreviousResponseNotFound,
    SessionBusy,
    SessionInvariant,
    SessionNotFound,
    TokenizationFailed,
    TruncatedGeneration,
    UnrenderableMessage,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
    WorkerUnavailable,
)
from stenograph.dialects.anthropic.dialect import COUNT_TOKENS_PATH, MESSAGES_PATH, CountedTokens
from stenograph.dialects.anthropic.errors import MessagesErrorBody
from stenograph.dialects.anthropic.fields import WireMessagesRequest
from stenograph.dialects.anthropic.reply import MessagesReply
from stenograph.dialects.common.reply_parts import FINISH_HEADER
from stenograph.dialects.gemini.dialect import COUNT, GENERATE, STREAM, TokenCount
from stenograph.dialects.gemini.errors import GeminiErrorBody
from stenograph.dialects.gemini.fields import WireGenerateRequest
from stenograph.dialects.gemini.reply import GenerateContentResponse
from stenograph.dialects.openai.chat import CHAT_PATH
from stenograph.dialects.openai.chat_fields import WireChatRequest
from stenograph.dialects.openai.chat_reply import ChatCompletion, ChatCompletionChunk
from stenograph.dialects.openai.completions import WireCompletionRequest
from stenograph.dialects.openai.completions_reply import TextCompletion
from stenograph.dialects.openai.dialect import COMPLETIONS_PATH
from stenograph.dialects.responses.fields import WireResponsesRequest
from stenograph.dialects.responses.reply import ResponseBody
from stenograph.dialects.responses.request import RESPONSES_PATH
from stenograph.dialects.responses.stream import ResponseEvent
from stenograph.dialects.settings import DialectKind
from stenograph.http.openapi.schemas import Described
from stenograph.http.response_route import HeldResponses
from stenograph.http.route import (
    ANY,
    ID,
    JSON,
    SESSION_HEADER,
    STORED,
    Errors,
    Route,
    Schema,
    in_json,
    operation,
    parameter,
    ref,
    rows_of,
)
from stenograph.http.turn_route import REMAINING, SESSION_REMAINING

_TURN_PATHS = {
    CHAT_PATH: DialectKind.OPENAI,
    COMPLETIONS_PATH: DialectKind.OPENAI,
    MESSAGES_PATH: DialectKind.ANTHROPIC,
    COUNT_TOKENS_PATH: DialectKind.ANTHROPIC,
    RESPONSES_PATH: DialectKind.RESPONSES,
}

_TURN: Errors = (
    *STORED,
    ModelMismatch,
    HistoryMismatch,
    UnrenderableMessage,
    ContextLengthExceeded,
    SessionNotFound,
    SessionBusy,
    TruncatedGeneration,
    IdempotencyMismatch,
    BudgetSpent,
    LimitExceeded,
    SessionInvariant,
    TokenizationFailed,
    UpstreamInvalid,
    UpstreamUnreachable,
    UpstreamTimeout,
    Draining,
    EngineUnavailable,
    Paused,
    WorkerUnavailable,
)


_REQUEST_HEADERS = (
    parameter(
        "header",
        "Idempotency-Key",
        "A retry sends the key of its first request. It joins that request's turn, or gets its reply again.",
        {"type": "string"},
    ),
    parameter(
        "header",
        "x-stainless-retry-count",
        "If above 0, a request with the same body as the last one is its retry. Anything but digits counts as 0.",
        {"type": "string"},
    ),
    parameter(
        "header",
        "X-data-parallel-rank",
        "The engine's data-parallel worker that is to run the turn. docs/engines.md says which engines take it.",
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


def _turns(described: Described) -> Iterator[Route]:
    """OpenAI chat, completions and responses: each on the session of its path, and on a header's."""
    chat = _turn_answers(described, ChatCompletion, ChatCompletionChunk)
    completion = _turn_answers(described, TextCompletion, TextCompletion)
    for what, id_, path, body, answers in (
        ("chat", "chat", CHAT_PATH, WireChatRequest, chat),
        ("completions", "complete", COMPLETIONS_PATH, WireCompletionRequest, completion),
        ("responses", "respond", RESPONSES_PATH, WireResponsesRequest, _response_answers(described)),
    ):
        if _TURN_PATHS[path] not in described.dialects:
            continue
        on_session = operation(
            f"POST /sessions/{{id}}{path}",
            f"{id_}OnSession",
            f"OpenAI {what} on a session",
            parameters=_REQUEST_HEADERS,
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
            parameters=(SESSION_HEADER, *_REQUEST_HEADERS),
        )


def _messages() -> Iterator[Route]:
    """Anthropic's Messages and the counting of tokens: each on the session of its path, and on a header's."""
    aborted: Schema = {"description": "`abort` of a reply that was aborted.", "schema": {"const": "abort"}}
    reply: Schema = {
        "description": "The reply. A stream has Anthropic's events, `message_stop` the last. One that fails ends with"
        " the event `error`, a `MessagesErrorBody`.",
        "headers": {**_TURN_HEADERS, FINISH_HEADER: aborted},
        "content": {**in_json(MessagesReply), "text/event-stream": {}},
    }
    turn = operation(
        f"POST /sessions/{{id}}{MESSAGES_PATH}",
        "messageOnSession",
        "Anthropic Messages on a session",
        parameters=_REQUEST_HEADERS,
        body=WireMessagesRequest,
        answers={"200": reply},
        errors=_TURN,
        error_body=MessagesErrorBody,
    )
    count = operation(
        f"POST /sessions/{{id}}{COUNT_TOKENS_PATH}",
        "countMessageTokensOnSession",
        "Count the tokens of a request to Messages on a session",
        CountedTokens,
        body=WireMessagesRequest,
        errors=(UnrenderableMessage, SessionNotFound, TokenizationFailed, LimitExceeded, *STORED),
        error_body=MessagesErrorBody,
    )
    for one, path, id_ in ((turn, MESSAGES_PATH, "message"), (count, COUNT_TOKENS_PATH, "countMessageTokens")):
        yield one
        yield replace(
            one,
            path=path,
            id=id_,
            summary=f"{one.summary.removesuffix(' on a session')} on the session that a header names, or none",
            parameters=(SESSION_HEADER, *one.parameters),
        )


_MODEL = parameter("path", "model", "Any name: there is one model.", {"type": "string", "minLength": 1})
_SSE = parameter(
    "query", "alt", "`sse` for a stream of events; else the stream is a JSON list.", {"enum": ["sse", "json"]}
)
_MODEL_PARAMETER = {**_MODEL, "required": True}
_GEMINI_CONTENT: dict[str, dict[str, Schema]] = {
    GENERATE: in_json(GenerateContentResponse),
    STREAM: {
        "text/event-stream": {},
        JSON: {"schema": {"type": "array", "items": {"$ref": ref(GenerateContentResponse)}}},
    },
}


def _gemini() -> Iterator[Route]:
    """Gemini's methods: each on the session of its path, and on a header's. `/v1/models/…` is the same."""
    for prefix, suffix, where in (
        ("/sessions/{id}", "OnSession", "on a session"),
        ("", "", "on the session that a header names, or none"),
    ):
        ours = () if prefix else (SESSION_HEADER,)
        for method in (GENERATE, STREAM):
            about = "The reply" if method == GENERATE else "The reply's events; a stream that fails ends with an error"
            content = _GEMINI_CONTENT[method]
            reply: Schema = {"description": f"{about}.", "headers": _TURN_HEADERS, "content": content}
            yield operation(
                f"POST {prefix}/v1beta/models/{{model}}:{method}",
                f"{method}{suffix}",
                f"Gemini's {method} {where}",
                body=WireGenerateRequest,
                parameters=(_MODEL_PARAMETER, *ours, *_REQUEST_HEADERS, *((_SSE,) if method == STREAM else ())),
                answers={"200": reply},
                errors=_TURN,
                error_body=GeminiErrorBody,
            )
        yield operation(
            f"POST {prefix}/v1beta/models/{{model}}:{COUNT}",
            f"{COUNT}{suffix}",
            f"Gemini's {COUNT} {where}: the tokens of the prompt that the same request would have",
            TokenCount,
            body=WireGenerateRequest,
            parameters=(_MODEL_PARAMETER, *ours),
            errors=(UnrenderableMessage, SessionNotFound, TokenizationFailed, HistoryMismatch, LimitExceeded, *STORED),
            error_body=GeminiErrorBody,
        )


_GEMINI = tuple(_gemini())


def _turn_answers(described: Described, whole: type, event: type) -> dict[str, Schema]:
    """A turn's reply. An engine's server may write it itself, or refuse in its own words."""
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
    """A response, written by this server with any engine."""
    answers = _turn_answers(described, ResponseBody, ResponseEvent)
    reply = answers["200"]
    reply["description"] = (
        "The response. A stream has events with a `ResponseEvent` each, the last of them `response.completed`,"
        " `response.incomplete` or `response.failed`."
    )
    reply["content"] = {**in_json(ResponseBody), "text/event-stream": {}}
    return answers


def turn_operations(described: Described) -> Iterator[Route]:
    """Every turn, the counting of its tokens, and the reading of one held by a session."""
    yield from _turns(described)
    if DialectKind.ANTHROPIC in described.dialects:
        yield from _messages()
    if DialectKind.RESPONSES in described.dialects:
        yield from (row for row, _ in rows_of(HeldResponses))
    if DialectKind.GEMINI in described.dialects:
        yield from _GEMINI


def turn_paths(described: Described) -> set[str]:
    """Paths below `/v1/` of the server's own turns."""
    return {path for path, kind in _TURN_PATHS.items() if kind in described.dialects}
