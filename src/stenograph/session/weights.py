"""The policy's weights as turns see them: their name, whether new turns wait, and which turns a change reaches.

`Weights` is that state; every method is synchronous. `WeightSync` changes it: it tells the engines what a trainer says,
one change at a time. Its `Followers` take over each state: they hold their turns before an engine is told, and let them
go on after. Sessions, ids and histories are not touched.

Invariants. A turn that is let in is in `runs` until it ends. A turn that was in `runs` at any moment between a change's
beginning and its end cannot tell by itself which weights sampled which token: only an engine that reports it for each
token can. `num_changes` is odd while a change is under way, so a turn needs to remember one number.
"""

import asyncio
import enum
import logging
from collections import Counter
from typing import Protocol

from msgspec import Struct

from stenograph.core.weights import (
    UpdateWeights,
)

log = logging.getLogger(__name__)

PAUSED_RETRY_S = 5.0
"""Seconds after which a turn that was paused until its deadline is told to come again."""


class SyncState(Struct, frozen=True, kw_only=True):
    """The whole state of a `WeightSync`: a follower of the last one has missed nothing that still holds.

    `num_taken` changes of weights were taken by an engine, the last of them named `version`; the engines `lacking` have
    to take it still. `path` is the folder of the weights that were loaded last, `last_update` the command, if no other
    weights have come since. `addresses` are those of the engines, where they have any.
    """

    is_paused: bool = False
    is_frozen: bool = False
    is_changing: bool = False
    num_taken: int = 0
    version: str | None = None
    lacking: tuple[str, ...] = ()
    last_update: UpdateWeights | None = None
    path: str | None = None
    addresses: tuple[str, ...] = ()


class UpdateOutcome(enum.StrEnum):
    """Outcome of a change of weights."""

    TAKEN = "taken"
    PARTIAL = "partial"
    """Some engines took it; the others get no turns until they have it."""
    REFUSED = "refused"
    """No engine took it; the weights before go on."""


class Followers(Protocol):
    """Takers of a `WeightSync`'s states, whose turns are sampled by the same engines."""

    async def hold(self, state: SyncState) -> int:
        """Have all take a state in which turns wait; returns how many turns they run. Raises WorkerUnavailable if one
        does not answer."""
        ...

    async def follow(self, state: SyncState) -> None:
        """Have all take a state; one that does not answer takes it when it can."""
        ...

    async def abort_all(self) -> int:
        """End every turn with what it has; returns how many there were."""
        ...

    async def change_engines(self, state: SyncState) -> None:
        """Have all use the engines of a state; returns when the turns at those that leave have ended. Raises
        InvalidRequest for one that cannot join."""
        ...


class Freezable(Protocol):
    """A request whose deadline can stand still."""

    def freeze(self) -> None:
        """Stop its clock."""
        ...

    def thaw(self) -> None:
        """Let its clock go on; nothing if it does."""
        ...


class Weights:
    """The name of the weights that sample now, and the gate before the engines.

    `version` None: neither the settings nor a trainer nor the engine has named them.
    """

    def __init__(self, version: str | None = None) -> None:
        self.version = version
        self._names = [version]  # after as many changes as stand before it
        self.is_paused = False
        self.is_held = False
        """Whether new turns wait: generation is paused, or a change is under way."""
        self.num_changes = 0
        self.num_taken = 0
        """Changes that an engine took, also those of the state that this one began with."""
        self.num_mixed_turns = 0
        """Turns whose weights changed, and nobody knows for which tokens."""
        self.outcomes: Counter[UpdateOutcome] = Counter()
        self.runs: set[Freezable] = set()
        self._is_frozen = False
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"<Weights {self.version} paused={self.is_paused} changing={self.is_changing} {len(self.runs)} running>"

    @property
    def is_changing(self) -> bool:
        """Whether a change is under way."""
        return self.num_changes % 2 == 1

    @property
    def is_frozen(self) -> bool:
        """Whether the clocks of running turns stand still."""
        return self._is_frozen

    def opened(self) -> "asyncio.Future[None]":
        """A turn's wait; done once new turns are let in. Whoever leaves cancels it."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def hold(self) -> None:
        """Let no new turn in."""
        self.is_paused = self.is_held = True

    def release(self) -> None:
        """Let turns in again, and the clocks of those that stood still go on."""
        self.is_paused = False
        self._let_in()

    def freeze(self) -> None:
        """Stop the clocks of all turns that run."""
        self._is_frozen = True
        for run in self.runs:
            run.freeze()

    def oldest_since(self, num_changes: int) -> str | None:
        """Name of the oldest weights that may have sampled for a turn that began at `num_changes`."""
        return self._names[num_changes // 2]

    def name(self, version: str | None) -> None:
        """Take an engine's word for the name of the weights that are there."""
        self.version = self._names[-1] = version

    def begin_change(self) -> None:
        """Other weights come: hold new turns, and stop the clocks of those that run, until `end_change`."""
        assert not self.is_changing, "one change at a time"
        self.num_changes += 1
        self.is_held = True
        self.freeze()

    def end_change(self, version: str | None) -> None:
        """The change is over; `version` names the weights that are there now, None: they are those of before."""
        assert self.is_changing, "a change has begun"
        if version is None:
            self.num_changes -= 1
        else:
            self._took(version)
        self._let_in()

    def follow(self, state: SyncState) -> None:
        """Be as a `WeightSync` elsewhere says. A change that is over already has reached what runs here."""
        self.is_paused = state.is_paused
        if state.num_taken != self.num_taken:
            self.num_changes |= 1
            self._took(state.version)
            self.num_taken = state.num_taken
        elif not state.is_changing:
            self.num_changes -= self.num_changes % 2
        if state.version is not None:
            self.version = self._names[-1] = state.version
        if state.is_changing and not self.is_changing:
            self.begin_change()
        if state.is_frozen:
            self.freeze()
        self._let_in()

    def _took(self, version: str | None) -> None:
        self.num_changes += 1
        self.num_taken += 1
        self.version = version
        self._names.append(version)

    def _let_in(self) -> None:
        self.is_held = self.is_paused or self.is_changing
        if self.is_held:
            return
        if self._is_frozen:
            self._is_frozen = False
            for run in self.runs:
                run.thaw()
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
