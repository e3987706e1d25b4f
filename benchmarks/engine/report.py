"""The tables of `stenograph bench engine`: the engine beside llama.cpp, a session with and without prefix reuse."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.engine.figures import OVER, middle_of
from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.figures import Figures, better, values_of
from benchmarks.kit.report import figure_rows, name_in, number, ratios_of, spread_cell, table
from benchmarks.kit.verdicts import Verdict, compare_values

ENGINE, BESIDE = "engine", "llamacpp"
"""Under which names an artifact has the figures of the embedded engine, and of what is beside it."""
REUSE_ON, REUSE_OFF = "reuse on", "reuse off"
MOST_LOAD = 0.25
"""Above so much work for each core before a run, it is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The rounds of two measurements that are shown side by side; `other` is empty where there is but one."""

    name: str
    mine: list[Figures]
    other: list[Figures]


def engine_table(artifact: Artifact) -> str:
    """Median (least … most) over rounds; empty where no decode and no prefill was asked for."""
    head = ["scenario", "figure", "embedded", "llama.cpp", "embedded / llama.cpp", "told from noise"]
    return _side_table(head, list(_of_rates(artifact)))


def reuse_table(artifact: Artifact) -> str:
    """The same of a session; empty where it was not asked for."""
    head = ["scenario", "figure", REUSE_ON, REUSE_OFF, "on / off", "told from noise"]
    return _side_table(head, list(_of_reuse(artifact)))


def notes_of(artifact: Artifact) -> Iterator[str]:
    """Remarks beside the figures, a line each."""
    results = {result.name: result for result in artifact.scenarios}
    if REUSE_ON in results:
        num_turns = results[REUSE_ON].turns
        yield f"the turn in the middle is number {middle_of(num_turns)} of {num_turns}"
        yield _same_replies(results[REUSE_ON], results[REUSE_OFF])
    load, cores = artifact.machine["load_average"], artifact.machine["cores"]
    if load > MOST_LOAD * cores:
        yield (
            f"NOTE the machine had other work (load average {number(load)} on {cores} cores before the run): tokens/s"
            " and TTFT are those of a share of it"
        )


def _of_rates(artifact: Artifact) -> Iterator[Sides]:
    for result in artifact.scenarios:
        if result.name not in {REUSE_ON, REUSE_OFF}:
            yield Sides(
                name=name_in(artifact, result), mine=result.figures[ENGINE], other=result.figures.get(BESIDE, [])
            )


def _of_reuse(artifact: Artifact) -> Iterator[Sides]:
    results = {result.name: result.figures[ENGINE] for result in artifact.scenarios}
    if REUSE_ON in results:
        yield Sides(name="reuse", mine=results[REUSE_ON], other=results[REUSE_OFF])


def _side_table(head: Sequence[str], sides: Sequence[Sides]) -> str:
    """Two columns and what tells them apart; one column where nothing is beside."""
    rows = [row for side in sides for row in figure_rows(side.name, partial(_cells, side))]
    if not rows:
        return ""
    width = len(head) if any(side.other for side in sides) else 3
    return table([list(head)[:width], *(row[:width] for row in rows)])


def _cells(sides: Sides, figure: str) -> Sequence[str] | None:
    mine, other = values_of(sides.mine, figure), values_of(sides.other, figure)
    if figure in OVER or not mine:
        return None
    told = ""
    if other:
        verdict = compare_values(other, mine, better(figure)).verdict
        told = "no" if verdict is Verdict.NOISE else f"yes, {verdict}"
    return spread_cell(mine), spread_cell(other), spread_cell(ratios_of(figure, sides.mine, sides.other)), told


def _same_replies(on: ScenarioResult, off: ScenarioResult) -> str:
    """Whether reuse changed what was drawn: the prompts of a turn are the same only as long as it did not."""
    pairs = [
        (warm["turns"]["drawn"], cold["turns"]["drawn"])
        for warm, cold in zip(on.raw[ENGINE], off.raw[ENGINE], strict=True)
    ]
    turns: list[Any] = [turn for warm, cold in pairs for turn in zip(warm, cold, strict=True)]
    num_same = sum(warm == cold for warm, cold in turns)
    return f"replies that have the same ids with reuse and without: {num_same} of {len(turns)}"
