"""Sessions and their turn tasks: who exists, and how everything begins and ends.

Owns every `Session` and every turn task. A handler that wants a turn asks `admit` for a place, decodes the request in
it, calls `begin`, gets a `Watch`, and leaves it when its client leaves; it never runs a turn. All state changes are
synchronous.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from stenograph.core.chat import ChatRequest, TurnRequest
from stenograph.core.errors import Draining, Limit, LimitExceeded, SessionNotFound
from stenograph.core.outcome import SessionOutcome
from stenograph.core.telemetry import NoTelemetry, SessionEnd, SessionReport, Telemetry, TurnEnd
from stenograph.core.types import SessionId, Stage, StageTimes
from stenograph.session.admission import Caller, Capacity, Limits, Place
from stenograph.session.durable import Keeper, keep_outcome
from stenograph.session.journal import STOPPED, log_discarded, log_session_end, log_turn_end, session_report
from stenograph.session.kept import StoredReply
from stenograph.session.kinds import Sighting
from stenograph.session.making import request_run
from stenograph.session.request import Keep, RequestRun, TurnOutcome, turn_reports
from stenograph.session.retries import RequestIdentity
from stenograph.session.session import Session, SessionOptions
from stenograph.session.shelf import Shelf, ShelvedSession
from stenograph.session.strand import Seats
from stenograph.session.turn import TurnServices
from stenograph.session.watch import Delivery, RequestTask, Watch
from stenograph.trajectory.canonical import rewritten
from stenograph.trajectory.commits import RequestMark

log = logging.getLogger(__name__)

NOBODY = Caller()
"""A caller of whom nothing is known."""

FILE_DIGITS = "00"
"""The beginning of the ids of sessions in the store's one file, whose name it is."""

HANG_UP_PASSES = 8
"""Event-loop iterations until the turn learns of a closed connection: two are enough in the tests."""


