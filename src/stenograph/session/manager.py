"""Sessions and their turn tasks: who exists, who may start, and how everything ends.

Owns every `Session` and every turn task. A handler that wants a turn calls `start`, watches the `Turn` it gets, and
abandons it when its client leaves; it never runs one. All state changes are synchronous.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from stenograph.core.chat import ChatRequest, StreamPiece
from stenograph.core.errors import (
    Draining,
    LimitExceeded,
    SessionNotFound,
    StenographError,
    UnexpectedFailure,
)
from stenograph.core.types import RequestId, SessionId, Stage, StageTimes
from stenograph.session.gate import Gate
from stenograph.session.history import LinearHistory
from stenograph.session.matching import MATCHERS, MatcherName
from stenograph.session.turn import TurnOutcome, TurnRun, TurnServices

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What a session is created with. None is no limit; limits count committed turns and the line's tokens."""

    matcher: MatcherName = MatcherName.HARNESS
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])
    max_turns: int | None = None
    max_total_tokens: int | None = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the whole server, and how long a deleted session waits for its partial reply."""

    max_sessions: int
    max_in_flight: int
    abort_grace_s: float = 5.0


class Session:
    """One rollout: an id, its history, its gate, and the turn that runs on it."""

    def __init__(self, session_id: SessionId, options: SessionOptions, created_at: float) -> None:
        self.id = session_id
        self.options = options
        self.created_at = created_at
        self.history = LinearHistory(MATCHERS[options.matcher])
        self.gate = Gate(session_id)
        self.turn: Turn | None = None

    def __repr__(self) -> str:
        return f"<Session {self.id} {self.history!r} {self.gate!r}>"

    def check_limits(self) -> None:
        """Raise LimitExceeded if this session has used up its turns or tokens."""
        turns, options = self.history.turns, self.options
        if options.max_turns is not None and len(turns) >= options.max_turns:
            raise LimitExceeded(f"this session has had its {options.max_turns} turns (max_turns)")
        if options.max_total_tokens is not None:
            used = sum(turn.num_tokens for turn in turns)
            if used >= options.max_total_tokens:
                raise LimitExceeded(
                    f"this session has used {used} of its {options.max_total_tokens} tokens (max_total_tokens)"
                )


class TurnAbandoned(Exception):
    """The turn that was watched has been abandoned by its own watcher; there is nobody to tell."""


class Turn:
    """A running turn as its watcher sees it."""

    def __init__(self, run: TurnRun, task: "asyncio.Task[TurnOutcome]") -> None:
        self._run = run
        self._task = task
        self._why: StenographError | None = None

    def __repr__(self) -> str:
        return f"<Turn {self.request_id} done={self._task.done()}>"

    @property
    def request_id(self) -> RequestId:
        """By which the engine knows it."""
        return self._run.request_id

    @property
    def request(self) -> ChatRequest:
        """What was asked for."""
        return self._run.request

    @property
    def task(self) -> "asyncio.Task[TurnOutcome]":
        """The manager's task; wait for it, never cancel it."""
        return self._task

    async def take(self) -> StreamPiece | None:
        """What the turn has produced since the last call; None when it has ended. For one watcher."""
        return await self._run.buffer.take()

    async def result(self) -> TurnOutcome:
        """Wait for the end. Cancelling this wait leaves the turn alone.

        Raises the turn's StenographError, the one that it was abandoned with, UnexpectedFailure for a bug of ours
        (logged), or TurnAbandoned.
        """
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise self._why or TurnAbandoned
        error = self._task.exception()
        if error is None:
            return self._task.result()
        if isinstance(error, StenographError):
            raise error
        raise UnexpectedFailure("The server failed on this turn; nothing of it was kept.") from error

    async def abort(self) -> bool:
        """Ask that the turn end with what it has drawn; returns whether there was anything left to end."""
        return await self._run.abort()

    def abandon(self, why: StenographError | None = None) -> None:
        """Stop the turn and keep nothing of it. Without effect once it has ended; past the commit it has.

        `why` is what its watcher is told; None if it is the watcher who leaves.
        """
        if self._task.cancel() and self._why is None:
            self._why = why


