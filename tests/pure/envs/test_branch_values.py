"""Branches of a rollout by its log-probabilities, and the values of its turns by them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.client.samples import DecodedSample
from stenograph.envs.branches import BranchPlace, ForkPlan, places, turn_values


def sample(sizes: list[int], nats: list[float], mask: list[int]) -> DecodedSample:
    """Turns of so many sampled tokens, each behind one token of a prompt, the first prompt's left out of the mask."""
    turns, at = list[dict[str, object]](), 0
    for node, size in enumerate(sizes):
        turns.append({"node_id": 10 + node, "prompt_start": at, "start": at + 1, "end": at + 1 + size})
        at += 1 + size
    return DecodedSample(
        tokens=np.zeros(at, np.int64),
        loss_mask=np.array(mask[: at - 1], np.uint8),
        log_probs=np.array(nats[: at - 1]),
        status="completed",
        metadata={},
        turns=tuple(turns),
    )


def test_the_lowest_log_probabilities_come_first_but_not_at_a_reply_s_end() -> None:
    nats = [-1.0, -9.0, 0.0, -3.0, -1.0, -8.0]  # two tokens, a prompt's, three tokens
    made = sample([2, 3], nats, [1, 1, 0, 1, 1, 1])
    assert [(one.number, one.turn, one.token, one.surprise_nats) for one in places(made, 2)] == [
        (1, 11, 0, 3.0),
        (0, 10, 0, 1.0),
    ]
    inherited = sample([2, 3], nats, [0, 0, 0, 1, 1, 1])
    assert [one.turn for one in places(inherited, 9)] == [11, 11]


@given(
    st.integers(1, 6),
    st.floats(-5, 5),
    st.lists(st.tuples(st.integers(0, 5), st.floats(-5, 5)), max_size=9),
)
def test_the_values_of_turns_sum_to_the_reward_less_the_value_at_the_start(
    num_turns: int, reward: float, ends: list[tuple[int, float]]
) -> None:
    branches = [
        (BranchPlace(number=min(at, num_turns - 1), turn=0, token=0, surprise_nats=0.0), one) for at, one in ends
    ]
    made = sample([2] * num_turns, [0.0] * 18, [1] * 18)
    values = turn_values(made, reward, branches)
    mean = (reward + math.fsum(one for _, one in branches)) / (1 + len(branches))
    assert list(values) == [10 + number for number in range(num_turns)]
    assert math.fsum(values.values()) == pytest.approx(reward - mean, abs=1e-9)


def test_a_turn_after_the_last_branch_is_worth_nothing_more() -> None:
    made = sample([2, 2, 2], [0.0] * 8, [1] * 8)
    branch = BranchPlace(number=1, turn=11, token=0, surprise_nats=1.0)
    assert turn_values(made, 1.0, [(branch, 0.0)]) == {10: 0.0, 11: 0.5, 12: 0.0}


@pytest.mark.parametrize("text", ["entropy", "entropy:", "entropy:0", "entropy:65", "surprise:4", "entropy:-1"])
def test_another_plan_than_entropy_with_a_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="entropy:N"):
        ForkPlan.of(text)
