"""An environment's rollouts on a real server: groups, rewards, samples in the folder, and on from where it stopped."""

import asyncio
import io
from pathlib import Path

import pytest

from stenograph.client import Client
from stenograph.envs.base import Environment, WrongEnvironment, environment
from stenograph.envs.folder import RolloutFolder, place_of
from stenograph.envs.rollout import RolloutPlan, members_of, run_rollouts, summary

from .conftest import Live

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CITIES = """
import asyncio
from stenograph.envs.chat import chat

STOP = asyncio.Event()

def tasks():
    return [{"id": f"city {name}/1", "name": name} for name in ("Paris", "Rome", "Bern")]

async def run(task, session):
    async with chat(session, {"max_tokens": 40}) as talk:
        said = await talk.say([{"role": "user", "content": task["name"]}])
    if task["name"] == "Bern":
        raise ValueError("no bears")
    if task["name"] == "Rome":
        await STOP.wait()
    return {"said": float(task["name"] in said["content"])}
"""
FACTS = {"environment": "cities.py", "options": {}, "seed": 0, "session": {"max_turns": 3}}
PLAN = RolloutPlan(facts=FACTS, group_size=2, concurrency=6, session={"max_turns": 3})


def cities(tmp_path: Path) -> Environment:
    file = tmp_path / "cities.py"
    file.write_text(CITIES)
    return environment(str(file), {})


async def test_an_interrupted_run_goes_on_and_leaves_every_rollout_once(live: Live, tmp_path: Path) -> None:
    for _ in range(8):
        live.says("In Paris.")
    made, folder, said = cities(tmp_path), RolloutFolder(tmp_path / "out"), io.StringIO()
    members = members_of(made, PLAN)
    async with Client(live.url) as client:
        with folder.held(FACTS):
            run = asyncio.create_task(run_rollouts(client, made, members, folder, PLAN, said))
            while len(list(folder)) < 4:  # noqa: ASYNC110 - Rome waits; a folder is a file
                await asyncio.sleep(0)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
        assert (await live.call("GET", "/sessions")).json()["sessions"] == []

        again = RolloutFolder(tmp_path / "out")
        with again.held(FACTS):
            assert sorted(one.task for one in again) == ["city Bern/1"] * 2 + ["city Paris/1"] * 2
            made._run.__globals__["STOP"].set()  # type: ignore[attr-defined]
            await run_rollouts(client, made, members, again, PLAN, said)
    assert (await live.call("GET", "/sessions")).json()["sessions"] == []

    ended = {(one.task, one.number): one for one in again}
    assert len(ended) == 6
    for (task, number), one in ended.items():
        samples = again.samples(one)
        assert samples is not None
        assert one.num_trained == sum(sample.num_trained for sample in samples) > 0
        assert {sample.metadata["group"] for sample in samples} == {task}
        assert one.samples == place_of(task, number)
    assert {one.reward["said"] for one in again if isinstance(one.reward, dict)} == {0.0, 1.0}
    lines = "\n".join(summary(again))
    assert "6 rollouts of 3 tasks: 4 ok, 2 agent_failed" in lines
    assert "2 x ValueError: no bears" in lines
    assert "4 of 6 ok, 2 agent failed, mean reward 0.500, 0 running" in said.getvalue()


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_an_id_that_names_no_group_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "named.py"
    file.write_text(f'def tasks(): return [{{"id": "{name}"}}]\nasync def run(task, session): return 1')
    with pytest.raises(WrongEnvironment, match="a task's id has 1 to 256 characters"):
        members_of(environment(str(file), {}), PLAN)


def test_tasks_with_one_id_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.py"
    file.write_text('def tasks(): return [{"id": 1}, {"id": 1}]\nasync def run(task, session): return 1')
    with pytest.raises(WrongEnvironment, match="1 ids of tasks come more than once, such as '1'"):
        members_of(environment(str(file), {}), PLAN)
