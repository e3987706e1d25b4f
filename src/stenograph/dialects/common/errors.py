"""Errors as OpenAI and this server's own routes write them, and the headers of an error in any protocol. Pure."""

from typing import TypedDict

import msgspec

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import Spelling
from stenograph.core.errors import (
    CallerError,
    ContextLengthExceeded,
    Forbidden,
    GrammarBesideCall,
    HistoryMismatch,
    InternalError,
    InvalidJson,
    LastEngine,
    LimitExceeded,
    MethodNotAllowed,
    ModelMismatch,
    NobodyError,
    RequestTimeout,
    Rollback,
    RouteNotFound,
    SessionBusy,
    SessionClaimed,
    SessionNotFound,
    StenographError,
    TruncatedGeneration,
    Unauthorized,
    UpstreamError,
    UpstreamInvalid,
    UpstreamRefused,
)
from stenograph.core.kinds import Compat
from stenograph.dialects.base import Refusal, Refuse

_TYPES: dict[type[StenographError], str] = {
    CallerError: "invalid_request_error",
    Unauthorized: "authentication_error",
    Forbidden: "permission_error",
    SessionNotFound: "not_found_error",
    RouteNotFound: "not_found_error",
    TruncatedGeneration: "conflict_error",
    LastEngine: "conflict_error",
    ModelMismatch: "conflict_error",
    UpstreamError: "upstream_error",
    InternalError: "server_error",
    NobodyError: "overloaded_error",
    RequestTimeout: "timeout_error",
    SessionBusy: "conflict_error",
    SessionClaimed: "conflict_error",
    LimitExceeded: "rate_limit_error",
}
"""OpenAI's `type` of an error, by its class or the nearest class above it."""


class ErrorFacts(TypedDict):
    """One error. `param` is the JSON pointer of the field at fault."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(TypedDict):
    """The one shape of an error."""

    error: ErrorFacts


def error_type(kind: type[StenographError]) -> str:
    """OpenAI's `type` of a class of errors."""
    return next(_TYPES[one] for one in kind.__mro__ if one in _TYPES)


def error_body(error: StenographError, spelling: Spelling | None = None) -> bytes:
    """`{"error": {"message", "type", "code", "param"}}`; `param` is a JSON pointer where a field is to blame.

    `spelling` is the request's, None where none was read.
    """
    param = error.param
    if param is None and error.blame is not None and spelling is not None:
        param = spelling.pointer(error.blame)
    facts: ErrorFacts = {
        "message": _message(error, spelling),
        "type": error_type(type(error)),
        "code": error.code,
        "param": param,
    }
    body: ErrorBody = {"error": facts}
    return msgspec.json.encode(body)


def _message(error: StenographError, spelling: Spelling | None) -> str:
    """The error's message, with the names of the client's fields; a short context in the words expected by SDKs."""
    if isinstance(error, GrammarBesideCall):
        grammar = _field(spelling, Blame(RequestPart.GRAMMAR)) or "A grammar"
        return f"{grammar} cannot be combined with a forced tool call."
    if isinstance(error, ContextLengthExceeded):
        return f"{_context_message(error, _field(spelling, error.prompt) or 'prompt')} {error.remark}".rstrip()
    return error.message


def _context_message(error: ContextLengthExceeded, what: str) -> str:
    num_prompt, num_completion = error.num_prompt_tokens, error.max_tokens or 1
    if num_prompt > error.max_context_tokens:
        asked = f"your {what} resulted in {num_prompt} tokens. Please reduce the length of the {what}."
    else:
        asked = (
            f"you requested {num_prompt + num_completion} tokens ({num_prompt} in the {what}, {num_completion} in the"
            f" completion). Please reduce the length of the {what} or completion."
        )
    return f"This model's maximum context length is {error.max_context_tokens} tokens. However, {asked}"


def _field(spelling: Spelling | None, blame: Blame) -> str | None:
    """The field of a part of the request."""
    pointer = None if spelling is None else spelling.pointer(blame)
    return None if pointer is None else pointer.split("/")[1]


def refusal(error: StenographError, spelling: Spelling | None = None) -> Refusal:
    """An error in OpenAI's shape; an engine's refusal as the engine wrote it."""
    if isinstance(error, UpstreamRefused):
        headers = [("content-type", error.content_type), *error.headers]
        return Refusal(status=error.engine_status, content=error.body, headers=headers)
    headers = [("content-type", "application/json"), *error_headers(error)]
    return Refusal(status=error.status, content=error_body(error, spelling), headers=headers)


def refusal_in_miles(error: StenographError) -> Refusal:
    """An error as the miles session server's clients know it; an engine's refusal as the engine wrote it."""
    written = refusal(error)
    if isinstance(error, UpstreamRefused):
        return written
    return Refusal(status=written.status, content=miles_body(error), headers=written.headers)


def refusal_of(compat: Compat | None) -> Refuse:
    """The writer of errors of requests not read by any dialect, under the contract of a server."""
    return refusal_in_miles if compat is Compat.MILES else refusal


def miles_body(error: StenographError) -> bytes:
    """`{"error": text}`."""
    return msgspec.json.encode({"error": _miles_message(error)})


def _miles_message(error: StenographError) -> str:
    """The error's text, with miles' own beginning where its clients look for that."""
    match error:
        case SessionNotFound():
            return f"session not found: session_id={error.session_id}"
        case InvalidJson():
            return f"invalid JSON body: {error.message}"
        case HistoryMismatch(rollback=Rollback() as rollback):
            return (
                f"rollback failed: discard_count={rollback.num_turns} exceeds max_assistant_rollback_steps=1"
                f" (stored has {rollback.num_stored} messages, request has {rollback.num_given} messages)"
            )
        case UpstreamInvalid(law="content_is_text"):
            return f"assistant message content is None: {error.message}"
        case _:
            return _message(error, None)


def error_headers(error: StenographError) -> list[tuple[str, str]]:
    """Headers to tell a client whether to try again: `x-should-retry` for the SDKs, `retry-after` in seconds.

    A 405 lists the methods in `allow`. Source: RFC 9110, section 15.5.6.
    """
    headers = [("x-should-retry", "true" if error.should_retry else "false")]
    if error.retry_after_s is not None:
        headers.append(("retry-after", f"{max(1, round(error.retry_after_s))}"))
    if isinstance(error, MethodNotAllowed):
        headers.append(("allow", ", ".join(error.allowed)))
    return headers
