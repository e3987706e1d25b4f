"""`stenograph bench guided`: what does a grammar cost a token?

Rounds; in each, the same prompts to the embedded engine twice, guided and free (unless --no-baseline), in an order that
alternates. Grammars change the length of replies, so the time of a token is compared, not that of a reply. Owns the
run's options, its order and its progress; a phase is in load.py.
"""

import argparse
import enum
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.guided.figures import (
    FREE,
    GUIDED,
    OVER_FREE,
    Phase,
    append_csv,
    check_csv,
    guided_figures,
    guided_table,
    notes_of,
    raw_of,
    write_row,
)
from benchmarks.guided.grammar import (
    PROFILE_SCHEMA,
    CheckedGrammar,
    of_choices,
    of_ebnf,
    of_json_object,
    of_regex,
    of_schema,
)
from benchmarks.guided.load import GuidedLoad, idle_lateness_s
from benchmarks.guided.prompts import Conversation, built_in, random_prompts, read_prompts, sharegpt_prompts
from benchmarks.kit.artifact import ENGINE, Artifact, Measurement, ScenarioResult, write_artifact
from benchmarks.kit.datasets import read_sharegpt
from benchmarks.kit.figures import ratios_between
from benchmarks.kit.options import add_artifact, add_engine, count, count_or_none, engine_options
from benchmarks.kit.processes import CannotMeasure
from benchmarks.kit.quantiles import summary_ms
from benchmarks.kit.runner import ProgressNotes, begin_artifact, cached_model, in_turn, say, show
from benchmarks.kit.steps import new_runner
from stenograph.core.errors import CallerError
from stenograph.core.types import Grammar, Prompt, SamplingParams
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files
from stenograph.parts import EmbeddedSettings
from stenograph.text.renderer import Renderer

DEFAULT_MAX_TOKENS = 96
DEFAULT_INPUT_TOKENS = 128
IDLE_S = 1.0
"""Seconds of the heartbeat without a load."""


