"""`stenograph bench engine`: what does the embedded engine itself give for a second of CPU?

Rounds; in each, every scenario once for each side of it, in an order that alternates: decode and prefill for the
embedded engine and, where asked, llama.cpp on the same weights; a long session with prefix reuse and without. Owns the
order of a run and its progress; what is asked for is in plan.py, what a measurement is in load.py.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import uvloop

from benchmarks.engine.figures import (
    decode_figures,
    decode_raw,
    over,
    prefill_figures,
    prefill_raw,
    session_figures,
    session_raw,
)
from benchmarks.engine.llamacpp import start_llamacpp
from benchmarks.engine.load import TooShort, decode, prefill, session
from benchmarks.engine.plan import SHORT_TOKENS, EngineBenchPlan, EngineScenario, Sizes, add_arguments, read_plan
from benchmarks.engine.prompts import PromptIds
from benchmarks.engine.report import (
    BESIDE,
    ENGINE,
    REUSE_OFF,
    REUSE_ON,
    engine_table,
    notes_of,
    reuse_table,
)
from benchmarks.engine.target import EmbeddedTarget, MeasuredEngine
from benchmarks.kit.artifact import Artifact, Measurement, ScenarioResult, write_artifact
from benchmarks.kit.processes import Children
from benchmarks.kit.runner import ProgressNotes, begin_artifact, in_turn, say, show
from benchmarks.kit.verdicts import RULE
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.model.tokenizer import Tokenizer

__all__ = ["add_arguments", "run"]

ATTEMPTS = 5
"""Begun measurements before their tokens are said to be too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A target in a scenario, and where in the artifact its figures go: the result, and the column in it."""

    target: MeasuredEngine
    result: ScenarioResult
    column: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A scenario for one side or two: the first's figures have their ratio to the second's.

    `measure(target, sizes, round)` asks all sides of a round the same.
    """

    name: str
    sides: tuple[Side, ...]
    measure: Callable[[MeasuredEngine, Sizes, str], Awaitable[Measurement]]


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    plan = read_plan(options)
    artifact = begin_artifact("engine", options)
    with Children() as children:
        beside = {slots: _start_beside(children, plan, slots) for slots in plan.slots if plan.is_beside_llamacpp}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(plan, artifact, beside))
    tables = [f"{shown}\n" for shown in (engine_table(artifact), reuse_table(artifact)) if shown]
    return show(artifact, options, *tables, RULE, *notes_of(artifact))


def _start_beside(children: Children, plan: EngineBenchPlan, slots: int) -> MeasuredEngine:
    """A llama.cpp for each size of a batch: one with more slots than are asked looks at what lies in all of them."""
    path = str(plan.files.path)
    return start_llamacpp(children, path, slots=slots, slot_tokens=plan.longest_tokens, note=say)


async def _measure(plan: EngineBenchPlan, artifact: Artifact, beside: Mapping[int, MeasuredEngine]) -> None:
    """All rounds. What is measured is kept at once, whatever happens to the rest."""
    async with contextlib.AsyncExitStack() as stack:
        warm = await stack.enter_async_context(_running("embedded", plan, reuses_prefixes=True))
        targets = _Targets(embedded=warm, beside=beside)
        contests = _rate_contests(plan, targets)
        if EngineScenario.REUSE in plan.scenarios:
            cold = await stack.enter_async_context(_running("embedded, no reuse", plan, reuses_prefixes=False))
            contests.append(_reuse_contest(plan, warm, cold))
        for contest in contests:
            artifact.scenarios += {side.result.name: side.result for side in contest.sides}.values()
        for number in range(plan.options.warm_up):
            for contest in contests:
                await _warm_up(contest, plan.warm_up_sizes, number)
        for number in range(plan.options.repeats):
            for contest in contests:
                shown = f"{number + 1} of {plan.options.repeats}"
                _keep(contest, await _round(contest, plan.sizes, number, shown))
                write_artifact(plan.options.out, artifact)


@contextlib.asynccontextmanager
async def _running(name: str, plan: EngineBenchPlan, *, reuses_prefixes: bool) -> AsyncGenerator[EmbeddedTarget]:
    """An engine that has loaded its model; it is ended in the end. Raises StartupError."""
    say(f"starting the engine: {name}")
    engine = EmbeddedEngine(plan.files.path, plan.engine_options(reuses_prefixes=reuses_prefixes))
    try:
        await engine.start()
        yield EmbeddedTarget(name, engine)
    finally:
        await engine.aclose()


# -- the scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class _Targets:
    """The engine, and llama.cpp's servers by the number of requests at a time that each is for."""

    embedded: MeasuredEngine
    beside: Mapping[int, MeasuredEngine]

    def sides(self, result: ScenarioResult, slots: int) -> tuple[Side, ...]:
        """Both, or the engine alone."""
        sides = [Side(target=self.embedded, result=result, column=ENGINE)]
        if (other := self.beside.get(slots)) is not None:
            sides.append(Side(target=other, result=result, column=BESIDE))
        return tuple(sides)


