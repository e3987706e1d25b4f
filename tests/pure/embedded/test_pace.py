"""How soon one that is refused is told to come again: after the mean time between two ends, within bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.embedded.engine_core import LONGEST_S, SHORTEST_S, Pace


def test_before_two_have_ended_it_is_the_shortest() -> None:
    pace = Pace()
    assert pace.retry_after_s == SHORTEST_S
    pace.ended(100.0)
    assert pace.retry_after_s == SHORTEST_S


def test_at_an_even_pace_it_is_the_interval() -> None:
    pace = Pace()
    for number in range(20):
        pace.ended(7.0 * number)
    assert pace.retry_after_s == pytest.approx(7.0)


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_it_is_within_bounds_whatever_comes(intervals: list[float]) -> None:
    pace, now = Pace(), 0.0
    for interval in intervals:
        pace.ended(now := now + interval)
        assert SHORTEST_S <= pace.retry_after_s <= LONGEST_S
