"""The policy's weights as turns see them: their name, whether new turns wait, and the turns reached by a change.

`Weights` is this state; every method is synchronous. `WeightSync` changes it: it passes a trainer's orders to the
engines, one change at a time. Its `Followers` take over each state: they hold their turns before an engine is told, and
let them go on after. Sessions, ids and histories are not touched.

Invariants. An admitted turn is in `runs` until it ends. A turn in `runs` at any moment between a change's beginning and
its end cannot tell by itself which weights sampled a token: only an engine's report for each token can. `num_changes`
is odd while a change is under way, so a turn needs to remember one number.
"""

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from stenograph.core.loaded import entry
from stenograph.core.weights import UpdateWeights

log = logging.getLogger(__name__)

PAUSED_RETRY_S = 5.0
"""Delay before the retry of a turn paused until its deadline, in seconds."""


class SyncState(Struct, frozen=True, kw_only=True):
    """The whole state of a `WeightSync`: a follower of the last one has missed nothing still valid.

    `num_taken` changes of weights were taken by an engine, the last of them named `version`; the engines `lacking` have
    to take it still. `path` is the folder of the weights loaded last, `last_update` the command, if no other weights
    have come since. `addresses` are those of the engines, where they have any.
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
    """Takers of a `WeightSync`'s states. The same engines sample their turns."""

    async def hold(self, state: SyncState) -> int:
        """Have all take a state in which turns wait; returns how many turns they run. Raises WorkerUnavailable if one
        does not answer."""
        ...

    async def follow(self, state: SyncState) -> None:
        """Have all take a state; a follower that does not answer takes it when it can."""
        ...

    async def abort_all(self) -> int:
        """End every turn with its tokens so far; returns how many there were."""
        ...

    async def change_engines(self, state: SyncState) -> None:
        """Have all use the engines of a state; returns when the turns at those that leave have ended. Raises
        InvalidRequest for one that cannot join."""
        ...


class Freezable(Protocol):
    """A request with a deadline that can stand still."""

    def freeze(self) -> None:
        """Stop its clock."""
        ...

    def thaw(self) -> None:
        """Let its clock go on; nothing if it does."""
        ...


class KeptLoras(Protocol):
    """The last load of each LoRA, over a restart: version names go on where turns of stored sessions have them."""

    def last(self, lora: str) -> tuple[str, str] | None:
        """Version and folder of its last load, no folder after an unload; None: never loaded."""
        ...

    def folders(self, lora: str) -> set[str]:
        """The folders in which engines list it now."""
        ...

    def keep(self, lora: str, version: str, folder: str) -> None:
        """Keep a load. Raises UnexpectedFailure."""
        ...


class Weights:
    """The name of the weights in use, and the gate before the engines.

    `version` None: neither the settings nor a trainer nor the engine has named them. `cached_as` names what they cache.
    `loras` are the weights of turns by a LoRA, which change with these; each has its own version and gate.
    """

    version: str | None
    cached_as: str | None

    def __init__(self, version: str | None = None) -> None:
        self._named(version)
        self._names = [version]  # after as many changes as stand before it
        self.is_paused = False
        self.is_held = False
        """Whether new turns wait: generation is paused, or a change is under way."""
        self.num_changes = 0
        self.num_taken = 0
        """Changes taken by an engine, also those of the state given at the beginning."""
        self.num_mixed_turns = 0
        """Turns whose weights changed, nobody knows for which tokens."""
        self.outcomes: Counter[UpdateOutcome] = Counter()
        self.runs: set[Freezable] = set()
        self.on_taken: Callable[[], None] | None = None
        """Called after each change."""
        self.loras: dict[str, Weights] = {}
        self.kept_loras: Callable[[], KeptLoras] | None = None
        self._is_frozen = False
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"<Weights {self.version} paused={self.is_paused} changing={self.is_changing} {len(self.runs)} running>"

    def of(self, lora: str | None) -> "Weights":
        """The weights of turns by this LoRA; None: these."""
        if lora is None:
            return self
        if lora not in self.loras:
            self.loras[lora] = entry("stenograph.session.policies:LoraWeights")(self, lora)
        return self.loras[lora]

    @property
    def num_running(self) -> int:
        """Turns that a change reaches."""
        return len(self.runs) + sum(len(one.runs) for one in self.loras.values())

    @property
    def num_mixed(self) -> int:
        """`num_mixed_turns`, those by LoRAs included."""
        return self.num_mixed_turns + sum(one.num_mixed_turns for one in self.loras.values())

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
        for one in self.loras.values():
            one.hold()

    def release(self) -> None:
        """Let turns in again, and start the stopped clocks again."""
        self.is_paused = False
        self._let_in()
        for one in self.loras.values():
            one.release()

    def freeze(self) -> None:
        """Stop the clocks of all running turns."""
        self._is_frozen = True
        for run in self.runs:
            run.freeze()
        for one in self.loras.values():
            one.freeze()

    def oldest_since(self, num_changes: int) -> str | None:
        """Name of the oldest weights possibly used by a turn begun at `num_changes`."""
        return self._names[num_changes // 2]

    def name(self, version: str | None) -> None:
        """Take an engine's word for the name of its weights."""
        self._names[-1] = version
        self._named(version)
        for one in self.loras.values():
            one.name(version)

    def begin_change(self) -> None:
        """Other weights come: hold new turns, and stop the clocks of running ones, until `end_change`."""
        assert not self.is_changing, "one change at a time"
        self.num_changes += 1
        self.is_held = True
        self.freeze()
        for one in self.loras.values():
            if not one.is_changing:
                one.begin_change()

    def end_change(self, version: str | None) -> None:
        """The change is over; `version` names the weights now in use, None: the same as before."""
        assert self.is_changing, "a change has begun"
        if version is None:
            self.num_changes -= 1
        else:
            self._took(version)
        self._let_in()
        for one in self.loras.values():
            one.end_change(version)

    def follow(self, state: SyncState) -> None:
        """Follow a `WeightSync` elsewhere. A change already over has reached the turns here."""
        num_new = state.num_taken - self.num_taken
        self.is_paused = state.is_paused
        if state.num_taken != self.num_taken:
            self.num_changes |= 1
            self._took(state.version)
            self.num_taken = state.num_taken
        elif not state.is_changing:
            self.num_changes -= self.num_changes % 2
        if state.version is not None:
            self._names[-1] = state.version
            self._named(state.version)
        for one in self.loras.values():
            one.follow(replace(state, num_taken=one.num_taken + num_new))
        if state.is_changing and not self.is_changing:
            self.begin_change()
        if state.is_frozen:
            self.freeze()
        self._let_in()

    def _named(self, version: str | None) -> None:
        self.version = self.cached_as = version

    def _took(self, version: str | None) -> None:
        self.num_changes += 1
        self.num_taken += 1
        self._named(version)
        self._names.append(version)
        if self.on_taken is not None:
            self.on_taken()

    def age_of(self, version: str) -> int | None:
        """Changes since a version: by its number, where versions are numbers; None where it is not known."""
        now = self.version or ""
        if version.isdecimal() and now.isdecimal():
            return int(now) - int(version)
        names = self._names[::-1]
        return names.index(version) if version in names else None

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
