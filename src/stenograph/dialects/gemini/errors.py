"""Errors as Google writes them. Pure.

Source: google.rpc.Status in JSON, with ErrorInfo, BadRequest and RetryInfo as details (google/rpc/error_details.proto).
"""

from collections.abc import Sequence
from typing import TypedDict

import msgspec

from stenograph.core.chat import Spelling
from stenograph.core.errors import ContextLengthExceeded, StenographError
from stenograph.dialects.base import Refusal
from stenograph.dialects.common.errors import error_headers

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    502: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Google's name of an HTTP status; other statuses of ours are a request's fault."""

_TYPE = "type.googleapis.com/google.rpc."


class GeminiErrorFacts(TypedDict):
    """One error. The `reason` in its details is this server's code; a field at fault is a violation there."""

    code: int
    message: str
    status: str
    details: Sequence[dict[str, object]]


class GeminiErrorBody(TypedDict):
    """The one shape of an error."""

    error: GeminiErrorFacts


def gemini_error(error: StenographError, spelling: Spelling | None = None) -> bytes:
    """`{"error": {"code", "message", "status", "details"}}`; `spelling` is the request's, None where none was read."""
    param = error.param
    if param is None and error.blame is not None and spelling is not None:
        param = spelling.pointer(error.blame)
    status, message = error.client_status, _message(error)
    details: list[dict[str, object]] = [
        {"@type": f"{_TYPE}ErrorInfo", "reason": error.code.upper(), "domain": "stenograph"}
    ]
    if param is not None:
        violation = {"field": param, "description": message}
        details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
    if error.retry_after_s is not None:
        details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{max(1, round(error.retry_after_s))}s"})
    name = _STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    body: GeminiErrorBody = {"error": {"code": status, "message": message, "status": name, "details": details}}
    return msgspec.json.encode(body)


def _message(error: StenographError) -> str:
    """The error's message; a prompt beyond the limit in Google's words, because clients look for them."""
    if isinstance(error, ContextLengthExceeded):
        return f"{_too_long(error)} {error.remark}".rstrip()
    return error.message


def _too_long(error: ContextLengthExceeded) -> str:
    if error.num_prompt_tokens >= error.max_context_tokens:
        return (
            f"The input token count ({error.num_prompt_tokens}) exceeds the maximum number of tokens allowed"
            f" ({error.max_context_tokens})."
        )
    return (
        f"The input token count ({error.num_prompt_tokens}) and maxOutputTokens ({error.max_tokens or 1}) together"
        f" exceed the maximum number of tokens allowed ({error.max_context_tokens})."
    )


def gemini_refusal(error: StenographError, spelling: Spelling | None = None) -> Refusal:
    """An error in Google's shape; an engine's refusal with the engine's status and, in the message, its text."""
    headers = [("content-type", "application/json"), *error_headers(error)]
    return Refusal(status=error.client_status, content=gemini_error(error, spelling), headers=headers)
