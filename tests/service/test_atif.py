"""A session as an ATIF trajectory: every sampled token once, with its ids; Harbor's own models take it."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from stenograph.client import Client
from stenograph.client.session import RolloutSession
from stenograph.envs.atif import session_trajectory
from stenograph.envs.base import environment
from stenograph.envs.folder import RolloutFolder
from stenograph.envs.rollout import RolloutPlan, members_of, run_rollouts, summary

from .conftest import Live, user

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}]
IMAGE = {"type": "text", "text": "Look at it."}


async def talked(live: Live, session: RolloutSession) -> None:
    """Two turns with a call between them and a message of another model before; and another conversation."""
    live.says('<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>')
    live.says("It is blue.")
    live.says("Elsewhere.")
    opening = [
        {"role": "system", "content": "Be brief."},
        user("What is it?"),
        {"role": "assistant", "content": "I shall look."},
        {"role": "user", "content": [IMAGE]},
    ]
    called = (await live.chat(session.id, *opening, tools=TOOLS)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "blue"}
    await live.chat(session.id, *opening, called, result, tools=TOOLS)
    await live.chat(session.id, user("Something else"))


async def test_each_sampled_turn_is_a_step_with_its_ids_and_log_probabilities(live: Live) -> None:
    async with Client(live.url) as client, client.session() as session:
        assert await session_trajectory(session) is None
        await talked(live, session)
        made = await session_trajectory(session, reward={"right": 1.0})
        samples = await session.samples(include_side=True)
    assert made is not None
    (other,) = made["subagent_trajectories"]  # type: ignore[misc]
    lines: list[Any] = sorted([made, other], key=lambda line: len(line["steps"]))
    for line, sample in zip(lines, sorted(samples, key=lambda sample: len(sample.turns)), strict=True):
        sampled = [step for step in line["steps"] if "metrics" in step]
        for step, turn in zip(sampled, sample.turns, strict=True):
            start, end, metrics = int(str(turn["start"])), int(str(turn["end"])), step["metrics"]
            assert metrics["prompt_token_ids"] == sample.tokens[:start].tolist()
            assert metrics["completion_token_ids"] == sample.tokens[start:end].tolist()
            begin = sample.prompt_length
            assert metrics["logprobs"] == sample.log_probs[start - begin : end - begin].tolist()
        assert line["final_metrics"]["total_completion_tokens"] == sample.num_trained
    steps = lines[1]["steps"]
    assert [(step["source"], step.get("is_copied_context")) for step in steps] == [
        ("system", None),
        ("user", None),
        ("agent", True),
        ("user", None),
        ("agent", None),
        ("agent", None),
    ]
    (call,) = steps[4]["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("look", {"at": "it"})
    assert steps[4]["observation"] == {"results": [{"content": "blue", "source_call_id": call["tool_call_id"]}]}
    assert steps[5]["message"] == "It is blue."
    assert made["extra"]["reward"] == {"right": 1.0}  # type: ignore[index]


async def test_rollout_keeps_a_trajectory_beside_the_samples(live: Live, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from stenograph.envs.chat import chat\n"
        "def tasks(): return [{'id': 'a/b'}]\n"
        "async def run(task, session):\n"
        "    async with chat(session, {}) as talk:\n"
        "        await talk.say([{'role': 'user', 'content': 'Go.'}])\n"
        "    return 0.5\n"
    )
    live.says("Gone.")
    plan = RolloutPlan(facts={}, atif=True)
    made, folder = environment(str(file), {}), RolloutFolder(tmp_path / "out")
    async with Client(live.url) as client:
        with folder.held({}):
            await run_rollouts(client, made, members_of(made, plan), folder, plan)
    (kept,) = (tmp_path / "out" / "atif").iterdir()
    found = json.loads(kept.read_text())
    assert found["steps"][1]["message"] == "Gone."
    assert found["extra"]["reward"] == 0.5


ENDS = """
from stenograph.envs.chat import chat
def tasks(): return [{'id': 'a'}]
async def run(task, session):
    async with chat(session, {}) as talk:
        await talk.say([{'role': 'user', 'content': 'Go.'}])
    {last}
"""


@pytest.mark.parametrize(
    ("last", "end", "reward", "error"),
    [("return 0.5", "ok", 0.5, None), ("raise ValueError('mine')", "agent_failed", None, "ValueError: mine")],
)
async def test_a_trajectory_that_cannot_be_made_costs_neither_the_reward_nor_the_cause(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, end: str, reward: float | None, error: str
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise KeyError("records")

    monkeypatch.setattr("stenograph.envs.atif.trajectory", broken)
    file, folder = tmp_path / "mine.py", RolloutFolder(tmp_path / "out")
    file.write_text(ENDS.replace("{last}", last))
    live.says("Gone.")
    made, plan = environment(str(file), {}), RolloutPlan(facts={}, atif=True)
    async with Client(live.url) as client:
        with folder.held({}):
            await run_rollouts(client, made, members_of(made, plan), folder, plan)
    (ended,) = folder
    assert (ended.end, ended.reward, ended.error) == (end, reward, error)
    assert ended.num_trained > 0
    assert ended.trajectory_error == "KeyError: 'records'"
    assert summary(folder)[-1] == "1 x no trajectory: KeyError: 'records'"


async def test_a_disk_that_takes_no_trajectory_stops_the_run(live: Live, tmp_path: Path) -> None:
    file, folder = tmp_path / "mine.py", RolloutFolder(tmp_path / "out")
    file.write_text(ENDS.replace("{last}", "return 0.5"))
    live.says("Gone.")
    made, plan = environment(str(file), {}), RolloutPlan(facts={}, atif=True)
    async with Client(live.url) as client:
        with folder.held({}):
            (tmp_path / "out" / "atif").write_text("in the way")
            with pytest.raises(OSError, match="atif"):
                await run_rollouts(client, made, members_of(made, plan), folder, plan)
    assert list(folder) == []


@pytest.mark.envs
async def test_harbors_own_models_take_it(live: Live) -> None:
    harbor: Any = importlib.import_module(
        "harbor.models.trajectories"
    )  # the wheel's module alone, by scripts/test-envs
    async with Client(live.url) as client, client.session() as session:
        await talked(live, session)
        made = await session_trajectory(session, reward=1.0)
    assert harbor.Trajectory.model_validate(made).to_json_dict() == json.loads(json.dumps(made))
