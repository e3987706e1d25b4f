"""Sessions and their turn tasks: who exists, who may start, and how everything ends.

Owns every `Session` and every turn task. A handler that wants a turn calls `start`, gets a `Watch`, and leaves it when
its client leaves; it never runs a turn. All state changes are synchronous.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stenograph.core.chat import ChatRequest, CompletionRequest, TurnRequest
from stenograph.core.errors import (
    Draining,
    InternalError,
    InvalidRequest,
    Limit,
    LimitExceeded,
    SessionNotFound,
    StenographError,
    UpstreamInvalid,
)
from stenograph.core.settings import HistoryKind
from stenograph.core.telemetry import NoTelemetry, SessionEnd, Telemetry, TurnEnd, TurnReport
from stenograph.core.types import FinishReason, RequestId, SessionId, Stage, StageTimes
from stenograph.session.gate import Lease
from stenograph.session.history import LinearHistory
from stenograph.session.line_json import LineJson
from stenograph.session.matching import StrictMatcher
from stenograph.session.opening import Ledger, openings
from stenograph.session.recent import RecentRequest
from stenograph.session.retries import RequestIdentity
from stenograph.session.running import Turn, Watch
from stenograph.session.session import Session, SessionOptions
from stenograph.session.turn import RequestRun, TurnOutcome, TurnRun, TurnServices

log = logging.getLogger(__name__)

HANG_UP_PASSES = 8
"""Of the loop, until word of a closed connection has gone from its socket to the turn: two do in the tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the whole server."""

    max_sessions: int
    max_in_flight: int
    max_held_tokens: int = 10**9


class SessionManager:
    """All sessions of this process."""

    def __init__(self, *, services: TurnServices, limits: Limits, telemetry: Telemetry | None = None) -> None:
        self._services = services
        self._limits = limits
        self._telemetry = telemetry or NoTelemetry()
        self._sessions: dict[SessionId, Session] = {}
        self._turns: set[Turn] = set()
        self._num_in_flight = 0
        self._held_tokens = 0
        self.num_forgotten = 0
        """Sessions that are gone."""
        self._draining = False

    def __repr__(self) -> str:
        return f"<SessionManager {len(self._sessions)} sessions, {self.num_in_flight} turns in flight>"

    @property
    def num_in_flight(self) -> int:
        """Turns that run now. May be read on any thread, as all numbers here."""
        return self._num_in_flight

    @property
    def num_held_tokens(self) -> int:
        """Tokens of all sessions."""
        return self._held_tokens

    @property
    def num_sessions(self) -> int:
        """Sessions that are held now, those that are being deleted included."""
        return len(self._sessions)

    def create(self, options: SessionOptions) -> Session:
        """Open a session. Raises LimitExceeded or Draining."""
        if self._draining:
            raise Draining("the server is shutting down and opens no sessions", retry_after_s=5.0)
        if len(self._sessions) >= self._limits.max_sessions:
            self.expire()
        if len(self._sessions) >= self._limits.max_sessions:
            raise LimitExceeded(
                Limit.SESSIONS,
                f"the server holds its {self._limits.max_sessions} sessions (--max-sessions); delete one first",
                retry_after_s=5.0,
            )
        clock = self._services.clock
        session = Session(SessionId(uuid.uuid4().hex), options, created_at=clock.wall(), now=clock.monotonic())
        self._sessions[session.id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The live session of that id. Raises SessionNotFound, also for one that is being deleted or has expired."""
        session = self._sessions.get(SessionId(session_id))
        if session is not None and session.is_expired(self._services.clock.monotonic()):
            self._drop_expired(session)
            session = None
        if session is None or session.gate.is_closing:
            raise SessionNotFound(session_id)
        return session

    def has(self, session_id: str) -> bool:
        """Whether there is a live session of that id."""
        session = self._sessions.get(SessionId(session_id))
        if session is None or session.gate.is_closing:
            return False
        return not session.is_expired(self._services.clock.monotonic())

    def page(self, *, limit: int, after: str | None) -> list[Session]:
        """Up to `limit` live sessions in order of creation, those after the id `after`.

        Raises SessionNotFound if there is no session `after`.
        """
        self.expire()
        ids = iter(self._sessions)
        if after is not None:
            self.get(after)
            ids = itertools.dropwhile(lambda id_: id_ != after, ids)
            next(ids)
        live = (self._sessions[id_] for id_ in ids)
        return list(itertools.islice((s for s in live if not s.gate.is_closing), limit))

    def expire(self) -> int:
        """Drop the sessions that have been idle for longer than they may; returns how many."""
        now = self._services.clock.monotonic()
        expired = [session for session in self._sessions.values() if session.is_expired(now)]
        for session in expired:
            self._drop_expired(session)
        return len(expired)

    async def settle(self, session: Session | None) -> None:
        """Wait for the turns that have been abandoned to end. They have been told to; this takes no engine's time.

        A client that hung up and came back may be here before the hang-up has been read from its old connection: then
        the loop gets a few passes to read it, and the session is not called busy with what nobody waits for.
        """
        if session is None:
            return
        for _ in range(HANG_UP_PASSES):
            if session.gate.is_full and not any(turn.is_abandoned for turn in session.running):
                await asyncio.sleep(0)
        while tasks := [turn.task for turn in session.running if turn.is_abandoned]:
            await asyncio.wait(tasks)

    def is_new(self, session: Session | None, identity: RequestIdentity | None) -> bool:
        """Whether `start` would run a turn for this request, if it were called now; False if it would join one.

        For who has to wait before it can call `start`: raises what `start` raises before it decodes, and holds nothing.
        """
        if session is not None:
            if session.gate.is_closing:
                raise SessionNotFound(session.id)
            if identity is not None and session.find_repeated(identity) is not None:
                return False
            session.gate.check()
        self._check_room(1)
        return True

    def start(
        self,
        session: Session | None,
        decode: Callable[[], tuple[TurnRequest, bytes]],
        *,
        started: StageTimes,
        identity: RequestIdentity | None = None,
    ) -> Watch:
        """Admit a request, decode it and run its turns. `session` None serves it statelessly, unrecorded.

        `decode` gives the request and, as JSON, what of it is kept in the record. A request that repeats a turn, by
        its `identity`, watches that turn instead. Raises SessionNotFound before IdempotencyMismatch before
        SessionBusy before Draining and LimitExceeded before whatever `decode` raises; nothing is held then. The lease
        is given back when the task ends, however it ends. Where `started` says when admission ended, `is_new` was asked
        then and what came after it was decoding.
        """
        if session is not None and not session.gate.is_closing and identity is not None:
            repeated = session.find_repeated(identity)
            if repeated is not None:
                self._telemetry.retry_answered(joined=not repeated.task.done())
                return repeated.watch()
        lease = session.gate.lease() if session is not None else None
        try:
            self._check_room(1)
            if Stage.ADMIT not in started.ends:
                started.mark(Stage.ADMIT, self._services.clock.monotonic())
            if session is not None:
                session.check_limits()
            request, request_json = decode()
            self._check_prompts(session, request)
            started.mark(Stage.DECODE, self._services.clock.monotonic())
            run = self._make_run(session, request, request_json, started)
        except BaseException:
            if lease is not None:
                lease.release()
            raise
        return self._run(run, session, lease, identity).watch()

    async def delete(self, session_id: str) -> None:
        """Close a session: refuse new turns at once, end the running ones at the engine, forget everything.

        The running turns' callers get what the engine answers to the abort, within a grace time. Raises
        SessionNotFound.
        """
        session = self.get(session_id)
        session.gate.close()
        turns = session.running
        try:
            # All are told before the first wait, so that each ends within its grace time whatever becomes of this one.
            await asyncio.gather(*(turn.run.abort(unanswered=SessionNotFound(session.id)) for turn in turns))
            if turns:
                await asyncio.wait([turn.task for turn in turns])
        finally:
            self._forget(session, SessionEnd.DELETED)

    async def abort(self, session_id: str | None) -> int:
        """Ask the engine to end the running turns of one session, or (None) every turn; returns how many it knew."""
        turns = list(self._turns) if session_id is None else self.get(session_id).running
        return sum(await asyncio.gather(*(turn.run.abort() for turn in turns)))

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
            why = "The turn was stopped because the server is shutting down; nothing of it was kept."
            turn.abandon(Draining(why, retry_after_s=5.0))

    def _drop_expired(self, session: Session) -> None:
        session.gate.close()
        self._forget(session, SessionEnd.EXPIRED)

    def _forget(self, session: Session, end: SessionEnd) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._count_tokens(session, 0)
            self.num_forgotten += 1
            session.close()
            self._telemetry.session_ended(end)

    def _count_tokens(self, session: Session, num_tokens: int) -> None:
        self._held_tokens += num_tokens - session.num_counted_tokens
        session.num_counted_tokens = num_tokens

    def _check_prompts(self, session: Session | None, request: TurnRequest) -> None:
        """Raise InvalidRequest or LimitExceeded if there is no room for all turns of a request with several prompts."""
        if isinstance(request, ChatRequest) or (num := len(request.prompts)) == 1:
            return
        if num > self._limits.max_in_flight:
            raise InvalidRequest(
                f"At most {self._limits.max_in_flight} prompts (--max-in-flight), got {num}.", param="/prompt"
            )
        if session is not None and session.options.history is HistoryKind.LINEAR:
            raise InvalidRequest(
                "A linear session takes one prompt at a time; a session with history 'tree' takes several.",
                param="/prompt",
            )
        self._check_room(num)
        if session is not None:
            session.check_limits(num)

    def _check_room(self, num_turns: int) -> None:
        if self._draining:
            raise Draining("the server is shutting down and takes no new turns", retry_after_s=5.0)
        if self.num_in_flight + num_turns > self._limits.max_in_flight:
            raise LimitExceeded(
                Limit.IN_FLIGHT,
                f"the server runs {self.num_in_flight} of at most {self._limits.max_in_flight} turns (--max-in-flight)",
                retry_after_s=1.0,
            )
        if self._held_tokens >= self._limits.max_held_tokens:
            raise LimitExceeded(
                Limit.HELD_TOKENS,
                f"the sessions hold {self._held_tokens} tokens of at most {self._limits.max_held_tokens}"
                " (--max-held-tokens); delete those that are done",
                retry_after_s=5.0,
            )

    def _make_run(
        self, session: Session | None, request: TurnRequest, request_json: bytes, stages: StageTimes
    ) -> RequestRun:
        if isinstance(request, ChatRequest):
            request = self._with_template_kwargs(request, session)

        def may_commit() -> bool:
            return session is not None and not session.gate.is_closing

        services = self._services
        ledger = Ledger(
            history=session.history if session is not None else LinearHistory(StrictMatcher()),
            recent=session.recent if session is not None else RecentRequest(),
            line_json=session.line_json if session is not None else LineJson(),
        )
        opened = openings(
            request,
            ledger=ledger,
            renderer=services.renderer,
            pool=services.pool,
            share=services.share,
            capabilities=services.engine.capabilities,
            over_budget=services.over_budget,
            opened_at=session.created_at if session is not None else services.clock.wall(),
        )
        ids = [RequestId(uuid.uuid4().hex) for _ in opened]
        reply_id = f"{'cmpl' if isinstance(request, CompletionRequest) else 'chatcmpl'}-{ids[0]}"
        turns = [
            TurnRun(
                request_id=request_id,
                reply_id=reply_id if len(ids) == 1 else f"{reply_id}-{index}",
                request=request,
                request_json=request_json,
                opening=opening,
                ledger=ledger,
                affinity_key=session.id if session is not None else None,
                stages=stages if len(ids) == 1 else StageTimes(start=stages.start, ends=dict(stages.ends)),
                services=services,
            )
            for index, (request_id, opening) in enumerate(zip(ids, opened, strict=True))
        ]
        return RequestRun(
            request=request,
            reply_id=None if len(turns) == 1 else reply_id,
            turns=turns,
            ledger=ledger,
            may_commit=may_commit,
            token_limit=None if session is None else session.options.max_total_tokens,
            services=services,
        )

    def _with_template_kwargs(self, request: ChatRequest, session: Session | None) -> ChatRequest:
        """The request with the arguments that the server and its session give the template, where it has none."""
        of_session: Mapping[str, object] = {} if session is None else session.options.template_kwargs
        if not of_session and not self._services.template_kwargs:
            return request
        kwargs = {**self._services.template_kwargs, **of_session, **request.template_kwargs}
        return replace(request, template_kwargs=kwargs)

    def _run(
        self, run: RequestRun, session: Session | None, lease: Lease | None, identity: RequestIdentity | None
    ) -> Turn:
        """Start the task of a request. Its callback ends its life here: a coroutine that is cancelled before its first
        step runs no `finally`, a task's callback always runs."""
        task = asyncio.get_running_loop().create_task(run.run(), name=f"turn-{run.request_id}")

        def delivered(turn: Turn) -> None:
            for stages in (turn.stages for turn in run.turns):
                stages.mark(Stage.REPLY, self._services.clock.monotonic())
                if (reply_s := stages.span_s(Stage.COMMIT, Stage.REPLY)) is not None:
                    self._telemetry.reply_delivered(reply_s)
            if session is not None:
                session.release_delivered(turn)

        turn = Turn(run, task, identity=identity, on_delivered=delivered)
        self._turns.add(turn)
        self._num_in_flight += len(run.turns)
        if session is not None:
            session.began(turn)

        def ended(task: "asyncio.Task[TurnOutcome]") -> None:
            self._turns.discard(turn)
            self._num_in_flight -= len(run.turns)
            for one in run.turns:
                one.buffer.close()
            reports = _reports(run, task)
            if session is not None:
                now = self._services.clock.monotonic()
                session.ended(turn, now=now, committed=reports[0].end is TurnEnd.COMMITTED)
                if session.id in self._sessions:
                    self._count_tokens(session, session.history.num_tokens)
            if lease is not None:
                lease.release()
            for report in reports:
                self._telemetry.turn_ended(report)
            if not task.cancelled() and (error := task.exception()) is not None:
                _log_failure(run, error)

        task.add_done_callback(ended)
        return turn


