"""Tables of figures beside their goals, and the one JSON line."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from stenograph.bench.artifact import Artifact, ScenarioResult
from stenograph.bench.figures import LABELS, Figures, Goal, better, spread, values_of
from stenograph.bench.verdicts import compare_values


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


def responsiveness_table(artifact: Artifact) -> str:
    """Every figure of every scenario: median (least … most), its goal, the same figure straight at the engine."""
    has_before = any("before" in result.figures for result in artifact.scenarios)
    head = ["scenario", "figure", "server", "goal", "reached", "direct"]
    rows = [[*head, "before", "against before"] if has_before else head]
    for result in artifact.scenarios:
        rows += _rows_of(result, name_in(artifact, result), has_before=has_before)
    return table(rows)


def _rows_of(result: ScenarioResult, name: str, *, has_before: bool) -> Iterator[list[str]]:
    goals = {figure: Goal(figure=figure, value=value) for figure, value in result.goals}
    server, direct = result.figures.get("server", []), result.figures.get("direct", [])
    before = result.figures.get("before", [])
    shown = name
    for figure, label in LABELS.items():
        values = values_of(server, figure)
        goal = goals.get(figure)
        if not values and goal is None:
            continue
        reached = "" if goal is None else "not measured" if not values else _yes(goal.is_reached(spread(values).median))
        row = [
            shown,
            label,
            spread_cell(values),
            "" if goal is None else goal.shown,
            reached,
            spread_cell(_of(direct, figure)),
        ]
        if has_before:
            old = _of(before, figure)
            row += [spread_cell(old), compare_values(old, values, better(figure)).verdict if old and values else ""]
        yield row
        shown = ""


def _of(repeats: list[Figures], figure: str) -> list[float]:
    return values_of(repeats, figure)


def _yes(is_reached: bool) -> str:
    return "yes" if is_reached else "NO"


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
    """What went wrong in a run, a line a kind, with the first body of each step that had one."""
    lines: list[str] = []
    for result in artifact.scenarios:
        for target, repeats in result.raw.items():
            for raw in repeats:
                steps: list[dict[str, Any]] = [step for step in raw.values() if isinstance(step, dict)]
                lines += [
                    f"{result.name} {target}, {step['step']}: {step['errors']}; the first: {step['first_error']}"
                    for step in steps
                    if step.get("errors")
                ]
    return lines


def json_line(artifact: Artifact) -> str:
    """The run in one line: medians, and which goals were missed."""
    medians: dict[str, dict[str, dict[str, float]]] = {}
    missed: list[str] = []
    for result in artifact.scenarios:
        name = name_in(artifact, result)
        medians[name] = {
            target: {
                figure: float(f"{spread(values_of(repeats, figure)).median:.4g}")
                for figure in LABELS
                if values_of(repeats, figure)
            }
            for target, repeats in result.figures.items()
        }
        for figure, value in result.goals:
            median = medians[name].get("server", {}).get(figure)
            if median is None or not Goal(figure=figure, value=value).is_reached(median):
                missed.append(f"{name}.{figure}")
    line = {
        "bench": artifact.bench,
        "commit": artifact.commit,
        "dirty": artifact.dirty,
        "scale": artifact.arguments.get("scale"),
        "repeats": artifact.arguments.get("repeats"),
        "missed": missed,
        "figures": medians,
    }
    return msgspec.json.encode(line).decode()
