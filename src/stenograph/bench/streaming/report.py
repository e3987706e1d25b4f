"""The table of `bench streaming`: a column for each way to tokenize, and how each after the first differs from it."""

from collections.abc import Iterator, Sequence

from stenograph.bench.kit.artifact import ENGINE, Artifact
from stenograph.bench.kit.figures import better, values_of
from stenograph.bench.kit.report import figure_rows, spread_cell, table
from stenograph.bench.kit.verdicts import Verdict, change_cell, compare_values


def streaming_table(artifact: Artifact, names: Sequence[str]) -> str:
    """Every figure: median (least … most) over repeats. `names` are the ways', in the order of the scenarios."""
    columns = [result.figures[ENGINE] for result in artifact.scenarios]

    def cells(figure: str) -> Sequence[str] | None:
        values = [values_of(repeats, figure) for repeats in columns]
        return [*map(spread_cell, values), *_against_first(figure, values)] if any(values) else None

    head = ["figure", *names, *(f"{name}, against {names[0]}" for name in names[1:])]
    return table([head, *figure_rows(None, cells)])


def _against_first(figure: str, columns: Sequence[list[float]]) -> Iterator[str]:
    first = columns[0]
    for values in columns[1:]:
        if not first or not values or first == values:
            yield ""
            continue
        found = compare_values(first, values, better(figure))
        verdict = "noise" if found.verdict is Verdict.NOISE else str(found.verdict)
        yield verdict if found.change is None else f"{change_cell(found.change)} {verdict}"
