"""What a measurement of `bench streaming` came to: its report, as the load gives it, to figures. Pure.

Submission counts every call of `add_request`; all else is over the requests that were answered, those that failed are
counted beside them. TTFT counts from submission, and its parts (means) add up to its mean.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from stenograph.bench.figures import Figures
from stenograph.bench.quantiles import quantile, summary_ms

_QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
_PARTS = ("tokenize", "queue", "prefill")


def streaming_figures(run: dict[str, Any]) -> Figures:
    """The figures of one measurement; see figures.LABELS."""
    figures: Figures = {
        "answered": run["num_ok"],
        "errors": sum(run["errors"].values()),
        "submit_wall_ms": run["submit_wall_ms"],
    }
    for name, value in summary_ms([latency / 1e3 for latency in run["add_ms"]]).items():
        figures[f"add_{name}"] = value
    if run["late_ms"]:
        figures["late_p99_ms"] = quantile(sorted(run["late_ms"]), 0.99)
    requests: dict[str, list[Any]] = run["requests"]
    if not requests:
        return figures
    _add_throughput(figures, run, requests)
    for name in ("ttft", "tpot", "e2e"):
        _add_latencies(figures, name, [value for value in requests[f"{name}_ms"] if value is not None])
    _add_latencies(figures, "itl", [gap for gaps in requests["gaps_ms"] for gap in gaps])
    for part in _PARTS:
        if values := [value for value in requests[f"{part}_ms"] if value is not None]:
            figures[f"ttft_{part}_ms"] = statistics.fmean(values)
    return figures


def raw_of(run: dict[str, Any]) -> dict[str, Any]:
    """The report as an artifact keeps it: of the gaps between a request's tokens, the longest."""
    requests = {name: values for name, values in run["requests"].items() if name != "gaps_ms"}
    if requests:
        requests["longest_gap_ms"] = [max(gaps, default=None) for gaps in run["requests"]["gaps_ms"]]
    return {"run": {name: value for name, value in run.items() if name != "requests"}, "requests": requests}


def _add_throughput(figures: Figures, run: dict[str, Any], requests: dict[str, list[Any]]) -> None:
    num_prompt, num_cached = sum(requests["num_prompt"]), sum(requests["num_cached"])
    num_completion = sum(requests["num_completion"])
    figures["prompt_tokens_per_s"] = num_prompt / run["seconds"]
    figures["completion_tokens_per_s"] = num_completion / run["seconds"]
    figures["computed_tokens_per_cpu_s"] = (num_prompt - num_cached + num_completion) / run["cpu_s"]
    figures["completion_tokens_per_cpu_s"] = num_completion / run["cpu_s"]
    figures["cached_share"] = num_cached / num_prompt


def _add_latencies(figures: Figures, name: str, values_ms: Sequence[float]) -> None:
    if not values_ms:
        return
    ordered = sorted(values_ms)
    for shown, q in _QUANTILES.items():
        figures[f"{name}_{shown}_ms"] = quantile(ordered, q)
    figures[f"{name}_mean_ms"] = statistics.fmean(ordered)
