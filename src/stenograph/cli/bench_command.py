"""`stenograph bench …`: hands over to `python -m stenograph.bench`, which is a program of its own.

The command line and the benchmarks are side by side: neither imports the other, and no server carries a benchmark.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn


def become_bench(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the benchmarks."""
    os.execv(sys.executable, [sys.executable, "-m", "stenograph.bench", *arguments])
