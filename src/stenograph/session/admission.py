"""Step 2 of a turn: its admission among the turns in flight, held from before its body is decoded until it has ended.

Owns the server's limits, the counts against them, `Admission`, and `Caller`, the sender. Knows no body, no engine and
no task: the manager admits a request, its route decodes the body, and the manager begins its turns under it. All of it
is synchronous.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import msgspec
from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, TurnRequest
from stenograph.core.errors import Draining, InvalidRequest, Limit, LimitExceeded, StenographError
from stenograph.core.kinds import HistoryKind
from stenograph.core.stages import StageTimes
from stenograph.core.telemetry import TurnReport
from stenograph.core.trace_context import TraceContext
from stenograph.core.types import RequestId
from stenograph.session.kept import StoredReply
from stenograph.session.ledger import NO_ROW, OpenRow
from stenograph.session.retries import RequestIdentity
from stenograph.session.services import Place
from stenograph.session.session import Session
from stenograph.session.turn import RequestRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the whole server."""

    max_sessions: int
    max_in_flight: int
    max_held_tokens: int = 10**9
    max_strands: int = 1000


class RequestTrace(Protocol):
    """The trace of one request. All methods are synchronous, cheap, and never raise."""

    def generation(self, request_id: RequestId) -> TraceContext:
        """The span of one of its turns at the engine, before the turn begins."""
        ...

    def ended(
        self, run: RequestRun, reports: Sequence[TurnReport], session_id: str | None, error: BaseException | None
    ) -> None:
        """Its turns are over: a report of each, and their error."""
        ...

    def refused(self, error: StenographError) -> None:
        """It made no turn."""


class Caller(Struct, frozen=True, kw_only=True, gc=False):
    """The sender of a request: its own name for itself, the path, and the headers for the rules.

    It labels and is logged; it decides about nothing but the agent id. `row` is the request's row in its session's
    ledger, `trace` its trace, where traces are made.
    """

    name: str = ""
    path: str = ""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    row: OpenRow = msgspec.field(default_factory=lambda: NO_ROW)
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Uses of the server's limits in its other processes, where it has any."""

    num_sessions: int = 0
    num_in_flight: int = 0
    num_held_tokens: int = 0


NOWHERE = Elsewhere()


class Capacity:
    """The used part of the server's limits: `num_sessions` in memory, `num_in_flight` turns, `num_held_tokens` of all
    sessions in this process, and those `elsewhere`."""

    num_sessions: int
    num_in_flight: int
    num_held_tokens: int
    elsewhere: Elsewhere

    def __init__(self, limits: Limits, *, evicts: bool = False) -> None:
        self.limits = limits
        self.evicts = evicts
        """Whether sessions leave memory when they hold too many tokens; else turns are refused."""
        self.num_sessions = 0
        self.num_in_flight = 0
        self.num_held_tokens = 0
        self.elsewhere = NOWHERE
        self.is_draining = False

    def __repr__(self) -> str:
        return f"<Capacity {self.num_in_flight} turns, {self.num_held_tokens} tokens, draining={self.is_draining}>"

    @property
    def num_sessions_lent(self) -> int:
        """Sessions in memory whose room another process claims first."""
        return 0

    @property
    def num_tokens_lent(self) -> int:
        """Tokens in memory whose room another process claims first."""
        return 0

    def check(self, num_turns: int) -> None:
        """Raise Draining, or LimitExceeded if so many more turns cannot run. The error tells the limit and not the
        use: that is other clients' too."""
        if self.is_draining:
            raise _draining()
        limits, elsewhere = self.limits, self.elsewhere
        most = limits.max_in_flight
        if self.num_in_flight + elsewhere.num_in_flight + num_turns > most:
            runs = f"runs {most} of" if num_turns == 1 else f"has no place for {num_turns} more among"
            raise LimitExceeded(
                Limit.IN_FLIGHT, f"the server {runs} at most {most} turns (--max-in-flight)", retry_after_s=1.0
            )
        num_held_tokens = self.num_held_tokens + elsewhere.num_held_tokens
        if num_held_tokens >= limits.max_held_tokens and not self.evicts:
            raise LimitExceeded(
                Limit.HELD_TOKENS,
                f"the server's sessions hold the {limits.max_held_tokens} tokens that they may (--max-held-tokens);"
                " delete those that are done",
                retry_after_s=5.0,
            )


class Admission:
    """One request's share of the turns in flight. Inside of `with` it is held; once turns began in it, it stays held
    until they have ended.

    `session` None: the request has none. `num_turns` is one until the request is known to have several prompts.
    `num_started` counts the session's requests at admission: where it has moved since, another one came first.
    """

    __slots__ = (
        "_capacity", "identity", "is_begun", "num_started", "num_turns", "place", "repeats", "session", "stages",
    )  # fmt: skip

    def __init__(
        self, capacity: Capacity, session: Session | None, identity: RequestIdentity | None, stages: StageTimes
    ) -> None:
        self.session = session
        self.identity = identity
        self.stages = stages
        self.num_turns = 1
        self.repeats: StoredReply | None = None
        """The reply it asks for again, written anew once its request is decoded."""
        self.num_started = 0 if session is None else session.num_started
        self._capacity = capacity
        self.place: Place | None = None
        """Its tenant's; None: there are none."""
        self.is_begun = False
        """Whether its turns run: whoever runs them gives it back."""
        capacity.num_in_flight += 1

    def __repr__(self) -> str:
        return f"<Admission of {self.num_turns} turns, begun={self.is_begun}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_begun:
            self.give_back()

    def fit(self, request: TurnRequest) -> None:
        """Make it as large as its request: a turn for each prompt. Raises Draining if no turn may begin any more,
        InvalidRequest for a prompt that its session cannot have, LimitExceeded if the server cannot run all turns."""
        session = self.session
        if self._capacity.is_draining:
            raise _draining()
        if isinstance(request, ChatRequest):
            if session is not None and request.truncation is not None:
                raise InvalidRequest(
                    "truncate_prompt_tokens is not for a chat on a session: a turn's prompt begins with all ids of the"
                    " turns before. Leave it out, or send the chat without a session.",
                    blame=Blame(RequestPart.TRUNCATION),
                )
        elif (num := len(request.prompts)) > 1:
            self._fit_prompts(num)

    def give_back(self) -> None:
        """Let other turns have it."""
        self._capacity.num_in_flight -= self.num_turns
        self.num_turns = 0
        if self.place is not None:
            self.place.end()

    def _fit_prompts(self, num: int) -> None:
        capacity, session = self._capacity, self.session
        most = capacity.limits.max_in_flight
        if num > most:
            raise InvalidRequest(
                f"At most {most} prompts (--max-in-flight), got {num}.", blame=Blame(RequestPart.PROMPT)
            )
        if session is not None and session.options.history is HistoryKind.LINEAR:
            raise InvalidRequest(
                "A linear session takes one prompt at a time; one with another history takes several.",
                blame=Blame(RequestPart.PROMPT),
            )
        capacity.check(num - self.num_turns)
        if self.place is not None:
            self.place.grow(num - self.num_turns)
        capacity.num_in_flight += num - self.num_turns
        self.num_turns = num


def _draining() -> Draining:
    return Draining("the server is shutting down and takes no new turns", retry_after_s=5.0)
