"""`stenograph bench responsiveness`: does the server answer at once while it carries large and many chats?

For each scenario and repeat: the load straight at the engine stand-in (where there is one), then through the server,
and through one of another checkout or with other flags where that was asked for, each with a probe of `/health` beside
it. Owns the run's options and order; what a measurement is, is in measure.py.
"""

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.kit.artifact import ScenarioResult, write_artifact
from benchmarks.kit.conversation import Messages
from benchmarks.kit.figures import Figures
from benchmarks.kit.machine import checkout
from benchmarks.kit.options import add_artifact, add_model, add_plot, check_plot, count, numbers, share
from benchmarks.kit.report import errors_of
from benchmarks.kit.runner import begin_artifact, cached_model, in_turn, say, show
from benchmarks.kit.servers import Checkout
from benchmarks.responsiveness.measure import (
    DIRECT_LEAST_S,
    ServerCommand,
    measure_direct,
    measure_server,
)
from benchmarks.responsiveness.report import responsiveness_table
from benchmarks.responsiveness.scenarios import Scenario, scenarios_named
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

SAMPLE_BYTES = 50_000
"""Bytes of text in which the tokens per byte are counted."""
SHOWN = {"server": "through the server", "before": "through the server before"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsivenessRun:
    """The servers of a run by name (`server`, and `before`), and how often."""

    commands: dict[str, ServerCommand]
    vocab_size: int
    bytes_per_token: float
    repeats: int
    direct_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    add = parser.add_argument
    add("--scenario", default="all", metavar="A,B,…|all", help="which loads to run. Default: all.")
    add("--scale", type=share, default=1.0, help="the share of each load's chats. Default: 1.")
    add_artifact(parser, "responsiveness", repeats=3)
    add("--levels", metavar="1,8,64", help="run each scenario once for each number of sessions")
    add_model(parser)
    add("--server-flags", default="", metavar="FLAGS", help="more flags of `serve`: --server-flags='--x 1'")
    add("--before", type=Path, metavar="DIR", help="measure the server of this checkout too, in turn with ours")
    add("--before-flags", metavar="FLAGS", help="flags of that server; without --before, of a second one of ours")
    add_plot(parser, "latency against load")


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code. A goal that is missed is no failure of the benchmark."""
    scenarios = list(_asked_scenarios(options))
    check_plot(options)
    asked = _prepare(options)
    artifact = begin_artifact("responsiveness", options)
    if options.before is not None:
        artifact.arguments |= {f"before_{name}": value for name, value in checkout(options.before).items()}
    for scenario in scenarios:
        artifact.scenarios.append(_measure_scenario(scenario, asked))
        write_artifact(options.out, artifact)  # what is measured is kept, whatever happens to the rest
    part = "" if options.scale == 1 else f"The goals are for whole loads; this was a share of {options.scale:g}."
    return show(artifact, options, responsiveness_table(artifact), *errors_of(artifact), part)


def _asked_scenarios(options: argparse.Namespace) -> Iterator[Scenario]:
    for scenario in scenarios_named(options.scenario):
        scaled = scenario.scaled(options.scale)
        if options.levels is None:
            yield scaled
        else:
            yield from (replace(scaled, sessions=level) for level in numbers("--levels", options.levels, count))


def _prepare(options: argparse.Namespace) -> ResponsivenessRun:
    before = None if options.before is None else Checkout(options.before.absolute())
    path = cached_model(options.model)
    files = load_model_files(path)
    sample = next(Messages(num_bytes=SAMPLE_BYTES, num_messages=1).texts(1))
    command = ServerCommand(model=str(path), flags=tuple(shlex.split(options.server_flags)))
    commands = {"server": command}
    if before is not None or options.before_flags is not None:
        flags = options.server_flags if options.before_flags is None else options.before_flags
        commands["before"] = replace(command, flags=tuple(shlex.split(flags)), checkout=before)
    return ResponsivenessRun(
        commands=commands,
        vocab_size=files.vocab_size,
        bytes_per_token=SAMPLE_BYTES / len(Tokenizer(files.tokenizer_json).encode(sample)),
        repeats=options.repeats,
        direct_s=DIRECT_LEAST_S * options.scale,
    )


def _measure_scenario(asked: Scenario, run: ResponsivenessRun) -> ScenarioResult:
    scenario = replace(
        asked,
        shape=msgspec.structs.replace(asked.shape, vocab_size=run.vocab_size),
        message_bytes=round(asked.message_tokens * run.bytes_per_token) or asked.message_bytes,
    )
    result = ScenarioResult(
        name=scenario.name,
        title=scenario.title,
        sessions=scenario.sessions,
        turns=scenario.turns,
        message_bytes=scenario.message_bytes,
        goals=[(goal.figure, goal.value) for goal in scenario.goals],
        before_goals=[(goal.figure, goal.value) for goal in scenario.before_goals if "before" in run.commands],
    )
    load = f"{scenario.name}: {scenario.title}; {scenario.sessions * scenario.turns} chats, {scenario.sessions} at once"
    for number in range(run.repeats):
        shown = f"{load}; {number + 1} of {run.repeats}"
        ceiling: Figures = {}
        if not scenario.guided_tokens:
            say(f"{shown}, straight at the engine")
            direct = measure_direct(scenario, least_s=run.direct_s)
            result.keep("direct", direct)
            ceiling = direct.figures
        for target in in_turn(list(run.commands), number):
            say(f"{shown}, {SHOWN[target]}")
            measured = measure_server(scenario, run.commands[target], number=number)
            if ceiling.get("chats_per_s"):
                measured.figures["share_of_direct"] = measured.figures["chats_per_s"] / ceiling["chats_per_s"]
            result.keep(target, measured)
    return result