class SessionManager:
    """All sessions of this process."""

    def __init__(
        self,
        *,
        services: TurnServices,
        limits: Limits,
        telemetry: Telemetry | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self._services = services
        self._capacity = Capacity(limits, evicts=shelf is not None)
        self._telemetry = telemetry or NoTelemetry()
        self.shelf = shelf
        """The sessions on disk; None if there are none but in memory."""
        self._sessions: dict[SessionId, Session] = {}
        self._turns: set[RequestTask] = set()
        self.num_forgotten = 0
        """Sessions that have left memory."""
        self.num_evicted = 0
        """Those of them that are in the store still."""

    def __repr__(self) -> str:
        return f"<SessionManager {len(self._sessions)} sessions, {self.num_in_flight} turns in flight>"

    @property
    def num_in_flight(self) -> int:
        """Turns that run now. May be read on any thread, as all numbers here."""
        return self._capacity.num_in_flight

    @property
    def num_held_tokens(self) -> int:
        """Tokens of all sessions."""
        return self._capacity.num_held_tokens

    @property
    def num_sessions(self) -> int:
        """Sessions that are held now, those that are being deleted included."""
        return len(self._sessions)

    def create(self, options: SessionOptions) -> Session:
        """Open a session in memory. Raises LimitExceeded or Draining."""
        session = self._opened(options)
        self._sessions[session.id] = session
        return session

    async def open(self, options: SessionOptions, opened_by: RequestMark | None = None) -> Session:
        """Open a session, durably where there is a store. Raises LimitExceeded, Draining or StorageUnavailable."""
        session = self._opened(options)
        session.opened_by = opened_by
        if self.shelf is not None:
            await self.shelf.create(session)
        self._sessions[session.id] = session
        return session

    def _opened(self, options: SessionOptions) -> Session:
        if self._capacity.is_draining:
            raise Draining("the server is shutting down and opens no sessions", retry_after_s=5.0)
        self._make_room()
        clock = self._services.clock
        id_ = uuid.uuid4().hex if self.shelf is None else FILE_DIGITS + uuid.uuid4().hex[len(FILE_DIGITS) :]
        return Session(SessionId(id_), options, created_at=clock.wall(), now=clock.monotonic())

    def _make_room(self) -> None:
        """See that one more session may be in memory. Raises LimitExceeded."""
        limits = self._capacity.limits
        if len(self._sessions) >= limits.max_sessions:
            self.expire()
            self._evict(1 + len(self._sessions) - limits.max_sessions, 0)
        if len(self._sessions) >= limits.max_sessions:
            raise LimitExceeded(
                Limit.SESSIONS,
                f"the server holds its {limits.max_sessions} sessions (--max-sessions); delete one first",
                retry_after_s=5.0,
            )

    def _evict(self, num_sessions: int, num_tokens: int) -> None:
        """Let go of sessions that nobody works on and that the store has, those that were idle longest first, until
        that many are gone, and that many tokens."""
        if self.shelf is None or (num_sessions <= 0 and num_tokens <= 0):
            return
        for session in sorted(self._sessions.values(), key=lambda session: session.last_chat):
            if num_sessions <= 0 and num_tokens <= 0:
                break
            if session.is_idle and session.tail is not None:
                num_sessions, num_tokens = num_sessions - 1, num_tokens - session.num_counted_tokens
                del self._sessions[session.id]
                self._count_tokens(session, 0)
                session.close()
                self.num_evicted += 1
                self.num_forgotten += 1

    async def wake(self, session_id: str) -> Session:
        """The live session of that id, read from the store if it is not in memory.

        Raises SessionNotFound, SessionDamaged, StorageUnavailable, or LimitExceeded if no more may be in memory.
        """
        if self.shelf is None or session_id in self._sessions:
            return self.get(session_id)
        session = await self.shelf.read(session_id)
        if session_id in self._sessions:  # another request was quicker
            return self.get(session_id)
        self._make_room()
        self._sessions[session.id] = session
        self._count_tokens(session, session.strands.num_tokens)
        return session

    async def look(self, session_id: str) -> Session:
        """A session to be read: the live one, or what the store has of it, which wakes nothing. Raises as `wake`."""
        if self.shelf is None or session_id in self._sessions:
            return self.get(session_id)
        return await self.shelf.read(session_id)

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

    async def put_outcome(self, session_id: str, outcome: SessionOutcome) -> None:
        """Set a session's outcome, durably where there is a store, in place of one that it has. Raises as `wake`, and
        StorageUnavailable."""
        session = await self.wake(session_id)
        if self.shelf is None or session.tail is None:
            session.outcome = outcome
            return
        clock = self._services.clock
        idle_since = clock.wall() - (clock.monotonic() - session.last_chat)
        await keep_outcome(self.shelf.store, session, outcome, at=idle_since)

    def note_trained(self, session: Session, num_by_node: Mapping[int, int]) -> None:
        """Samples of a session were given out, which may have been read to be looked at: as `Session.note_trained`."""
        self._sessions.get(session.id, session).note_trained(num_by_node)
        if self.shelf is not None:
            self.shelf.note_trained(session.id, num_by_node)

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

    async def page_kept(self, *, limit: int, after: str | None) -> "list[Session | ShelvedSession]":
        """As `page`, with those in the store; one that is in memory is the live one."""
        if self.shelf is None:
            return [*self.page(limit=limit, after=after)]
        self.expire()
        found = await self.shelf.page(limit=limit, after=after)
        shown = [self._sessions.get(one.opened.session_id, one) for one in found]
        return [one for one in shown if isinstance(one, ShelvedSession) or not one.is_closing]

    async def expire_kept(self) -> None:
        """Delete sessions in the store that have been idle for longer than they may."""
        if self.shelf is None or self.shelf.store.failure is not None:
            return
        for session_id in await self.shelf.expired():
            if session_id not in self._sessions:
                with suppress(SessionNotFound):  # somebody has deleted it meanwhile
                    await self._remove(self.shelf, session_id, SessionEnd.EXPIRED)

    async def settle(self, session: Session | None) -> None:
        """Wait for the abandoned turns to end. They have been cancelled; this takes no engine's time.

        A client that disconnects and reconnects may be here before the disconnect has been read from its old
        connection: a few event-loop iterations let it be read, and no abandoned turn makes the session busy.
        """
        if session is None or not session.running:
            return
        for _ in range(HANG_UP_PASSES):
            if not session.is_full or any(turn.is_ending for turn in session.running):
                break
            await asyncio.sleep(0)
        while tasks := [turn.task for turn in session.running if turn.is_ending]:
            await asyncio.wait(tasks)

    def admit(
        self, session: Session | None, *, stages: StageTimes, identity: RequestIdentity | None = None
    ) -> "Place | Watch":
        """A place for a new request, to be decoded in it; for one that repeats a turn, by its `identity`, that turn.

        `session` None: it is served statelessly, unrecorded. Raises SessionNotFound before IdempotencyMismatch before
        SessionBusy of a linear session before Draining and LimitExceeded; nothing is held then.
        """
        if session is not None:
            if identity is not None and (repeated := self._repeated(session, identity)) is not None:
                if not isinstance(repeated, StoredReply):
                    return repeated
                place = Place(self._capacity, session, identity, stages)
                place.repeats = repeated
                return place
            session.check_open()
        capacity, most = self._capacity, self._capacity.limits.max_held_tokens
        if capacity.num_held_tokens >= most and capacity.evicts:
            self._evict(0, 1 + capacity.num_held_tokens - most + most // 10)
        capacity.check(1)
        stages.mark(Stage.ADMIT, self._services.clock.monotonic())
        if session is not None:
            session.check_limits()
        return Place(capacity, session, identity, stages)

    def begin(self, place: Place, decoded: tuple[TurnRequest, bytes], caller: Caller = NOBODY) -> Watch:
        """Run the turns of a request in its place. `decoded` is the request, and as JSON what of it is kept in the
        record; `caller` is whoever asks.

        Raises as `admit` if anything changed since, InvalidRequest and LimitExceeded for prompts that it cannot have,
        and SessionBusy of a strand; nothing but the place is held then. The seats and the place are given back when
        the task ends, however it ends. A request that repeats one that came while it was decoded watches that one.
        """
        session, stages = place.session, place.stages
        if place.repeats is not None:
            return place.repeats.watch(decoded[0], self._services.engine.capabilities)
        if session is not None and (session.is_closing or session.num_started != place.num_started):
            if place.identity is not None and (repeated := self._repeated(session, place.identity)) is not None:
                assert not isinstance(repeated, StoredReply), "none comes while a request is decoded"
                return repeated
            session.check_open()
            session.check_limits()
        self._capacity.check_open()
        request, request_json = decoded
        place.fit(request)
        stages.mark(Stage.DECODE, self._services.clock.monotonic())
        seats = self._seats(session, request, caller)
        try:
            run = request_run(
                self.as_sent(request, session, seats.agent_id),
                request_json,
                session=session,
                seats=seats,
                stages=stages,
                services=self._services,
                keep=None if self.shelf is None else self._keep(place, seats, caller),
            )
        except BaseException:
            seats.give_back()
            raise
        return self._run(run, place, seats, caller.name).watch()

    async def delete(self, session_id: str) -> None:
        """Close a session: refuse new turns at once, end the running ones at the engine, forget everything.

        The running turns' callers get what the engine answers to the abort, within a grace time. Raises
        SessionNotFound.
        """
        if self.shelf is not None and session_id not in self._sessions:
            await self._remove(self.shelf, session_id, SessionEnd.DELETED)
            return
        session = self.get(session_id)
        session.refuse_new()
        turns = session.running
        try:
            # All are aborted before the first wait, so that each ends within its grace time, even if this call fails.
            await asyncio.gather(*(turn.run.abort(unanswered=SessionNotFound(session.id)) for turn in turns))
            if turns:
                await asyncio.wait([turn.task for turn in turns])
            if self.shelf is not None:
                await self.shelf.delete(session_id)
        except BaseException:
            if self.shelf is not None:
                self.shelf.discard(session.id)
            raise
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
        self._capacity.is_draining = True
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
        self._capacity.is_draining = True

    def abandon_all(self) -> None:
        """Stop every turn at once; the watchers get an error that the server is shutting down."""
        for turn in list(self._turns):
            why = "The turn was stopped because the server is shutting down; nothing of it was kept."
            turn.abandon(Draining(why, retry_after_s=5.0))

    def _drop_expired(self, session: Session) -> None:
        session.refuse_new()
        if self.shelf is not None and session.tail is not None:
            self.shelf.discard(session.id)
        self._forget(session, SessionEnd.EXPIRED)

    def _forget(self, session: Session, end: SessionEnd) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._count_tokens(session, 0)
            self.num_forgotten += 1
            session.close()
            self._tell_gone(session, end)

    async def _remove(self, shelf: Shelf, session_id: str, end: SessionEnd) -> None:
        """Delete a session that is in the store alone. Raises SessionNotFound or StorageUnavailable."""
        session = await shelf.remove(session_id)
        if session is None:  # damaged: nobody knows what it had
            self._telemetry.session_ended(SessionReport(end=end))
        else:
            self._tell_gone(session, end)

    def _tell_gone(self, session: Session, end: SessionEnd) -> None:
        log_session_end(session, end, age_s=self._services.clock.wall() - session.created_at)
        self._telemetry.session_ended(session_report(session, end))

    def _count_tokens(self, session: Session, num_tokens: int) -> None:
        self._capacity.num_held_tokens += num_tokens - session.num_counted_tokens
        session.num_counted_tokens = num_tokens

    def _keep(self, place: Place, seats: Seats, caller: Caller) -> Keep | None:
        """The way of a request's turns to the store; None if they do not go there."""
        if self.shelf is None or place.session is None or place.session.tail is None:
            return None
        keeper = Keeper(self.shelf.store, place.session, seats=seats, identity=place.identity, note=caller.note)
        return keeper.keep

    def _repeated(self, session: Session, identity: RequestIdentity) -> Watch | StoredReply | None:
        """The turn of the session that this request asks for again. Raises IdempotencyMismatch."""
        repeated = None if session.is_closing else session.find_repeated(identity)
        if repeated is None:
            return None
        is_running = isinstance(repeated, RequestTask) and not repeated.task.done()
        self._telemetry.retry_answered(joined=is_running)
        return repeated if isinstance(repeated, StoredReply) else repeated.watch()

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

    def as_sent(self, request: TurnRequest, session: Session | None, agent_id: str = "") -> TurnRequest:
        """The request as it is matched, rendered and sampled: under its session's sampling rules, a chat with the
        arguments that the server and its session give the template where it has none, and under the rules that rewrite.
        `agent_id` is its client's own."""
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
        unshown, rules = renderer.unshown_late, self._services if session is None else session.options
        if unshown or request.system_blocks is not None:  # else there is nothing to rewrite
            request = rewritten(request, rules.canonical.drops, unshown)
        if session is not None and session.strands.pins is not None:
            request = session.strands.pinned(session.strands.pins, request, agent_id)
        return request

    def _run(self, run: RequestRun, place: Place, seats: Seats, client: str) -> RequestTask:
        """Start the task of a request. Its callback ends its life here: a coroutine that is cancelled before its first
        step runs no `finally`, a task's callback always runs."""
        task = asyncio.get_running_loop().create_task(run.run(), name=f"turn-{run.request_id}")
        session, request_id, all_stages = place.session, run.request_id, [turn.stages for turn in run.turns]

        def delivered() -> None:  # is kept with the reply: it refers to no run and no task
            for stages in all_stages:
                stages.mark(Stage.REPLY, self._services.clock.monotonic())
                if (reply_s := stages.span_s(Stage.COMMIT, Stage.REPLY)) is not None:
                    self._telemetry.reply_delivered(reply_s)
            if session is not None:
                session.release_delivered(request_id)

        turn = RequestTask(run, task, identity=place.identity, delivery=Delivery(delivered))
        self._turns.add(turn)
        place.begun()
        if session is not None:
            session.began(turn)

        def ended(task: "asyncio.Task[TurnOutcome]") -> None:
            self._turns.discard(turn)
            place.give_back()
            for one in run.turns:
                one.buffer.close()
            reports = turn_reports(run.turns, task, None if session is None else session.options.group)
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
