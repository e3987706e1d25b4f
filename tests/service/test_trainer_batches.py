"""A trainer's rows of real batches: an agent that raises has its row, and ends no other's."""

import asyncio
import dataclasses
from typing import Any

import pytest

from stenograph.client import AgentFailure, Client, InfraFailure, RolloutSession, silent
from stenograph.trainers import dicts, miles, trl
from stenograph.trainers.rows import WrongRows, only_rollout
from tests.pure.trainers.test_rows import SlimeSample

from .conftest import Live, user


async def test_an_agent_that_raises_does_not_end_its_group(live: Live) -> None:
    for _ in range(3):
        live.says("yes")

    async def agent(task: str, session: RolloutSession) -> float:
        if task == "at once":
            raise ValueError("it broke")
        await live.chat(session.id, user(task))
        if task == "later":
            raise AgentFailure("it gave up", reward=-1.0)
        if task == "infra":
            raise InfraFailure("the sandbox is gone")
        return 1.0

    asked = [SlimeSample(index=index, prompt=task) for index, task in enumerate(("well", "at once", "later", "infra"))]

    async def generate(client: Client, sample: Any) -> list[Any]:
        batch = await client.rollouts(agent, [sample.prompt], failed_reward=0.0, infra_retries=0, progress=silent)
        rollout = only_rollout(batch)
        return miles.rollout_samples(rollout.samples, sample, rollout_id=sample.index, reward=rollout.reward)

    async with Client(live.url) as client:
        group = await asyncio.gather(*(generate(client, sample) for sample in asked))
    assert [[one.status.value for one in made] for made in group] == [
        ["completed"],
        ["aborted"],
        ["completed"],
        ["aborted"],
    ]
    assert [made[0].reward for made in group] == [1.0, 0.0, -1.0, None]
    assert [sum(made[0].loss_mask or ()) > 0 for made in group] == [True, False, True, False]
    assert [made[0].rollout_id for made in group] == [0, 1, 2, 3]


async def test_a_rollout_that_has_no_trained_token_counts_in_its_group(live: Live) -> None:
    live.says("yes")
    turns = iter((False, True))

    async def agent(task: str, session: RolloutSession) -> float:
        if next(turns):
            await live.chat(session.id, user(task))
            return 1.0
        raise ValueError("it broke")

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, ["t"], group_size=2, concurrency=1, failed_reward=0.0, progress=silent)
    rows: dict[str, Any] = dicts.skyrl(batch.groups)
    assert (rows["rewards"], rows["is_last_step"]) == ([0.0, 1.0], [True, True])
    assert [name for name, _ in rows["trajectory_ids"]] == [batch.groups[0].name] * 2
    assert [sum(mask) > 0 for mask in rows["loss_masks"]] == [False, True]
    assert rows["rollout_metrics"]["generate/min_assistant_tokens"] == 0.0
    one = dataclasses.replace(batch.groups[0], rollouts=batch.groups[0].rollouts[:1], index=0)
    only = dataclasses.replace(batch, groups=(one,))
    made: dict[str, Any] = trl.rollout_rows(only, num_prompts=1, filler_id=9)
    assert (made["env_mask"], trl.rollout_reward(**made)) == ([[0]], [0.0])
    with pytest.raises(WrongRows, match="a batch of one task has one rollout, got 2"):
        only_rollout(batch)
