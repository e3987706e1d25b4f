"""What `bench serving` shows: a table with the server beside the engine alone."""

from collections.abc import Iterator

from stenograph.bench.artifact import Artifact, ScenarioResult
from stenograph.bench.figures import LABELS, better, spread, values_of
from stenograph.bench.report import name_in, number, spread_cell, table
from stenograph.bench.verdicts import Verdict, compare_values


def serving_table(artifact: Artifact) -> str:
    """Every figure of every load: median (least … most) through the server and straight, and what lies between."""
    rows = [["load", "figure", "server", "straight", "server - straight", "told from noise"]]
    for result in artifact.scenarios:
        rows += _rows_of(result, name_in(artifact, result))
    return table(rows)


def _rows_of(result: ScenarioResult, name: str) -> Iterator[list[str]]:
    shown = name
    for figure, label in LABELS.items():
        server = values_of(result.figures.get("server", []), figure)
        direct = values_of(result.figures.get("direct", []), figure)
        if server or direct:
            yield [shown, label, spread_cell(server), spread_cell(direct), *_between(figure, direct, server)]
            shown = ""


def _between(figure: str, direct: list[float], server: list[float]) -> tuple[str, str]:
    if not direct or not server:
        return "", ""
    difference = spread(server).median - spread(direct).median
    sign = "+" if difference > 0 else ""
    found = compare_values(direct, server, better(figure))
    share = "" if found.change is None else f" ({found.change:+.1%})"
    return f"{sign}{number(difference)}{share}", "no" if found.verdict is Verdict.NOISE else "yes"
