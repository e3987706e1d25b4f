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

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, CompletionRequest, TurnRequest
from stenograph.core.errors import (
    Draining,
    InvalidRequest,
    Limit,
    LimitExceeded,
    SessionNotFound,
    StenographError,
    UpstreamInvalid,
)
from stenograph.core.history_kinds import HistoryKind
from stenograph.core.telemetry import NoTelemetry, SessionEnd, Telemetry, TurnEnd, TurnReport
from stenograph.core.types import FinishReason, RequestId, SessionId, Stage, StageTimes
from stenograph.session.caller import Caller
from stenograph.session.journal import STOPPED, log_discarded, log_session_end, log_turn_end
from stenograph.session.kinds import Sighting
from stenograph.session.opening import openings
from stenograph.session.request import RequestRun, TurnOutcome
from stenograph.session.retries import RequestIdentity
from stenograph.session.session import Session, SessionOptions
from stenograph.session.strand import Seats
from stenograph.session.turn import TurnRun, TurnServices
from stenograph.session.watch import Delivery, RequestTask, Watch
from stenograph.trajectory.late_system import with_reminders

log = logging.getLogger(__name__)

NOBODY = Caller()
"""A caller of whom nothing is known."""

HANG_UP_PASSES = 8
"""Event-loop iterations until the turn learns of a closed connection: two are enough in the tests."""


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
        self._turns: set[RequestTask] = set()
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
        if session is None or session.is_closing:
            raise SessionNotFound(session_id)
        return session

    def has(self, session_id: str) -> bool:
        """Whether there is a live session of that id."""
        session = self._sessions.get(SessionId(session_id))
        if session is None or session.is_closing:
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
        return list(itertools.islice((s for s in live if not s.is_closing), limit))

    def expire(self) -> int:
        """Drop the sessions that have been idle for longer than they may; returns how many."""
        now = self._services.clock.monotonic()
        expired = [session for session in self._sessions.values() if session.is_expired(now)]
        for session in expired:
            self._drop_expired(session)
        return len(expired)

    async def settle(self, session: Session | None) -> None:
        """Wait for the abandoned turns to end. They have been cancelled; this takes no engine's time.

        A client that disconnects and reconnects may be here before the disconnect has been read from its old
        connection: a few event-loop iterations let it be read, and no abandoned turn makes the session busy.
        """
        if session is None or not session.running:
            return
        for _ in range(HANG_UP_PASSES):
            if not session.is_full or any(turn.is_abandoned for turn in session.running):
                break
            await asyncio.sleep(0)
        while tasks := [turn.task for turn in session.running if turn.is_abandoned]:
            await asyncio.wait(tasks)

    def is_new(self, session: Session | None, identity: RequestIdentity | None) -> bool:
        """Whether `start` would run a turn for this request, if it were called now; False if it would join one.

        For who has to wait before it can call `start`: raises what `start` raises before it decodes, and holds nothing.
        """
        if session is not None:
            if not session.is_closing and identity is not None and session.find_repeated(identity) is not None:
                return False
            session.check_open()
        self._check_room(1)
        return True

    def start(
        self,
        session: Session | None,
        decode: Callable[[], tuple[TurnRequest, bytes]],
        *,
        started: StageTimes,
        identity: RequestIdentity | None = None,
        caller: Caller = NOBODY,
    ) -> Watch:
        """Admit a request, decode it and run its turns. `session` None serves it statelessly, unrecorded.

        `decode` gives the request and, as JSON, what of it is kept in the record. A request that repeats a turn, by
        its `identity`, watches that turn instead. Raises SessionNotFound before IdempotencyMismatch before
        SessionBusy of a linear session before Draining and LimitExceeded before whatever `decode` raises before
        SessionBusy of a strand; nothing is held then. The seats are given back when the task ends, however it ends.
        Where `started` says when admission ended, `is_new` was asked then and what came after it was decoding.
        `caller` is whoever asks.
        """
        if session is not None and not session.is_closing and identity is not None:
            repeated = session.find_repeated(identity)
            if repeated is not None:
                is_running = isinstance(repeated, RequestTask) and not repeated.task.done()
                self._telemetry.retry_answered(joined=is_running)
                return repeated.watch()
        if session is not None:
            session.check_open()
        self._check_room(1)
        if Stage.ADMIT not in started.ends:
            started.mark(Stage.ADMIT, self._services.clock.monotonic())
        if session is not None:
            session.check_limits()
        request, request_json = decode()
        self._check_prompts(session, request)
        started.mark(Stage.DECODE, self._services.clock.monotonic())
        seats = self._seats(session, request, caller)
        try:
            run = self._make_run(session, request, request_json, started, seats)
        except BaseException:
            seats.give_back()
            raise
        return self._run(run, session, seats, identity, caller.name).watch()

    async def delete(self, session_id: str) -> None:
        """Close a session: refuse new turns at once, end the running ones at the engine, forget everything.

        The running turns' callers get what the engine answers to the abort, within a grace time. Raises
        SessionNotFound.
        """
        session = self.get(session_id)
        session.refuse_new()
        turns = session.running
        try:
            # All are aborted before the first wait, so that each ends within its grace time, even if this call fails.
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
        """Refuse new turns, let those that run end, and after `timeout_s` seconds end the rest as an abort does.

        What they have sampled is returned and committed; one whose engine does not answer within the grace time fails
        with Draining.
        """
        self._draining = True
        late = {turn for turn in self._turns if not turn.task.done()}
        if late:
            await asyncio.wait({turn.task for turn in late}, timeout=timeout_s)
        late = {turn for turn in late if not turn.task.done()}
        if late:
            log.warning("ending %d turns that did not end by themselves within %g s", len(late), timeout_s)
            why = Draining("The engine did not end the turn before the server stopped; nothing of it was kept.")
            await asyncio.gather(*(turn.run.abort(unanswered=why) for turn in late if not turn.run.is_timed_out))
            await asyncio.wait({turn.task for turn in late})

    def log_stopped(self) -> None:
        """Log the end of each session that ends with the process."""
        now = self._services.clock.wall()
        for session in self._sessions.values():
            log_session_end(session, STOPPED, age_s=now - session.created_at)

    def refuse_new(self) -> None:
        """Begin to drain: new turns and sessions get 503 from now on."""
        self._draining = True

    def abandon_all(self) -> None:
        """Stop every turn at once; the watchers get an error that the server is shutting down."""
        for turn in list(self._turns):
            why = "The turn was stopped because the server is shutting down; nothing of it was kept."
            turn.abandon(Draining(why, retry_after_s=5.0))

    def _drop_expired(self, session: Session) -> None:
        session.refuse_new()
        self._forget(session, SessionEnd.EXPIRED)

    def _forget(self, session: Session, end: SessionEnd) -> None:
        if self._sessions.pop(session.id, None) is not None:
            log_session_end(session, end, age_s=self._services.clock.wall() - session.created_at)
            self._count_tokens(session, 0)
            self.num_forgotten += 1
            session.close()
            self._telemetry.session_ended(end)

    def _count_tokens(self, session: Session, num_tokens: int) -> None:
        self._held_tokens += num_tokens - session.num_counted_tokens
        session.num_counted_tokens = num_tokens

    def _check_prompts(self, session: Session | None, request: TurnRequest) -> None:
        """Raise InvalidRequest for a prompt that its session cannot have, or LimitExceeded if not all turns
        of a request with several prompts can run."""
        if session is not None and isinstance(request, ChatRequest) and request.truncation is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens is not for a chat on a session: a turn's prompt begins with all ids of the"
                " turns before. Leave it out, or send the chat without a session.",
                blame=Blame(RequestPart.TRUNCATION),
            )
        if isinstance(request, ChatRequest) or (num := len(request.prompts)) == 1:
            return
        if num > self._limits.max_in_flight:
            raise InvalidRequest(
                f"At most {self._limits.max_in_flight} prompts (--max-in-flight), got {num}.",
                blame=Blame(RequestPart.PROMPT),
            )
        if session is not None and session.options.history is HistoryKind.LINEAR:
            raise InvalidRequest(
                "A linear session takes one prompt at a time; one with another history takes several.",
                blame=Blame(RequestPart.PROMPT),
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

    def _seats(self, session: Session | None, request: TurnRequest, caller: Caller) -> Seats:
        """The request's places, none of which is taken yet, with what the rules say of it."""
        if session is None:
            return Seats(None)
        rules = self._services.kind_rules
        label = rules.label(Sighting(headers=caller.headers, path=caller.path, request=request))
        if label.kind is not None:
            caller.note.labelled(label)
        return Seats(
            session.strands,
            agent_id=rules.agent_id(caller.headers) if caller.headers else "",
            label=label,
            check=None if session.options.max_turns is None else session.check_strand,
        )

    def _make_run(
        self, session: Session | None, request: TurnRequest, request_json: bytes, stages: StageTimes, seats: Seats
    ) -> RequestRun:
        request = self.as_sent(request, session)

        def may_commit() -> bool:
            return session is not None and not session.is_closing

        services = self._services
        opened = openings(
            request,
            seats=seats,
            renderer=services.renderer,
            pool=services.pool,
            share=services.share,
            capabilities=services.engine.capabilities,
            over_budget=services.over_budget,
            tokenizer=services.tokenizer if session is None or isinstance(request, CompletionRequest) else None,
            clock=services.clock,
            opened_at=session.created_at if session is not None else services.clock.wall(),
        )
        ids = [RequestId(uuid.uuid4().hex) for _ in opened]
        reply_id = request.spelling.id_prefix + ids[0]
        turns = [
            TurnRun(
                request_id=request_id,
                reply_id=reply_id if len(ids) == 1 else f"{reply_id}-{index}",
                request=request,
                request_json=request_json,
                opening=opening,
                seats=seats,
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
            seats=seats,
            may_commit=may_commit,
            token_limit=None if session is None else session.options.max_total_tokens,
            services=services,
        )

    def as_sent(self, request: TurnRequest, session: Session | None) -> TurnRequest:
        """The request as it is matched, rendered and sampled: under its session's sampling rules, a chat with the
        arguments that the server and its session give the template where it has none, and with what the template
        cannot show as it stands rewritten."""
        if session is not None and session.options.sampling is not None:
            request = session.options.sampling.ruled(request)
        if not isinstance(request, ChatRequest):
            return request
        of_session: Mapping[str, object] = {} if session is None else session.options.template_kwargs
        renderer = self._services.renderer
        thought = renderer.thinking_arguments(request) if request.thinks is not None or request.effort else {}
        if of_session or thought or self._services.template_kwargs:
            kwargs = {**self._services.template_kwargs, **of_session, **thought, **request.template_kwargs}
            request = replace(request, template_kwargs=kwargs)
        unshown = renderer.unshown_late
        return with_reminders(request, unshown) if unshown else request

    def _run(
        self,
        run: RequestRun,
        session: Session | None,
        seats: Seats,
        identity: RequestIdentity | None,
        client: str,
    ) -> RequestTask:
        """Start the task of a request. Its callback ends its life here: a coroutine that is cancelled before its first
        step runs no `finally`, a task's callback always runs."""
        task = asyncio.get_running_loop().create_task(run.run(), name=f"turn-{run.request_id}")

        request_id, all_stages = run.request_id, [turn.stages for turn in run.turns]

        def delivered() -> None:  # is kept with the reply: it refers to no run and no task
            for stages in all_stages:
                stages.mark(Stage.REPLY, self._services.clock.monotonic())
                if (reply_s := stages.span_s(Stage.COMMIT, Stage.REPLY)) is not None:
                    self._telemetry.reply_delivered(reply_s)
            if session is not None:
                session.release_delivered(request_id)

        turn = RequestTask(run, task, identity=identity, delivery=Delivery(delivered))
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
                    self._count_tokens(session, session.strands.num_tokens)
            seats.give_back()
            error = None if task.cancelled() else task.exception()
            for one, report in zip(run.turns, reports, strict=True):
                self._telemetry.turn_ended(report)
                log_turn_end(one, report, session=session, client=client, error=error)
                error = None  # is logged once
            if session is not None:
                log_discarded(session, run.turns)

        task.add_done_callback(ended)
        return turn


def _reports(run: RequestRun, task: "asyncio.Task[TurnOutcome]") -> list[TurnReport]:
    """The report of each turn of a request whose task has ended."""
    return [_report(run, index, task) for index in range(len(run.turns))]


def _report(run: RequestRun, index: int, task: "asyncio.Task[TurnOutcome]") -> TurnReport:
    turn = run.turns[index]
    meter = turn.meter
    report = TurnReport(
        end=TurnEnd.ABANDONED,
        stages_s=turn.stages.durations_s(),
        num_completion=meter.num_sampled,
        ttft_s=meter.ttft_s,
        tpot_s=meter.tpot_s,
        itl_s=meter.itl_s,
        unasked_replay=meter.unasked_replay,
        kind=turn.kind,
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
        finish=reply.sampled.finish.reason.value,
        num_discarded_turns=len(turn.discarded),
        num_discarded_tokens=sum(len(gone.sampled.ids) for gone in turn.discarded),
        rewrites=turn.rewrites,
    )
