"""Errors as Anthropic writes them. Pure.

Its clients act on the wording of two of them: Claude Code lowers `max_tokens` by one, and stops at the other.
"""

from typing import Literal, TypedDict

import msgspec

from stenograph.core.chat import Spelling
from stenograph.core.errors import ContextLengthExceeded, GrammarBesideCall, StenographError, UpstreamRefused
from stenograph.dialects.base import Refusal
from stenograph.dialects.common.errors import error_headers

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's `type` of an error, by its status, where it is no other of the caller's or of ours."""


class MessagesErrorFacts(TypedDict):
    """One error. `param` is the JSON pointer of the field at fault."""

    type: str
    message: str
    code: str
    param: str | None


class MessagesErrorBody(TypedDict):
    """The shape of an error, and of the event that ends a stream with one."""

    type: Literal["error"]
    error: MessagesErrorFacts
    request_id: str | None


def messages_error_type(status: int) -> str:
    """Anthropic's `type` of an error with this status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def messages_error(error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> bytes:
    """An error's body. `spelling` is the request's, None where none was read."""
    param = error.param
    if param is None and error.blame is not None and spelling is not None:
        param = spelling.pointer(error.blame)
    facts: MessagesErrorFacts = {
        "type": messages_error_type(error.client_status),
        "message": _message(error),
        "code": error.code,
        "param": param,
    }
    body: MessagesErrorBody = {"type": "error", "error": facts, "request_id": request_id}
    return msgspec.json.encode(body)


def _message(error: StenographError) -> str:
    if isinstance(error, GrammarBesideCall):
        return "output_config.format cannot be combined with a forced tool call."
    if isinstance(error, ContextLengthExceeded):
        return f"{_context_message(error)} {error.remark}".rstrip()
    return error.message


def _context_message(error: ContextLengthExceeded) -> str:
    num_prompt, limit = error.num_prompt_tokens, error.max_context_tokens
    if num_prompt >= limit:
        return f"prompt is too long: {num_prompt} tokens > {limit} maximum"
    return f"input length and `max_tokens` exceed context limit: {num_prompt} + {error.max_tokens or 1} > {limit}"


def messages_refusal(error: StenographError, spelling: Spelling | None, request_id: str | None = None) -> Refusal:
    """An error before anything was sent. An engine's error has its status, and the engine's words in its message."""
    theirs = error.headers if isinstance(error, UpstreamRefused) else ()
    ours = [("content-type", "application/json"), *error_headers(error)]
    named = {name for name, _ in ours}
    headers = [*ours, *(pair for pair in theirs if pair[0] not in named and not pair[0].startswith("content-"))]
    return Refusal(status=error.client_status, content=messages_error(error, spelling, request_id), headers=headers)
