"""START READING HERE. One request: its turns side by side, under one deadline, one abort and one commit.

A chat makes one turn, a completion one for each of its prompts; each step is taken by all of them before the next.
`RequestRun.run` is the whole of it. What a step does is the turn's (steps.py). `turn_report` says for the
metrics and the log how a turn ended.

Invariants. Nothing but the leases of its seats is held across an await. The commit is one synchronous step, whatever
the number of turns. Where there is a store, the turns are durable before it, and the step is taken when that is known.
Cancelling the task is how a request is abandoned; once its turns are on their way to the disk it is not cancelled. An
abort is asked of the engine, which answers with what it has sampled; only if it does not, within the grace time, is the
request ended without it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from msgspec import Struct

from stenograph.core.budgets import Budgets, OverLimit
from stenograph.core.chat import ChatReply, ChatRequest, Remaining, TurnRequest
from stenograph.core.errors import (
    BudgetSpent,
    Limit,
    NothingToAnswer,
    Paused,
    StenographError,
    UpstreamInvalid,
    UpstreamTimeout,
)
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.sampling_rules import blame_session
from stenograph.core.telemetry import TurnEnd, TurnReport
from stenograph.core.trace_context import TraceContext
from stenograph.core.types import FinishReason, RequestId
from stenograph.session.services import TurnServices
from stenograph.session.steps import TurnRun
from stenograph.session.strand import Seats
from stenograph.session.weights import PAUSED_RETRY_S, Weights

NO_DEADLINE_S = 10 * 365 * 86400.0
"""Stands for no deadline: an abort can still bring it forward."""


class TurnOutcome(Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of a request that ended: a reply to each prompt, what is left after them, and whether they are kept.

    `reply_id` is by which the client knows the replies.
    `strand` and `node` number the place of the first turn that is kept, None if none is; `rewrites` are its changes.
    `is_echo`: the request was the strand's last reply once more, and nothing was generated for it. Nor was it where the
    session had `spent` a budget.
    """

    reply_id: str
    replies: tuple[ChatReply, ...]
    committed: bool
    remaining: Remaining
    strand: int | None = None
    node: int | None = None
    rewrites: tuple[AppliedRewrite, ...] = ()
    is_echo: bool = False
    spent: BudgetSpent | None = None

    @property
    def reply(self) -> ChatReply:
        """The first; of most requests the only one."""
        return self.replies[0]


