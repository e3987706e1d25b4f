"""`stenograph bench …`: hands over to `benchmarks`, a program of its own, in a checkout and not in a wheel."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from stenograph.core.errors import StartupError

CHECKOUT = Path(__file__).parents[3]


def become_bench(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the benchmarks. Raises StartupError where the package is installed without them."""
    if not (CHECKOUT / "benchmarks" / "__main__.py").is_file():
        raise StartupError(
            "the benchmarks are in the repository, not in the installed package: run `pip install -e .` in a checkout,"
            " then `stenograph bench`"
        )
    found = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(found)
    # With -P: the folder that it runs in may have other benchmarks.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "benchmarks", *arguments])
