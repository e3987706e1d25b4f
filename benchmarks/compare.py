"""`stenograph bench compare A.json B.json`: did each figure get better, worse, or can it not be told from noise?"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.kit.artifact import Artifact, BadArtifact, ScenarioResult, read_artifact
from benchmarks.kit.figures import LABELS, Figures, better, spread, values_of
from benchmarks.kit.report import number, table
from benchmarks.kit.verdicts import RULE, Comparison, change_cell, compare_values

_GUIDED = (
    "grammar",
    "ignore_eos",
    "temperature",
    "top_p",
    "top_k",
    "threads",
    "prompts",
    "dataset",
    "input_len",
    "endpoint",
)
_SIZES = ("prompt_tokens", "num_requests", "submit_interval_ms", "max_batch", "turn_tokens", "reply_tokens")
_TEXT = ("family", "message_bytes")
SAME = ("scale", "model", "levels", "engine", "mix", "seed", "max_tokens", "num_sessions", *_GUIDED, *_SIZES, *_TEXT)
"""Arguments that change what a figure means."""
MEASURED = ("server", "engine", "text")
"""The columns that are compared, the first that is there: the server's; an engine's or the text side's without one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("first", type=Path, metavar="A.json", help="an artifact, the older one")
    parser.add_argument("second", type=Path, metavar="B.json", help="an artifact, the newer one")


def run(options: argparse.Namespace) -> int:
    """Print the comparison; returns the exit code, 0 whatever it says. Raises BadArtifact."""
    first, second = read_artifact(options.first), read_artifact(options.second)
    pairs = list(_pairs(first, second))
    if not pairs:
        raise BadArtifact(f"{options.first} and {options.second} have no scenario in common")
    rows = [["scenario", "figure", "A", "B", "change", "verdict", "p"]]
    found: dict[str, dict[str, str]] = {}
    for old, new in pairs:
        name = f"{new.name} @ {new.sessions}"
        found[name] = {}
        for figure, before, after, comparison in _figures(old, new):
            rows.append([name, LABELS[figure], *_cells(before, after, comparison)])
            found[name][figure] = comparison.verdict
    write = sys.stdout.write
    for line in _differences(first, second):
        write(f"NOTE {line}\n")
    write(f"{table(rows)}\n{RULE}\n")
    write(msgspec.json.encode({"bench": "compare", "verdicts": found}).decode() + "\n")
    return 0


def _pairs(first: Artifact, second: Artifact) -> Iterator[tuple[ScenarioResult, ScenarioResult]]:
    """The same scenarios at the same number of sessions and turns: others do not measure the same thing."""
    old = {(result.name, result.sessions, result.turns): result for result in first.scenarios}
    for result in second.scenarios:
        if (found := old.get((result.name, result.sessions, result.turns))) is not None:
            yield found, result


def _figures(old: ScenarioResult, new: ScenarioResult) -> Iterator[tuple[str, list[float], list[float], Comparison]]:
    for figure in LABELS:
        before, after = (values_of(_measured(result), figure) for result in (old, new))
        if before and after:
            yield figure, before, after, compare_values(before, after, better(figure))


def _measured(result: ScenarioResult) -> list[Figures]:
    return next((result.figures[name] for name in MEASURED if result.figures.get(name)), list[Figures]())


def _cells(before: list[float], after: list[float], comparison: Comparison) -> list[str]:
    change = "" if comparison.change is None else change_cell(comparison.change)
    medians = [number(spread(values).median) for values in (before, after)]
    return [*medians, change, comparison.verdict, f"{comparison.p:.2g}"]


def _differences(first: Artifact, second: Artifact) -> Iterator[str]:
    """The differences that make two runs hard to compare."""
    for name in SAME:
        old, new = first.arguments.get(name), second.arguments.get(name)
        if old != new:
            yield f"they were run with different --{name}: {old} and {new}"
    for name in ("cpu", "cores", "python"):
        old, new = first.machine.get(name), second.machine.get(name)
        if old != new:
            yield f"they ran on different machines ({name}): {old} and {new}"
