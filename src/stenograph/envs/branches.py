"""Branches of a rollout where the policy was least certain, and what its turns were worth by them.

A branch is a fork of the rollout's session, cut before a token; the environment runs again from its beginning, is
answered by the recorded replies up to the cut, and from there on by the fork. So its state is rebuilt by its own
calls, which an environment allows by `retraces`: it does the same after the same replies.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import cast

from stenograph.client.samples import DecodedSample, DecodedSamples, Reward
from stenograph.client.session import RolloutEnd, RolloutSession
from stenograph.client.shown import error_line
from stenograph.envs.base import Environment, Task, WrongEnvironment
from stenograph.envs.chat import RetracedChats, retraced


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlan:
    """Branches at the `num` sampled tokens of a rollout with the lowest log-probability, one each."""

    num: int

    @staticmethod
    def of(text: str) -> "ForkPlan":
        """Reads `entropy:N`. Raises ValueError."""
        kind, _, number = text.partition(":")
        if kind != "entropy" or not number.isdecimal() or not 1 <= int(number) <= MAX_BRANCHES:
            raise ValueError(f"entropy:N is expected, N from 1 to {MAX_BRANCHES}, got {text!r}")
        return ForkPlan(num=int(number))


MAX_BRANCHES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlace:
    """A cut before a sampled token: the number of the turn in the line, its node's id, the tokens of it that stay, and
    -ln p of the token that was sampled there."""

    number: int
    turn: int
    token: int
    surprise_nats: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A branch as it ended; `samples` has the fork's. `error` is a line, None where it ended `ok`."""

    place: BranchPlace
    session: str
    end: RolloutEnd
    reward: Reward | None
    error: str | None
    samples: DecodedSamples = field(repr=False)


def places(sample: DecodedSample, num: int) -> list[BranchPlace]:
    """The `num` trained tokens with the lowest log-probability, the least certain first; of equal ones the earlier.

    A reply's last token is none of them: it is what ended the reply, or a limit did.
    """
    found: list[BranchPlace] = []
    start = sample.prompt_length
    for number, turn in enumerate(sample.turns):
        first, end, node = (cast("int", turn[name]) for name in ("start", "end", "node_id"))
        for at in range(first, end - 1):
            if sample.loss_mask[at - start]:
                nats = -float(sample.log_probs[at - start])
                found.append(BranchPlace(number=number, turn=node, token=at - first, surprise_nats=nats))
    return sorted(found, key=lambda place: -place.surprise_nats)[:num]


def turn_values(
    sample: DecodedSample, reward: float, branches: Sequence[tuple[BranchPlace, float]]
) -> dict[int, float]:
    """The change of the expected reward over each turn of a rollout, by its node's id.

    The value at a turn's beginning is the mean reward of the rollout and of all branches that passed there: those cut
    in it or later. A turn has the value at its end less that at its beginning; the last one ends at the rollout's own
    reward. So the sum over all turns is the reward less the value at the first.
    """

    def value(number: int) -> float:
        return fmean([reward, *(one for place, one in branches if place.number >= number)])

    values = [*map(value, range(len(sample.turns))), reward]
    nodes = [cast("int", turn["node_id"]) for turn in sample.turns]
    return {node: values[number + 1] - values[number] for number, node in enumerate(nodes)}


def check_retraces(environment: Environment) -> None:
    """Raise WrongEnvironment for an environment that cannot go on from the middle."""
    if not getattr(environment, "retraces", False):
        raise WrongEnvironment(
            f"{environment!r} cannot go on from a fork: its state would have to be rebuilt by the recorded replies. Of"
            " those here reasoning-gym's can; a .py file says so by `retraces = True`, if its run(task, session) chats"
            " by stenograph.envs.chat alone and does the same after the same replies"
        )


async def branched(
    environment: Environment, task: Task, session: RolloutSession, plan: ForkPlan
) -> tuple[Reward | None, list[Branch], str | None]:
    """Run a task, then its branches, all at once; the last value says why there are none. The session's `turn_rewards`
    are then those of `turn_values`, where the rollout and a branch have a number as reward. Raises what the
    environment's own run raises, and what the server refused to a branch, once all have ended; one whose run fails has
    its error, and no value."""
    chats = RetracedChats()
    with retraced(chats):
        reward = await environment.run(task, session)
    samples = await session.samples()
    if len(samples) != 1 or len(samples[0].turns) != len(chats.said):
        lines = f"{len(samples)} lines of conversation for {len(chats.said)} replies to stenograph.envs.chat"
        return reward, [], f"a rollout that branches has one line, each turn a reply; this one has {lines}"
    found = places(samples[0], plan.num)
    ended = await asyncio.gather(
        *(_branch(environment, task, session, chats, place) for place in found),
        return_exceptions=True,  # none runs on after the rollout
    )
    branches: list[Branch] = []
    for one in ended:
        if isinstance(one, BaseException):
            raise one
        branches.append(one)
    numbers = [(one.place, one.reward) for one in branches if isinstance(one.reward, float)]
    if isinstance(reward, int | float) and numbers:
        session.turn_rewards = turn_values(samples[0], float(reward), numbers)
    return reward, branches, None


async def _branch(
    environment: Environment, task: Task, session: RolloutSession, chats: RetracedChats, place: BranchPlace
) -> Branch:
    (fork,) = await session.fork(turn=place.turn, token=place.token)
    reward: Reward | None = None
    end: RolloutEnd = "ok"
    error: str | None = None
    try:
        with retraced(RetracedChats(past=chats.said[: place.number])):
            reward = await environment.run(task, fork)
    except Exception as failed:  # noqa: BLE001 - whatever it is costs the branch, not the rollout it comes from
        end, error = "agent_failed", error_line(failed)
    reward = float(reward) if isinstance(reward, int | float) else reward
    await fork.outcome(reward, verdict=end, detail=error)
    samples = await fork.samples()
    return Branch(place=place, session=fork.id, end=end, reward=reward, error=error, samples=samples)


def branch_row(branch: Branch, samples: str) -> Mapping[str, object]:
    """A branch in its rollout's line, with the place of its samples."""
    place = branch.place
    return {
        "turn": place.turn,
        "token": place.token,
        "surprise_nats": round(place.surprise_nats, 6),
        "session": branch.session,
        "end": branch.end,
        "reward": branch.reward,
        "num_trained": sum(one.num_trained for one in branch.samples),
        "samples": samples,
        "error": branch.error,
    }
