"""Better, worse, or noise: the rule on hand-made repeats, and its test against all arrangements."""

import itertools

import pytest

from benchmarks.kit.figures import Better
from benchmarks.kit.verdicts import Verdict, change_cell, compare_values, rank_sum_p


def verdict(first: list[float], second: list[float], better: Better = Better.LOWER) -> Verdict:
    return compare_values(first, second, better).verdict


def test_three_repeats_that_do_not_overlap_are_told_apart() -> None:
    assert verdict([10, 11, 12], [7, 8, 9]) is Verdict.BETTER
    assert verdict([7, 8, 9], [10, 11, 12]) is Verdict.WORSE


def test_the_figures_direction_decides_which_is_better() -> None:
    assert verdict([7, 8, 9], [10, 11, 12], Better.HIGHER) is Verdict.BETTER
    assert verdict([10, 11, 12], [7, 8, 9], Better.HIGHER) is Verdict.WORSE


def test_three_repeats_that_overlap_are_noise() -> None:
    assert verdict([10, 11, 12], [7, 8, 10.5]) is Verdict.NOISE


def test_two_repeats_tell_nothing_however_far_apart() -> None:
    assert verdict([100, 101], [1, 2]) is Verdict.NOISE
    assert verdict([100], [1]) is Verdict.NOISE


def test_five_repeats_may_overlap_a_little() -> None:
    assert verdict([10, 11, 12, 13, 14], [6, 7, 8, 9, 10.5]) is Verdict.BETTER


def test_a_difference_of_less_than_three_percent_is_noise_however_sure() -> None:
    assert verdict([100.0, 100.1, 100.2], [98.0, 98.1, 98.2]) is Verdict.NOISE
    assert verdict([100.0, 100.1, 100.2], [96.0, 96.1, 96.2]) is Verdict.BETTER


def test_equal_figures_are_noise_and_a_first_of_zero_can_only_get_worse() -> None:
    assert verdict([0, 0, 0], [0, 0, 0]) is Verdict.NOISE
    found = compare_values([0, 0, 0], [1, 2, 3], Better.LOWER)
    assert (found.verdict, found.change) == (Verdict.WORSE, None)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        ([1, 2, 3], [4, 5, 6], 2 / 20),  # tables of Mann and Whitney: U = 0, n = m = 3
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([1, 2, 4], [3, 5, 6], 4 / 20),
        ([1, 1, 1], [1, 1, 1], 1.0),
    ],
)
def test_the_p_of_a_rank_sum_is_that_of_the_tables(first: list[float], second: list[float], p: float) -> None:
    assert rank_sum_p(first, second) == pytest.approx(p)
    assert rank_sum_p(second, first) == pytest.approx(p)


def test_no_arrangement_of_unchanged_repeats_is_called_a_change_more_often_than_the_rule_says() -> None:
    values = [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    told = [
        verdict(list(first), [value for value in values if value not in first]) is not Verdict.NOISE
        for first in itertools.combinations(values, 3)
    ]
    assert sum(told) / len(told) <= 0.1


def test_with_many_repeats_the_approximation_takes_over() -> None:
    assert rank_sum_p([float(i) for i in range(30)], [i + 0.5 for i in range(30)]) > 0.5
    assert rank_sum_p([float(i) for i in range(30)], [i + 100.0 for i in range(30)]) < 1e-6


@pytest.mark.parametrize(
    ("change", "cell"), [(-0.5, "-50.0%"), (0.03, "+3.0%"), (8.9, "+890.0%"), (9.0, "10 ×"), (1234.4, "1,235 ×")]
)
def test_a_change_is_a_percentage_and_from_tenfold_on_a_factor(change: float, cell: str) -> None:
    assert change_cell(change) == cell
