"""Figures of groups and steps: pass@k against all choices, and sums against plain ones."""

import json
import statistics
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.console.steps import MAX_GROUPS, pass_at_k, steps_view
from stenograph.session.rollout_points import RolloutPoint

REWARDS = st.none() | st.sampled_from([-1.0, 0.0, 0.5, 1.0])


def point(group: str = "g", **fields: Any) -> RolloutPoint:
    whole: dict[str, Any] = {
        "group": group, "step": "1", "opened_at": 1.0, "reward": None, "has_failed": False, "is_busy": False,
        "num_turns": 2, "num_tokens": 10, "is_cut": False, "version": None,
    }  # fmt: skip
    return RolloutPoint(**{**whole, **fields})


def view(*points: RolloutPoint, passes_at: float = 1.0, version: str | None = None) -> Any:
    return steps_view(points, passes_at=passes_at, version=version, num_ungrouped=0, num_left_out=0)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k_that_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    choices = [any(chosen) for chosen in combinations(passed, k)]
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_pass_at_more_than_there_are_is_refused() -> None:
    for k in (0, 5):
        with pytest.raises(ValueError, match="there are 4"):
            pass_at_k(4, 1, k)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("12"), REWARDS), max_size=30))
def test_a_step_s_figures_are_those_of_its_groups_rewards(drawn: list[tuple[str, str, float | None]]) -> None:
    found = view(*(point(group, step=step, reward=reward) for group, step, reward in drawn))
    for step in found["steps"]:
        mine = [(group, reward) for group, of, reward in drawn if of == step["step"]]
        rewards = [reward for _, reward in mine if reward is not None]
        assert (step["num_rollouts"], step["num_rewarded"]) == (len(mine), len(rewards))
        assert step["mean_reward"] == (pytest.approx(statistics.fmean(rewards)) if rewards else None)
        assert step["std_reward"] == (pytest.approx(statistics.pstdev(rewards), abs=1e-9) if rewards else None)
        groups = [[r for g, r in mine if g == group and r is not None] for group in {group for group, _ in mine}]
        assert step["num_groups"] == len(groups)
        assert step["num_compared"] == sum(len(one) > 1 for one in groups)
        assert step["num_alike"] == sum(len(one) > 1 and len(set(one)) == 1 for one in groups)
        with_any = [one for one in groups if one]
        expected = [sum(reward >= 1.0 for reward in one) / len(one) for one in with_any]
        assert step["pass_at"].get("1") == (pytest.approx(statistics.fmean(expected)) if expected else None)
    assert sum(step["num_rollouts"] for step in found["steps"]) == len(drawn)


def test_what_only_the_store_has_is_left_out_of_shares_and_counted() -> None:
    found = view(point(is_cut=True), point(is_cut=False), point(is_cut=None))
    (step,) = found["steps"]
    assert (step["cut_share"], step["num_known"], step["num_rollouts"]) == (0.5, 2, 3)
    (step,) = view(point(is_cut=None))["steps"]
    assert (step["cut_share"], step["num_known"]) == (None, 0)


def test_rollouts_are_as_many_versions_behind_as_the_server_is_ahead_of_their_oldest() -> None:
    points = (point(version="7"), point(version="9"), point(version=None))
    (step,) = view(*points, version="10")["steps"]
    assert (step["mean_behind"], step["most_behind"]) == (2.0, 3)
    (step,) = view(*points)["steps"]  # the server's is not known: they are behind the newest of them
    assert (step["mean_behind"], step["most_behind"]) == (1.0, 2)
    (step,) = view(*points, version="main")["steps"]  # a name has no distance
    assert (step["mean_behind"], step["most_behind"]) == (None, None)


def test_the_reward_that_passes_may_be_another() -> None:
    points = [point(reward=reward) for reward in (0.0, 0.5, 0.5, 1.0)]
    assert view(*points)["groups"][0]["pass_at"] == {"1": 0.25, "2": 0.5, "4": 1.0}
    assert view(*points, passes_at=0.5)["groups"][0]["pass_at"]["1"] == 0.75


def test_the_newest_groups_and_steps_come_first_and_all_are_counted() -> None:
    points = [point(f"g{at}", step=str(at % 3), opened_at=float(at)) for at in range(MAX_GROUPS + 10)]
    found = view(*points)
    assert found["num_groups"] == MAX_GROUPS + 10
    assert [one["group"] for one in found["groups"][:2]] == [f"g{MAX_GROUPS + 9}", f"g{MAX_GROUPS + 8}"]
    assert len(found["groups"]) == MAX_GROUPS
    newest = [one["opened_at"] for one in found["steps"]]
    assert newest == sorted(newest, reverse=True)
    assert sum(one["num_groups"] for one in found["steps"]) == MAX_GROUPS + 10


def test_groups_of_one_name_in_two_steps_are_two_groups() -> None:
    found = view(point(step="1", reward=0.0), point(step="2", reward=1.0), point(step=None))
    assert {(one["step"], one["num_rollouts"]) for one in found["groups"]} == {("1", 1), ("2", 1), (None, 1)}


@pytest.mark.parametrize("large", [1e200, 1.7e308])
def test_a_reward_may_be_as_large_as_a_number_can_be(large: float) -> None:
    told = view(point(reward=large), point(reward=-large), point(reward=large))
    assert json.loads(msgspec.json.encode(told))["steps"][0]["num_rewarded"] == 3
