"""`python -m stenograph.bench`, which `stenograph bench` becomes: one subcommand a benchmark.

A benchmark is a module with `add_arguments(parser)` and `run(options) -> exit code`, and a row in `BENCHMARKS`.
"""

import sys
from collections.abc import Sequence

from stenograph.bench import compare, plot
from stenograph.bench.guided import command as guided
from stenograph.bench.kit.runner import Benchmark, run_benchmarks
from stenograph.bench.responsiveness import command as responsiveness
from stenograph.bench.serving import command as serving
from stenograph.bench.streaming import command as streaming

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
    "guided": Benchmark("what does a grammar cost a token?", guided.add_arguments, guided.run),
    "plot": Benchmark("what runs measured, as PNG files", plot.add_arguments, plot.run),
    "compare": Benchmark("what got better or worse between two runs?", compare.add_arguments, compare.run),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    return run_benchmarks(
        BENCHMARKS, arguments, prog="stenograph bench", description="Measure the server on this machine."
    )


if __name__ == "__main__":
    sys.exit(main())
