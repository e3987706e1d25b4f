"""START READING HERE. One request, from its place in a session to its committed reply.

| step | | who |
|---|---|---|
| 1 receive | socket → bytes | http/turn_route.py |
| 2 admit | session → its admission, or the turn that it repeats | admission.py |
| 3 decode | bytes → request, and its strand's lease | dialects/, manager.py |
| 4 to 9 | position, render, sample, validate, parse, commit | `RequestRun.run`, here |
| 10 reply | outcome → bytes, to its watchers (watch.py) | dialects/, http/turn_route.py |

The steps' work on a turn is in steps.py. A completion with several prompts has a turn for each (completion.py).

Invariants. Nothing is committed unless everything before it succeeded, and the commit is one synchronous step. Where
there is a store, the turn is durable before it, and the step is taken when durability is known. Nothing but the leases
is held across an await. Cancelling the task abandons a request; once its turn is on its way to the disk it is not
cancelled. An abort asks the engine, and the engine answers with the tokens sampled so far; only if it does not, within
the grace time, is the request ended without them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatReply, ChatRequest, Remaining, TurnRequest
from stenograph.core.errors import (
    BudgetSpent,
    Limit,
    NothingToAnswer,
    Paused,
    StenographError,
    UpstreamTimeout,
)
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.sampling_rules import blame_session
from stenograph.core.stated_options import Budgets, OverLimit
from stenograph.session.services import TurnServices
from stenograph.session.steps import RunningTurn
from stenograph.session.weights import PAUSED_RETRY_S
from stenograph.trajectory.strand import Leases

if TYPE_CHECKING:
    from stenograph.session.completion import SideBySide  # loaded by a completion with several prompts

NO_DEADLINE_S = 10 * 365 * 86400.0
"""Stands for no deadline: an abort can still bring it forward."""


class TurnOutcome(Struct, frozen=True, kw_only=True, gc=False):
    """Outcome of an ended request: a reply to each prompt, the budget left after them, and whether they are kept.

    `reply_id` is the client's name for the replies. `strand` and `node` number the place of the first kept turn, None
    if none is kept; `rewrites` are its changes. `is_echo`: the request was the strand's last reply once more, and
    nothing was generated for it. Nor was it where the session had `spent` a budget.
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


WriteTurns = Callable[["RequestRun", Callable[[], TurnOutcome]], "asyncio.Future[TurnOutcome]"]
"""Makes the turns durable (`write_turns`), then calls the commit."""


