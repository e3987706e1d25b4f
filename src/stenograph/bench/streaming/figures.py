"""The figures of a measurement of `bench streaming`, made of the load's report. Pure.

Submission counts every call of `add_request`; all else is over the requests that were answered, those that failed are
counted beside them. TTFT counts from submission, and its parts (means) add up to its mean.
"""

import statistics
from typing import Any

from stenograph.bench.kit.figures import Figures
from stenograph.bench.kit.quantiles import latency_figures
from stenograph.bench.kit.requests import Columns, request_figures, without_gaps

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


def raw_of(run: dict[str, Any]) -> dict[str, Any]:
    """The report as an artifact keeps it: of the gaps between a request's tokens, the longest."""
    rest = {name: value for name, value in run.items() if name != "requests"}
    return {"run": rest, "requests": without_gaps(run["requests"])}
