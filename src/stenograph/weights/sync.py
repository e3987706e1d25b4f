"""A trainer's commands on the weights, carried out on all engines, one change at a time.

`Followers` take over each state: they hold their turns before an engine is told, and let them go on after. The weights
as turns see them are in weights.py. Sessions, ids and histories are not touched.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stenograph.core.errors import StenographError
from stenograph.core.weights import (
    ContinueGeneration,
    ControlAnswer,
    FlushCache,
    LoadLora,
    NameWeights,
    PauseGeneration,
    PauseMode,
    UnloadLora,
    UpdateWeights,
    WeightCommand,
)
from stenograph.engine.base import Engine
from stenograph.session.policies import LoraWeights, last_loaded
from stenograph.session.weights import Followers, SyncState, UpdateOutcome, Weights

log = logging.getLogger(__name__)


class NoFollowers(Followers):
    """Nobody follows."""

    async def hold(self, state: SyncState) -> int:
        return 0

    async def follow(self, state: SyncState) -> None:
        return

    async def abort_all(self) -> int:
        return 0

    async def change_engines(self, state: SyncState) -> None:
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """Result of a trainer's command: whether all engines did it, and its outcome in one line."""

    success: bool
    message: str
    num_paused: int = 0


class WeightSync:
    """A trainer's commands, carried out on all engines. `abort_all` ends every turn here with its tokens so far.

    A change under way in the initial state is in doubt: no engine's weights are known. Turns
    wait until the trainer says it again, or lets them go on as things are.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        abort_all: Callable[[], Awaitable[int]],
        followers: Followers | None = None,
    ) -> None:
        self._engine = engine
        self._followers = followers or NoFollowers()
        self.abort_all = abort_all
        self.weights = weights
        self._no_change = asyncio.Event()
        self._no_change.set()
        self._path: str | None = None
        self._pause_mode: PauseMode | None = None
        self._lacking: tuple[str, ...] = ()
        self._loras = dict[str, LoadLora]()  # the last load of each, for engines to come
        self.last_update: UpdateWeights | None = None
        """The last weights taken by an engine from a folder; None if others came later, or none did."""

    def __repr__(self) -> str:
        return f"<WeightSync of {self.weights!r}>"

    async def find_version(self) -> str | None:
        """Name of the weights in use. An engine is asked where nobody has said it."""
        if self.weights.version is None:
            version = await self._engine.find_version()
            self.weights.name(self.weights.version or version)
        return self.weights.version

    async def update(self, command: UpdateWeights, *, aborts: bool) -> SyncResult:
        """Have all engines load weights; new turns wait meanwhile. With `aborts`, running turns end first."""
        message = f"The weights are those of {command.path}, version {command.version!r}."
        if self.weights.is_paused and self._pause_mode is PauseMode.IN_PLACE:
            command = dataclasses.replace(command, stands_in_place=True)
        return await self._change(command, command.version, message, aborts=aborts)

    async def name(self, version: str, *, aborts: bool) -> SyncResult:
        """Tell all engines the name of weights sent to them by another way. With `aborts`, running turns end."""
        return await self._change(NameWeights(version=version), version, f"The version is {version!r}.", aborts=aborts)

    async def change_lora(self, command: LoadLora | UnloadLora) -> SyncResult:
        """Have all engines load a LoRA, or forget one. Turns by it wait meanwhile; those that run are over a change."""
        if not self._no_change.is_set() or self.is_in_doubt:
            return SyncResult(success=False, message="A change of weights is under way; send this one after it.")
        if not isinstance(self._followers, NoFollowers):
            return SyncResult(success=False, message="With --workers LoRAs are loaded at the engines, not here.")
        engine, answers = self._engine, list[ControlAnswer]()
        known = [one.capabilities for one in engine.members.values()]
        if isinstance(command, LoadLora) and any(command.name in (one.model, one.policy) for one in known):
            return SyncResult(success=False, message=f"{command.name!r} is the model's own name: give it another.")
        weights = self.weights.of(command.name)
        assert isinstance(weights, LoraWeights), "those of a LoRA"
        self._no_change.clear()
        weights.begin_change()
        try:
            await _find_policies(engine)
            has_one = any(command.name in (one.capabilities.policies or ()) for one in engine.members.values())
            if isinstance(command, LoadLora):
                command = dataclasses.replace(command, replaces=has_one)
            answers += await engine.control(command)
            await _find_policies(engine)
        finally:
            problems = _problems(answers)
            is_taken = isinstance(command, LoadLora) and len(problems) < len(answers)
            if isinstance(command, UnloadLora):
                self._loras.pop(command.name, None)
            elif is_taken:
                self._loras[command.name] = command
            self._no_change.set()
            if isinstance(command, UnloadLora):
                weights.unload(is_gone=command.name not in self.loras())
            elif is_taken:
                weights.load(command.version, command.path)
            else:
                weights.load(None)
        what = f"load of version {command.version!r}" if isinstance(command, LoadLora) else "end"
        level, told = logging.WARNING if problems else logging.INFO, "".join(f"; {problem}" for problem in problems)
        log.log(level, "LoRA %r: %s%s", command.name, what, told)
        if problems:
            return SyncResult(success=False, message=f"Not every engine did it: {'; '.join(problems)}.")
        return SyncResult(success=True, message="")

    def next_lora_version(self, name: str) -> str:
        """The name of a version of a LoRA that has none: the next after its last one."""
        return next_version(last_loaded(self.weights, name))

    def loras(self) -> dict[str, str]:
        """Folders of the LoRAs that the engines list, by name."""
        listed = [one.capabilities.policies or {} for one in self._engine.members.values()]
        return {name: folder for one in listed for name, folder in one.items()}

    async def bring_up(self, engine: Engine, join: Callable[[], None]) -> None:
        """Give an engine the weights and LoRAs of the others and have it join them. Before it has them it takes no
        turns; without a LoRA it takes none by that one.

        It joins while no change is under way, with the weights of the last one: so the next one reaches it.
        """
        while True:
            await self._no_change.wait()
            num_taken, loras = self.weights.num_taken, dict(self._loras)
            problem = await self._give_weights(engine)
            await self._give_loras(engine)
            if self._no_change.is_set() and (num_taken, loras) == (self.weights.num_taken, self._loras):
                break
        join()
        if problem:
            self._lacking += (engine.name,)

    async def _give_weights(self, engine: Engine) -> str:
        """Have an engine load the weights of the last change; returns why it has not, or nothing."""
        version, has_changed = self.weights.version, self.weights.num_taken or self.weights.is_changing
        if version is None or not has_changed:
            return ""
        if await engine.find_version() == version:
            engine.follow_version(version, ())  # so that it is found out if it comes back with others
            return ""
        engine.require_version(version)
        if self.last_update is None:
            return f"it has to be sent the weights {version!r}"
        return "; ".join(_problems(await engine.control(self.last_update)))

    async def _give_loras(self, engine: Engine) -> None:
        for command in list(self._loras.values()):
            has_one = command.name in (engine.capabilities.policies or ())
            for problem in _problems(await engine.control(dataclasses.replace(command, replaces=has_one))):
                log.warning("LoRA %r: %s", command.name, problem)
        if self._loras:
            await engine.find_policies()

    @property
    def is_in_doubt(self) -> bool:
        """Whether a change was cut off, and nobody has settled it since."""
        return self.weights.is_changing and self._no_change.is_set()

    def state(self) -> SyncState:
        """The state as followers take it."""
        weights = self.weights
        return SyncState(
            is_paused=weights.is_paused,
            is_frozen=weights.is_frozen,
            is_changing=weights.is_changing,
            num_taken=weights.num_taken,
            version=weights.version,
            lacking=self._lacking,
            last_update=self.last_update,
            path=self._path,
            addresses=tuple(self._engine.addresses),
        )

    def follow(self, state: SyncState) -> None:
        """Take over a state: of a `WeightSync` elsewhere, or of the one before this one."""
        is_news = state.num_taken != self.weights.num_taken or state.lacking != self._lacking
        self.weights.follow(state)
        self.last_update, self._lacking, self._path = state.last_update, state.lacking, state.path
        if is_news:
            self._engine.follow_version(state.version, state.lacking)

    async def change_engines(self) -> None:
        """Have the followers use the present engines. Raises InvalidRequest."""
        await self._followers.change_engines(self.state())

    async def pause(self, mode: PauseMode) -> SyncResult:
        """Hold new turns and have running ones end or stand still. If an engine refuses, nothing is paused."""
        weights, was_paused, is_done = self.weights, self.weights.is_paused, False
        weights.hold()
        try:
            num_running, problems = await self._stand_still(mode, was_paused=was_paused)
            is_done = not problems
        except StenographError:
            if not was_paused:
                weights.release()
                await self._followers.follow(self.state())
            raise
        finally:
            if is_done and mode is not PauseMode.ABORT:
                weights.freeze()
            elif not is_done and not was_paused:
                weights.release()
        await self._followers.follow(self.state())
        if problems:
            return SyncResult(success=False, message=f"Generation is not paused: {'; '.join(problems)}.")
        self._pause_mode = mode
        log.info("paused (%s): new turns wait; %d were running", mode, num_running)
        return SyncResult(success=True, message="Generation is paused.", num_paused=num_running)

    async def _stand_still(self, mode: PauseMode, *, was_paused: bool) -> tuple[int, list[str]]:
        """Number of running turns, and why engines have not stopped. The stopped ones go on then."""
        num_running = self.weights.num_running + await self._followers.hold(self.state())
        if mode is PauseMode.ABORT:
            await self._abort_everywhere()
        answers = await self._engine.control(PauseGeneration(mode=mode))
        problems = _problems(answers)
        if problems and not was_paused and len(problems) < len(answers):
            await self._engine.control(ContinueGeneration())
        return num_running, problems

    async def resume(self) -> SyncResult:
        """Let all go on, also where a change was cut off: with whichever weights the engines have."""
        answers = await self._engine.control(ContinueGeneration())
        if self.is_in_doubt:
            await self._settle_doubt()
        self.weights.release()
        await self._followers.follow(self.state())
        log.info("continued: new turns are let in")
        if problems := _problems(answers):
            return SyncResult(success=False, message=f"Not every engine goes on: {'; '.join(problems)}.")
        return SyncResult(success=True, message="Generation goes on.")

    async def _settle_doubt(self) -> None:
        """Take the weights' name from the engines; every running turn has been over a change."""
        self._engine.follow_version(None, ())
        version = await self._engine.find_version()
        self.last_update, self._lacking = None, ()
        self.follow(replace(self.state(), is_changing=False, num_taken=self.weights.num_taken + 1, version=version))

    async def _abort_everywhere(self) -> None:
        await asyncio.gather(self.abort_all(), self._followers.abort_all())

    async def flush(self) -> SyncResult:
        """Have all engines empty their caches."""
        if problems := _problems(await self._engine.control(FlushCache())):
            return SyncResult(success=False, message=f"Not every cache is empty: {'; '.join(problems)}.")
        return SyncResult(success=True, message="The caches are empty.")

    async def _change(self, command: WeightCommand, version: str, message: str, *, aborts: bool) -> SyncResult:
        if not self._no_change.is_set():
            return SyncResult(success=False, message="Another change of weights is under way; send this one after it.")
        was_in_doubt, num_running, answers = self.is_in_doubt, 0, list[ControlAnswer]()
        self._no_change.clear()
        if not was_in_doubt:
            self.weights.begin_change()
        try:
            num_running = await self._hold_all(aborts=aborts)
            answers += await self._engine.control(command)
        except StenographError:
            self._end_change(command, None, answers, was_in_doubt=was_in_doubt)
            await self._followers.follow(self.state())
            raise
        finally:
            problems = _problems(answers)
            taken = version if len(problems) < len(answers) else None
            if not self._no_change.is_set():
                self._end_change(command, taken, answers, was_in_doubt=was_in_doubt)
        await self._followers.follow(self.state())
        outcome = (
            UpdateOutcome.TAKEN if not problems else UpdateOutcome.REFUSED if taken is None else UpdateOutcome.PARTIAL
        )
        self.weights.outcomes[outcome] += 1
        log.log(
            logging.WARNING if problems else logging.INFO,
            "weights %s (version %r, %d turns over the change)%s",
            outcome, version, num_running, "".join(f"; {problem}" for problem in problems),
        )  # fmt: skip
        if problems:
            kept = "they get no turns until they have the version" if taken else _KEPT[was_in_doubt]
            message = f"Not every engine took it: {'; '.join(problems)}. Of these, {kept}."
        notes = [f"{answer.name}: {answer.note}" for answer in answers if answer.note]
        if notes:
            message = f"{message} Of {'; '.join(notes)}."
        num_paused = sum(answer.num_paused for answer in answers)
        return SyncResult(success=not problems, message=message, num_paused=num_paused)

    async def _hold_all(self, *, aborts: bool) -> int:
        """Let no turn begin anywhere until the change is over; returns how many run. Raises WorkerUnavailable."""
        await self.find_version()
        num_elsewhere = await self._followers.hold(self.state())
        if aborts:
            await self._abort_everywhere()
        return self.weights.num_running + num_elsewhere

    def _end_change(
        self, command: WeightCommand, taken: str | None, answers: Sequence[ControlAnswer], *, was_in_doubt: bool
    ) -> None:
        """A change is over. One that no engine took does not end the doubt of one before."""
        self._no_change.set()
        if taken is not None or not was_in_doubt:
            self.weights.end_change(taken)
        if taken is not None:
            self.last_update = None
            if isinstance(command, UpdateWeights):
                self.last_update = dataclasses.replace(command, stands_in_place=False)
            self._path = self._path if self.last_update is None else self.last_update.path
            self._lacking = tuple(answer.name for answer in answers if answer.problem)


_KEPT = {
    False: "the weights before go on",
    True: "nobody knows the weights, because an update before was cut off: send it again, or continue_generation",
}


def next_version(version: str | None) -> str:
    """The name of unnamed weights, after those of `version`: never the same."""
    if version is None:
        return "1"
    if version.isascii() and version.isdigit():
        return str(int(version) + 1)
    stem, plus, number = version.rpartition("+")
    return f"{stem}+{int(number) + 1}" if plus and number.isascii() and number.isdigit() else f"{version}+1"


async def _find_policies(engine: Engine) -> None:
    await asyncio.gather(*(one.find_policies() for one in engine.members.values()))


def _problems(answers: Sequence[ControlAnswer]) -> list[str]:
    return [f"{answer.name}: {answer.problem}" for answer in answers if answer.problem]
