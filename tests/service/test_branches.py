"""Branches of rollouts at their least certain tokens: exact forks, rewards of turns by them, and refusals."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from stenograph.client import Client, tree_of
from stenograph.client.errors import SessionGone
from stenograph.client.samples import DecodedSample, decoded
from stenograph.client.session import RolloutSession
from stenograph.envs.base import Task, WrongEnvironment, environment
from stenograph.envs.branches import ForkPlan, branched
from stenograph.envs.chat import chat
from stenograph.envs.folder import RolloutFolder
from stenograph.envs.rollout import RolloutPlan, members_of, run_rollouts, summary

from .conftest import Live

GUESS = """
from stenograph.envs.chat import chat

retraces = True
NUM_RUNS = 0

def tasks():
    return [{"id": "guess"}]

async def run(task, session):
    global NUM_RUNS
    NUM_RUNS += 1
    async with chat(session, {"max_tokens": 60}) as talk:
        messages = [{"role": "user", "content": "begin" + " again" * (NUM_RUNS > DRIFTS_FROM)}]
        messages.append(await talk.say(messages))
        messages.append({"role": "user", "content": "go on"})
        said = await talk.say(messages)
    return float("good" in said["content"])
"""
PLAN = RolloutPlan(facts={}, fork_at=ForkPlan(num=2))


async def run(live: Live, folder: Path, *, drifts_from: int = 9) -> tuple[dict[str, Any], RolloutFolder]:
    """One rollout with two branches: its line in the folder."""
    file = folder / "guess.py"
    file.write_text(GUESS + f"DRIFTS_FROM = {drifts_from}\n")
    live.says("short")
    live.says("this is a long and a bad end")
    live.says(" good")
    live.says(" bad")
    made, out = environment(str(file), {}), RolloutFolder(folder / "out")
    with out.held({}):
        async with Client(live.url) as client:
            await run_rollouts(client, made, members_of(made, PLAN), out, PLAN)
    (line,) = (out.path / "rollouts.jsonl").read_text().splitlines()
    return json.loads(line), out


def sample_of(out: RolloutFolder, place: str) -> DecodedSample:
    (sample,) = decoded((out.path / place).read_bytes())
    return sample


async def test_branches_fork_at_the_least_certain_tokens_and_value_the_turns(live: Live, tmp_path: Path) -> None:
    line, out = await run(live, tmp_path)
    base = sample_of(out, line["samples"])
    branches = [(row, sample_of(out, row["samples"])) for row in line["branches"]]
    end = base.turns[1]["end"]
    assert isinstance(end, int)
    start = base.turns[1]["start"]
    assert isinstance(start, int)
    nats = sorted((-float(one) for one in base.log_probs[: end - 1 - base.prompt_length]), reverse=True)
    assert [row["surprise_nats"] for row, _ in branches] == nats[:2]
    assert [row["turn"] for row, _ in branches] == [1, 1]
    for row, sample in branches:
        cut = start + row["token"]
        assert sample.tokens[:cut].tolist() == base.tokens[:cut].tolist()
        trained = sample.loss_mask[: cut - sample.prompt_length]
        assert (trained.sum(), sample.num_trained) == (0, row["num_trained"])
        assert sample.reward == row["reward"]
    assert sorted(row["reward"] for row, _ in branches) == [0.0, 1.0]
    assert base.token_rewards is not None
    assert base.reward == 0.0
    rewards = base.token_rewards[base.token_rewards != 0]
    assert rewards.tolist() == pytest.approx([-1 / 3])  # the value at the turn's beginning is a third, it ended at 0
    assert base.token_rewards[end - 1 - base.prompt_length] == rewards[0]
    tree = tree_of([base, *(sample for _, sample in branches)])
    assert len(tree.tokens) == len(base.tokens) + sum(sample.num_trained for _, sample in branches)
    assert "2 branches" in "\n".join(summary(out))
    assert (await live.call("GET", "/sessions")).json()["sessions"] == []


async def test_an_environment_that_does_something_else_again_loses_its_branches_alone(
    live: Live, tmp_path: Path
) -> None:
    line, out = await run(live, tmp_path, drifts_from=1)
    assert (line["end"], line["reward"]) == ("ok", 0.0)
    assert {row["end"] for row in line["branches"]} == {"agent_failed"}
    assert all("not what it was" in row["error"] for row in line["branches"])
    assert sample_of(out, line["samples"]).token_rewards is None


class OneGoes:
    """Its first branch deletes its own session; the others end some calls later."""

    retraces = True

    def __init__(self) -> None:
        self.num_begun = self.num_ended = 0
        self.has_gone = asyncio.Event()

    def tasks(self, *, limit: int | None, seed: int | None) -> list[Task]:
        return [Task(id="one", data=None)]

    async def run(self, task: Task, session: RolloutSession) -> float:
        self.num_begun += 1
        if self.num_begun == 2:
            await session.delete()
            self.has_gone.set()
            return 0.0
        async with chat(session, {"max_tokens": 60}) as talk:
            await talk.say([{"role": "user", "content": "begin"}])
        if self.num_begun > 2:
            await self.has_gone.wait()
            for _ in range(9):
                await session.ledger()
        self.num_ended += 1
        return 1.0


async def test_no_branch_runs_on_after_its_rollout_has_failed(live: Live) -> None:
    for text in ("a long and a bad end", " good", " bad"):
        live.says(text)
    made = OneGoes()
    async with Client(live.url) as client, client.session() as session:
        with pytest.raises(SessionGone):
            await branched(made, made.tasks(limit=None, seed=None)[0], session, ForkPlan(num=3))
        assert (made.num_begun, made.num_ended) == (4, 3)


def test_an_environment_that_cannot_be_retraced_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "guess.py"
    file.write_text(GUESS.replace("retraces = True", "") + "DRIFTS_FROM = 0\n")
    with pytest.raises(WrongEnvironment, match="retraces = True"):
        members_of(environment(str(file), {}), PLAN)
