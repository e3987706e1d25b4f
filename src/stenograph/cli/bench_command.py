"""`stenograph bench …`: hands over to `python -m stenograph.bench`, which is a program of its own.

The command line and the benchmarks are side by side: neither imports the other, and no server carries a benchmark.
"""

import os
import sys
from collections.abc import Sequence

BENCH = "bench"


def become_bench(arguments: Sequence[str]) -> None:
    """Replace this process by the benchmarks if that is what was asked for; else return."""
    if arguments[:1] == [BENCH]:
        os.execv(sys.executable, [sys.executable, "-m", "stenograph.bench", *arguments[1:]])
