"""`scripts/bench`: what the repository measures for itself. One subcommand a benchmark, as in `stenograph bench`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.engine import command as engine
from benchmarks.render import command as render
from benchmarks.rollouts import command as rollouts
from benchmarks.soak import command as soak
from benchmarks.store import command as store
from stenograph.bench.kit.runner import Benchmark, run_benchmarks

BENCHMARKS = {
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
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    # Its children import this package too, from whatever folder it is run.
    found = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(found)
    return run_benchmarks(
        BENCHMARKS, arguments, prog="scripts/bench", description="Measure what the repository promises of itself."
    )


if __name__ == "__main__":
    sys.exit(main())
