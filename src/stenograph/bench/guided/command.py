"""`stenograph bench guided`: what does a grammar cost a token?

Rounds; in each, the same prompts to the embedded engine twice, guided and free (unless --no-baseline), in an order that
alternates. Grammars change the length of replies, so the time of a token is compared, not that of a reply. Owns the
order of a run and its progress; the options are in plan.py, a phase is in load.py.
"""

import argparse
import asyncio
import random
from collections.abc import Iterator

import uvloop

from stenograph.bench.guided.figures import FREE, GUIDED, OVER_FREE, Phase, guided_figures, raw_of
from stenograph.bench.guided.load import GuidedLoad, idle_lateness_s
from stenograph.bench.guided.plan import GuidedPlan, add_arguments, read_plan
from stenograph.bench.guided.report import append_csv, guided_table, notes_of, write_row
from stenograph.bench.kit.artifact import ENGINE, Artifact, Measurement, ScenarioResult, write_artifact
from stenograph.bench.kit.figures import ratios_between
from stenograph.bench.kit.processes import CannotMeasure
from stenograph.bench.kit.quantiles import summary_ms
from stenograph.bench.kit.runner import ProgressNotes, begin_artifact, in_turn, say, show
from stenograph.core.errors import CallerError
from stenograph.core.types import Prompt
from stenograph.engine.embedded import EmbeddedEngine

__all__ = ["add_arguments", "run"]

IDLE_S = 1.0
"""Seconds of the heartbeat without a load."""


class NothingAnswered(CannotMeasure):
    """A phase in which no request was answered: the rest of the run would say nothing."""


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    plan = read_plan(options)
    prompts = list(_rendered(plan))
    artifact = _begin(plan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_measure(plan, artifact, prompts))
    if options.csv is not None:
        append_csv(options.csv, artifact)
    titles = "\n".join(f"{result.name}: {result.title}" for result in artifact.scenarios)
    checked = f"whether a reply satisfies the grammar is checked by {artifact.arguments['checked_by']}\n"
    shortage = f"NOTE {plan.prompts.shortage}" if plan.prompts.shortage else ""
    return show(artifact, options, titles, checked, guided_table(artifact), *notes_of(artifact), shortage)


def _rendered(plan: GuidedPlan) -> Iterator[Prompt]:
    """The prompts as the model sees them. Raises ValueError for what its template cannot show."""
    for number, messages in enumerate(plan.prompts.conversations, 1):
        try:
            yield Prompt(ids=plan.renderer.render(messages, (), {}))
        except CallerError as error:
            raise ValueError(f"prompt {number}: {error}") from error


def _begin(plan: GuidedPlan) -> Artifact:
    """The artifact before anything is measured; what is not as it was asked for is said at once."""
    options, conversations = plan.options, plan.prompts.conversations
    num, grammar = len(conversations), plan.constraint.grammar
    artifact = begin_artifact("guided", options)
    artifact.arguments |= {
        "grammar": f"{grammar.kind} {grammar.source}".rstrip(),
        "checked_by": plan.constraint.checked_by,
        "shortage": plan.prompts.shortage,
    }
    num_bytes = sum(len((message.content or "").encode()) for messages in conversations for message in messages)
    shown = {GUIDED: plan.constraint.shown, FREE: "no grammar"}
    for mode in plan.modes:
        until = ", eos ignored" if options.ignore_eos else ""
        result = ScenarioResult(
            name=mode,
            title=f"{num} prompts, {shown[mode]}, at most {options.max_tokens} tokens{until}",
            sessions=options.concurrency,
            turns=num,
            message_bytes=round(num_bytes / num),
        )
        artifact.scenarios.append(result)
    if plan.prompts.shortage:
        say(f"NOTE {plan.prompts.shortage}")
    return artifact


async def _measure(plan: GuidedPlan, artifact: Artifact, prompts: list[Prompt]) -> None:
    """All rounds. What is measured is kept at once, whatever happens to the rest."""
    options = plan.options
    engine = EmbeddedEngine(plan.model, plan.engine_options())
    try:
        await engine.start()
        artifact.machine["idle_loop_late"] = summary_ms(await idle_lateness_s(IDLE_S))
        load = GuidedLoad(
            engine,
            plan.renderer.tokenizer,
            prompts,
            concurrency=options.concurrency,
            params_of=plan.params,
            note=ProgressNotes().note,
        )
        for number in range(options.warm_up):
            await _round(plan, load, -1 - number, f"warm-up {number + 1} of {options.warm_up}")
        for number in range(options.repeats):
            phases = await _round(plan, load, number, f"{number + 1} of {options.repeats}", artifact)
            _keep(plan, artifact, phases)
            write_artifact(options.out, artifact)
    finally:
        await engine.aclose()


async def _round(
    plan: GuidedPlan, load: GuidedLoad, number: int, shown: str, artifact: Artifact | None = None
) -> dict[str, Phase]:
    """All prompts in each mode, in an order of their own that the modes share. Raises NothingAnswered.

    With an `artifact`, to which the round will belong, each phase's row is written as soon as it is known, where that
    was asked for.
    """
    order = list(range(len(plan.prompts.conversations)))
    random.Random(f"{plan.options.seed} {number}").shuffle(order)
    grammar_of = {GUIDED: plan.constraint.grammar, FREE: None}
    phases: dict[str, Phase] = {}
    for mode in in_turn(plan.modes, number):
        say(f"{shown}, {mode}: {len(order)} prompts, {plan.options.concurrency} at once")
        phase = phases[mode] = await load.phase(mode, grammar_of[mode], order)
        if not phase.heard:
            raise NothingAnswered(f"no {mode} request was answered; the first failure: {phase.failures.first}")
        if artifact is not None and plan.options.stream_output:
            write_row(artifact, mode, number + 1, guided_figures(phase, plan.constraint.is_kept))
    return phases


def _keep(plan: GuidedPlan, artifact: Artifact, phases: dict[str, Phase]) -> None:
    is_kept = plan.constraint.is_kept
    figures = {mode: guided_figures(phase, is_kept) for mode, phase in phases.items()}
    figures[GUIDED] |= ratios_between(OVER_FREE, figures[GUIDED], figures.get(FREE, {}))
    for result in artifact.scenarios:
        raw = raw_of(phases[result.name], is_kept)
        result.keep(ENGINE, Measurement(figures=figures[result.name], raw=raw))
