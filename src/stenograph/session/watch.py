"""A request's task, and its watchers. The manager owns the task; a watcher can only leave.

A request ends early when its last watcher has left. A joining retry is one more watcher: after a disconnect and a
retry, a client finds its turn going on.
"""

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Mapping
from typing import Protocol

from msgspec import Struct

from stenograph.core.chat import Remaining, ReplyOptions, Spelling, StreamPiece
from stenograph.core.errors import StenographError, UnexpectedFailure
from stenograph.core.stages import Stage
from stenograph.core.types import RequestId, SamplingParams, token_ids
from stenograph.session.reply_buffer import BufferReader
from stenograph.session.retries import RequestIdentity
from stenograph.session.turn import RequestRun, TurnOutcome


class TurnAbandoned(Exception):
    """The watched turn has been abandoned by its own watchers; no client waits for it."""


class Delivery(Struct, eq=False):
    """Whether a reply has reached a client. All watchers share one, before the commit and after it."""

    on_delivered: Callable[[], None]
    is_done: bool = False

    def __repr__(self) -> str:
        return f"<Delivery done={self.is_done}>"

    def done(self) -> None:
        """A client has the whole reply. Only the first time counts."""
        if not self.is_done:
            self.is_done = True
            self.on_delivered()


class Watch(Protocol):
    """One client's view of a request: its pieces from the beginning, and its end."""

    request_id: RequestId
    """The turn's id at the engine."""
    options: ReplyOptions
    """The client's options for the reply."""
    spelling: Spelling
    """The spelling of the request's dialect for reports about it."""
    params: SamplingParams
    """The requested sampling, with the session's rules applied."""
    created: int
    """When it was asked for, in whole seconds of the epoch."""

    @property
    def reply_id(self) -> str:
        """The client's name for the reply; settled when the first piece is there."""
        ...

    @property
    def prompts(self) -> "list[array[int]]":
        """The ids of each prompt; empty while there are none."""
        ...

    @property
    def remaining(self) -> Remaining:
        """Maximum number of tokens to come; known when the first piece is there."""
        ...

    async def take(self) -> list[StreamPiece] | None:
        """The pieces produced since the last call; None when the turns have ended, or this watch has left."""
        ...

    def call(self) -> None:
        """End a waiting `take`: it returns what is new, if only nothing."""
        ...

    def result(self) -> Coroutine[None, None, TurnOutcome]:
        """Wait for the end.

        Raises the turn's StenographError, the error of its abandonment, UnexpectedFailure for a bug of ours (logged),
        or TurnAbandoned.
        """
        ...

    def timings_s(self) -> Mapping[Stage, float]:
        """Seconds in each stage ended by now; of several turns the first's."""
        ...

    def delivered(self) -> None:
        """Report the reply's last byte as sent through a live connection."""
        ...

    def leave(self) -> None:
        """Watch no more. Harmless when repeated."""
        ...


class RequestTask(Struct, eq=False, kw_only=True):
    """A request's task and its watchers. `order` counts those of its session, from 1, as they were started.

    `request_id` is its id at the engine. `is_superseded`: another request with the same body was begun after it.
    `is_abandoned`: it was stopped by us, and is only waited for to end. `delivery` outlives the task.
    """

    run: RequestRun
    request_id: RequestId
    task: "asyncio.Task[TurnOutcome]"
    identity: RequestIdentity | None
    delivery: Delivery
    is_superseded: bool = False
    order: int = 0
    watches: "set[LiveWatch]" = set()
    waiters: list[asyncio.Future[None]] = []
    why: StenographError | None = None
    is_abandoned: bool = False

    def __repr__(self) -> str:
        return f"<RequestTask {self.request_id} done={self.task.done()} watched by {len(self.watches)}>"

    @property
    def is_ending(self) -> bool:
        """Whether nobody waits for it, and it ends without the engine: it is abandoned, or on its way to the disk."""
        return self.is_abandoned or (self.run.is_committing and not self.watches)

    def watch(self) -> "LiveWatch":
        """One more watcher. It must leave."""
        watch = LiveWatch(self)
        self.watches.add(watch)
        return watch

    def abandon(self, why: StenographError | None = None) -> None:
        """Stop the turn and keep nothing of it. Without effect once it has ended or is on its way to the disk.

        `why` is raised to its watchers; None if they have all left. The task is cancelled once: a second time would
        interrupt its cleanup, and the engine might never be asked to stop. A turn past its deadline is ending already,
        for this reason.
        """
        if self.run.is_committing:
            return
        if self.is_abandoned or self.run.is_timed_out or self.task.cancel():
            self.is_abandoned = True
            self.why = self.why or why


class LiveWatch:
    """A `Watch` of a request with a task that runs, or has ended a moment ago."""

    def __init__(self, task: RequestTask) -> None:
        request = task.run.request
        self.request_id = task.request_id
        self.options = request.reply
        self.spelling = request.spelling
        self.params = request.params
        self.delivered = task.delivery.done
        self.created = int(task.run.turn.requested_at)
        self._task = task
        self._reader: BufferReader | None = None
        self._has_left = False
        self._prompts: list[array[int]] | None = None
        """Made once: they are as long as the history."""

    def __repr__(self) -> str:
        return f"<LiveWatch of {self._task!r}>"

    @property
    def reply_id(self) -> str:
        run = self._task.run
        return run.turn.reply_id if run.joint_reply_id is None else run.joint_reply_id

    @property
    def prompts(self) -> "list[array[int]]":
        if self._prompts is not None:
            return self._prompts
        turns = self._task.run.turns
        prompts = [turn.prompt.ids if turn.is_open else token_ids() for turn in turns]
        self._prompts = prompts if all(turn.is_open for turn in turns) else None
        return prompts

    @property
    def remaining(self) -> Remaining:
        return self._task.run.remaining

    async def take(self) -> list[StreamPiece] | None:
        return None if self._has_left else await self._pieces().take()

    def call(self) -> None:
        if not self._has_left:
            self._pieces().call()

    async def result(self) -> TurnOutcome:
        """Wait for the end. Cancelling this wait leaves the turn alone."""
        owner, task = self._task, self._task.task
        if not task.done():
            waiter: asyncio.Future[None] = task.get_loop().create_future()
            owner.waiters.append(waiter)
            await waiter
        if task.cancelled():
            raise owner.why or TurnAbandoned
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, StenographError):
            raise error
        raise UnexpectedFailure("The server failed on this turn; nothing of it was kept.") from error

    def timings_s(self) -> Mapping[Stage, float]:
        return self._task.run.turn.stages.durations_s()

    def leave(self) -> None:
        """Watch no more; the last watcher's leaving stops a running turn."""
        self._has_left = True
        if self._reader is not None:
            self._reader.close()
        task = self._task
        task.watches.discard(self)
        if not task.watches and not task.task.done():
            task.abandon()

    def _pieces(self) -> BufferReader:
        """The reader of a stream's pieces; a client of a whole reply has none."""
        if self._reader is None:
            self._reader = BufferReader([turn.buffer for turn in self._task.run.turns])
        return self._reader
