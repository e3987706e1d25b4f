"""The one tree of errors that reach a client, split by who broke it.

    StenographError
    ├── CallerError           the request is at fault; the same request fails again
    │   ├── InvalidJson, InvalidRequest, HistoryMismatch, UnrenderableMessage, ContextLengthExceeded      400
    │   ├── Unauthorized 401, Forbidden 403, SessionNotFound 404, RouteNotFound 404, MethodNotAllowed 405
    │   ├── TruncatedGeneration 409, BodyTooLarge 413, SamplesInconsistent 422, IdempotencyMismatch 422
    ├── UpstreamError         the engine is at fault: UpstreamInvalid 502, UpstreamUnreachable 502, UpstreamTimeout 504,
    │                         UpstreamRefused (the engine's own status and body)
    ├── InternalError         we are at fault: SessionInvariant, TokenizationFailed, UnexpectedFailure    500
    └── NobodyError           try again: SessionBusy 409, LimitExceeded 429, Draining 503, EngineUnavailable 503

Each class fixes `code` (wire-stable, SPEC 13), `status`, `retryable` and OpenAI's `type`; `param` is the JSON pointer
of the field to blame. How an error is written on a wire is the protocol's business. docs/errors.md lists them all.
"""

import enum
from collections.abc import Iterable
from typing import ClassVar


class StenographError(Exception):
    """Anything that a client is told. Raise a leaf, never this."""

    code: ClassVar[str]
    status: ClassVar[int]
    retryable: ClassVar[bool]
    type: ClassVar[str]

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = self.retryable


class CallerError(StenographError):
    """The caller broke it; the same request will fail again."""

    retryable = False
    type = "invalid_request_error"


class InvalidJson(CallerError):
    """The body is not JSON, or not UTF-8."""

    code, status = "invalid_json", 400


class InvalidRequest(CallerError):
    """A field is missing, of a wrong type, out of range, unknown, or refused; `param` says which."""

    code, status = "invalid_request", 400


class HistoryMismatch(CallerError):
    """The request's messages or ids do not continue the session's history, nor it without its last turn."""

    code, status = "history_mismatch", 400


class UnrenderableMessage(CallerError):
    """The model's chat template has no way to show this message, role or tool list."""

    code, status = "unrenderable_message", 400


