"""An engine that joins a fleet or leaves it at any moment of an update of weights, or of its own joining."""

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from standins.planned_server import AskedRequest
from standins.scripted_engine import ScriptedEngine
from stenograph.core.clock import SystemClock
from stenograph.core.weights import ControlAnswer, NameWeights, UpdateWeights, WeightCommand
from stenograph.engine.base import EngineHealth, EngineState
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.session.weights import SyncState, Weights
from stenograph.text.renderer import Renderer
from stenograph.weights.engine_routes import EngineRoutes
from stenograph.weights.sync import SyncResult, WeightSync

from .test_engines_join import rigged

NUM_PASSES = 2


class Loader(ScriptedEngine):
    """An engine with weights, which takes `num_passes` passes of the loop for whatever it is asked."""

    def __init__(self, name: str, *, loaded: str, refuses: bool = False, num_passes: int = NUM_PASSES) -> None:
        super().__init__(vocab_size=10)
        self.num_passes = num_passes
        self._name = name
        self.loaded = loaded
        self.refuses = refuses
        self.required: str | None = None

    @property
    def name(self) -> str:
        return self._name

    def health(self) -> EngineHealth:
        lacks = self.required not in (None, self.loaded)
        return EngineHealth(state=EngineState.DOWN if lacks else EngineState.READY)

    async def find_version(self) -> str | None:
        await passes(self.num_passes)
        return self.loaded

    def require_version(self, version: str) -> None:
        self.required = version

    def follow_version(self, version: str | None, lacking: Collection[str]) -> None:
        self.required = version

    async def control(self, command: WeightCommand) -> Sequence[ControlAnswer]:
        await passes(self.num_passes)
        if self.refuses:
            return (ControlAnswer(name=self.name, problem="no"),)
        if isinstance(command, UpdateWeights | NameWeights):
            await passes(self.num_passes)
            self.loaded = self.required = command.version
        return (ControlAnswer(name=self.name),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A fleet of two, and one that is to join."""

    fleet: Fleet
    sync: WeightSync
    new: Loader
    members: list[Loader]

    async def update(self, version: str = "1") -> SyncResult:
        return await self.sync.update(UpdateWeights(path="step", version=version), aborts=False)

    async def join(self) -> None:
        await self.new.start()
        await self.sync.bring_up(self.new, lambda: self.fleet.join(FleetMember(name="new", engine=self.new)))

    async def leave(self) -> None:
        assert await self.fleet.leave("b")

    def check(self) -> None:
        """Every engine that takes turns has the weights that turns are labelled with."""
        states = {status.name: status.health.state for status in self.fleet.statuses()}
        for engine in (*self.members, self.new):
            if states.get(engine.name) is EngineState.READY:
                assert engine.loaded == self.sync.weights.version, (engine.name, states)


async def passes(num: int) -> None:
    """Let the loop go round so often."""
    for _ in range(num):
        await asyncio.sleep(0)


async def no_turns() -> int:
    """Abort all of no turns."""
    return 0


async def make_lab(
    *, is_new_refusing: bool = False, all_refuse: bool = False, num_passes_of_new: int = NUM_PASSES
) -> Lab:
    """A fleet that has taken the weights "0"; the new engine has them where all refuse others from now on."""
    members = [Loader(name, loaded="") for name in ("a", "b")]
    fleet = Fleet([FleetMember(name=one.name, engine=one) for one in members], clock=SystemClock())
    await fleet.start()

    sync = WeightSync(fleet, Weights(), no_turns)
    new = Loader("new", loaded="0" if all_refuse else "", refuses=is_new_refusing or all_refuse)
    new.num_passes = num_passes_of_new
    lab = Lab(fleet=fleet, sync=sync, new=new, members=members)
    assert (await lab.update("0")).success
    for member in members:
        member.refuses = all_refuse
    return lab


Act = Callable[[Lab], Coroutine[Any, Any, Any]]


async def at_each_pass(make: Callable[[], Coroutine[Any, Any, Lab]], first: Act, second: Act) -> list[tuple[Lab, Any]]:
    """For each pass of the loop that `first` takes, a lab in which `second` begins then; and what `first` returned."""
    labs: list[tuple[Lab, Any]] = []
    for num in itertools.count():
        lab = await make()
        one = asyncio.create_task(first(lab))
        await passes(num)
        was_done = one.done()
        await second(lab)
        labs.append((lab, await one))
        if was_done:
            break
    assert len(labs) > NUM_PASSES
    return labs


@pytest.mark.parametrize("num_passes", [NUM_PASSES, 9])
@pytest.mark.parametrize(
    ("first", "second"), [(Lab.update, Lab.join), (Lab.join, Lab.update)], ids=["join later", "update later"]
)
async def test_an_engine_that_joins_at_any_moment_of_an_update_has_the_weights(
    first: Act, second: Act, num_passes: int
) -> None:
    """The slow one has a whole update begin and end while it is asked what it has."""
    for lab, result in await at_each_pass(lambda: make_lab(num_passes_of_new=num_passes), first, second):
        lab.check()
        assert len(lab.fleet.statuses()) == 3
        assert {engine.loaded for engine in (*lab.members, lab.new)} == {"1"}
        assert result is None or result.success, result
        assert lab.sync.state().lacking == ()


@pytest.mark.parametrize(("first", "second"), [(Lab.update, Lab.join), (Lab.join, Lab.update)])
async def test_one_that_refuses_them_gets_no_turns(first: Act, second: Act) -> None:
    for lab, _ in await at_each_pass(lambda: make_lab(is_new_refusing=True), first, second):
        lab.check()
        assert lab.new.health().state is EngineState.DOWN
        assert lab.sync.state().lacking == ("new",)
        lab.new.refuses = False
        assert (await lab.update("2")).success
        assert lab.new.loaded == "2"
        assert lab.sync.state().lacking == ()


@pytest.mark.parametrize(("first", "second"), [(Lab.update, Lab.join), (Lab.join, Lab.update)])
async def test_one_that_joins_at_an_update_that_nobody_takes_has_the_old_ones(first: Act, second: Act) -> None:
    for lab, result in await at_each_pass(lambda: make_lab(all_refuse=True), first, second):
        lab.check()
        assert result is None or not result.success
        assert lab.sync.weights.version == "0"
        assert lab.new.health().state is EngineState.READY


async def test_one_that_leaves_at_any_moment_of_an_update_does_not_make_it_fail() -> None:
    async def make() -> Lab:
        lab = await make_lab()
        lab.members[1].refuses = True
        return lab

    labs = await at_each_pass(make, Lab.update, Lab.leave)
    for lab, result in labs:
        lab.check()
        assert lab.members[0].loaded == "1"
        assert result.success is (lab is not labs[-1][0])  # the last one left after the update


class LateLoader(Loader):
    """An engine during whose start this process is told of other weights."""

    def __init__(self, sync: list[WeightSync]) -> None:
        super().__init__("new", loaded="1")
        self._sync = sync

    async def start(self) -> None:
        await super().start()
        self._sync[0].follow(SyncState(num_taken=2, version="2", lacking=("new",)))


async def test_an_engine_that_another_process_added_follows_the_weights_of_the_moment_it_joins() -> None:
    syncs: list[WeightSync] = []
    old = Loader("old", loaded="1")
    fleet = Fleet(
        [FleetMember(name="old", engine=old, url="http://old")],
        clock=SystemClock(),
        make=lambda url: FleetMember(name="new", engine=LateLoader(syncs), url=url),
    )
    await fleet.start()
    syncs.append(WeightSync(fleet, Weights(), no_turns))
    syncs[0].follow(SyncState(num_taken=1, version="1"))
    await EngineRoutes(engine=fleet, sync=syncs[0], max_body_bytes=0).follow(["http://old", "http://new"])
    assert [(one.name, one.health.state) for one in fleet.statuses()] == [
        ("old", EngineState.DOWN), ("new", EngineState.DOWN)
    ]  # fmt: skip
    assert old.required == "2"


async def test_an_engine_that_is_added_while_weights_load_joins_with_them(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    began, go_on = asyncio.Event(), asyncio.Event()
    asked_new = asyncio.Event()

    async def slowly(asked: AskedRequest) -> None:
        if asked.path == "/update_weights_from_disk":
            began.set()
            await go_on.wait()

    async def seen(asked: AskedRequest) -> None:
        asked_new.set()

    async with rigged(renderer, 2, routes=(slowly, seen), weights_dir=tmp_path) as rig:
        update = {"model_path": "step-1", "weight_version": "1"}
        updating = asyncio.ensure_future(rig.call("POST", "/update_weights_from_disk", update))
        await began.wait()
        adding = asyncio.ensure_future(rig.add(1))
        await asked_new.wait()
        assert await rig.states() == [(rig.servers[0].url, "ready")]
        go_on.set()
        assert (await updating).status == 200
        assert (await adding).json()["state"] == "ready"
        assert rig.servers[1].weight_version == "1"
        assert rig.servers[1].loaded == [str(tmp_path / "step-1")]
