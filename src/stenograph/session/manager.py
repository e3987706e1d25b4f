"""The turns of all sessions: how each begins and ends, and how a session or the process ends with them.

Owns every turn task; sessions.py decides which sessions exist. For a turn, a handler calls `admit`, decodes the request
under its admission, calls `begin`, gets a `Watch`, and leaves it when its client leaves; it never runs a turn. All
state changes are synchronous.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import cast

from msgspec.structs import replace

from stenograph.core.chat import ChatRequest, TurnRequest
from stenograph.core.errors import Draining, SessionNotFound, StorageUnavailable
from stenograph.core.kinds import Compat
from stenograph.core.loaded import entry
from stenograph.core.stages import StageTimes
from stenograph.core.stated_options import NO_BUDGETS
from stenograph.core.telemetry import NoTelemetry, SessionEnd, Telemetry, TurnEnd, TurnReport
from stenograph.core.types import RequestId, SessionId
from stenograph.core.weights import CacheSalt
from stenograph.session.admission import Admission, Caller, Capacity, Limits
from stenograph.session.budgets import spent_budget
from stenograph.session.commit_writer import write_turns
from stenograph.session.journal import log_discarded, log_turn_end, turn_report
from stenograph.session.kept import StoredReply
from stenograph.session.kinds import Sighting
from stenograph.session.prompt_builder import ChatPromptBuilder, PromptBuilder
from stenograph.session.retries import RequestIdentity
from stenograph.session.services import TurnServices
from stenograph.session.session import Session
from stenograph.session.sessions import Sessions
from stenograph.session.steps import RunningTurn
from stenograph.session.storage import SessionStorage
from stenograph.session.turn import RequestRun, TurnOutcome
from stenograph.session.watch import Delivery, RequestTask, Watch
from stenograph.trajectory.canonical import rewritten
from stenograph.trajectory.strand import Leases

log = logging.getLogger(__name__)

NOBODY = Caller()
"""A caller of whom nothing is known."""

COMPLETIONS = "stenograph.session.completion:completions"
SIDE_BY_SIDE = "stenograph.session.completion:SideBySide"
CONTINUED = "stenograph.session.continued:turn_of"
KEEP_MEDIA = "stenograph.session.kept_media:keep_media"
INHERITED = "stenograph.session.inherited:answered"
"""Loaded by the first completion, the first turn of a fork, the first with media, and a fork's first request."""

HANG_UP_PASSES = 8
"""Event-loop iterations until the turn learns of a closed connection: two are enough in the tests."""


