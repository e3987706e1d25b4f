"""TTFT, ITL and TPOT are told where the engine's steps were seen, and only there."""

from stenograph.session.reply_buffer import TurnMeter


def meter_of(*steps: tuple[int, float]) -> TurnMeter:
    meter = TurnMeter(started=10.0)
    for num_tokens, now in steps:
        meter.sampled(num_tokens, now)
    return meter


def test_steps_make_a_time_to_the_first_token_gaps_and_a_mean() -> None:
    meter = meter_of((1, 11.0), (1, 11.5), (0, 11.75), (2, 12.5))
    assert (meter.ttft_s, meter.gaps_s, meter.tpot_s, meter.num_sampled) == (1.0, [0.5, 1.0], 0.5, 4)


def test_a_reply_that_came_at_once_says_nothing_of_its_first_token() -> None:
    meter = meter_of((40, 14.0))
    assert (meter.ttft_s, meter.gaps_s, meter.tpot_s) == (None, [], None)


def test_a_reply_of_one_token_has_a_first_token() -> None:
    assert (meter_of((1, 11.0)).ttft_s, meter_of((1, 11.0)).tpot_s) == (1.0, None)


def test_nothing_drawn_has_no_times() -> None:
    assert (meter_of((0, 11.0)).ttft_s, meter_of().gaps_s) == (None, [])
