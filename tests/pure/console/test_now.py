"""The moment: quantiles of a histogram's buckets, rates between readings, and the stage that a turn is in."""

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.console.now import WINDOW_S, Counts, Readings, quantiles_of, stage_of
from stenograph.core.stages import Stage, StageTimes

BOUNDS = (0.001, 0.01, 0.1, 1.0)


def buckets_of(durations: list[float]) -> list[int]:
    counts = [0] * (len(BOUNDS) + 1)
    for one in durations:
        counts[bisect_left(BOUNDS, one)] += 1
    return counts


@given(st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_a_quantile_is_in_the_bucket_of_the_duration_that_it_is_of(durations: list[float]) -> None:
    told = quantiles_of(buckets_of(durations), BOUNDS)
    assert told["num"] == len(durations)
    ordered, ends = sorted(durations), [*BOUNDS, BOUNDS[-1]]
    for share, value in ((0.5, told["p50"]), (0.99, told["p99"])):
        index = bisect_left(BOUNDS, ordered[min(int(share * len(ordered)), len(ordered) - 1)])
        assert value is not None
        assert (0.0, *ends)[index] <= value <= ends[index]
    assert told["p50"] is not None
    assert told["p99"] is not None
    assert told["max"] is not None
    assert told["p50"] <= told["p99"] <= told["max"] == ends[bisect_left(BOUNDS, ordered[-1])]


def test_of_nothing_there_are_no_quantiles() -> None:
    assert quantiles_of([0] * 5, BOUNDS) == {"num": 0, "p50": None, "p99": None, "max": None}


def counts(at_s: float, turns: int = 0, lags: tuple[int, ...] = (0, 0, 0, 0, 0)) -> Counts:
    return Counts(at_s=at_s, turns=turns, sampled_tokens=0, prompt_tokens=0, lags=lags, ttfts=(0,) * 5)


def test_a_rate_is_of_the_last_seconds_and_quantiles_of_the_last_minute() -> None:
    readings = Readings()
    readings.add(counts(0.0, turns=5, lags=(3, 0, 0, 0, 0)))
    assert readings.rate(lambda one: one.turns) == 0.0
    assert readings.quantiles(lambda one: one.lags, BOUNDS)["num"] == 3  # all since the start
    readings.add(counts(30.0, turns=8))
    assert readings.rate(lambda one: one.turns) == pytest.approx(0.1)
    readings.add(counts(35.0, turns=18, lags=(3, 2, 0, 0, 0)))
    assert readings.rate(lambda one: one.turns) == pytest.approx(2.0)
    assert readings.quantiles(lambda one: one.lags, BOUNDS)["num"] == 2
    readings.add(counts(35.0 + 2 * WINDOW_S, turns=18, lags=(3, 2, 0, 0, 1)))
    assert readings.quantiles(lambda one: one.lags, BOUNDS) == {"num": 1, "p50": 1.0, "p99": 1.0, "max": 1.0}
    assert len(readings.kept) == 2


@pytest.mark.parametrize(
    ("ended", "is_open", "has_sampled", "stage"),
    [
        ((Stage.DECODE,), False, False, Stage.RENDER),
        ((Stage.DECODE, Stage.RENDER), True, False, Stage.PREFILL),
        ((Stage.DECODE, Stage.RENDER), True, True, Stage.DECODE_TOKENS),
        ((Stage.RENDER, Stage.VALIDATE), True, True, Stage.STORE),
        ((Stage.VALIDATE, Stage.STORE), True, True, Stage.COMMIT),
        ((Stage.VALIDATE, Stage.COMMIT), True, True, Stage.REPLY),
    ],
)
def test_the_stage_is_the_one_after_the_last_that_ended(
    ended: tuple[Stage, ...], is_open: bool, has_sampled: bool, stage: Stage
) -> None:
    times = StageTimes(start=0.0, **{one.value: float(index) for index, one in enumerate(ended)})
    assert stage_of(times, is_open=is_open, has_sampled=has_sampled) is stage
