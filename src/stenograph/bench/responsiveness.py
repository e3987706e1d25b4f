"""`stenograph bench responsiveness`: does the server answer at once while it carries large and many chats?

For each scenario and repeat: the load straight at the engine stand-in, then through the server, each with a probe of
`/health` beside it. Owns the run's options, order and progress; what a measurement is, is in measure.py.
"""

import argparse
import datetime
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from stenograph.bench.artifact import Artifact, ScenarioResult, write_artifact
from stenograph.bench.conversation import Messages
from stenograph.bench.figures import Figures
from stenograph.bench.machine import provenance
from stenograph.bench.measure import (
    DIRECT_LEAST_S,
    Measured,
    ServerCommand,
    measure_direct,
    measure_server,
    tokens_per_byte,
)
from stenograph.bench.plots import PLOT_NEEDS, can_plot, plot_latency
from stenograph.bench.processes import ChildFailed
from stenograph.bench.report import errors_of, json_line, responsiveness_table
from stenograph.bench.scenarios import Scenario, scenarios_named
from stenograph.core.errors import StartupError
from stenograph.core.settings import default_cache_dir
from stenograph.embedded.fetch import resolve_model
from stenograph.embedded.progress import StreamProgress
from stenograph.render.model_files import load_model_files

SAMPLE_BYTES = 50_000
"""Of how much text the tokens per byte are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run needs: its servers by name (`server`, and `before`), and how often."""

    commands: dict[str, ServerCommand]
    vocab_size: int
    repeats: int
    direct_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--scenario", default="all", metavar="A,B,…|all", help="which loads to run. Default: all.")
    parser.add_argument("--scale", type=share, default=1.0, help="the share of each load's chats. Default: 1.")
    parser.add_argument("--repeats", type=count, default=3, help="how often each is measured. Default: 3.")
    parser.add_argument("--levels", metavar="1,8,64", help="run each scenario once for each number of sessions")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template the server uses")
    parser.add_argument(
        "--server-flags",
        default="",
        metavar="FLAGS",
        help="further flags of `serve`: --server-flags='--x 1'",
    )
    parser.add_argument(
        "--before-flags", metavar="FLAGS", help="measure a second server with these flags, in turn with the first"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bench-responsiveness.json"), metavar="FILE.json", help="the artifact's place"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="latency against load; needs the extra `bench`")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="where the last server's CPU went, as collapsed stacks"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, and write down; returns the exit code. A goal that is missed is no failure of the benchmark."""
    try:
        scenarios = list(_asked_scenarios(options))
        if options.plot is not None and not can_plot():
            raise ValueError(f"--plot {PLOT_NEEDS}")
        prepared = _prepare(options)
        artifact = begin_artifact("responsiveness", options)
        for scenario in scenarios:
            artifact.scenarios.append(_measure_scenario(scenario, prepared))
            write_artifact(options.out, artifact)  # what is measured is kept, whatever happens to the rest
    except (ChildFailed, StartupError, ValueError, OSError) as error:
        sys.stderr.write(f"stenograph: {error}\n")
        return 2
    _show(artifact, options)
    return 0


def _asked_scenarios(options: argparse.Namespace) -> Iterator[Scenario]:
    for scenario in scenarios_named(options.scenario):
        scaled = scenario.scaled(options.scale)
        if options.levels is None:
            yield scaled
        else:
            yield from (replace(scaled, sessions=count(level)) for level in options.levels.split(","))


def _prepare(options: argparse.Namespace) -> Run:
    path = cached_model(options.model)
    profile = None if options.profile is None else str(options.profile.absolute())
    command = ServerCommand(model=str(path), flags=tuple(shlex.split(options.server_flags)), profile=profile)
    commands = {"server": command}
    if options.before_flags is not None:
        commands["before"] = replace(command, flags=tuple(shlex.split(options.before_flags)), profile=None)
    return Run(
        commands=commands,
        vocab_size=load_model_files(path).vocab_size,
        repeats=options.repeats,
        direct_s=DIRECT_LEAST_S * options.scale,
    )


def cached_model(model: str) -> Path:
    """A model's place, fetched first if it has to be. Raises StartupError."""
    cache = os.environ.get("STENOGRAPH_CACHE")
    folder = Path(cache) if cache else default_cache_dir(os.environ)
    return resolve_model(model, cache_dir=folder, progress=StreamProgress(sys.stderr))


def begin_artifact(bench: str, options: argparse.Namespace) -> Artifact:
    """What is known before anything is measured."""
    arguments = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if isinstance(value, str | int | float | Path | None)
    }
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    head = {"bench": bench, "begun": begun, "arguments": arguments, **provenance()}
    return msgspec.convert(head, Artifact)


def _measure_scenario(scenario: Scenario, run: Run) -> ScenarioResult:
    shape = msgspec.structs.replace(scenario.shape, vocab_size=run.vocab_size)
    message_bytes = scenario.message_bytes
    if scenario.message_tokens:
        sample = next(Messages(num_bytes=SAMPLE_BYTES, num_messages=1).texts(1))
        message_bytes = round(scenario.message_tokens / tokens_per_byte(run.commands["server"], shape, sample))
    result = ScenarioResult(
        name=scenario.name,
        title=scenario.title,
        sessions=scenario.sessions,
        turns=scenario.turns,
        message_bytes=message_bytes,
        goals=[(goal.figure, goal.value) for goal in scenario.goals],
        figures={},
    )
    for repeat in range(run.repeats):
        _note(scenario, run, repeat, "straight at the engine")
        direct = measure_direct(scenario, shape, message_bytes=message_bytes, least_s=run.direct_s)
        _keep(result, "direct", direct)
        for target in _in_turn(list(run.commands), repeat):
            _note(scenario, run, repeat, f"through the {target}" if target == "server" else "through the one before")
            measured = measure_server(scenario, shape, run.commands[target], message_bytes=message_bytes)
            _keep(result, target, measured, ceiling=direct.figures)
    return result


def _in_turn(targets: list[str], repeat: int) -> list[str]:
    """Every other repeat the other way round: what drifts with time falls on both."""
    return targets if repeat % 2 == 0 else targets[::-1]


def _keep(result: ScenarioResult, target: str, measured: Measured, *, ceiling: Figures | None = None) -> None:
    figures = measured.figures
    if ceiling is not None and ceiling["chats_per_s"]:
        figures["share_of_direct"] = figures["chats_per_s"] / ceiling["chats_per_s"]
    result.figures.setdefault(target, []).append(figures)
    result.raw.setdefault(target, []).append(measured.raw)


def _note(scenario: Scenario, run: Run, repeat: int, what: str) -> None:
    num_chats = scenario.sessions * scenario.turns
    sys.stderr.write(
        f"{scenario.name}: {scenario.title}; {num_chats} chats, {scenario.sessions} at once;"
        f" {repeat + 1} of {run.repeats}, {what}\n"
    )


def _show(artifact: Artifact, options: argparse.Namespace) -> None:
    write = sys.stdout.write
    write(responsiveness_table(artifact) + "\n")
    for line in errors_of(artifact):
        write(f"ERRORS {line}\n")
    if options.scale != 1:
        write(f"The goals are for whole loads; this was a share of {options.scale:g}.\n")
    if options.plot is not None:
        plot_latency(artifact, options.plot)
    write(f"written to {options.out}\n{json_line(artifact)}\n")
    sys.stdout.flush()


def share(text: str) -> float:
    """An option's value above 0 and at most 1."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def count(text: str) -> int:
    """An option's value of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value