class SessionManager:
    """All sessions of this process."""

    def __init__(self, *, services: TurnServices, limits: Limits) -> None:
        self._services = services
        self._limits = limits
        self._sessions: dict[SessionId, Session] = {}
        self._turns: set[Turn] = set()
        self._draining = False

    def __repr__(self) -> str:
        return f"<SessionManager {len(self._sessions)} sessions, {len(self._turns)} turns in flight>"

    @property
    def num_in_flight(self) -> int:
        """Turns that run now."""
        return len(self._turns)

    def create(self, options: SessionOptions) -> Session:
        """Open a session. Raises LimitExceeded or Draining."""
        if self._draining:
            raise Draining("the server is shutting down and opens no sessions", retry_after_s=5.0)
        if len(self._sessions) >= self._limits.max_sessions:
            raise LimitExceeded(
                f"the server holds its {self._limits.max_sessions} sessions (--max-sessions); delete one first",
                retry_after_s=5.0,
            )
        session = Session(SessionId(uuid.uuid4().hex), options, self._services.clock.wall())
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The live session of that id. Raises SessionNotFound, also for one that is being deleted."""
        session = self._sessions.get(SessionId(session_id))
        if session is None or session.gate.is_closing:
            raise SessionNotFound(session_id)
        return session

    def has(self, session_id: str) -> bool:
        """Whether there is a live session of that id."""
        session = self._sessions.get(SessionId(session_id))
        return session is not None and not session.gate.is_closing

    def page(self, *, limit: int, after: str | None) -> list[Session]:
        """Up to `limit` live sessions in order of creation, those after the id `after`.

        Raises SessionNotFound if there is no session `after`.
        """
        ids = iter(self._sessions)
        if after is not None:
            self.get(after)
            ids = itertools.dropwhile(lambda id_: id_ != after, ids)
            next(ids)
        live = (self._sessions[id_] for id_ in ids)
        return list(itertools.islice((s for s in live if not s.gate.is_closing), limit))

    def start(
        self,
        session: Session | None,
        decode: Callable[[], tuple[ChatRequest, bytes]],
        *,
        started: StageTimes,
    ) -> Turn:
        """Admit a turn, decode its request and run it. `session` None serves it statelessly, unrecorded.

        `decode` gives the request and, as JSON, what of it is kept in the record. Raises SessionNotFound before
        SessionBusy before whatever `decode` raises; nothing is held then. The lease is given back when the task ends,
        however it ends.
        """
        self._check_room()
        lease = session.gate.lease() if session is not None else None
        started.mark(Stage.ADMIT, self._services.clock.monotonic())
        try:
            if session is not None:
                session.check_limits()
            request, request_json = decode()
            started.mark(Stage.DECODE, self._services.clock.monotonic())
            run = self._make_run(session, request, request_json, started)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        # The set owns the task, and the callback ends its life here; a coroutine that is cancelled before its first
        # step runs no `finally`, a task's callback always runs.
        task = asyncio.get_running_loop().create_task(run.run(), name=f"turn-{run.request_id}")
        turn = Turn(run, task)
        self._turns.add(turn)
        if session is not None:
            session.turn = turn

        def ended(task: "asyncio.Task[TurnOutcome]") -> None:
            self._turns.discard(turn)
            run.buffer.close()
            if session is not None:
                session.turn = None
            if lease is not None:
                lease.release()
            if not task.cancelled() and (error := task.exception()) is not None:
                _log_failure(run, error)

        task.add_done_callback(ended)
        return turn

    async def delete(self, session_id: str) -> None:
        """Close a session: refuse new turns at once, end the running one at the engine, forget everything.

        The running turn's caller gets what the engine answers to the abort, within a grace time. Raises
        SessionNotFound.
        """
        session = self.get(session_id)
        session.gate.close()
        turn = session.turn
        try:
            if turn is not None:
                await self._end_turn(turn, session.id)
        finally:
            self._sessions.pop(session.id, None)

    async def abort(self, session_id: str | None) -> int:
        """Ask the engine to end the running turn of one session, or (None) every turn; returns how many it knew."""
        turns = list(self._turns)
        if session_id is not None:
            turn = self.get(session_id).turn
            turns = [] if turn is None else [turn]
        return sum([await turn.abort() for turn in turns])

    async def drain(self, *, timeout_s: float) -> None:
        """Refuse new turns, let those that run end, and after `timeout_s` seconds abandon the rest."""
        self._draining = True
        tasks = {turn.task for turn in self._turns}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        if late:
            log.warning("abandoning %d turns that did not end within %g s", len(late), timeout_s)
            self.abandon_all()
            await asyncio.wait(late)

    def refuse_new(self) -> None:
        """Begin to drain: new turns and sessions get 503 from now on."""
        self._draining = True

    def abandon_all(self) -> None:
        """Stop every turn at once; the watchers are told that the server is going down."""
        for turn in list(self._turns):
            turn.abandon(Draining("The turn was stopped because the server is shutting down; nothing of it was kept."))

    async def _end_turn(self, turn: Turn, session_id: SessionId) -> None:
        await turn.abort()
        _, late = await asyncio.wait({turn.task}, timeout=self._limits.abort_grace_s)
        if late:
            turn.abandon(SessionNotFound(session_id))
            await asyncio.wait(late)

    def _check_room(self) -> None:
        if self._draining:
            raise Draining("the server is shutting down and takes no new turns", retry_after_s=5.0)
        if len(self._turns) >= self._limits.max_in_flight:
            raise LimitExceeded(
                f"the server runs its {self._limits.max_in_flight} turns (--max-in-flight)", retry_after_s=1.0
            )

    def _make_run(
        self, session: Session | None, request: ChatRequest, request_json: bytes, stages: StageTimes
    ) -> TurnRun:
        history = session.history if session is not None else LinearHistory(MATCHERS[MatcherName.STRICT])
        if session is not None and session.options.template_kwargs:
            kwargs = {**session.options.template_kwargs, **request.template_kwargs}
            request = replace(request, template_kwargs=kwargs)

        def may_commit() -> bool:
            return session is not None and not session.gate.is_closing

        return TurnRun(
            request_id=RequestId(uuid.uuid4().hex),
            request=request,
            request_json=request_json,
            history=history,
            may_commit=may_commit,
            stages=stages,
            services=self._services,
        )


def _log_failure(run: TurnRun, error: BaseException) -> None:
    if isinstance(error, StenographError) and error.status < 500:
        log.debug("%r refused: %s", run, error)
    elif isinstance(error, StenographError):
        log.warning("%r failed: %s: %s", run, error.code, error)
    else:
        log.error("%r failed on a bug of ours", run, exc_info=error)
