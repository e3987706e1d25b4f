"""Groups and steps of rollouts in figures, for training on them. Pure; work for the CPU pool.

A rollout is made a point where its session is, and counted where the figures were asked for, perhaps in another
process. A step is a session's `metadata.step`; groups of sessions without one are of no step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, fsum, hypot, sqrt
from typing import TypedDict

from stenograph.core.json_types import Count
from stenograph.session.rollout_points import RolloutPoint, is_number

MAX_POINTS = 20_000
"""Most sessions counted, the newest."""
MAX_GROUPS = 500
"""Most groups listed by themselves, the newest."""
MAX_K = 64
"""The largest k of pass@k in a report; each is twice the one before."""


class RolloutFigures(TypedDict):
    """Figures of some rollouts; null where nothing is known. Shares are of `num_known` or `num_compared`.

    `std_reward` is the deviation of all their rewards (divided by their number). `num_compared` groups have two rewards
    or more; of these `num_alike` have all rewards equal, and so no advantage. `cut_share`: rollouts whose last turn
    ended for its length. `mean_behind` and `most_behind`: weight versions between the oldest that sampled a rollout and
    the server's, or the newest of these where that is not known. `pass_at`: pass@k by k.
    """

    num_groups: Count
    num_rollouts: Count
    num_busy: Count
    num_failed: Count
    num_rewarded: Count
    mean_reward: float | None
    std_reward: float | None
    num_compared: Count
    num_alike: Count
    num_known: Count
    cut_share: float | None
    mean_turns: float
    mean_tokens: float
    most_tokens: Count
    mean_behind: float | None
    most_behind: Count | None
    pass_at: Mapping[str, float]


class StepFigures(RolloutFigures):
    """A step; `step` is null for groups without one."""

    step: str | None
    opened_at: float


class GroupFigures(RolloutFigures):
    """A group. `rewards` in order, the least first."""

    group: str
    step: str | None
    opened_at: float
    rewards: Sequence[float]


class StepsView(TypedDict):
    """Steps and groups, the newest first. A rollout passes if its reward is at least `passes_at`. `num_left_out`
    sessions are older than those that are counted, `num_ungrouped` have no group; `num_groups` is of all groups."""

    passes_at: float
    weights_version: str | None
    steps: Sequence[StepFigures]
    groups: Sequence[GroupFigures]
    num_groups: Count
    num_ungrouped: Count
    num_left_out: Count


def pass_at_k(num: int, num_passed: int, k: int) -> float:
    """The chance of a pass among k rollouts, estimated without bias from `num` with `num_passed` passes.

    1 - C(n - c, k) / C(n, k): the share, in all choices of k of the n, of those with a passing one. Raises ValueError
    for more than n. Source: Chen et al., Evaluating Large Language Models Trained on Code, 2021, equation 1.
    """
    if not 1 <= k <= num:
        raise ValueError(f"pass@{k} needs {k} rollouts, and there are {num}")
    return 1.0 - comb(num - num_passed, k) / comb(num, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The points of a group, and the figures of its rewards."""

    points: Sequence[RolloutPoint]
    rewards: Sequence[float]
    num_passed: int

    @staticmethod
    def of(points: Sequence[RolloutPoint], passes_at: float) -> "_Group":
        rewards = sorted(point.reward for point in points if point.reward is not None)
        return _Group(points=points, rewards=rewards, num_passed=sum(one >= passes_at for one in rewards))


def steps_view(
    points: Sequence[RolloutPoint], *, passes_at: float, version: str | None, num_ungrouped: int, num_left_out: int
) -> StepsView:
    """The figures of all steps, and of the newest groups. `version` is the server's weight version."""
    known = [int(point.version) for point in points if point.version is not None]
    newest = max(known, default=None) if version is None else int(version) if is_number(version) else None
    by_group = _parted(points, lambda point: (point.step, point.group))
    groups = {key: _Group.of(of_one, passes_at) for key, of_one in by_group.items()}
    of_steps: dict[str | None, list[_Group]] = defaultdict(list)
    for (step, _), group in groups.items():
        of_steps[step].append(group)
    steps: list[StepFigures] = [
        {"step": step, "opened_at": _newest(chain.from_iterable(one.points for one in some)), **_figures(some, newest)}
        for step, some in of_steps.items()
    ]
    shown_groups = sorted(groups.items(), key=lambda item: -_newest(item[1].points))[:MAX_GROUPS]
    shown: list[GroupFigures] = [
        {
            "group": name,
            "step": step,
            "opened_at": _newest(group.points),
            "rewards": group.rewards,
            **_figures([group], newest),
        }
        for (step, name), group in shown_groups
    ]
    return {
        "passes_at": passes_at,
        "weights_version": version,
        "steps": sorted(steps, key=lambda one: -one["opened_at"]),
        "groups": shown,
        "num_groups": len(groups),
        "num_ungrouped": num_ungrouped,
        "num_left_out": num_left_out,
    }


def _parted(
    points: Iterable[RolloutPoint], key: Callable[[RolloutPoint], tuple[str | None, str]]
) -> Mapping[tuple[str | None, str], Sequence[RolloutPoint]]:
    found: dict[tuple[str | None, str], list[RolloutPoint]] = defaultdict(list)
    for point in points:
        found[key(point)].append(point)
    return found


def _newest(points: Iterable[RolloutPoint]) -> float:
    return max(point.opened_at for point in points)


def _figures(groups: Sequence[_Group], newest: int | None) -> RolloutFigures:
    points = [point for group in groups for point in group.points]
    rewards = [reward for group in groups for reward in group.rewards]
    compared = [group for group in groups if len(group.rewards) > 1]
    known = [point.is_cut for point in points if point.is_cut is not None]
    mean = _mean(rewards)
    behind: list[int] = []
    if newest is not None:
        behind = [newest - int(point.version) for point in points if point.version is not None]
    return {
        "num_groups": len(groups),
        "num_rollouts": len(points),
        "num_busy": sum(point.is_busy for point in points),
        "num_failed": sum(point.has_failed for point in points),
        "num_rewarded": len(rewards),
        "mean_reward": mean,
        "std_reward": None if mean is None else hypot(*(one - mean for one in rewards)) / sqrt(len(rewards)),
        "num_compared": len(compared),
        "num_alike": sum(group.rewards[0] == group.rewards[-1] for group in compared),
        "num_known": len(known),
        "cut_share": _mean(known),
        "mean_turns": _mean([point.num_turns for point in points]) or 0.0,
        "mean_tokens": _mean([point.num_tokens for point in points]) or 0.0,
        "most_tokens": max((point.num_tokens for point in points), default=0),
        "mean_behind": _mean(behind),
        "most_behind": max(behind, default=None),
        "pass_at": _passes(groups),
    }


def _passes(groups: Sequence[_Group]) -> Mapping[str, float]:
    """pass@k for each k, as the mean over the groups with so many rewards."""
    most, found, k = max((len(group.rewards) for group in groups), default=0), dict[str, float](), 1
    while k <= min(most, MAX_K):
        chances = [pass_at_k(len(one.rewards), one.num_passed, k) for one in groups if len(one.rewards) >= k]
        found[str(k)] = fsum(chances) / len(chances)
        k *= 2
    return found


def _mean(values: Sequence[float]) -> float | None:
    return fsum(value / len(values) for value in values) if values else None
