"""Percentiles by hand, and probes that a stall held back counted as if they had been sent."""

import pytest

from benchmarks.kit.quantiles import latencies_of_due, quantile, summary_ms


def test_a_quantile_is_the_smallest_value_that_covers_its_share() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, q) for q in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert quantile([7.0], 0.5) == quantile([7.0], 0.99) == 7
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2
    assert quantile([1.0, 2.0], 0.5) == 1
    assert quantile([1.0, 2.0], 0.51) == 2


def test_nothing_measured_has_no_quantile_and_an_empty_summary() -> None:
    with pytest.raises(ValueError, match="nothing"):
        quantile([], 0.5)
    assert summary_ms([]) == {}


def test_a_summary_is_in_milliseconds() -> None:
    assert summary_ms([0.004, 0.001, 0.002, 0.003]) == {"p50_ms": 2.0, "p95_ms": 4.0, "p99_ms": 4.0, "max_ms": 4.0}


def test_an_answer_before_the_next_probe_is_due_counts_once() -> None:
    assert list(latencies_of_due(10.0, 10.003, 0.005)) == pytest.approx([0.003])


def test_probes_that_fell_due_while_one_was_held_back_count_from_when_they_were_due() -> None:
    # Due at 0, 5, 10, 15 and 20 ms; the first is answered at 22 ms, the others were never sent.
    assert list(latencies_of_due(0.0, 0.022, 0.005)) == pytest.approx([0.022, 0.017, 0.012, 0.007, 0.002])


def test_a_stall_of_a_second_among_a_hundred_good_seconds_is_not_one_sample_in_twenty_thousand() -> None:
    good = [0.001] * 19_800
    uncorrected = summary_ms([*good, 1.0])
    corrected = summary_ms([*good, *latencies_of_due(0.0, 0.9999, 0.005)])
    assert uncorrected["p99_ms"] == pytest.approx(1.0)
    assert corrected["p99_ms"] == pytest.approx(1.0)  # 200 of 20 000 are just one in a hundred
    stall_of_two = summary_ms([*good, *latencies_of_due(0.0, 1.9999, 0.005)])
    assert stall_of_two["p99_ms"] > 900
