"""Runs an environment's rollouts into a folder: groups, concurrency, progress; a run goes on from where it stopped."""

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TextIO, cast

from stenograph.client.batch import Rollout, RolloutBatch
from stenograph.client.client import Client
from stenograph.client.progress import LOG_S, TERMINAL_S, BatchProgress
from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession, SessionFields
from stenograph.client.shown import error_line
from stenograph.envs.atif import session_trajectory
from stenograph.envs.base import Environment, Task, WrongEnvironment
from stenograph.envs.branches import Branch, ForkPlan, branch_row, branched, check_retraces
from stenograph.envs.folder import EndedRollout, RolloutFolder, place_of

MAX_ID_CHARS = 256
"""As many as a session's group may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """A run: `group_size` rollouts of each of at most `num_tasks` tasks, `concurrency` at a time, each agent for
    `timeout_s` seconds at most. `session` are fields of each session. `facts` name the run in its folder. `atif`: keep
    a trajectory of each rollout too. `fork_at`: the branches of each rollout."""

    facts: Mapping[str, object]
    num_tasks: int | None = None
    seed: int | None = None
    group_size: int = 1
    concurrency: int = 16
    timeout_s: float | None = None
    session: Mapping[str, object] = field(default_factory=dict[str, object])
    atif: bool = False
    fork_at: ForkPlan | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """One rollout of a task's group, by its number from 0."""

    task: Task
    number: int


def members_of(environment: Environment, plan: RolloutPlan) -> Sequence[Member]:
    """All rollouts of a run. Raises WrongEnvironment, also where two tasks have one id, and for an id too long."""
    if plan.fork_at is not None:
        check_retraces(environment)
    tasks = environment.tasks(limit=plan.num_tasks, seed=plan.seed)
    for task in tasks:
        if not 1 <= len(task.id) <= MAX_ID_CHARS:
            raise WrongEnvironment(
                f"a task's id has 1 to {MAX_ID_CHARS} characters, got {len(task.id)}: {task.id[:40]!r}"
            )
    if twice := [name for name, number in Counter(task.id for task in tasks).items() if number > 1]:
        raise WrongEnvironment(f"{len(twice)} ids of tasks come more than once, such as {twice[0]!r}")
    return [Member(task, number) for task in tasks for number in range(plan.group_size)]


