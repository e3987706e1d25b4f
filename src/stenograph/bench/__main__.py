"""`python -m stenograph.bench`, which `stenograph bench` becomes: one subcommand a benchmark.

A benchmark is a module with `add_arguments(parser)` and `run(options) -> exit code`, and a row in `BENCHMARKS`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stenograph.bench import compare, engine, guided, plot, render, responsiveness, serving, soak, streaming
from stenograph.bench.processes import INTERRUPTS

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A subcommand."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


BENCHMARKS = {
    "responsiveness": Benchmark(
        "does the server answer at once while it carries large and many chats?",
        responsiveness.add_arguments,
        responsiveness.run,
    ),
    "serving": Benchmark(
        "what do conversations get, through the server and straight at the engine?",
        serving.add_arguments,
        serving.run,
    ),
    "streaming": Benchmark(
        "what does it cost to submit a request, and where does its first token's time go?",
        streaming.add_arguments,
        streaming.run,
    ),
    "engine": Benchmark(
        "what does the embedded engine itself give for a second of CPU?", engine.add_arguments, engine.run
    ),
    "render": Benchmark(
        "what does the text side of a turn cost, beside a render of the whole conversation?",
        render.add_arguments,
        render.run,
    ),
    "guided": Benchmark("what does a grammar cost a token?", guided.add_arguments, guided.run),
    "soak": Benchmark(
        "does the server stay as it is under a mixed load with faults?",
        soak.add_arguments,
        soak.run,
    ),
    "plot": Benchmark("what runs measured, as PNG files", plot.add_arguments, plot.run),
    "compare": Benchmark("what got better or worse between two runs?", compare.add_arguments, compare.run),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="stenograph bench", description="Measure the server, on this machine.")
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, benchmark in BENCHMARKS.items():
        benchmark.add_arguments(commands.add_parser(name, help=benchmark.help, description=benchmark.help))
    options = parser.parse_args(arguments)
    INTERRUPTS.take()
    try:
        code = BENCHMARKS[options.benchmark].run(options)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_INTERRUPTED if INTERRUPTS.came else code


if __name__ == "__main__":
    sys.exit(main())