class ContextLengthExceeded(CallerError):
    """Prompt, or prompt and completion, do not fit the model's context."""

    code, status = "context_length_exceeded", 400

    def __init__(
        self,
        *,
        num_prompt_tokens: int,
        max_tokens: int | None,
        max_context_tokens: int,
        prompt_param: str = "/messages",
        max_tokens_param: str = "/max_tokens",
    ) -> None:
        what = prompt_param.split("/")[1]
        if num_prompt_tokens > max_context_tokens:
            asked = f"your {what} resulted in {num_prompt_tokens} tokens. Please reduce the length of the {what}."
        else:
            num_drawn = max_tokens or 1
            asked = (
                f"you requested {num_prompt_tokens + num_drawn} tokens ({num_prompt_tokens} in the {what},"
                f" {num_drawn} in the completion). Please reduce the length of the {what} or completion."
            )
        super().__init__(
            f"This model's maximum context length is {max_context_tokens} tokens. However, {asked}",
            param=prompt_param if num_prompt_tokens >= max_context_tokens else max_tokens_param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_context_tokens = max_context_tokens

    def in_terms_of(self, *, prompt_param: str, max_tokens_param: str) -> "ContextLengthExceeded":
        """The same, said of the client's own fields: an engine knows only that the prompt is too long."""
        return ContextLengthExceeded(
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=self.max_tokens,
            max_context_tokens=self.max_context_tokens,
            prompt_param=prompt_param,
            max_tokens_param=max_tokens_param,
        )


class Unauthorized(CallerError):
    """No key, or a wrong one, where the server asks for one."""

    code, status, type = "unauthorized", 401, "authentication_error"


class Forbidden(CallerError):
    """The route is not on the proxy's allow-list."""

    code, status, type = "forbidden", 403, "permission_error"


class SessionNotFound(CallerError):
    """No such session, or one that is being deleted."""

    code, status, type = "session_not_found", 404, "not_found_error"

    def __init__(self, session_id: str) -> None:
        super().__init__(f"There is no session {session_id[:64]!r}. POST /sessions opens one.")


class RouteNotFound(CallerError):
    """No such route."""

    code, status, type = "route_not_found", 404, "not_found_error"


class MethodNotAllowed(CallerError):
    """The route exists, for another method."""

    code, status = "method_not_allowed", 405

    def __init__(self, method: str, path: str, *, allowed: Iterable[str]) -> None:
        self.allowed = tuple(sorted(allowed))
        super().__init__(f"{path} takes {', '.join(self.allowed)}, not {method}.")


class TruncatedGeneration(CallerError):
    """The history's last turn ended by length or abort: it can be regenerated, not extended."""

    code, status, type = "truncated_generation", 409, "conflict_error"


class BodyTooLarge(CallerError):
    """The body has more bytes than the server takes."""

    code, status = "body_too_large", 413


class SamplesInconsistent(CallerError):
    """The session's turns cannot be joined into one sample; the message says where they disagree."""

    code, status = "samples_inconsistent", 422


class IdempotencyMismatch(CallerError):
    """The `Idempotency-Key` was used for another body on this session."""

    code, status = "idempotency_mismatch", 422

    def __init__(self) -> None:
        super().__init__("This Idempotency-Key came before with another body; a new request needs a new key.")


class UpstreamError(StenographError):
    """The engine broke it. Nothing was committed."""

    retryable = True
    type = "upstream_error"


class UpstreamInvalid(UpstreamError):
    """The engine answered 200, but the reply breaks a law; the message says which. Nothing of it is recorded."""

    code, status = "upstream_invalid", 502

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


class UpstreamRefused(UpstreamError):
    """The engine answered with a status other than 200: its status, headers and body go to the client as they came.

    Nothing is recorded. `code` and the class's `status` are only for where no status can be sent any more.
    """

    code, status = "upstream_refused", 502

    def __init__(self, *, status: int, content_type: str, headers: tuple[tuple[str, str], ...], body: bytes) -> None:
        super().__init__(f"The engine refused the turn with status {status}: {body[:500].decode(errors='replace')}")
        self.engine_status = status
        self.content_type = content_type
        self.headers = headers
        self.body = body


class UpstreamUnreachable(UpstreamError):
    """The engine could not be reached, or the connection broke before the reply was whole.

    `reply_began`: something of the reply had come, so that tokens were drawn that are lost.
    """

    code, status = "upstream_unreachable", 502

    def __init__(self, message: str, *, reply_began: bool = False) -> None:
        super().__init__(message)
        self.reply_began = reply_began


class UpstreamTimeout(UpstreamError):
    """The turn's deadline passed before the engine was done."""

    code, status = "upstream_timeout", 504


class InternalError(StenographError):
    """We broke it; it is logged with a traceback. Nothing was committed."""

    retryable = False
    type = "server_error"


class SessionInvariant(InternalError):
    """A session's state is not what our own code guarantees."""

    code, status = "session_invariant", 500


class TokenizationFailed(InternalError):
    """The tokenizer failed on a text that passed every check."""

    code, status = "tokenization", 500


class UnexpectedFailure(InternalError):
    """Any other failure of ours."""

    code, status = "internal_error", 500


class NobodyError(StenographError):
    """Nobody is to blame: the same request may succeed later."""

    retryable = True
    type = "overloaded_error"


class SessionBusy(NobodyError):
    """A linear session runs one turn at a time, and one is running. SDKs must not retry this by themselves."""

    code, status, retryable, type = "session_busy", 409, False, "conflict_error"

    def __init__(self) -> None:
        super().__init__("This session is generating another turn; a linear session takes one chat at a time.")


class Limit(enum.StrEnum):
    """What there is a limit on. Each has its metric (docs/metrics.md)."""

    SESSIONS = "sessions"
    IN_FLIGHT = "in_flight"
    SESSION_TURNS = "session_turns"
    SESSION_TOKENS = "session_tokens"
    NODES = "nodes"
    HELD_TOKENS = "held_tokens"


class LimitExceeded(NobodyError):
    """A limit of the server or of the session is reached."""

    code, status, type = "limit_exceeded", 429, "rate_limit_error"

    def __init__(self, limit: Limit, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit
        # Other clients' turns and sessions end; what this session has used up, it has.
        self.should_retry = limit in (Limit.SESSIONS, Limit.IN_FLIGHT, Limit.HELD_TOKENS)


class Draining(NobodyError):
    """The server is shutting down and takes no new turns."""

    code, status = "draining", 503


class EngineUnavailable(NobodyError):
    """No engine can take the turn: it is starting, has died, or is full."""

    code, status = "engine_unavailable", 503


class StartupError(Exception):
    """Something that stops the start: a bad setting, a missing model, a port in use. The message is one line.

    Not a `StenographError`: no client ever sees it; the command line prints it and exits with 2.
    """
