"""Percentiles, and the correction for probes that were not sent because an earlier one was held back. Pure."""

import math
from collections.abc import Iterator, Sequence


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least the share `q` of all values does not exceed. `ordered` ascends, not empty."""
    if not ordered:
        raise ValueError("nothing was measured")
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def summary_ms(latencies_s: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 and max of latencies, in milliseconds; nothing if there are none."""
    if not latencies_s:
        return {}
    ordered = sorted(latencies_s)
    return {
        "p50_ms": quantile(ordered, 0.50) * 1e3,
        "p95_ms": quantile(ordered, 0.95) * 1e3,
        "p99_ms": quantile(ordered, 0.99) * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


def latencies_of_due(first_due: float, answered: float, period: float) -> Iterator[float]:
    """What all the probes waited that fell due from `first_due` until `answered`, the one that was sent included.

    One probe is under way at a time. Those that fall due meanwhile are not sent: whoever asked then would have waited
    as well, so each counts from the time at which it was due (coordinated omission; Gil Tene, HdrHistogram).
    """
    num = 1 + max(0, math.floor((answered - first_due) / period))
    for index in range(num):
        yield answered - (first_due + index * period)