class RequestRun:
    """One request. Made by the manager, run once, watched through the buffers of its turns: one, or several for a
    completion with several prompts, whose `steps` take each step of all turns at once.

    `may_commit`: there is a session, and it is not being deleted. `budgets` are the session's limits in all. `write`
    None: there is no store. `keep_media` keeps those of the request's messages. `remaining` is the budget left before
    sampling; it is known when the first piece is there.
    """

    def __init__(
        self,
        turns: Sequence[RunningTurn],
        *,
        steps: "RunningTurn | SideBySide",
        request: TurnRequest,
        leases: Leases,
        may_commit: bool,
        budgets: Budgets,
        services: TurnServices,
        write: WriteTurns | None = None,
        joint_reply_id: str | None = None,
        keep_media: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.turns = tuple(turns)
        self.turn = self.turns[0]
        """The first; its id is the request's, for the engine and the session."""
        self._steps = steps
        self.request_id = self.turn.request_id
        self.joint_reply_id = joint_reply_id
        """The client's name for the replies of several turns."""
        self.request = request
        self.remaining = Remaining()
        self.leases = leases
        self.may_commit = may_commit
        self.is_work = True
        """Whether its turns are of the session's work, counted by `max_turns`."""
        self._budgets = budgets
        self._spent: BudgetSpent | None = None
        self._has_ended = False
        self._services = services
        self._deadline: asyncio.Timeout | None = None
        self._abort_error: StenographError | None = None
        self._abort_requested = False
        self._write, self._keep_media = write, keep_media
        self._held: asyncio.Future[None] | None = None
        self._frozen_s: float | None = None
        self.is_committing = False
        """Whether its turns are on their way to the disk: from then on it cannot be abandoned."""

    def __repr__(self) -> str:
        return f"<RequestRun {self.request_id}, {len(self.turns)} turns>"

    async def run(self) -> TurnOutcome:
        """Steps 4 to 9. Raises StenographError; anything else is a bug of ours. Commits last, or not at all."""
        steps = self._steps
        try:
            if self._spent is not None:
                return self._stopped(self._spent)
            async with asyncio.timeout(self._services.timeout_s or NO_DEADLINE_S) as self._deadline:
                if self._abort_requested:  # before the first step
                    self._begin_grace()
                await steps.position()  # 4: trajectory, where it attaches
                if self.turn.attachment.adds_nothing:
                    return self._echo()
                await steps.render()  # 5: text, the ids of its prompt
                self._grant()  # how much may be sampled
                await self._let_in()  # the gate, shut while the weights change
                await steps.sample()  # 6: engine; 7: validate; 8: text, ids to message
                if self._keep_media is not None:
                    await self._keep_media()  # nothing refers to bytes that are not there
                if self._write is None or not self.may_commit:
                    return self._commit()  # 9: trajectory
            self.is_committing, self._deadline = True, None  # neither its deadline nor whoever leaves ends it now
            return await self._write(self, self._commit)  # 9: store, then trajectory
        except TimeoutError as error:
            if not self.is_timed_out:
                raise  # not ours: a bug of whoever let it out
            raise self._timeout_error() from error
        except StenographError as error:
            if isinstance(error, BudgetSpent) and self._budgets.over_limit is OverLimit.STOP:
                return self._stopped(error)
            blame_session(error, self.request.imposed)
            if isinstance(self.request, ChatRequest):
                error.blame = self.request.blame_of_client(error.blame)
            raise
        finally:
            self._deadline = None
            self._services.weights.runs.discard(self)
            for turn in self.turns:
                turn.buffer.close()

    def _echo(self) -> TurnOutcome:
        """The outcome of a request ending with a reply of its strand: without a message, if that is the last reply and
        the request takes it. Raises NothingToAnswer."""
        turn = self.turn
        parent, strand = turn.attachment.parent, turn.builder.strand
        assert parent is not None, "nothing is added to a line that is there"
        takes_echo = isinstance(self.request, ChatRequest) and self.request.takes_echo
        if not takes_echo or parent is not strand.history.latest:
            raise NothingToAnswer(
                "The request ends with a reply that this session generated: there is nothing to answer."
                " Add a message, or leave the last reply out to generate it again.",
                blame=Blame(RequestPart.MESSAGES, max(0, parent.num_messages - 1)),
            )
        reply = turn.empty_reply(parent)
        return TurnOutcome(
            reply_id=reply.id,
            replies=(reply,),
            committed=False,
            remaining=self.remaining,
            strand=strand.number,
            is_echo=True,
        )

    def _grant(self) -> None:
        """Settle how much may be sampled. Each turn gets the same share of the session's remaining tokens."""
        session, most = None, self._budgets.max_total_tokens
        if most is not None:
            num_before = self.leases.num_tokens_before([(turn.builder.strand, turn.attachment) for turn in self.turns])
            session = most - num_before - sum(turn.num_new_tokens for turn in self.turns)
        share = None if session is None else session // len(self.turns)
        left = [turn.grant(share) for turn in self.turns]
        self.remaining = Remaining(
            context_tokens=min((one for one in left if one is not None), default=None), session_tokens=session
        )

    async def _let_in(self) -> None:
        """Wait at the gate, until it is open or the request is aborted. Between it and the engine nothing is awaited: a
        later change finds the request at the engine, none meets it with the name of other weights."""
        weights = self._services.weights
        while weights.is_held and not self._abort_requested:
            self._held = weights.opened()
            try:
                await asyncio.wait((self._held,))
            finally:
                self._held.cancel()
        self._held = None
        weights.runs.add(self)

    def _commit(self) -> TurnOutcome:
        """Keep the turns, unless their session is being deleted. Synchronous: nothing can come between."""
        committed, self._has_ended = self.may_commit, True
        num_added = longest = 0
        replies: list[ChatReply] = []
        for turn in self.turns:
            reply = turn.commit(is_kept=committed)
            replies.append(reply)
            num_added += len(reply.sampled.ids) + (sum(len(one.ids) - 1 for one in turn.media) if turn.media else 0)
            longest = max(longest, reply.usage.num_prompt + len(reply.sampled.ids))
        first = self.turn
        limit, session = first.capabilities.max_context_tokens, self.remaining.session_tokens
        return TurnOutcome(
            reply_id=self.joint_reply_id or first.reply_id,
            replies=tuple(replies),
            committed=committed,
            remaining=Remaining(
                context_tokens=None if limit is None else limit - longest,
                session_tokens=None if session is None else session - num_added,
            ),
            strand=first.builder.strand.number,
            node=first.node_id,
            rewrites=first.rewrites,
        )

    @property
    def is_timed_out(self) -> bool:
        """Whether its deadline has passed, and it is only waited for to end."""
        return self._deadline is not None and self._deadline.expired()

    @property
    def may_yet_commit(self) -> bool:
        """Whether its turns are counted nowhere yet, and may be kept."""
        return self.may_commit and self._spent is None and not self._has_ended

    def refuse(self, spent: BudgetSpent) -> None:
        """Sample nothing when it is run: its client gets an empty reply. Raises the error where an error is the
        answer."""
        if self._budgets.over_limit is not OverLimit.STOP:
            raise spent
        self.leases.give_back()
        self._spent = spent

    def _stopped(self, spent: BudgetSpent) -> TurnOutcome:
        """The outcome of a request beyond its session's budget: an empty reply to each prompt."""
        self.remaining = Remaining(session_tokens=0 if spent.limit is Limit.SESSION_TOKENS else None)
        replies = tuple(turn.empty_reply() for turn in self.turns)
        id_ = self.joint_reply_id or self.turn.reply_id
        return TurnOutcome(reply_id=id_, replies=replies, committed=False, remaining=self.remaining, spent=spent)

    def abort(self, unanswered: StenographError | None = None) -> Coroutine[None, None, int]:
        """End the turns with their tokens so far; one that has not reached the engine ends with nothing.

        If the engine has not answered within the grace time, the request fails with `unanswered` (default:
        UpstreamTimeout): this much is settled on return. The returned coroutine asks the engine, within the same time,
        and returns how many turns there were left to end.
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

    def freeze(self) -> None:
        """Stop the clock of the deadline, except an abort's."""
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

    def _begin_grace(self) -> None:
        """Bring the deadline forward. One already past ends the request as it is."""
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