async def run_rollouts(
    client: Client,
    environment: Environment,
    members: Sequence[Member],
    folder: RolloutFolder,
    plan: RolloutPlan,
    stream: TextIO | None = None,
) -> RolloutBatch[Member]:
    """Run what the opened folder does not have yet. Cancelled, it deletes its sessions; the folder has what ended.

    Raises WrongRequest or WrongKey where the server refuses the run's own calls, OSError where the folder cannot be
    written.
    """
    wanted = [one for one in members if not folder.is_done(one.task.id, one.number)]
    progress = RolloutProgress(folder, num_wanted=len(members), stream=stream)

    trajectories: dict[tuple[str, int], KeptTrajectory] = {}
    branches: dict[tuple[str, int], tuple[list[Branch], str | None]] = {}

    async def agent(member: Member, session: RolloutSession) -> Reward | None:
        reward: Reward | None = None
        branches.pop((member.task.id, member.number), None)  # of a try that infrastructure failed
        try:
            if plan.fork_at is None:
                reward = await environment.run(member.task, session)
            else:
                reward, found, why_none = await branched(environment, member.task, session, plan.fork_at)
                branches[member.task.id, member.number] = found, why_none
        finally:
            if plan.atif:
                trajectories[member.task.id, member.number] = await _trajectory(session, reward)
        return reward

    async def ended(rollout: Rollout[Member]) -> None:
        kept = trajectories.pop((rollout.task.task.id, rollout.task.number), KeptTrajectory())
        payload = None if rollout.samples is None else rollout.samples.payload
        found, why_none = branches.pop((rollout.task.task.id, rollout.task.number), ([], None))
        rows = await asyncio.to_thread(_kept, folder, rollout.task, found)
        line = replace(_line(rollout, kept.error), branches=rows, branches_error=why_none)
        await asyncio.to_thread(folder.add, line, payload, kept.made)

    def fields(member: Member) -> SessionFields:
        found: SessionFields = {"group": member.task.id}
        found.update(plan.session)  # type: ignore[typeddict-item]
        return found

    return await client.rollouts(
        agent,
        wanted,
        progress=progress,
        session=fields,
        ended=ended,
        concurrency=plan.concurrency,
        timeout_s=plan.timeout_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTrajectory:
    """A session's trajectory before its session is deleted; `error` says in a line why there is none."""

    made: Mapping[str, object] | None = None
    error: str | None = None


async def _trajectory(session: RolloutSession, reward: Reward | None) -> KeptTrajectory:
    try:
        return KeptTrajectory(made=await session_trajectory(session, reward=reward))
    except Exception as error:  # noqa: BLE001 - whatever it is costs the trajectory, not the rollout's end and reward
        return KeptTrajectory(error=error_line(error))


def _kept(folder: RolloutFolder, member: Member, branches: Sequence[Branch]) -> list[Mapping[str, object]]:
    """The rows of a rollout's branches, whose samples are on the disk when it returns. Blocks."""
    rows: list[Mapping[str, object]] = []
    for number, branch in enumerate(branches):
        place = place_of(member.task.id, member.number, branch=number)
        folder.keep(place, branch.samples.payload)
        rows.append(branch_row(branch, place))
    return rows


def _line(rollout: Rollout[Member], trajectory_error: str | None) -> EndedRollout:
    task, number = rollout.task.task.id, rollout.task.number
    return EndedRollout(
        task=task,
        number=number,
        session=rollout.session_id,
        end=rollout.end,
        reward=rollout.reward,
        seconds=round(rollout.seconds, 3),
        num_tries=rollout.num_tries,
        num_trained=rollout.num_trained,
        samples=None if rollout.samples is None else place_of(task, number),
        error=None if rollout.error is None else error_line(rollout.error),
        trajectory_error=trajectory_error,
    )


class RolloutProgress:
    """A line for a person: in place on a terminal, else one each half a minute, and one at the end."""

    def __init__(self, folder: RolloutFolder, *, num_wanted: int, stream: TextIO | None = None) -> None:
        self._folder, self._num_wanted = folder, num_wanted
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._due = 0.0

    def __call__(self, progress: BatchProgress) -> None:
        """Write the line if it is due."""
        now = asyncio.get_running_loop().time()
        if now < self._due and not progress.is_over:
            return
        self._due = now + (TERMINAL_S if self._is_terminal else LOG_S)
        ended = list(self._folder)
        failed = Counter(one.end for one in ended)
        parts = [f"{failed['ok']} of {self._num_wanted} ok"]
        parts += [f"{failed[end]} {end.replace('_', ' ')}" for end in ("agent_failed", "infra_failed") if failed[end]]
        rewards = numbers(ended)
        parts += [f"mean reward {fmean(rewards):.3f}"] if rewards else []
        line = f"rollouts: {', '.join(parts)}, {progress.num_running} running"
        end = "\n" if progress.is_over or not self._is_terminal else ""
        self._stream.write(f"\r\x1b[K{line}{end}" if self._is_terminal else f"{line}{end}")
        self._stream.flush()


def numbers(ended: list[EndedRollout]) -> list[float]:
    """The rewards: each a number, of one by names their sum."""
    rewards = [one.reward for one in ended if one.reward is not None]
    return [sum(one.values()) if isinstance(one, Mapping) else one for one in rewards]


def summary(folder: RolloutFolder) -> list[str]:
    """A run's results, in lines: ends, tokens, rewards by group, failures by cause."""
    ended = list(folder)
    ends = Counter(one.end for one in ended)
    branches = [row for one in ended for row in one.branches]
    rewards = numbers(ended)
    groups = defaultdict[str, list[EndedRollout]](list)
    for one in ended:
        groups[one.task].append(one)
    spread = [numbers(group) for group in groups.values()]
    same = sum(len(group) > 1 and len(set(group)) == 1 for group in spread)
    by_end = ", ".join(f"{number} {end}" for end, number in ends.most_common())
    lines = [
        f"{len(ended)} rollouts of {len(groups)} tasks: {by_end}",
        f"{sum(one.num_trained for one in ended):,} trained tokens in {folder.path / 'samples'}",
    ]
    if branches:
        num_trained = sum(cast("int", row["num_trained"]) for row in branches)
        lines.append(f"{len(branches)} branches, {num_trained:,} trained tokens of their own")
    if rewards:
        lines.append(f"mean reward {fmean(rewards):.3f}; {same} of {len(groups)} groups have one reward alone")
    causes = Counter(one.error for one in ended if one.error is not None and one.end != "aborted")
    lines += [f"{number} x {cause}" for cause, number in causes.most_common(5)]
    causes = Counter(one.trajectory_error for one in ended if one.trajectory_error is not None)
    nothing = Counter(one.branches_error for one in ended if one.branches_error is not None)
    lines += [f"{number} x no branches: {cause}" for cause, number in nothing.most_common(5)]
    lines += [f"{number} x no trajectory: {cause}" for cause, number in causes.most_common(5)]
    return lines
