"""A request's times: what lies between which points, and that what was never passed is absent."""

from array import array

import pytest

from stenograph.embedded.times import Times


def test_ttft_is_tokenize_and_queue_and_prefill() -> None:
    times = Times(submitted=10.0, tokenized=10.5, admitted=12.0, first_token=12.25, finished=13.0)
    times.tokens.extend((12.25, 12.5, 13.0))
    view = times.view()
    assert (view.tokenize_s, view.queue_s, view.prefill_s) == (0.5, 1.5, 0.25)
    assert view.ttft_s == 2.25
    assert view.latency_s == 3.0
    assert view.itls_s == (0.25, 0.5)
    assert view.tpot_s == pytest.approx(0.375)


def test_a_point_that_was_not_passed_is_absent_and_so_is_what_ends_there() -> None:
    view = Times(submitted=10.0, tokenized=10.5, finished=11.0).view()
    assert (view.admitted, view.first_token, view.tokens) == (None, None, ())
    assert (view.tokenize_s, view.latency_s) == (0.5, 1.0)
    assert (view.queue_s, view.prefill_s, view.ttft_s, view.tpot_s, view.itls_s) == (None, None, None, None, ())


def test_one_token_has_no_time_per_token() -> None:
    assert Times(submitted=1.0, tokens=array("d", (2.0,))).view().tpot_s is None


def test_a_view_stays_as_it_was() -> None:
    times = Times(submitted=10.0)
    view = times.view()
    times.tokens.append(11.0)
    times.finished = 12.0
    assert (view.tokens, view.finished) == ((), None)
