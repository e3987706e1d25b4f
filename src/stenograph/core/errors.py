"""The one tree of errors for clients, split by who broke it.

    StenographError
    ├── CallerError           the request is at fault; the same request fails again
    │   ├── InvalidJson, InvalidRequest, GrammarBesideCall, HistoryMismatch (NothingToAnswer),
    │   │   PreviousResponseNotFound, UnrenderableMessage, ContextLengthExceeded, BudgetSpent    400
    │   ├── Unauthorized 401, Forbidden 403, SessionNotFound, RouteNotFound 404, MethodNotAllowed 405
    │   ├── TruncatedGeneration, ModelMismatch, LastEngine 409, SessionAbandoned 410, BodyTooLarge 413, UriTooLong 414
    │   ├── UnsupportedMediaType 415, SamplesInconsistent, IdempotencyMismatch 422, UpgradeRequired 426
    │   ├── HeadersTooLarge 431
    ├── UpstreamError         the engine is at fault: UpstreamInvalid 502, UpstreamUnreachable 502, UpstreamTimeout 504,
    │                         UpstreamRefused (the engine's own status and body)
    ├── InternalError         we are at fault: SessionInvariant, SessionDamaged, TokenizationFailed,
    │                         UnexpectedFailure    500
    └── NobodyError           try again: RequestTimeout 408, SessionBusy, SessionClaimed 409, LimitExceeded 429;
                              Draining, EngineUnavailable, WorkerUnavailable, SessionElsewhere, Paused,
                              StorageUnavailable 503

Each class fixes `code` (wire-stable), `status` and `retryable`. `blame` is the part of the request that is at
fault; `param` is its JSON pointer where a dialect raises, having read the client's own bytes. How an error is written
on a wire is the dialect's business. docs/errors.md lists them all.
"""

import enum
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from stenograph.core.blame import Blame, RequestPart

THE_PROMPT = Blame(RequestPart.PROMPT)
"""The one prompt of a request."""


