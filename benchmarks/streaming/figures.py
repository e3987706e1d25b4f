"""The figures of a measurement of `bench streaming`, made of the load's report, and their table. Pure.

Submission counts every call of `add_request`; all else is over the requests that were answered, those that failed are
counted beside them. TTFT counts from submission, and its parts (means) add up to its mean.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.kit.artifact import ENGINE, Artifact, Raw
from benchmarks.kit.figures import Figures, better, values_of
from benchmarks.kit.quantiles import latency_figures
from benchmarks.kit.report import figure_rows, spread_cell, table
from benchmarks.kit.requests import Columns, request_figures, without_gaps
from benchmarks.kit.verdicts import Verdict, change_cell, compare_values

_PARTS = ("tokenize", "queue", "prefill")


def streaming_figures(run: dict[str, Any]) -> Figures:
    """The figures of one measurement; see figures.LABELS."""
    figures: Figures = {
        "answered": run["num_ok"],
        "errors": sum(run["errors"].values()),
        "submit_wall_ms": run["submit_wall_ms"],
    }
    figures |= latency_figures("add", run["add_ms"], "p50 p95 p99 max")
    figures |= latency_figures("late", run["late_ms"], "p99")
    requests: Columns = run["requests"]
    if not requests:
        return figures
    figures |= request_figures(requests)
    num_prompt, num_completion = figures["prompt_tokens"], figures["completion_tokens"]
    figures["prompt_tokens_per_s"] = num_prompt / run["seconds"]
    figures["completion_tokens_per_s"] = num_completion / run["seconds"]
    num_computed = num_prompt - sum(requests["num_cached"]) + num_completion
    figures["computed_tokens_per_cpu_s"] = num_computed / run["cpu_s"]
    figures["completion_tokens_per_cpu_s"] = num_completion / run["cpu_s"]
    for part in _PARTS:
        if values := [value for value in requests[f"{part}_ms"] if value is not None]:
            figures[f"ttft_{part}_ms"] = statistics.fmean(values)
            figures |= latency_figures(f"ttft_{part}", values, "p50 p95 p99")
    return figures


def raw_of(run: dict[str, Any]) -> Raw:
    """The report as an artifact keeps it: of the gaps between a request's tokens, the longest."""
    rest = {name: value for name, value in run.items() if name != "requests"}
    return {"run": rest, "requests": without_gaps(run["requests"])}


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
