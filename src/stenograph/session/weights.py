"""The policy's weights as turns see them: their name, whether new turns wait, and which turns a change reaches.

`Weights` is that state, owned by one server; every method is synchronous. `WeightSync` is what changes it: it tells the
engines what a trainer says, one change at a time. Sessions, ids and histories are not touched.

Invariants. A turn that is let in is in `runs` until it ends. A turn that was in `runs` at any moment between a change's
beginning and its end cannot tell by itself which weights sampled which token: only an engine that reports it for each
token can. `num_changes` is odd while a change is under way, so a turn needs to remember one number.
"""

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stenograph.core.weights import (
    ContinueGeneration,
    ControlAnswer,
    FlushCache,
    NameWeights,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
    WeightCommand,
)
from stenograph.engine.base import Engine

log = logging.getLogger(__name__)

PAUSED_RETRY_S = 5.0
"""Seconds after which a turn that was paused until its deadline is told to come again."""


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
        self.num_mixed_turns = 0
        """Turns whose weights changed, and nobody knows for which tokens."""
        self.runs: set[Freezable] = set()
        self._is_frozen = False
        self._waiting: set[asyncio.Future[None]] = set()

    def __repr__(self) -> str:
        return f"<Weights {self.version} paused={self.is_paused} changing={self.is_changing} {len(self.runs)} running>"

    @property
    def is_changing(self) -> bool:
        """Whether a change is under way."""
        return self.num_changes % 2 == 1

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

    def learn(self, version: str | None) -> None:
        """Take an engine's word for the name of the weights that are there, if nobody has said it here."""
        self.version = self._names[-1] = self.version or version

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
            self.num_changes += 1
            self.version = version
            self._names.append(version)
        self._let_in()

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


class UpdateOutcome(enum.StrEnum):
    """Outcome of a change of weights."""

    TAKEN = "taken"
    PARTIAL = "partial"
    """Some engines took it; the others get no turns until they have it."""
    REFUSED = "refused"
    """No engine took it; the weights before go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """Result of a trainer's command: whether all engines did it, and in one line what became of it."""

    success: bool
    message: str
    num_paused: int = 0


class WeightSync:
    """A trainer's commands, carried out on all engines. `abort_all` ends every running turn with what it has."""

    def __init__(self, engine: Engine, weights: Weights, abort_all: Callable[[], Awaitable[int]]) -> None:
        self._engine = engine
        self._abort_all = abort_all
        self.weights = weights
        self.last_update: UpdateWeights | None = None
        """The last weights that an engine took from a folder; None if others came later, or none did."""
        self.outcomes: Counter[UpdateOutcome] = Counter()

    def __repr__(self) -> str:
        return f"<WeightSync of {self.weights!r}>"

    async def find_version(self) -> str | None:
        """Name of the weights that sample now. An engine is asked where nobody has said it."""
        if self.weights.version is None:
            self.weights.learn(await self._engine.find_version())
        return self.weights.version

    async def update(self, command: UpdateWeights, *, aborts: bool) -> SyncResult:
        """Have all engines load weights; new turns wait meanwhile. With `aborts`, those that run end first."""
        message = f"The weights are those of {command.path}, version {command.version!r}."
        return await self._change(command, command.version, message, aborts=aborts)

    async def name(self, version: str, *, aborts: bool) -> SyncResult:
        """Tell all engines the name of weights that somebody has sent to them. With `aborts`, running turns end."""
        return await self._change(NameWeights(version=version), version, f"The version is {version!r}.", aborts=aborts)

    async def bring_up(self, engine: Engine) -> str:
        """Give an engine that joins the others their weights; returns why it has not got them, or nothing.

        Before it has them it takes no turns.
        """
        version = self.weights.version
        if version is None or not self.weights.num_changes or await engine.find_version() == version:
            return ""
        engine.require_version(version)
        if self.last_update is None:
            return f"it has to be sent the weights {version!r}"
        return "; ".join(_problems(await engine.control(self.last_update)))

    async def pause(self, mode: PauseMode) -> SyncResult:
        """Hold new turns and have those that run end or stand still. If an engine refuses, nothing is paused."""
        weights, was_paused = self.weights, self.weights.is_paused
        weights.hold()
        num_running = len(weights.runs)
        if mode is PauseMode.ABORT:
            await self._abort_all()
        answers = await self._engine.control(PauseGeneration(mode=mode))
        if problems := _problems(answers):
            if not was_paused:
                if len(problems) < len(answers):
                    await self._engine.control(ContinueGeneration())
                weights.release()
            return SyncResult(success=False, message=f"Generation is not paused: {'; '.join(problems)}.")
        if mode is not PauseMode.ABORT:
            weights.freeze()
        log.info("paused (%s): new turns wait; %d were running", mode, num_running)
        return SyncResult(success=True, message="Generation is paused.", num_paused=num_running)

    async def resume(self) -> SyncResult:
        """Let all go on."""
        answers = await self._engine.control(ContinueGeneration())
        self.weights.release()
        log.info("continued: new turns are let in")
        if problems := _problems(answers):
            return SyncResult(success=False, message=f"Not every engine goes on: {'; '.join(problems)}.")
        return SyncResult(success=True, message="Generation goes on.")

    async def flush(self) -> SyncResult:
        """Have all engines forget what they have cached."""
        if problems := _problems(await self._engine.control(FlushCache())):
            return SyncResult(success=False, message=f"Not every cache is empty: {'; '.join(problems)}.")
        return SyncResult(success=True, message="The caches are empty.")

    async def _change(self, command: WeightCommand, version: str, message: str, *, aborts: bool) -> SyncResult:
        weights = self.weights
        if weights.is_changing:
            return SyncResult(success=False, message="Another change of weights is under way; send this one after it.")
        weights.begin_change()
        taken: str | None = None
        try:
            await self.find_version()
            if aborts:
                await self._abort_all()
            num_running = len(weights.runs)
            answers = await self._engine.control(command)
            problems = _problems(answers)
            taken = version if len(problems) < len(answers) else None
        finally:
            weights.end_change(taken)
        if taken is not None:
            self.last_update = command if isinstance(command, UpdateWeights) else None
        outcome = (
            UpdateOutcome.TAKEN if not problems else UpdateOutcome.REFUSED if taken is None else UpdateOutcome.PARTIAL
        )
        self.outcomes[outcome] += 1
        log.log(
            logging.WARNING if problems else logging.INFO,
            "weights %s (version %r, %d turns over the change)%s",
            outcome, version, num_running, "".join(f"; {problem}" for problem in problems),
        )  # fmt: skip
        if problems:
            kept = "the weights before go on" if taken is None else "they get no turns until they have the version"
            message = f"Not every engine took it: {'; '.join(problems)}. Of these, {kept}."
        num_paused = sum(answer.num_paused for answer in answers)
        return SyncResult(success=not problems, message=message, num_paused=num_paused)


def next_version(version: str | None) -> str:
    """The name of weights that nobody has named, after those of `version`: never the same."""
    if version is None:
        return "1"
    if version.isascii() and version.isdigit():
        return str(int(version) + 1)
    stem, plus, number = version.rpartition("+")
    return f"{stem}+{int(number) + 1}" if plus and number.isascii() and number.isdigit() else f"{version}+1"


def _problems(answers: Sequence[ControlAnswer]) -> list[str]:
    return [f"{answer.name}: {answer.problem}" for answer in answers if answer.problem]