class StenographError(Exception):
    """Any error for a client. Raise a leaf, never this."""

    code: ClassVar[str]
    status: ClassVar[int]
    retryable: ClassVar[bool]

    def __init__(
        self,
        message: str,
        *,
        blame: Blame | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.blame = blame
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry = self.retryable
        self.remark = ""

    @property
    def client_status(self) -> int:
        """The HTTP status for the client."""
        return self.status

    def remark_on(self, remark: str) -> None:
        """End the message with a sentence on why no field is at fault; the error blames none then. A dialect with its
        own words for the message ends it with `remark` too."""
        self.remark = remark
        self.message = f"{self.message} {remark}"
        self.args = (self.message,)
        self.blame = None


class CallerError(StenographError):
    """The caller broke it; the same request will fail again."""

    retryable = False


class InvalidJson(CallerError):
    """The body is not JSON, or not UTF-8."""

    code, status = "invalid_json", 400


class InvalidRequest(CallerError):
    """A field is missing, of a wrong type, out of range, unknown, or refused; `param` says which."""

    code, status = "invalid_request", 400


class GrammarBesideCall(CallerError):
    """The request asks for a grammar, and forces a tool call too: a reply has one of them."""

    code, status = "invalid_request", 400

    def __init__(self) -> None:
        super().__init__("A grammar cannot be combined with a forced tool call.", blame=Blame(RequestPart.TOOL_CHOICE))


class Rollback(NamedTuple):
    """Turns that a request would take out of its line, and the messages of both."""

    num_turns: int
    num_stored: int
    num_given: int


class HistoryMismatch(CallerError):
    """The request's messages or ids continue neither its strand's line nor that line without its last turn.

    `rollback` says how many turns would have to go, where this is known.
    """

    code, status = "history_mismatch", 400

    def __init__(self, message: str, *, blame: Blame, rollback: "Rollback | None" = None) -> None:
        super().__init__(message, blame=blame)
        self.rollback = rollback


class NothingToAnswer(HistoryMismatch):
    """The request ends with a reply that its session generated, and adds nothing to it."""


class PreviousResponseNotFound(CallerError):
    """The session has no turn whose response the request goes on after."""

    code, status = "previous_response_not_found", 400


class UnrenderableMessage(CallerError):
    """The model's chat template cannot write this message, role or tool list."""

    code, status = "unrenderable_message", 400


class ContextLengthExceeded(CallerError):
    """The prompt, or prompt and completion together, do not fit the model's context.

    `prompt` is the prompt's part of the request.
    """

    code, status = "context_length_exceeded", 400

    def __init__(
        self, *, num_prompt_tokens: int, max_tokens: int | None, max_context_tokens: int, prompt: Blame = THE_PROMPT
    ) -> None:
        is_too_long = num_prompt_tokens >= max_context_tokens
        super().__init__(
            f"A prompt of {num_prompt_tokens} tokens and a completion of {max_tokens or 1} do not fit the model's"
            f" context of {max_context_tokens} tokens.",
            blame=prompt if is_too_long else Blame(RequestPart.MAX_TOKENS),
        )
        self.prompt = prompt
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_context_tokens = max_context_tokens

    def of(self, prompt: Blame) -> "ContextLengthExceeded":
        """The same, of this prompt of the request."""
        return ContextLengthExceeded(
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=self.max_tokens,
            max_context_tokens=self.max_context_tokens,
            prompt=prompt,
        )


class Limit(enum.StrEnum):
    """Limits of the server and of a session. Each has its metric (docs/metrics.md)."""

    SESSIONS = "sessions"
    IN_FLIGHT = "in_flight"
    SESSION_TURNS = "session_turns"
    SESSION_REQUESTS = "session_requests"
    SESSION_TOKENS = "session_tokens"
    NODES = "nodes"
    STRANDS = "strands"
    HELD_TOKENS = "held_tokens"
    TENANT = "tenant"


class BudgetSpent(CallerError):
    """The session has used up what it may have in all. The status is one that no client tries again."""

    code, status = "limit_exceeded", 400

    def __init__(self, limit: Limit, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class Unauthorized(CallerError):
    """No key, or a wrong one, where the server asks for one."""

    code, status = "unauthorized", 401


class Forbidden(CallerError):
    """The route takes another key or is not on the proxy's allow-list, or another site's web page asks."""

    code, status = "forbidden", 403


class SessionNotFound(CallerError):
    """No such session, or one that is being deleted."""

    code, status = "session_not_found", 404

    def __init__(self, session_id: str) -> None:
        super().__init__(f"There is no session {session_id[:64]!r}. POST /sessions opens one.")
        self.session_id = session_id


class RouteNotFound(CallerError):
    """No such route."""

    code, status = "route_not_found", 404


class MethodNotAllowed(CallerError):
    """The route exists, for another method."""

    code, status = "method_not_allowed", 405

    def __init__(self, method: str, path: str, *, allowed: Iterable[str]) -> None:
        self.allowed = tuple(sorted(allowed))
        super().__init__(f"{path} takes {', '.join(self.allowed)}, not {method}.")


class TruncatedGeneration(CallerError):
    """The turn to continue was aborted, or cut off where it cannot be closed: regenerate it; it cannot be extended."""

    code, status = "truncated_generation", 409


class ModelMismatch(CallerError):
    """The session was made with another tokenizer or chat template: it can be read, but takes no more turns."""

    code, status = "model_mismatch", 409

    def __init__(self, session_id: str, *, made_with: str, served: str) -> None:
        super().__init__(
            f"Session {session_id} was made with the tokenizer and chat template of {made_with!r}, and this server has"
            f" those of {served!r}: its turns and samples can be read, but no turn can follow. Open a new session."
        )


class SessionAbandoned(CallerError):
    """Nobody trains the session's tokens any more: it takes no turns."""

    code, status = "session_abandoned", 410


class LastEngine(CallerError):
    """No usable engine would be left."""

    code, status = "last_engine", 409


class BodyTooLarge(CallerError):
    """The body has more bytes than the server accepts."""

    code, status = "body_too_large", 413


class UriTooLong(CallerError):
    """The request's path and query have more bytes than the server accepts."""

    code, status = "uri_too_long", 414


class UnsupportedMediaType(CallerError):
    """The body's content type is not JSON, on a route that accepts only JSON."""

    code, status = "unsupported_media_type", 415


class UpgradeRequired(CallerError):
    """The route speaks HTTP; a websocket, which the client asked for, it does not open."""

    code, status = "upgrade_required", 426


class HeadersTooLarge(CallerError):
    """The request's head has more bytes or more headers than the server accepts."""

    code, status = "headers_too_large", 431


class SamplesInconsistent(CallerError):
    """The session's turns cannot be joined into one sample; the message says where they disagree."""

    code, status = "samples_inconsistent", 422


class IdempotencyMismatch(CallerError):
    """The `Idempotency-Key` was used for another body: on this session, or to open one."""

    code, status = "idempotency_mismatch", 422

    def __init__(self) -> None:
        super().__init__("This Idempotency-Key came before with another body; a new request needs a new key.")


class UpstreamError(StenographError):
    """The engine broke it. Nothing was committed. `has_ended`: by the engine's own word it samples no more."""

    retryable = True
    has_ended: ClassVar[bool] = False


class UpstreamInvalid(UpstreamError):
    """The engine answered 200, but the reply failed a check; the message names it. Nothing of it is recorded."""

    code, status = "upstream_invalid", 502

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


class UpstreamRefused(UpstreamError):
    """The engine answered with a status other than 200: its status, headers and body go to the client as they came.

    Nothing is recorded. `code` and the class's `status` are only for where no status can be sent any more. `said`: the
    message within the body, where it was found.
    """

    code, status, has_ended = "upstream_refused", 502, True

    def __init__(
        self, *, status: int, content_type: str, headers: tuple[tuple[str, str], ...], body: bytes, said: str = ""
    ) -> None:
        words = said[:500] or body[:500].decode(errors="replace")
        super().__init__(f"The engine refused the turn with status {status}: {words.strip()}")
        self.engine_status = status
        self.content_type = content_type
        self.headers = headers
        self.body = body

    @property
    def client_status(self) -> int:
        return self.engine_status


class UpstreamUnreachable(UpstreamError):
    """The engine could not be reached, or the connection broke before the reply was complete.

    `reply_began`: something of the reply had come, so sampled tokens are lost. `reason`: in a few words why, without
    the engine's name; the message where there is none.
    """

    code, status = "upstream_unreachable", 502

    def __init__(self, message: str, *, reply_began: bool = False, reason: str | None = None) -> None:
        super().__init__(message)
        self.reply_began = reply_began
        self.reason = reason or message


class UpstreamTimeout(UpstreamError):
    """The turn's deadline passed before the engine had finished."""

    code, status = "upstream_timeout", 504


class InternalError(StenographError):
    """We broke it; it is logged with a traceback. Nothing was committed."""

    retryable = False


class SessionInvariant(InternalError):
    """A session's state broke an invariant: a bug of the server."""

    code, status = "session_invariant", 500


class SessionDamaged(InternalError):
    """The rows of the session on disk are not those that were written; the message names the place."""

    code, status = "session_damaged", 500

    def __init__(self, session_id: str, *, place: str, problem: str, was_given: bool = True) -> None:
        """`was_given`: whether a client may have its id."""
        super().__init__(f"Session {session_id} is damaged on disk, in {place}: {problem}. No other session is.")
        self.place, self.was_given = place, was_given


class TokenizationFailed(InternalError):
    """The tokenizer failed on a text that passed every check."""

    code, status = "tokenization", 500


class UnexpectedFailure(InternalError):
    """Any other failure of the server."""

    code, status = "internal_error", 500


class NobodyError(StenographError):
    """Nobody is to blame: the same request may succeed later."""

    retryable = True


class RequestTimeout(NobodyError):
    """The request's head or body did not come in time; the message says which. The connection is closed."""

    code, status = "request_timeout", 408


class SessionBusy(NobodyError):
    """A strand, and a linear session, runs one turn at a time, and one does. SDKs must not retry this by themselves."""

    code, status, retryable = "session_busy", 409, False

    def __init__(self, session_id: str) -> None:
        super().__init__(
            f"Session {session_id} is generating another turn on this line, which takes one chat at a time."
        )


class SessionClaimed(NobodyError):
    """A trainer has claimed the session's samples: until its receipt, or the end of its lease, nobody changes them."""

    code, status, retryable = "session_claimed", 409, False


class LimitExceeded(NobodyError):
    """A limit of the server is reached: other clients' turns and sessions end."""

    code, status = "limit_exceeded", 429

    def __init__(self, limit: Limit, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit


class Draining(NobodyError):
    """The server is shutting down and accepts no new turns."""

    code, status = "draining", 503


class EngineUnavailable(NobodyError):
    """No engine can run the turn: it is starting, has died, or is full."""

    code, status = "engine_unavailable", 503


class Paused(NobodyError):
    """Generation is paused, or new weights are being loaded, and the turn's deadline passed before it could begin."""

    code, status = "paused", 503


class WorkerUnavailable(NobodyError):
    """The worker, one of the server's processes, that has the session has ended, and is being started again."""

    code, status = "worker_unavailable", 503


class StorageUnavailable(NobodyError):
    """The store cannot write: its disk is full, or it has failed. `is_full`: it goes on once there is room."""

    code, status = "storage_unavailable", 503

    def __init__(self, message: str, *, is_full: bool, retry_after_s: float = 5.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_full = is_full


class SessionElsewhere(NobodyError):
    """Another node owns the session; it is at `url`, "" if that is not known. This one may take it when that one's
    lease has run out."""

    code, status = "session_elsewhere", 503

    def __init__(self, session_id: str, *, url: str, retry_after_s: float) -> None:
        where = f"the node at {url}" if url else "another node"
        super().__init__(
            f"Session {session_id} belongs to {where}. Send the request there, or again: once that node's lease has"
            " run out, any node serves the session.",
            retry_after_s=retry_after_s,
        )
        self.url = url


class StorageLost(Exception):
    """The store failed for good, and the server has ended because of it. The command line prints it; it is one line."""

    exit_code = 74


class StartupError(Exception):
    """A failure of the start: a bad setting, a missing model, a port in use. The command line prints it, one line."""

    exit_code = 2
