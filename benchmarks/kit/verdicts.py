"""The rule for whether one set of repeats is better than another, or cannot be told from it. Pure.

The rule: the exact two-sided rank-sum test over the repeats says p ≤ 0.1, *and* the medians are at least 3 % apart.
Three repeats on each side are the fewest that can reach 0.1, and only where no repeat of one side lies within the
other; with fewer, every verdict is noise. One figure in ten that did not change passes the first half by chance: the
second half, and a look at `p`, are for that.
"""

import enum
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kit.figures import Better

MOST_P = 0.1
LEAST_CHANGE = 0.03
MOST_ARRANGEMENTS = 200_000
"""Beyond it, the normal approximation is exact enough."""

RULE = (
    f"better or worse: the exact rank-sum test over repeats says p ≤ {MOST_P:g} (two-sided), and the medians differ by"
    f" {LEAST_CHANGE:.0%} or more; else it cannot be told from noise"
)

FACTOR_FROM = 9.0
"""A change from which a factor is easier to read than a percentage."""


class Verdict(enum.StrEnum):
    """The verdict on a figure."""

    BETTER = "better"
    WORSE = "worse"
    NOISE = "cannot be told from noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`change` is that of the median, relative to the first; None where the first is 0."""

    verdict: Verdict
    p: float
    change: float | None


def compare_values(first: Sequence[float], second: Sequence[float], better: Better) -> Comparison:
    """Whether `second` is better than `first`. Raises ValueError if one of them is empty."""
    old, new = statistics.median(first), statistics.median(second)
    change = (new - old) / abs(old) if old else None
    p = rank_sum_p(first, second)
    is_far = new != old if change is None else abs(change) >= LEAST_CHANGE
    if p > MOST_P or not is_far:
        return Comparison(verdict=Verdict.NOISE, p=p, change=change)
    went_up = new > old
    is_better = went_up == (better is Better.HIGHER)
    return Comparison(verdict=Verdict.BETTER if is_better else Verdict.WORSE, p=p, change=change)


def rank_sum_p(first: Sequence[float], second: Sequence[float]) -> float:
    """The probability that chance alone parts two such sets at least as far; ties share their ranks.

    Exact up to `MOST_ARRANGEMENTS`.
    Source: Mann and Whitney 1947; with ties, the permutation distribution of the midranks.
    """
    ranks = _midranks([*first, *second])
    num_first, num = len(first), len(first) + len(second)
    expected = num_first * (num + 1) / 2
    seen = abs(sum(ranks[:num_first]) - expected)
    num_arrangements = math.comb(num, num_first)
    if num_arrangements <= MOST_ARRANGEMENTS:
        sums = (sum(chosen) for chosen in itertools.combinations(ranks, num_first))
        return sum(abs(total - expected) >= seen - 1e-9 for total in sums) / num_arrangements
    mean_square = sum((rank - (num + 1) / 2) ** 2 for rank in ranks) / (num - 1)
    variance = num_first * (num - num_first) / num * mean_square
    return math.erfc(seen / math.sqrt(2 * variance)) if variance else 1.0


def _midranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    rank_of: dict[float, float] = {}
    start = 0
    for value, group in itertools.groupby(ordered):
        size = len(list(group))
        rank_of[value] = start + (size + 1) / 2
        start += size
    return [rank_of[value] for value in values]


def change_cell(change: float) -> str:
    """A relative change for a table: in percent, and from tenfold on as a factor."""
    return f"{change:+.1%}" if change < FACTOR_FROM else f"{1 + change:,.0f} ×"
