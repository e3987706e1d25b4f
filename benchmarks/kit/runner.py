"""The frame of every benchmark: subcommand, artifact, rounds in turn, progress, and the last lines of output.

Also the one answer to what cannot be measured (a line, exit code 2) and to Ctrl-C (130). Knows no benchmark.
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.kit.artifact import Artifact
from benchmarks.kit.machine import provenance
from benchmarks.kit.plots import PLOTS
from benchmarks.kit.processes import INTERRUPTS, CannotMeasure
from benchmarks.kit.report import json_line
from stenograph.cli.commands import CommandParser
from stenograph.core.errors import CallerError, StartupError
from stenograph.model.fetch import resolve_model
from stenograph.model.progress import StreamProgress
from stenograph.model.settings import default_cache_dir

EXIT_CANNOT_MEASURE, EXIT_INTERRUPTED = 2, 130
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A subcommand: what it asks, its options, and the run itself, which returns the exit code."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def run_benchmarks(benchmarks: Mapping[str, Benchmark], arguments: Sequence[str] | None) -> int:
    """Run the benchmark that `arguments` (None: the command line's) name. Returns the exit code."""
    parser = CommandParser(prog="stenograph bench", description="Measure the server on this machine.")
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK")
    for name, benchmark in benchmarks.items():
        benchmark.add_arguments(commands.add_parser(name, help=benchmark.help, description=benchmark.help))
    parser.check_named(sys.argv[1:] if arguments is None else arguments, benchmarks, "benchmark", "responsiveness")
    options = parser.parse_args(arguments)
    INTERRUPTS.take()
    try:
        code = benchmarks[options.benchmark].run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (CannotMeasure, CallerError, StartupError, ValueError, OSError) as error:
        sys.stderr.write(f"stenograph: {error}\n")
        return EXIT_CANNOT_MEASURE
    return EXIT_INTERRUPTED if INTERRUPTS.came else code


def cached_model(model: str, *, weights: bool = True) -> Path:
    """A model's place, fetched first if it has to be, of a hub's with its `weights`. Raises StartupError."""
    folder = Path(os.environ.get("STENOGRAPH_CACHE") or default_cache_dir(os.environ))
    return resolve_model(model, cache_dir=folder, progress=StreamProgress(sys.stderr), weights=weights)


def begin_artifact(bench: str, options: argparse.Namespace) -> Artifact:
    """The artifact of a run before anything is measured."""
    arguments = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if isinstance(value, str | int | float | Path | None)
    }
    begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return msgspec.convert({"bench": bench, "begun": begun, "arguments": arguments, **provenance()}, Artifact)


def in_turn(items: Sequence[Item], number: int) -> Sequence[Item]:
    """The items of a round, every other round the other way round: a drift over time falls on all of them."""
    return items if number % 2 == 0 else items[::-1]


def say(text: str) -> None:
    """Write a line of progress."""
    sys.stderr.write(f"{text}\n")


class ProgressNotes:
    """Says how far a measurement is, once in a while."""

    def __init__(self, period_s: float = 2.0) -> None:
        self._period_s = period_s
        self._said_at = time.monotonic()

    def note(self, shown: object) -> None:
        """Say it, if nothing was said for a while; only then it is made a text."""
        if time.monotonic() - self._said_at >= self._period_s:
            self._said_at = time.monotonic()
            say(f"  {shown}")


def show(artifact: Artifact, options: argparse.Namespace, *paragraphs: str) -> int:
    """Plot if asked; write a run's results, where its artifact is, and one line of JSON. Returns a whole run's code."""
    if getattr(options, "plot", None) is not None:
        PLOTS[artifact.bench](artifact, options.plot)
    last = f"written to {options.out}\n{json_line(artifact)}\n"
    sys.stdout.write("".join(f"{text}\n" for text in paragraphs if text) + last)
    sys.stdout.flush()
    return 0
