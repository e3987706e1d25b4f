"""Percentiles, and the correction for probes that were not sent because an earlier one was held back. Pure."""

import math
import statistics
from collections.abc import Iterator, Sequence


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least the share `q` of all values does not exceed. `ordered` ascends, not empty."""
    if not ordered:
        raise ValueError("nothing was measured")
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def summary(values: Sequence[float], of: str) -> dict[str, float]:
    """Quantiles (`p50`), `mean` and `max`, as `of` names them with spaces between; nothing if there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    known = {"mean": statistics.fmean(ordered), "max": ordered[-1]}
    return {name: known[name] if name in known else quantile(ordered, int(name[1:]) / 100) for name in of.split()}


def summary_ms(latencies_s: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and max of latencies, in milliseconds; nothing if there are none."""
    return {f"{name}_ms": value * 1e3 for name, value in summary(latencies_s, "p50 p95 p99 max").items()}


def latency_figures(name: str, values_ms: Sequence[float], of: str = "p50 p90 p99 mean") -> dict[str, float]:
    """Latencies in milliseconds as figures named after them; nothing if there are none."""
    return {f"{name}_{shown}_ms": value for shown, value in summary(values_ms, of).items()}


def milliseconds(seconds: float, digits: int = 3) -> float:
    """Rounded, as an artifact keeps them."""
    return round(seconds * 1e3, digits)


def latencies_of_due(first_due: float, answered: float, period: float) -> Iterator[float]:
    """The waits of all probes that fell due from `first_due` until `answered`, the one that was sent included.

    One probe is under way at a time. Those that fall due meanwhile are not sent: their clients would have waited as
    well, so each counts from the time at which it was due (coordinated omission; Gil Tene, HdrHistogram).
    """
    num = 1 + max(0, math.floor((answered - first_due) / period))
    for index in range(num):
        yield answered - (first_due + index * period)
