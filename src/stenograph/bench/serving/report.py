"""The table of `bench serving`: the server beside the engine alone."""

from collections.abc import Sequence
from functools import partial

from stenograph.bench.kit.artifact import Artifact, ScenarioResult
from stenograph.bench.kit.figures import spread, values_of
from stenograph.bench.kit.report import figure_rows, name_in, number, spread_cell, table, told_apart


def serving_table(artifact: Artifact) -> str:
    """Every figure of every load: median (least … most) through the server and straight, and what lies between."""
    rows = [["load", "figure", "server", "straight", "server - straight", "told from noise"]]
    for result in artifact.scenarios:
        rows += figure_rows(name_in(artifact, result), partial(_cells, result))
    return table(rows)


def _cells(result: ScenarioResult, figure: str) -> Sequence[str] | None:
    server, direct = (values_of(result.figures.get(target, []), figure) for target in ("server", "direct"))
    if not server and not direct:
        return None
    return spread_cell(server), spread_cell(direct), _between(direct, server), told_apart(figure, direct, server)


def _between(direct: list[float], server: list[float]) -> str:
    if not direct or not server:
        return ""
    straight = spread(direct).median
    difference = spread(server).median - straight
    change = f" ({difference / abs(straight):+.1%})" if straight else ""
    return f"{'+' if difference > 0 else ''}{number(difference)}{change}"