class SessionManager:
    """The turns running on the sessions of this process: `sessions`."""

    def __init__(
        self,
        *,
        services: TurnServices,
        limits: Limits,
        telemetry: Telemetry | None = None,
        storage: SessionStorage | None = None,
        capacity: Capacity | None = None,
        digits: str | None = None,
    ) -> None:
        self._services, self.weights = services, services.weights
        self._clock, self._telemetry = services.clock, telemetry or NoTelemetry()
        self.sessions = Sessions(
            clock=services.clock,
            limits=limits,
            telemetry=telemetry,
            storage=storage,
            capacity=capacity,
            digits=digits,
            on_gone=services.engine.end_session,
        )
        self._capacity = self.sessions.capacity
        self._turns: set[RequestTask] = set()

    def __repr__(self) -> str:
        return f"<SessionManager {self.sessions!r}, {self.num_in_flight} turns in flight>"

    @property
    def num_in_flight(self) -> int:
        """Turns running now. May be read on any thread, as all numbers here."""
        return self._capacity.num_in_flight

    @property
    def running(self) -> list[RequestTask]:
        """The requests running now."""
        return list(self._turns)

    async def settle(self, session: Session) -> None:
        """Wait for the abandoned turns to end. They have been cancelled; this takes no engine's time.

        A client that disconnects and reconnects may be here before the disconnect has been read from its old
        connection: a few event-loop iterations let it be read, and no abandoned turn makes the session busy.
        """
        for _ in range(HANG_UP_PASSES):
            if not session.is_full or any(turn.is_ending for turn in session.running):
                break
            await asyncio.sleep(0)
        while tasks := [turn.task for turn in session.running if turn.is_ending]:
            await asyncio.wait(tasks)

    def admit(
        self, session: Session | None, *, stages: StageTimes, identity: RequestIdentity | None = None
    ) -> "Admission | Watch":
        """The admission of a new request, to be decoded under it; for the repeat of a turn, known by its `identity`,
        that turn.

        `session` None: it is served statelessly, unrecorded. Raises SessionNotFound before IdempotencyMismatch before
        SessionBusy of a linear session before Draining and LimitExceeded; nothing is held then.
        """
        if session is not None:
            # Any other request repeats none, by `is_repeated`: there is nothing to look for.
            may_repeat = identity is not None and (identity.is_retry or identity.key is not None)
            if identity is not None and may_repeat and (repeated := self._repeated(session, identity)) is not None:
                if not isinstance(repeated, StoredReply):
                    return repeated
                admission = Admission(self._capacity, session, identity, stages)
                admission.repeats = repeated
                return admission
            session.check_open(self._clock.monotonic())
        capacity, most = self._capacity, self._capacity.limits.max_held_tokens
        if capacity.evicts and (num_held := capacity.num_held_tokens + capacity.elsewhere.num_held_tokens) >= most:
            self.sessions.evict(0, 1 + num_held - most)
        capacity.check(1)
        stages.admit = self._clock.monotonic()
        return Admission(capacity, session, identity, stages)

    def begin(self, admission: Admission, decoded: tuple[TurnRequest, bytes], caller: Caller = NOBODY) -> Watch:
        """Run the turns of an admitted request. `decoded` is the request, and as JSON the part kept in the record;
        `caller` is its sender.

        Raises as `admit` if anything changed since, InvalidRequest and LimitExceeded for prompts it cannot have,
        SessionBusy of a strand, and BudgetSpent where the session is set to raise it; nothing but the admission is held
        then. The leases and the admission are given back when the task ends, however it ends. If it repeats a request
        that came while it was decoded, it watches that one.
        """
        session, stages = admission.session, admission.stages
        if admission.repeats is not None:
            return admission.repeats.watch(decoded[0], self._services.engine.capabilities)
        if session is not None and (session.is_closing or session.num_started != admission.num_started):
            if admission.identity is not None and (repeated := self._repeated(session, admission.identity)) is not None:
                assert not isinstance(repeated, StoredReply), "none comes while a request is decoded"
                return repeated
            session.check_open(self._clock.monotonic())
        request, request_json = decoded
        admission.fit(request)
        stages.decode = self._clock.monotonic()
        leases = self._leases(session, request, caller)
        try:
            sent = self.as_sent(request, session, leases.agent_id)
            if session is not None and session.options.fork is not None:
                sent, given = entry(INHERITED)(session, sent, self.sessions, self._services, leases.label)
                if given is not None:
                    return cast("Watch", given)
            run = self._request_run(admission, leases, caller, sent, request_json)
            spent = leases.spent
            if spent is None and session is not None and session.is_limited:
                spent = spent_budget(session, run)
            if spent is not None:
                run.refuse(spent)
        except BaseException:
            leases.give_back()
            raise
        task = asyncio.get_running_loop().create_task(run.run(), name=f"turn-{run.request_id}")
        all_stages = tuple(map(attrgetter("stages"), run.turns))
        turn = RequestTask(
            run=run,
            request_id=run.request_id,
            task=task,
            identity=admission.identity,
            delivery=Delivery(partial(self._delivered, all_stages, session, run.request_id)),
        )
        self._turns.add(turn)
        admission.is_begun = True
        if session is not None:
            session.began(turn)
        # A coroutine that is cancelled before its first step runs no `finally`; a task's callback always runs.
        task.add_done_callback(partial(self._ended, turn, admission, caller))
        return turn.watch()

    async def delete(self, session_id: str, *, force: bool = False) -> None:
        """Close a session: refuse new turns at once, end the running ones at the engine, forget everything.

        The running turns' callers get the engine's answer to the abort, within a grace time. Raises SessionNotFound,
        and SessionClaimed unless forced.
        """
        sessions, storage = self.sessions, self.sessions.storage
        if storage is not None and session_id not in sessions:
            await sessions.remove(session_id, SessionEnd.DELETED, force=force)
            return
        session = sessions.get(session_id)
        if not force:
            session.check_unclaimed(self._clock.monotonic())
        session.refuse_new()
        turns = session.running
        try:
            # All are aborted before the first wait, so that each ends within its grace time, even if this call fails.
            await asyncio.gather(*(turn.run.abort(unanswered=SessionNotFound(session.id)) for turn in turns))
            if turns:
                await asyncio.wait([turn.task for turn in turns])
            if storage is not None:
                await storage.delete(session_id, session)
        except BaseException:
            if storage is not None:
                storage.discard(session)
            raise
        finally:
            sessions.forget(session, SessionEnd.DELETED)

    async def abort(self, session_id: str | None) -> int:
        """Ask the engine to end the running turns of one session, or (None) every turn; returns how many it knew."""
        turns = list(self._turns) if session_id is None else self.sessions.get(session_id).running
        return sum(await asyncio.gather(*(turn.run.abort() for turn in turns)))

    async def drain(self, *, timeout_s: float) -> None:
        """Refuse new turns, let running ones end, and after `timeout_s` seconds end the rest as an abort does.

        Their sampled tokens are returned and committed; a turn without an answer from its engine within the grace time
        fails with Draining.
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

    def refuse_new(self) -> None:
        """Begin to drain: new turns and sessions get 503 from now on."""
        self._capacity.is_draining = True

    def abandon_all(self) -> None:
        """Stop every turn at once; the watchers get an error: the server is shutting down."""
        for turn in list(self._turns):
            why = "The turn was stopped because the server is shutting down; nothing of it was kept."
            turn.abandon(Draining(why, retry_after_s=5.0))

    def _repeated(self, session: Session, identity: RequestIdentity) -> Watch | StoredReply | None:
        """The turn of the session repeated by this request. Raises IdempotencyMismatch."""
        repeated = None if session.is_closing else session.find_repeated(identity)
        if repeated is None:
            return None
        is_running = isinstance(repeated, RequestTask) and not repeated.task.done()
        self._telemetry.retry_answered(joined=is_running)
        return repeated if isinstance(repeated, StoredReply) else repeated.watch()

    def let_go_of(self, session_id: SessionId | None, why: StorageUnavailable) -> None:
        """Let go of a session, or (None) of every one: another process may have it by now. Turns running on it end by
        `why`, but for those on their way to the store: the store reports those."""
        for one in [*self.sessions] if session_id is None else [session_id]:
            if (session := self.sessions.let_go(one, why)) is not None:
                for turn in session.running:
                    turn.abandon(why)

    def _leases(self, session: Session | None, request: TurnRequest, caller: Caller) -> Leases:
        """The request's leases, none taken yet, with the rules' label of it."""
        if session is None:
            return Leases(None)
        rules = self._services.kind_rules
        label = rules.label(Sighting(headers=caller.headers, path=caller.path, request=request))
        if label.kind is not None:
            caller.row.labelled(label)
        return Leases(
            session.strands,
            agent_id=rules.agent_id(caller.headers) if caller.headers else "",
            label=label,
            max_strands=self._capacity.limits.max_strands,
        )

    def as_sent(self, request: TurnRequest, session: Session | None, agent_id: str = "") -> TurnRequest:
        """The request as it is matched, rendered and sampled: under its session's sampling rules, a chat with the
        template arguments of the server and its session where it has none, and under the rewrite rules. `agent_id` is
        its client's own."""
        if session is not None and session.options.sampling is not None:
            request = session.options.sampling.ruled(request)
        if session is not None and session.options.compat is Compat.MILES:
            request = replace(request, reply=replace(request.reply, as_miles=True))
        if not isinstance(request, ChatRequest):
            return request
        of_session: Mapping[str, object] = {} if session is None else session.options.template_kwargs
        renderer = self._services.renderer
        thought = renderer.thinking_arguments(request) if request.thinks is not None or request.effort else {}
        if of_session or thought or self._services.template_kwargs:
            kwargs = {**self._services.template_kwargs, **of_session, **thought, **request.template_kwargs}
            request = replace(request, template_kwargs=kwargs)
        hidden, rules = renderer.hidden_late, self._services if session is None else session.options
        if hidden or request.system_blocks is not None:  # else there is nothing to rewrite
            request = rewritten(request, rules.canonical.drops, hidden)
        if session is not None and session.strands.pins is not None:
            request = session.strands.pinned(session.strands.pins, request, agent_id)
        return request

    def _delivered(self, all_stages: Sequence[StageTimes], session: Session | None, request_id: RequestId) -> None:
        """A client has the whole reply of a request. Called from where the reply is kept: it refers to nothing of the
        run."""
        for stages in all_stages:
            now = stages.reply = self._clock.monotonic()
            if stages.commit is not None:
                self._telemetry.reply_delivered(now - stages.commit)
        if session is not None:
            session.release_delivered(request_id)

    def _ended(
        self, turn: RequestTask, admission: Admission, caller: Caller, task: "asyncio.Task[TurnOutcome]"
    ) -> None:
        """End a request whose task is done: give back its holdings, and report."""
        run, session = turn.run, admission.session
        for waiter in turn.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._turns.discard(turn)
        admission.give_back()
        reports: list[TurnReport] = []
        for index, one in enumerate(run.turns):
            one.buffer.close()
            reports.append(turn_report(one, index, task))
        if session is not None:
            session.ended(turn, now=self._clock.monotonic(), committed=reports[0].end is TurnEnd.COMMITTED)
            self.sessions.chatted(session)
        run.leases.give_back()
        place, tenant = admission.place, None
        if place is not None:
            tenant = place.tenant
            place.sampled(sum(report.num_completion or 0 for report in reports))
        error = logged = None if task.cancelled() else task.exception()
        for one, report in zip(run.turns, reports, strict=True):
            self._telemetry.turn_ended(report)
            if report.end is not TurnEnd.COMMITTED or report.was_aborted:
                left = entry("stenograph.session.fates:turn_left")
                left(self.sessions, session, one.node_id, report, self.weights, tenant)
            log_turn_end(one, report, session=session, client=caller.name, error=logged)
            logged = None  # is logged once
        if session is not None and any(map(attrgetter("discarded"), run.turns)):
            log_discarded(session, run.turns)
        if caller.trace is not None:
            caller.trace.ended(run, reports, None if session is None else session.id, error)

    def _request_run(
        self, admission: Admission, leases: Leases, caller: Caller, request: TurnRequest, request_json: bytes
    ) -> RequestRun:
        """A request under the options of its session. A chat takes its lease. Raises SessionBusy."""
        session, stages, services = admission.session, admission.stages, self._services
        if session is not None and session.options.stated.policy is not None:
            services = entry("stenograph.session.policies:services_of")(services, session.options.stated.policy)
        capabilities = services.engine.capabilities
        builders: Sequence[PromptBuilder]
        if isinstance(request, ChatRequest):
            chat = partial(ChatPromptBuilder, leases=leases, services=services, capabilities=capabilities)
            builders = [chat(request, opened_at=session.created_at if session else services.clock.wall())]
        else:
            builders = entry(COMPLETIONS)(request, leases=leases, services=services, capabilities=capabilities)
        salt = session.options.cache_salt if session else CacheSalt.at(services.cache_salt, self.weights.version)
        turns, reply_id, is_one = list[RunningTurn](), "", len(builders) == 1
        make = RunningTurn if session is None or session.options.fork is None else entry(CONTINUED)(session.options)
        for index, builder in enumerate(builders):
            request_id = RequestId(os.urandom(16).hex())
            reply_id = reply_id or request.spelling.id_prefix + request_id
            turns.append(
                make(
                    request_id=request_id,
                    reply_id=reply_id if is_one else f"{reply_id}-{index}",
                    request=request,
                    request_json=request_json,
                    builder=builder,
                    leases=leases,
                    affinity_key=session.id if session is not None else None,
                    stages=stages if is_one else replace(stages),
                    services=services,
                    capabilities=capabilities,
                    wants_support=session is not None and session.options.support,
                    cache_salt=salt,
                    trace=None if caller.trace is None else caller.trace.generation(request_id),
                )
            )
        write, keep_media, storage = None, None, self.sessions.storage
        if session is not None and session.tail is not None and storage is not None:
            write = partial(write_turns, storage.store, session, admission.identity, caller.row)
        if session is not None and isinstance(request, ChatRequest) and request.media:
            keep_media = partial(entry(KEEP_MEDIA), session, storage, request.media)
        return RequestRun(
            turns,
            steps=turns[0] if is_one else entry(SIDE_BY_SIDE)(turns),
            joint_reply_id=None if is_one else reply_id,
            request=request,
            leases=leases,
            may_commit=session is not None,
            budgets=NO_BUDGETS if session is None else session.options.stated,
            services=services,
            write=write,
            keep_media=keep_media,
        )