class Dataset(enum.StrEnum):
    """Where prompts come from that are neither built in nor a file of prompts."""

    SHAREGPT = "sharegpt"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedPlan:
    """Everything that is measured: `prompts` are the conversations as the model sees them, `num_bytes` their text."""

    model: Path
    constraint: CheckedGrammar
    prompts: tuple[Prompt, ...]
    num_bytes: int
    renderer: Renderer
    options: argparse.Namespace

    @property
    def modes(self) -> tuple[str, ...]:
        """The phases of each round."""
        return (GUIDED,) if self.options.no_baseline else (GUIDED, FREE)

    @property
    def shortage(self) -> str:
        """A message where there are fewer prompts than were asked for; empty where there are enough."""
        num, num_asked = len(self.prompts), self.options.num_prompts
        return f"{num_asked} prompts were asked for, there are {num}" if num < num_asked else ""

    def params(self, number: int, grammar: Grammar | None) -> SamplingParams:
        """The sampling of the reply to a prompt: the same in every round, guided and free, but for the grammar."""
        return SamplingParams(
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            top_k=self.options.top_k,
            seed=self.options.seed + number,
            max_tokens=self.options.max_tokens,
            ignore_eos=self.options.ignore_eos,
            grammar=grammar,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add = parser.add_argument
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", type=Path, metavar="FILE", help="a JSON Schema. Default: a built-in one.")
    grammar.add_argument("--json-object", action="store_true", help="any JSON object")
    grammar.add_argument("--regex", metavar="R", help="a regular expression that the whole reply matches")
    grammar.add_argument("--choice", metavar="a,b", help="one of these texts")
    grammar.add_argument("--ebnf", type=Path, metavar="FILE", help="a grammar in EBNF: root ::= …")
    add_engine(parser)
    add("--prompts", type=Path, metavar="FILE", help="one a line, or a .jsonl. Default: built in.")
    add("--dataset", choices=tuple(Dataset), help="prompts of a data set instead")
    add("--dataset-path", type=Path, metavar="FILE", help="ShareGPT's file: .json or .jsonl")
    add("--input-len", type=count, help="tokens of a text of --dataset random. Default: 128.")
    add("--output-len", type=count, help="--max-tokens, by its name for data sets")
    add("--num-prompts", type=count, default=16, help="how many of them. Default: 16.")
    add("--concurrency", type=count, default=16, help="requests at once. Default: 16.")
    add("--max-tokens", type=count, help="the most that a reply has. Default: 96.")
    add("--ignore-eos", action="store_true", help="no reply ends before its grammar or max_tokens does")
    add("--temperature", type=float, default=0.7, help="0 is greedy. Default: 0.7.")
    add("--top-p", type=float, default=1.0, help="the most likely tokens of this share. Default: 1.")
    add("--top-k", type=int, default=0, help="the most likely so many tokens. Default: 0, all.")
    add("--seed", type=int, default=0, help="of replies and orders. Default: 0.")
    add("--warm-up", type=count_or_none, default=1, help="rounds before them. Default: 1.")
    add_artifact(parser, "guided", repeats=5)
    add("--csv", type=Path, metavar="FILE.csv", help="append a row of medians for each mode")
    add("--no-baseline", action="store_true", help="guided alone, without the free runs beside it")
    add("--stream-output", action="store_true", help="write the row of each mode and round to stdout as it is known")


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code."""
    plan = _plan(options)
    artifact = _begin(plan)
    with new_runner() as runner:
        runner.run(_measure(plan, artifact))
    if options.csv is not None:
        append_csv(options.csv, artifact)
    titles = "\n".join(f"{result.name}: {result.title}" for result in artifact.scenarios)
    checked = f"whether a reply satisfies the grammar is checked by {plan.constraint.checked_by}\n"
    shortage = f"NOTE {plan.shortage}" if plan.shortage else ""
    return show(artifact, options, titles, checked, guided_table(artifact), *notes_of(artifact), shortage)


# -- everything that can be wrong before an engine runs


def _plan(options: argparse.Namespace) -> GuidedPlan:
    """Raises ValueError, OSError, StartupError."""
    constraint = _constraint(options)
    _check(options)
    options.max_tokens = options.output_len or options.max_tokens or DEFAULT_MAX_TOKENS
    model = cached_model(options.model)
    files = load_model_files(model)
    assert files.max_context_tokens is not None, "weights come with their context"
    renderer = make_renderer(files, "auto")
    conversations = _conversations(options, renderer, files.max_context_tokens - options.max_tokens)
    plan = GuidedPlan(
        model=model,
        constraint=constraint,
        prompts=_rendered(renderer, conversations),
        num_bytes=sum(len((message.content or "").encode()) for messages in conversations for message in messages),
        renderer=renderer,
        options=options,
    )
    plan.params(0, None)
    return plan


def _constraint(options: argparse.Namespace) -> CheckedGrammar:
    if options.json_object:
        return of_json_object()
    if options.regex is not None:
        return of_regex(options.regex)
    if options.choice is not None:
        return of_choices(options.choice.split(","))
    if options.ebnf is not None:
        return of_ebnf(options.ebnf.read_text("utf-8"))
    return of_schema(
        json.dumps(PROFILE_SCHEMA) if options.json_schema is None else options.json_schema.read_text("utf-8")
    )


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that do not go together."""
    if options.dataset is not None and options.prompts is not None:
        raise ValueError("--prompts and --dataset are two sources of prompts: give one")
    if (options.dataset == Dataset.SHAREGPT) != (options.dataset_path is not None):
        raise ValueError("--dataset sharegpt needs its file as --dataset-path, and no other data set has one")
    if options.input_len is not None and options.dataset != Dataset.RANDOM:
        raise ValueError("--input-len is the length of the texts of --dataset random")
    if options.output_len is not None and options.max_tokens is not None:
        raise ValueError("--output-len and --max-tokens are the same: give one")
    if options.csv is not None:
        check_csv(options.csv)


def _conversations(options: argparse.Namespace, renderer: Renderer, most_tokens: int) -> Sequence[Conversation]:
    num = options.num_prompts
    if options.dataset == Dataset.SHAREGPT:
        return sharegpt_prompts(read_sharegpt(options.dataset_path), renderer, num=num, most_tokens=most_tokens)
    if options.dataset == Dataset.RANDOM:
        num_tokens = options.input_len or DEFAULT_INPUT_TOKENS
        return random_prompts(renderer.tokenizer, num=num, num_tokens=num_tokens)
    return built_in(num) if options.prompts is None else read_prompts(options.prompts, num)


def _rendered(renderer: Renderer, conversations: Sequence[Conversation]) -> tuple[Prompt, ...]:
    """The prompts as the model sees them. Raises ValueError for what its template cannot show."""
    prompts: list[Prompt] = []
    for messages in conversations:
        try:
            prompts.append(Prompt(new_ids=renderer.render(messages, (), {})))
        except CallerError as error:
            raise ValueError(f"prompt {len(prompts) + 1}: {error}") from error
    return tuple(prompts)


# -- the rounds


def _begin(plan: GuidedPlan) -> Artifact:
    """The artifact before anything is measured; what is not as it was asked for is said at once."""
    options, num, grammar = plan.options, len(plan.prompts), plan.constraint.grammar
    artifact = begin_artifact("guided", options)
    artifact.arguments |= {
        "grammar": f"{grammar.kind} {grammar.source}".rstrip(),
        "checked_by": plan.constraint.checked_by,
        "shortage": plan.shortage,
    }
    shown = {GUIDED: plan.constraint.shown, FREE: "no grammar"}
    for mode in plan.modes:
        until = ", eos ignored" if options.ignore_eos else ""
        result = ScenarioResult(
            name=mode,
            title=f"{num} prompts, {shown[mode]}, at most {options.max_tokens} tokens{until}",
            sessions=options.concurrency,
            turns=num,
            message_bytes=round(plan.num_bytes / num),
        )
        artifact.scenarios.append(result)
    if plan.shortage:
        say(f"NOTE {plan.shortage}")
    return artifact


def guided_engine(options: argparse.Namespace) -> EmbeddedOptions:
    """The engine as `serve` runs it, but that all that is asked at once is decoded at once."""
    return engine_options(threads=options.threads, max_batch=max(EmbeddedSettings().max_batch, options.concurrency))


async def _measure(plan: GuidedPlan, artifact: Artifact) -> None:
    """All rounds. What is measured is kept at once, whatever happens to the rest."""
    options = plan.options
    engine = EmbeddedEngine(plan.model, guided_engine(options))
    try:
        await engine.start()
        artifact.machine["idle_loop_late"] = summary_ms(await idle_lateness_s(IDLE_S))
        load = GuidedLoad(
            engine,
            plan.renderer.tokenizer,
            plan.prompts,
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
    """All prompts in each mode, in an order of their own that the modes share. Raises CannotMeasure.

    With an `artifact`, to which the round will belong, each phase's row is written as soon as it is known, where that
    was asked for.
    """
    order = list(range(len(plan.prompts)))
    random.Random(f"{plan.options.seed} {number}").shuffle(order)
    grammar_of = {GUIDED: plan.constraint.grammar, FREE: None}
    phases: dict[str, Phase] = {}
    for mode in in_turn(plan.modes, number):
        say(f"{shown}, {mode}: {len(order)} prompts, {plan.options.concurrency} at once")
        phase = phases[mode] = await load.phase(mode, grammar_of[mode], order)
        if not phase.heard:
            raise CannotMeasure(f"no {mode} request was answered; the first failure: {phase.failures.first}")
        if artifact is not None and plan.options.stream_output:
            result = artifact.scenarios[plan.modes.index(mode)]
            figures = guided_figures(phase, plan.constraint.is_kept)
            write_row(sys.stdout, artifact, result, number + 1, figures, has_header=number == 0 and len(phases) == 1)
    return phases


def _keep(plan: GuidedPlan, artifact: Artifact, phases: dict[str, Phase]) -> None:
    is_kept = plan.constraint.is_kept
    figures = {mode: guided_figures(phase, is_kept) for mode, phase in phases.items()}
    figures[GUIDED] |= ratios_between(OVER_FREE, figures[GUIDED], figures.get(FREE, {}))
    for result in artifact.scenarios:
        raw = raw_of(phases[result.name], is_kept)
        result.keep(ENGINE, Measurement(figures=figures[result.name], raw=raw))
