"""The turns' operations in /openapi.json: each call of a dialect as two rows, on the session of the path and on a
header's. Pure.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, cast, get_args

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
    SessionAbandoned,
    SessionBusy,
    SessionClaimed,
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
from stenograph.core.loaded import entry
from stenograph.dialects.base import DialectCall, DialectRow
from stenograph.dialects.common.errors import ErrorBody
from stenograph.dialects.settings import DialectKind
from stenograph.http.dialects import DIALECTS
from stenograph.http.openapi.schemas import Described
from stenograph.http.response_route import HeldResponses
from stenograph.http.route import (
    ANY,
    ID,
    JSON,
    SESSION_HEADER,
    STORED,
    Errors,
    Needs,
    Route,
    Schema,
    in_json,
    operation,
    parameter,
    ref,
    rows_of,
)
from stenograph.http.turn_route import REMAINING, SESSION_REMAINING

_TURN: Errors = (
    *STORED,
    ModelMismatch,
    SessionAbandoned,
    HistoryMismatch,
    UnrenderableMessage,
    ContextLengthExceeded,
    SessionNotFound,
    SessionBusy,
    SessionClaimed,
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
_COUNT: Errors = (UnrenderableMessage, SessionNotFound, TokenizationFailed, LimitExceeded, *STORED)

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

_WHERE = (("/sessions/{id}", "OnSession", "on a session"), ("", "", "on the session that a header names, or none"))


def turn_operations(described: Described) -> Iterator[Route]:
    """Every turn, the counting of its tokens, and the reading of one held by a session."""
    for kind in DialectKind:
        if kind is DialectKind.GEMINI and DialectKind.RESPONSES in described.dialects:
            yield from (row for row, _ in rows_of(HeldResponses))
        if kind in described.dialects:
            yield from turn_rows(kind, forwards=described.forwards)


def turn_paths(described: Described) -> set[str]:
    """The paths of the server's own turns."""
    spoken = (kind for kind in DialectKind if kind in described.dialects)
    return {row.shown_path for kind in spoken for row in turn_rows(kind, forwards=described.forwards)}


@cache
def turn_rows(kind: DialectKind, *, forwards: bool) -> tuple[Route, ...]:
    """The rows of one protocol's calls, on a server with an engine to pass requests on to, or without."""
    groups = cast("DialectRow", entry(DIALECTS[kind])).calls
    return tuple(_row(call, *where, forwards=forwards) for calls in groups for where in _WHERE for call in calls)


def _row(call: DialectCall, prefix: str, suffix: str, where: str, *, forwards: bool) -> Route:
    own = cast("tuple[Schema, ...]", call.parameters)
    parameters = (
        *(one for one in own if one["in"] == "path"),
        *(() if prefix else (SESSION_HEADER,)),
        *(() if call.counts else _REQUEST_HEADERS),
        *(one for one in own if one["in"] != "path"),
    )
    return operation(
        f"POST {prefix}{call.shown_path}",
        f"{call.id}{suffix}",
        call.summary.format(where=where),
        call.reply if call.counts else None,
        body=call.body,
        answers={} if call.counts else _answers(call, forwards=forwards),
        shapes=call.shapes if get_args(call.reply) else (call.reply, *call.shapes),
        parameters=parameters,
        errors=(*(_COUNT if call.counts else _TURN), *call.errors),
        error_body=call.error_body,
        needs=Needs.TOKEN,
    )


def _answers(call: DialectCall, *, forwards: bool) -> dict[str, Schema]:
    """A turn's reply. An engine's server may write it itself; its refusals go out as they came, in OpenAI's shape."""
    content: Schema = {media: _content(media, call.reply) for media in call.media}
    if forwards and call.by_engine:
        content |= {JSON: {"schema": {"type": "object"}}, **ANY}
    reply: Schema = {"description": call.about, "headers": {**_TURN_HEADERS, **call.headers}, "content": content}
    if forwards and call.error_body is ErrorBody:
        return {"200": reply, "default": {"description": "The engine's own refusal of the turn.", "content": ANY}}
    return {"200": reply}


def _content(media: str, reply: Any) -> Schema:
    if media != JSON:
        return {}
    items = get_args(reply)
    return {"schema": {"type": "array", "items": {"$ref": ref(items[0])}}} if items else in_json(reply)[JSON]
