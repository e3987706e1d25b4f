"""`python -m benchmarks`, which `stenograph bench` becomes in a checkout: one subcommand a benchmark.

A benchmark is a module with `add_arguments(parser)` and `run(options) -> exit code`, and a row in `BENCHMARKS`.
"""

import sys
from collections.abc import Sequence

from benchmarks import compare, plot
from benchmarks.engine import command as engine
from benchmarks.guided import command as guided
from benchmarks.kit.runner import Benchmark, run_benchmarks
from benchmarks.render import command as render
from benchmarks.responsiveness import command as responsiveness
from benchmarks.rollouts import command as rollouts
from benchmarks.serving import command as serving
from benchmarks.soak import command as soak
from benchmarks.store import command as store
from benchmarks.streaming import command as streaming

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
    "engine": Benchmark(
        "what does the embedded engine itself give for a second of CPU?", engine.add_arguments, engine.run
    ),
    "render": Benchmark(
        "what does the text side of a turn cost, beside a render of the whole conversation?",
        render.add_arguments,
        render.run,
    ),
    "rollouts": Benchmark(
        "what does a rollout cost in the client's own process?", rollouts.add_arguments, rollouts.run
    ),
    "soak": Benchmark("does the server stay as it is under a mixed load with faults?", soak.add_arguments, soak.run),
    "store": Benchmark("what do sessions on disk cost when they are wanted again?", store.add_arguments, store.run),
    "plot": Benchmark("what runs measured, as PNG files", plot.add_arguments, plot.run),
    "compare": Benchmark("what got better or worse between two runs?", compare.add_arguments, compare.run),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    return run_benchmarks(BENCHMARKS, arguments)


if __name__ == "__main__":
    sys.exit(main())
