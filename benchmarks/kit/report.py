"""Tables of figures beside their goals, and the one JSON line."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import msgspec

from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.figures import LABELS, NO_WORSE, Figures, Goal, Spread, better, spread, values_of
from benchmarks.kit.verdicts import Verdict, compare_values


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in columns, the first as the head; Markdown, so that it can be pasted."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def name_in(artifact: Artifact, result: ScenarioResult) -> str:
    """A result's name: with its sessions where the scenario was run at several levels."""
    is_alone = sum(other.name == result.name for other in artifact.scenarios) == 1
    return result.name if is_alone else f"{result.name}@{result.sessions}"


def figure_rows(name: str | None, cells_of: Callable[[str], Sequence[str] | None]) -> Iterator[list[str]]:
    """A row for each figure that has cells: the name (None: no such column) in the first, the label, the cells."""
    shown = name
    for figure, label in LABELS.items():
        if (cells := cells_of(figure)) is not None:
            yield [*([] if shown is None else [shown]), label, *cells]
            shown = None if name is None else ""


def column_table(artifact: Artifact, column: str) -> str:
    """Every figure of a benchmark without comparisons: median (least … most) over repeats, a column a scenario."""

    def cells(figure: str) -> Sequence[str] | None:
        values = [values_of(result.figures[column], figure) for result in artifact.scenarios]
        return [spread_cell(one) for one in values] if any(values) else None

    return table([["figure", *(result.title for result in artifact.scenarios)], *figure_rows(None, cells)])


def ratios_of(figure: str, mine: Sequence[Figures], other: Sequence[Figures]) -> list[float]:
    """Mine / other of each round that has both."""
    return [
        one[figure] / two[figure] for one, two in zip(mine, other, strict=False) if figure in one and two.get(figure)
    ]


def told_apart(figure: str, first: Sequence[float], second: Sequence[float]) -> str:
    """Whether the second can be told from the first by the rule of `compare`; empty where one was not measured."""
    if not first or not second:
        return ""
    return "no" if compare_values(first, second, better(figure)).verdict is Verdict.NOISE else "yes"


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:,.{decimals}f}"


def spread_cell(values: Sequence[float]) -> str:
    """Median (least … most), as a table shows it; nothing of nothing."""
    if not values:
        return ""
    found = spread(values)
    if found.least == found.most:
        return number(found.median)
    return f"{number(found.median)} ({number(found.least)} … {number(found.most)})"


def errors_of(artifact: Artifact) -> list[str]:
    """The failures of a run, a line for each step that had failures, with the first one's body."""
    lines: list[str] = []
    for result in artifact.scenarios:
        for target, repeats in result.raw.items():
            for raw in repeats:
                steps: list[dict[str, Any]] = [step for step in raw.values() if isinstance(step, dict)]
                lines += [
                    f"ERRORS {result.name} {target}, {step['step']}: {step['errors']}; the first: {step['first_error']}"
                    for step in steps
                    if step.get("errors")
                ]
    return lines


def json_line(artifact: Artifact) -> str:
    """The run in one line: medians, ratios to `before` where that was measured, and which goals were missed."""
    medians: dict[str, dict[str, dict[str, float]]] = {}
    ratios: dict[str, dict[str, list[float]]] = {}
    missed: list[str] = []
    for result in artifact.scenarios:
        name = name_in(artifact, result)
        medians[name] = {
            target: {
                figure: _short(spread(values_of(repeats, figure)).median)
                for figure in LABELS
                if values_of(repeats, figure)
            }
            for target, repeats in result.figures.items()
        }
        for figure, value in result.goals:
            median = medians[name].get("server", {}).get(figure)
            if median is None or not Goal(figure=figure, value=value).is_reached(median):
                missed.append(f"{name}.{figure}")
        if "before" in result.figures:
            found = ((figure, over_before(result, figure)) for figure in LABELS)
            ratios[name] = {figure: [_short(value) for value in astuple(ratio)] for figure, ratio in found if ratio}
            missed += [
                f"{name}.{figure}/before"
                for figure, value in result.before_goals
                if not keeps_up(result, figure, value)
            ]
    line: dict[str, object] = {
        "bench": artifact.bench,
        "commit": artifact.commit,
        "dirty": artifact.dirty,
        "scale": artifact.arguments.get("scale"),
        "repeats": artifact.arguments.get("repeats"),
        "missed": missed,
        "figures": medians,
    }
    if ratios:
        line["over_before"] = ratios
    return msgspec.json.encode(line).decode()


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def over_before(result: ScenarioResult, figure: str) -> Spread | None:
    """A figure of the server / that of the server before it, over the rounds; None where it was not measured."""
    ratios = ratios_of(figure, result.figures.get("server", []), result.figures.get("before", []))
    return spread(ratios) if ratios else None


def keeps_up(result: ScenarioResult, figure: str, ratio: float) -> bool:
    """Whether a figure's ratio to that of `before` is reached; `NO_WORSE` is, unless `compare` calls it worse."""
    found = over_before(result, figure)
    if found is None:
        return False
    if Goal(figure=figure, value=ratio).is_reached(found.median):
        return True
    before, server = (values_of(result.figures[name], figure) for name in ("before", "server"))
    return ratio == NO_WORSE and compare_values(before, server, better(figure)).verdict is not Verdict.WORSE