class RequestRun:
    """One request's turns. Made by the manager, run once, watched through the turns' buffers.

    `reply_id` is by which the client knows the reply, None if it is that of the one turn. `may_commit`: there is a
    session, and it is not being deleted. `budgets` are what that may have in all. `keep` makes the turns durable; None:
    there is no store. `remaining` is what is left before anything is sampled; it is known when the first piece is
    there.
    """

    def __init__(
        self,
        *,
        request: TurnRequest,
        reply_id: str | None,
        turns: Sequence[TurnRun],
        seats: Seats,
        may_commit: bool,
        budgets: Budgets,
        services: TurnServices,
        keep: "Keep | None" = None,
    ) -> None:
        self.request = request
        self.turns = tuple(turns)
        self.request_id = self.turns[0].request_id
        """By which the engine knows it; of several turns the first's."""
        self.joint_reply_id = reply_id
        """By which the client knows the replies of several turns."""
        self.remaining = Remaining()
        self.seats = seats
        self.may_commit = may_commit
        self.is_work = True
        """Whether its turns are of the session's work, which `max_turns` counts."""
        self._budgets = budgets
        self._spent: BudgetSpent | None = None
        self._has_ended = False
        self._services = services
        self._deadline: asyncio.Timeout | None = None
        self._abort_error: StenographError | None = None
        self._abort_requested = False
        self._keep = keep
        self._held: asyncio.Future[None] | None = None
        self._frozen_s: float | None = None
        self.is_committing = False
        """Whether its turns are on their way to the disk: from then on it cannot be abandoned."""

    def __repr__(self) -> str:
        return f"<RequestRun {self.request_id}, {len(self.turns)} turns>"

    @property
    def is_timed_out(self) -> bool:
        """Whether its deadline has passed, and it is only waited for to end."""
        return self._deadline is not None and self._deadline.expired()

    @property
    def may_yet_commit(self) -> bool:
        """Whether its turns are counted nowhere yet, and may be kept."""
        return self.may_commit and self._spent is None and not self._has_ended

    def refuse(self, spent: BudgetSpent) -> None:
        """Sample nothing when it is run: its client gets an empty reply. Raises the error where that is the answer."""
        if self._budgets.over_limit is not OverLimit.STOP:
            raise spent
        self.seats.give_back()
        self._spent = spent

    def abort(self, unanswered: StenographError | None = None) -> Coroutine[None, None, int]:
        """End the turns with what they have sampled; one that has not reached the engine ends with nothing.

        If the engine has not answered within the grace time, the request fails with `unanswered` (default:
        UpstreamTimeout): that much is settled when this returns. What it returns asks the engine, within that time
        too, and returns how many turns there were left to end.
        """
        was_new = not self._abort_requested
        self._abort_requested = True
        self._abort_error = unanswered or self._abort_error
        if was_new:
            self._begin_grace()
            if self._held is not None:
                self._held.cancel()
        left = [turn.end_early() for turn in self.turns]
        return self._ask_engine_to_end(left)

    async def run(self) -> TurnOutcome:
        """All turns. Raises StenographError; anything else is a bug of ours. Commits last, or not at all."""
        weights = self._services.weights
        try:
            if self._spent is not None:
                return self._stopped(self._spent)
            async with asyncio.timeout(self._services.timeout_s or NO_DEADLINE_S) as self._deadline:
                if self._abort_requested:  # before the first step
                    self._begin_grace()
                if len(self.turns) == 1:
                    await self.turns[0].open()  # position, render
                    self._grant()
                    await self._let_in(weights)
                    await self.turns[0].sample()  # sample, validate, parse
                else:
                    await _side_by_side(self.turns, TurnRun.open)
                    self._grant()
                    await self._let_in(weights)
                    await _side_by_side(self.turns, TurnRun.sample)
                if self._keep is None:
                    return self._commit()
            return await self._commit_durably(self._keep)
        except TimeoutError as error:
            if not self.is_timed_out:
                raise  # not ours: a bug of whoever let it out
            raise self._timeout_error() from error
        except StenographError as error:
            return self._unsampled(error)
        finally:
            self._deadline = None
            weights.runs.discard(self)
            for turn in self.turns:
                turn.buffer.close()

    def freeze(self) -> None:
        """Stop the clock of the deadline, but for that of an abort."""
        if self._deadline is None or self._abort_requested or self.is_timed_out:
            return
        if (when := self._deadline.when()) is not None:
            self._frozen_s = when - asyncio.get_running_loop().time()
            self._deadline.reschedule(None)

    def thaw(self) -> None:
        """Let the clock go on, with as much as was left."""
        left_s, self._frozen_s = self._frozen_s, None
        if left_s is not None and self._deadline is not None and not self._abort_requested:
            self._deadline.reschedule(asyncio.get_running_loop().time() + left_s)

    async def _let_in(self, weights: Weights) -> None:
        """Wait at the gate, until it is open or the request is aborted. Between it and the engine nothing is awaited:
        a change that begins later finds the request at the engine, none meets it with the name of other weights."""
        while weights.is_held and not self._abort_requested:
            self._held = weights.opened()
            try:
                await asyncio.wait((self._held,))
            finally:
                self._held.cancel()
        self._held = None
        weights.runs.add(self)

    def _grant(self) -> None:
        """Settle how much each turn may sample. Of what the session leaves, each gets the same share."""
        limit, session = self.turns[0].capabilities.max_context_tokens, None
        longest = 0
        for turn in self.turns:
            longest = max(longest, turn.prompt.num_tokens)
        limit_tokens = self._budgets.max_total_tokens
        if limit_tokens is not None:
            num_before = self.seats.num_tokens_before([(turn.opening.strand, turn.attachment) for turn in self.turns])
            session = limit_tokens - num_before - sum(turn.num_new_tokens for turn in self.turns)
        context = None if limit is None else limit - longest
        self.remaining = Remaining(context_tokens=context, session_tokens=session)
        for turn in self.turns:
            turn.grant(
                Remaining(
                    context_tokens=None if limit is None else limit - turn.prompt.num_tokens,
                    session_tokens=None if session is None else session // len(self.turns),
                )
            )

    async def _commit_durably(self, keep: "Keep") -> TurnOutcome:
        """Have the turns written, and kept in the very step in which that is known. Neither its deadline nor whoever
        leaves ends it any more, until it is known. Raises StorageUnavailable."""
        self.is_committing, self._deadline = True, None
        if not self.may_commit:
            return self._commit()
        return await keep(self, self._commit)

    def _unsampled(self, error: StenographError) -> TurnOutcome:
        """The outcome of a request that is answered without the engine; else raises the error as its client sees it."""
        if isinstance(error, BudgetSpent) and self._budgets.over_limit is OverLimit.STOP:
            return self._stopped(error)
        if isinstance(error, NothingToAnswer) and (reply := self.turns[0].echo(error.node_id)) is not None:
            number, left = self.turns[0].opening.strand.number, self.remaining
            return TurnOutcome(
                reply_id=reply.id, replies=(reply,), committed=False, remaining=left, strand=number, is_echo=True
            )
        blame_session(error, self.request.imposed)
        if isinstance(self.request, ChatRequest):
            error.blame = self.request.blame_of_client(error.blame)
        raise error

    def _stopped(self, spent: BudgetSpent) -> TurnOutcome:
        """The outcome of a request that its session has no budget for: an empty reply to each prompt."""
        self.remaining = Remaining(session_tokens=0 if spent.limit is Limit.SESSION_TOKENS else None)
        replies = tuple(turn.empty_reply() for turn in self.turns)
        id_ = self.joint_reply_id or replies[0].id
        return TurnOutcome(reply_id=id_, replies=replies, committed=False, remaining=self.remaining, spent=spent)

    def _commit(self) -> TurnOutcome:
        """Keep the turns, unless their session is being deleted. Synchronous: nothing can come between."""
        committed, self._has_ended = self.may_commit, True
        replies: list[ChatReply] = []
        num_sampled = longest = 0
        for turn in self.turns:
            reply = turn.commit(is_kept=committed)
            replies.append(reply)
            num_sampled += len(reply.sampled.ids)
            longest = max(longest, reply.prompt.num_tokens + len(reply.sampled.ids))
        limit, before = self.turns[0].capabilities.max_context_tokens, self.remaining
        remaining = Remaining(
            context_tokens=None if limit is None else limit - longest,
            session_tokens=None if before.session_tokens is None else before.session_tokens - num_sampled,
        )
        return TurnOutcome(
            reply_id=self.joint_reply_id or replies[0].id,
            replies=tuple(replies),
            committed=committed,
            remaining=remaining,
            strand=self.turns[0].opening.strand.number,
            node=self.turns[0].node_id,
            rewrites=self.turns[0].rewrites,
        )

    def _begin_grace(self) -> None:
        """Bring the deadline forward. One that has passed already ends the request as it is."""
        if self._deadline is not None and not self.is_timed_out:
            grace_end = asyncio.get_running_loop().time() + self._services.abort_grace_s
            when = self._deadline.when()  # None while it stands still
            self._deadline.reschedule(grace_end if when is None else min(when, grace_end))

    async def _ask_engine_to_end(self, left: list[bool]) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._services.abort_grace_s):
                for index, turn in enumerate(self.turns):
                    left[index] |= await self._services.engine.abort(turn.request_id)
        return sum(left)

    def _timeout_error(self) -> StenographError:
        if self._abort_error is not None:
            return self._abort_error
        if self._held is not None:
            return Paused(
                f"Generation has been paused for longer than the turn's deadline of {self._services.timeout_s:g} s;"
                " the turn has not begun.",
                retry_after_s=PAUSED_RETRY_S,
            )
        if self._abort_requested:
            return UpstreamTimeout(
                f"The turn was aborted, but the engine gave no reply within {self._services.abort_grace_s:g} s;"
                " nothing of it was kept."
            )
        return UpstreamTimeout(
            f"The turn took longer than {self._services.timeout_s:g} s; it was stopped, nothing of it was kept."
        )


