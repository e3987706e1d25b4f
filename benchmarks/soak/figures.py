"""The figures of a soak: whether memory and open files stayed where they were, and the server's metrics. Pure.

The first minute of a run, and at least a fifth of it, is warm-up: caches fill, and the allocator finds its size. Of the
rest, the last quarter's median is held against the first's: a single peak moves neither.
"""

import re
import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.kit.figures import Figures

WARM_UP_SHARE, WARM_UP_S = 0.2, 60.0
LEAST_MEASURED_S = 300.0
"""A run that measures for less is not judged by its growth: quarters of seconds are noise of some MiB."""
MOST_GROWTH_MIB = 8.0
MOST_GROWTH_SHARE = 0.05
MOST_SLOPE_KIB = 64.0
"""Per 1,000 turns: 64 bytes that a turn leaves behind."""
LEAST_SLOPE_TURNS = 150_000
"""With fewer turns the slope is noise: it was up to 95 KiB in 60,000 turns of a run that stayed where it was."""
MOST_FDS_GROWTH = 16
_GAUGE = re.compile(r"^(stenograph_sessions|stenograph_turns_in_flight) (\S+)$", re.MULTILINE)
_LAG = re.compile(r'^stenograph_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


class Moment(msgspec.Struct, frozen=True, array_like=True):
    """The server at one time: seconds and turns since the load began, KiB in memory, open files."""

    seconds: float
    num_turns: int
    rss_kib: int
    num_fds: int


def growth(moments: Sequence[Moment]) -> Figures:
    """Memory and open files, early and late, and the slope of memory over turns. Nothing of fewer than 8 moments."""
    measured = _measured(moments)
    if len(measured) < 4:
        return {}
    quarter = len(measured) // 4
    early, late = measured[:quarter], measured[-quarter:]
    rss = [statistics.median(moment.rss_kib for moment in part) / 1024 for part in (early, late)]
    fds = [statistics.median(moment.num_fds for moment in part) for part in (early, late)]
    figures = {
        "rss_early_mib": rss[0],
        "rss_late_mib": rss[1],
        "rss_growth_mib": rss[1] - rss[0],
        "fds_early": fds[0],
        "fds_late": fds[1],
        "fds_growth": fds[1] - fds[0],
    }
    turns = [moment.num_turns for moment in measured]
    if turns[-1] > turns[0]:
        slope = statistics.linear_regression(turns, [moment.rss_kib for moment in measured]).slope
        figures["rss_slope_kib_per_1000_turns"] = slope * 1000
    return figures


def flat_goals(moments: Sequence[Moment], figures: Figures) -> list[tuple[str, float]]:
    """The growth that is still flat, for runs that are long enough to tell."""
    measured = _measured(moments)
    if len(measured) < 4 or measured[-1].seconds - measured[0].seconds < LEAST_MEASURED_S:
        return []
    most = max(MOST_GROWTH_MIB, MOST_GROWTH_SHARE * figures["rss_early_mib"])
    goals = [("rss_growth_mib", round(most, 1)), ("fds_growth", float(MOST_FDS_GROWTH))]
    if measured[-1].num_turns - measured[0].num_turns >= LEAST_SLOPE_TURNS:
        goals.append(("rss_slope_kib_per_1000_turns", MOST_SLOPE_KIB))
    return goals


def _measured(moments: Sequence[Moment]) -> Sequence[Moment]:
    share = moments[round(len(moments) * WARM_UP_SHARE) :]
    late = [moment for moment in share if moment.seconds >= WARM_UP_S]
    return late if len(late) >= len(share) / 2 else share  # a run of a minute or two has no minute to spare


class ServerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A soak's part of `GET /metrics`: `lag` are the loop's delays, their number up to each bound in seconds."""

    num_sessions: int
    num_in_flight: int
    lag: dict[float, int]


def read_metrics(text: str) -> ServerMetrics:
    """Raises KeyError where a gauge is not there."""
    gauges = {name: int(float(value)) for name, value in _GAUGE.findall(text)}
    return ServerMetrics(
        num_sessions=gauges["stenograph_sessions"],
        num_in_flight=gauges["stenograph_turns_in_flight"],
        lag={float(bound): int(float(num)) for bound, num in _LAG.findall(text)},
    )


def lag_figures(before: ServerMetrics, after: ServerMetrics) -> Figures:
    """The lateness of the loop between two readings: the upper bounds of the buckets where p99 and the most are."""
    counts = {bound: num - before.lag.get(bound, 0) for bound, num in sorted(after.lag.items())}
    total = max(counts.values(), default=0)
    if not total:
        return {}
    finite = [bound for bound in counts if bound != float("inf")]
    bound_of = {
        share: next((bound for bound in finite if counts[bound] >= share * total), finite[-1]) for share in (0.99, 1.0)
    }
    return {"loop_lag_p99_ms": bound_of[0.99] * 1e3, "loop_lag_max_ms": bound_of[1.0] * 1e3}
