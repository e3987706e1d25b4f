"""The trees of code that the laws hold: the product, and beside it what a checkout has."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
MODULES = sorted(SRC.rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
STANDINS = sorted((ROOT / "standins").rglob("*.py"))
BESIDE = [*BENCHMARKS, *STANDINS, *sorted((ROOT / "scripts").glob("*.py"))]


def name_of(path: Path) -> str:
    """A module's name: `session/turn` in the product, `benchmarks/compare` beside it."""
    base = SRC / "stenograph" if path.is_relative_to(SRC) else ROOT
    return str(path.relative_to(base).with_suffix("")).removesuffix("/__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
