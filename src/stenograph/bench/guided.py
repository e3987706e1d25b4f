"""`stenograph bench guided`: what does a grammar cost a token?

Rounds; in each, the same prompts to the embedded engine twice, guided and free, in an order that alternates. Grammars
change how long replies are, so it is the time of a token that is compared, not that of a reply. Owns the order of a
run and its progress; what is asked for is in guided_plan.py, what a phase is in guided_load.py.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator

import uvloop

from stenograph.bench.artifact import Artifact, ScenarioResult, write_artifact
from stenograph.bench.guided_figures import FREE, GUIDED, Phase, guided_figures, over_free, raw_of
from stenograph.bench.guided_load import GuidedLoad, idle_lateness_s
from stenograph.bench.guided_plan import Plan, add_arguments, read_plan
from stenograph.bench.guided_report import ENGINE, append_csv, guided_table, notes_of
from stenograph.bench.quantiles import summary_ms
from stenograph.bench.report import json_line
from stenograph.bench.responsiveness import begin_artifact
from stenograph.core.errors import CallerError, StartupError
from stenograph.core.types import Prompt
from stenograph.engine.local import EmbeddedEngine
from stenograph.http.app import make_renderer
from stenograph.render.model_files import load_model_files
from stenograph.render.renderer import Renderer

__all__ = ["add_arguments", "run"]

PROGRESS_S = 2.0
IDLE_S = 1.0
"""How long the heartbeat is looked at without a load."""


class NothingAnswered(Exception):
    """A phase in which no request was answered: the rest of the run would say nothing."""


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    try:
        plan = read_plan(options)
        renderer = make_renderer(load_model_files(plan.model), "auto")
        prompts = list(_rendered(plan, renderer))
        artifact = _begin(plan)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(plan, artifact, renderer, prompts))
        if options.csv is not None:
            append_csv(options.csv, artifact)
    except (NothingAnswered, StartupError, ValueError, OSError) as error:
        sys.stderr.write(f"stenograph: {error}\n")
        return 2
    _show(artifact, options)
    return 0


def _rendered(plan: Plan, renderer: Renderer) -> Iterator[Prompt]:
    """The prompts as the model sees them. Raises ValueError for what its template cannot show."""
    for number, messages in enumerate(plan.prompts.conversations, 1):
        try:
            yield Prompt(ids=renderer.render(messages, (), {}))
        except CallerError as error:
            raise ValueError(f"prompt {number}: {error}") from error


def _begin(plan: Plan) -> Artifact:
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
    for mode, how in ((GUIDED, plan.constraint.shown), (FREE, "no grammar")):
        until = ", eos ignored" if options.ignore_eos else ""
        result = ScenarioResult(
            name=mode,
            title=f"{num} prompts, {how}, at most {options.max_tokens} tokens{until}",
            sessions=options.concurrency,
            turns=num,
            message_bytes=round(num_bytes / num),
            goals=[],
            figures={ENGINE: []},
            raw={ENGINE: []},
        )
        artifact.scenarios.append(result)
    if plan.prompts.shortage:
        sys.stderr.write(f"NOTE {plan.prompts.shortage}\n")
    return artifact


async def _measure(plan: Plan, artifact: Artifact, renderer: Renderer, prompts: list[Prompt]) -> None:
    """All rounds. What is measured is kept at once, whatever happens to the rest."""
    options = plan.options
    engine = EmbeddedEngine(plan.model, plan.engine_options())
    try:
        await engine.start()
        artifact.machine["idle_loop_late"] = summary_ms(await idle_lateness_s(IDLE_S))
        load = GuidedLoad(
            engine,
            renderer.tokenizer,
            prompts,
            concurrency=options.concurrency,
            params_of=plan.params,
            note=_Progress().note,
        )
        for number in range(options.warm_up):
            await _round(plan, load, -1 - number, f"warm-up {number + 1} of {options.warm_up}")
        for number in range(options.repeats):
            _keep(plan, artifact, await _round(plan, load, number, f"{number + 1} of {options.repeats}"))
            write_artifact(options.out, artifact)
    finally:
        await engine.aclose()


async def _round(plan: Plan, load: GuidedLoad, number: int, shown: str) -> dict[str, Phase]:
    """All prompts guided and free, in an order of their own that both share. Raises NothingAnswered."""
    order = list(range(len(plan.prompts.conversations)))
    random.Random(f"{plan.options.seed} {number}").shuffle(order)
    grammar_of = {GUIDED: plan.constraint.grammar, FREE: None}
    phases: dict[str, Phase] = {}
    for mode in (GUIDED, FREE) if number % 2 == 0 else (FREE, GUIDED):  # what drifts with time falls on both
        sys.stderr.write(f"{shown}, {mode}: {len(order)} prompts, {plan.options.concurrency} at once\n")
        phase = phases[mode] = await load.phase(mode, grammar_of[mode], order)
        if not phase.heard:
            raise NothingAnswered(f"no {mode} request was answered; the first failure: {phase.first_error}")
    return phases


def _keep(plan: Plan, artifact: Artifact, phases: dict[str, Phase]) -> None:
    is_kept = plan.constraint.is_kept
    figures = {mode: guided_figures(phase, is_kept) for mode, phase in phases.items()}
    figures[GUIDED] |= over_free(figures[GUIDED], figures[FREE])
    for result in artifact.scenarios:
        result.figures[ENGINE].append(figures[result.name])
        result.raw[ENGINE].append(raw_of(phases[result.name], is_kept))


class _Progress:
    """Says how far a phase is, once in a while."""

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def note(self, phase: Phase) -> None:
        """Say it, if nothing was said for a while."""
        if time.monotonic() - self._said_at >= PROGRESS_S:
            self._said_at = time.monotonic()
            num_ended = len(phase.heard) + phase.errors.total()
            sys.stderr.write(f"  {num_ended} of {phase.num_asked} replies, {phase.num_drawn} tokens\n")


def _show(artifact: Artifact, options: argparse.Namespace) -> None:
    write = sys.stdout.write
    write("".join(f"{result.name}: {result.title}\n" for result in artifact.scenarios))
    write(f"whether a reply satisfies the grammar is checked by {artifact.arguments['checked_by']}\n\n")
    write(guided_table(artifact) + "\n")
    for line in notes_of(artifact):
        write(f"{line}\n")
    if artifact.arguments["shortage"]:
        write(f"NOTE {artifact.arguments['shortage']}\n")
    write(f"written to {options.out}\n{json_line(artifact)}\n")
    sys.stdout.flush()
