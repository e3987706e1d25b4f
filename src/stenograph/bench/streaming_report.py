"""What `bench streaming` shows: a column for each way to tokenize, and how each after the first differs from it."""

from collections.abc import Iterator, Sequence

from stenograph.bench.artifact import Artifact
from stenograph.bench.figures import LABELS, Figures, better, values_of
from stenograph.bench.report import spread_cell, table
from stenograph.bench.verdicts import Verdict, compare_values

ENGINE = "engine"
"""Under which name an artifact has the figures of a way: they are the engine's, no server is there."""


def streaming_table(artifact: Artifact, names: Sequence[str]) -> str:
    """Every figure: median (least … most) over repeats. `names` are the ways', in the order of the scenarios."""
    columns = [result.figures[ENGINE] for result in artifact.scenarios]
    rows = [["figure", *names, *(f"{name}, against {names[0]}" for name in names[1:])]]
    for figure, label in LABELS.items():
        if any(values_of(repeats, figure) for repeats in columns):
            cells = [spread_cell(values_of(repeats, figure)) for repeats in columns]
            rows.append([label, *cells, *_against_first(figure, columns)])
    return table(rows)


def _against_first(figure: str, columns: Sequence[list[Figures]]) -> Iterator[str]:
    first = values_of(columns[0], figure)
    for repeats in columns[1:]:
        values = values_of(repeats, figure)
        if not first or not values:
            yield ""
            continue
        found = compare_values(first, values, better(figure))
        verdict = "noise" if found.verdict is Verdict.NOISE else str(found.verdict)
        change = "" if found.change is None else f"{found.change:+.1%} "
        yield "" if first == values else f"{change}{verdict}"