class RequestTrace(Protocol):
    """The trace of one request. All methods are synchronous, cheap, and never raise."""

    def generation(self, request_id: RequestId) -> TraceContext:
        """The span of one of its turns at the engine, before the turn begins."""
        ...

    def ended(
        self, run: RequestRun, reports: Sequence[TurnReport], session_id: str | None, error: BaseException | None
    ) -> None:
        """Its turns are over: a report of each, and what they failed with."""
        ...

    def refused(self, error: StenographError) -> None:
        """It made no turn."""


Keep = Callable[[RequestRun, Callable[[], TurnOutcome]], "asyncio.Future[TurnOutcome]"]
"""Writes the turns of a request that are sampled, and calls what commits them when they are durable."""


async def _side_by_side(turns: Sequence[TurnRun], step: Callable[[TurnRun], Coroutine[None, None, None]]) -> None:
    """Take a step of all turns at once. The first that fails stops the others, and its error is raised."""
    failed: list[Exception] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for turn in turns:
                tasks.create_task(step(turn), name=f"turn-{turn.request_id}")
    except* Exception as group:  # noqa: BLE001 -- raised again, the first of them
        failed += group.exceptions
    if failed:
        raise failed[0]


def turn_report(turn: TurnRun, index: int, task: "asyncio.Task[TurnOutcome]", group: str | None) -> TurnReport:
    """The report of a turn, the one of this index in a request whose task has ended. `group` is its session's."""
    meter = turn.meter
    report = partial(
        TurnReport,
        num_completion=meter.num_sampled,
        ttft_s=meter.ttft_s,
        tpot_s=meter.tpot_s,
        itl_s=tuple(meter.gaps_s),
        unasked_replay=meter.unasked_replay,
        kind=turn.kind,
        group=group,
    )
    if task.cancelled():
        return report(end=TurnEnd.ABANDONED, stages_s=turn.stages.durations_s())
    error = task.exception()
    if error is not None:
        code = error.code if isinstance(error, StenographError) else "internal_error"
        law = error.law if isinstance(error, UpstreamInvalid) else None
        return report(end=TurnEnd.FAILED, stages_s=turn.stages.durations_s(), code=code, law=law)
    outcome = task.result()
    reply, num_discarded = outcome.replies[index], 0
    for gone in turn.discarded:
        num_discarded += len(gone.sampled.ids)
    return report(
        end=TurnEnd.COMMITTED if outcome.committed else TurnEnd.UNRECORDED,
        stages_s=reply.stages_s,
        was_aborted=reply.sampled.finish.reason is FinishReason.ABORT,
        num_prompt=reply.usage.num_prompt,
        num_kept=reply.prompt.num_kept,
        num_cached=reply.usage.num_cached,
        finish=reply.sampled.finish.reason.value,
        num_discarded_turns=len(turn.discarded),
        num_discarded_tokens=num_discarded,
        rewrites=turn.rewrites,
    )