def _reports(run: RequestRun, task: "asyncio.Task[TurnOutcome]") -> list[TurnReport]:
    """What is told of each turn of a request whose task has ended."""
    return [_report(run, index, task) for index in range(len(run.turns))]


def _report(run: RequestRun, index: int, task: "asyncio.Task[TurnOutcome]") -> TurnReport:
    turn = run.turns[index]
    meter = turn.meter
    report = TurnReport(
        end=TurnEnd.ABANDONED,
        stages_s=turn.stages.durations_s(),
        num_completion=meter.num_drawn,
        ttft_s=meter.ttft_s,
        tpot_s=meter.tpot_s,
        itl_s=meter.itl_s,
    )
    if task.cancelled():
        return report
    error = task.exception()
    if error is not None:
        code = error.code if isinstance(error, StenographError) else "internal_error"
        law = error.law if isinstance(error, UpstreamInvalid) else None
        return replace(report, end=TurnEnd.FAILED, code=code, law=law)
    outcome = task.result()
    reply = outcome.replies[index]
    return replace(
        report,
        end=TurnEnd.COMMITTED if outcome.committed else TurnEnd.UNRECORDED,
        was_aborted=reply.sampled.finish.reason is FinishReason.ABORT,
        num_prompt=reply.usage.num_prompt,
        num_kept=reply.prompt.num_kept,
        num_cached=reply.usage.num_cached,
    )


def _log_failure(run: RequestRun, error: BaseException) -> None:
    if isinstance(error, StenographError) and error.status < 500:
        log.debug("%r refused: %s", run, error)
    elif isinstance(error, StenographError) and not isinstance(error, InternalError):
        log.warning("%r failed: %s: %s", run, error.code, error)
    else:
        log.error("%r failed on a bug of ours", run, exc_info=error)