def _rate_contests(plan: EngineBenchPlan, targets: _Targets) -> list[Contest]:
    options, contests = plan.options, list[Contest]()
    ids = PromptIds(Tokenizer(plan.files.tokenizer_json), seed=options.seed)
    if EngineScenario.DECODE in plan.scenarios:
        for batch in plan.batches:
            title = f"{batch} at once, {options.max_tokens} tokens each after a prompt of {SHORT_TOKENS}"
            result = _result(EngineScenario.DECODE, title, sessions=batch, turns=1)
            contests.append(
                Contest(
                    name=f"decode at batch {batch}",
                    sides=targets.sides(result, batch),
                    measure=partial(_decode, ids, batch),
                )
            )
    if EngineScenario.PREFILL in plan.scenarios:
        title = f"{options.num_prompts} prompts of {options.prompt_tokens} tokens, one after the other"
        result = _result(EngineScenario.PREFILL, title, sessions=1, turns=options.num_prompts)
        contests.append(
            Contest(
                name="prefill",
                sides=targets.sides(result, 1),
                measure=partial(_prefill, ids, options.prompt_tokens),
            )
        )
    return contests


def _reuse_contest(plan: EngineBenchPlan, warm: MeasuredEngine, cold: MeasuredEngine) -> Contest:
    options = plan.options
    ids = PromptIds(Tokenizer(plan.files.tokenizer_json), seed=options.seed)
    title = f"{options.turns} turns of {options.turn_tokens} new tokens and a reply of {options.reply_tokens}"
    return Contest(
        name="a session",
        sides=tuple(
            Side(target=target, result=_result(name, title, sessions=1, turns=options.turns), column=ENGINE)
            for name, target in ((REUSE_ON, warm), (REUSE_OFF, cold))
        ),
        measure=partial(_session, ids, options.turn_tokens, options.reply_tokens),
    )


def _result(name: str, title: str, *, sessions: int, turns: int) -> ScenarioResult:
    return ScenarioResult(name=name, title=title, sessions=sessions, turns=turns)


async def _decode(ids: PromptIds, batch: int, target: MeasuredEngine, sizes: Sizes, number: str) -> Measurement:
    """Raises TargetFailed."""
    prompts = ids.draw(f"decode {batch} {number}", num=batch, num_tokens=SHORT_TOKENS)
    window = await decode(target, prompts, sizes.decode_tokens, ProgressNotes().note)
    return Measurement(figures=decode_figures(window, target.rss_mib()), raw=decode_raw(window))


async def _prefill(ids: PromptIds, num_tokens: int, target: MeasuredEngine, sizes: Sizes, number: str) -> Measurement:
    """Raises TargetFailed."""
    prompts = ids.draw(f"prefill {number}", num=sizes.num_prompts, num_tokens=num_tokens)
    prefilled = await prefill(target, prompts, ProgressNotes().note)
    return Measurement(figures=prefill_figures(prefilled, target.rss_mib()), raw=prefill_raw(prefilled))


async def _session(
    ids: PromptIds, turn_tokens: int, reply_tokens: int, target: MeasuredEngine, sizes: Sizes, number: str
) -> Measurement:
    """Raises TargetFailed."""
    new_ids = ids.draw(f"session {number}", num=sizes.num_turns, num_tokens=turn_tokens)
    turns = await session(target, new_ids, reply_tokens, ProgressNotes().note)
    return Measurement(figures=session_figures(turns, target.rss_mib()), raw=session_raw(turns))


# -- a round


async def _warm_up(contest: Contest, sizes: Sizes, number: int) -> None:
    """All sides once, and nothing is kept: what is too short to be measured warms all the same. Raises TargetFailed."""
    for side in contest.sides:
        say(f"warm-up {number + 1}, {contest.name}, {side.target.name}")
        with contextlib.suppress(TooShort):
            await contest.measure(side.target, sizes, f"warm-up {number}")


async def _round(contest: Contest, sizes: Sizes, number: int, shown: str) -> list[Measurement]:
    """All sides once, every other time the other way round: what drifts falls on both. Raises TargetFailed."""
    measured: dict[int, Measurement] = {}
    order = range(len(contest.sides))
    for index in in_turn(order, number):
        side = contest.sides[index]
        say(f"{shown}, {contest.name}, {side.target.name}")
        measured[index] = await _measured(contest, side, sizes, str(number))
    return [measured[index] for index in order]


async def _measured(contest: Contest, side: Side, sizes: Sizes, number: str) -> Measurement:
    """The measurement, again where it was too short: on a busy machine a reply may be whole before it is looked at.

    Raises TargetFailed.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(TooShort):
            return await contest.measure(side.target, sizes, number)
        say(f"a reply was whole before all of the batch had begun: {contest.name}, {side.target.name}, again")
    return await contest.measure(side.target, sizes, number)


def _keep(contest: Contest, measured: Sequence[Measurement]) -> None:
    if len(measured) > 1:
        measured[0].figures.update(over(measured[0].figures, measured[1].figures))
    for side, one in zip(contest.sides, measured, strict=True):
        side.result.keep(side.column, one)
