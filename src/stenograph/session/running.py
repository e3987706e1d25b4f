"""A request's turns that run, and those who wait for them. The manager owns the task; whoever watches can only leave.

They end early when its last watcher has left. A retry that joins is one more watcher, so a client that hung up and
asked again finds its turn going on.
"""

import asyncio
from array import array
from collections.abc import Callable

from stenograph.core.chat import Remaining, StreamPiece, TurnRequest
from stenograph.core.errors import StenographError, UnexpectedFailure
from stenograph.core.types import RequestId, Stage, token_ids
from stenograph.session.reply_buffer import ReplyReader
from stenograph.session.retries import RequestIdentity
from stenograph.session.turn import RequestRun, TurnOutcome


class TurnAbandoned(Exception):
    """The turn that was watched has been abandoned by its own watchers; there is nobody to tell."""


class Turn:
    """A request's task, its watchers, and whether its reply has reached any of them. Of a chat, it is one turn's.

    `order` counts those of its session, from 1, as they were started.
    """

    def __init__(
        self,
        run: RequestRun,
        task: "asyncio.Task[TurnOutcome]",
        *,
        identity: RequestIdentity | None,
        on_delivered: Callable[["Turn"], None],
    ) -> None:
        self.run = run
        self.task = task
        self.identity = identity
        self.was_delivered = False
        self.order = 0
        self._on_delivered = on_delivered
        self._watches: set[Watch] = set()
        self._why: StenographError | None = None
        self._is_abandoned = False

    def __repr__(self) -> str:
        return f"<Turn {self.request_id} done={self.task.done()} watched by {len(self._watches)}>"

    @property
    def request_id(self) -> RequestId:
        """By which the engine knows it."""
        return self.run.request_id

    @property
    def is_abandoned(self) -> bool:
        """Whether it was stopped by us and is only waited for to end."""
        return self._is_abandoned

    def watch(self) -> "Watch":
        """One more watcher. It must leave."""
        watch = Watch(self)
        self._watches.add(watch)
        return watch

    def leave(self, watch: "Watch") -> None:
        """A watcher is gone; the last one's leaving stops a turn that still runs."""
        self._watches.discard(watch)
        if not self._watches:
            self.abandon()

    def abandon(self, why: StenographError | None = None) -> None:
        """Stop the turn and keep nothing of it. Without effect once it has ended; past the commit it has.

        `why` is what its watchers are told; None if they have all left. The task is cancelled once: a second time
        would break into what it does to end, and the engine might never be told. One whose deadline has passed is
        ending already, and by that.
        """
        if self._is_abandoned or self.run.is_timed_out or self.task.cancel():
            self._is_abandoned = True
            self._why = self._why or why

    def delivered(self) -> None:
        """A watcher's client has the whole reply. Only the first time counts."""
        if not self.was_delivered:
            self.was_delivered = True
            self._on_delivered(self)

    async def result(self) -> TurnOutcome:
        """Wait for the end. Cancelling this wait leaves the turn alone.

        Raises the turn's StenographError, the one that it was abandoned with, UnexpectedFailure for a bug of ours
        (logged), or TurnAbandoned.
        """
        await asyncio.wait({self.task})
        if self.task.cancelled():
            raise self._why or TurnAbandoned
        error = self.task.exception()
        if error is None:
            return self.task.result()
        if isinstance(error, StenographError):
            raise error
        raise UnexpectedFailure("The server failed on this turn; nothing of it was kept.") from error


class Watch:
    """One client's view of a turn: its pieces from the beginning, and its end."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._reader = ReplyReader([run.buffer for run in turn.run.turns])

    def __repr__(self) -> str:
        return f"<Watch of {self._turn!r}>"

    @property
    def request_id(self) -> RequestId:
        """By which the engine knows the turn."""
        return self._turn.request_id

    @property
    def request(self) -> TurnRequest:
        """What was asked for."""
        return self._turn.run.request

    @property
    def reply_id(self) -> str:
        """By which the client knows the reply; settled when the first piece is there."""
        return self._turn.run.reply_id

    @property
    def prompts(self) -> "list[array[int]]":
        """The ids of each prompt; empty while there are none."""
        return [run.prompt.ids if run.is_open else token_ids() for run in self._turn.run.turns]

    @property
    def remaining(self) -> Remaining:
        """How many tokens may come in all; known when the first piece is there."""
        return self._turn.run.remaining

    async def take(self) -> list[StreamPiece] | None:
        """What the turns have produced since the last call; None when they have ended, or this watch has left."""
        return await self._reader.take()

    async def result(self) -> TurnOutcome:
        """Wait for the end; raises as `Turn.result`."""
        return await self._turn.result()

    def timings_s(self) -> dict[Stage, float]:
        """Seconds that each stage took that has ended by now; of several turns the first's."""
        return self._turn.run.turns[0].stages.durations_s()

    def delivered(self) -> None:
        """Say that the reply's last byte was handed to a live connection."""
        self._turn.delivered()

    def leave(self) -> None:
        """Watch no more. Harmless when repeated."""
        self._reader.close()
        self._turn.leave(self)
