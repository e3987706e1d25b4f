"""Tasksets of verifiers by the real package: its own harness as a process, its reward, and every sampled token kept."""

from pathlib import Path

import pytest

from stenograph.client import Client
from stenograph.envs.base import WrongEnvironment, environment

from .conftest import Live

pytestmark = pytest.mark.envs

TASKSET = """
import verifiers.v1 as vf

class CityData(vf.TaskData):
    answer: str

class CityTask(vf.Task[CityData]):
    @vf.reward(weight=2.0)
    async def names_it(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

class CityTaskset(vf.Taskset[CityTask, vf.TasksetConfig]):
    def load(self):
        for city, place in (("Paris", "Louvre"), ("Rome", "Forum")):
            yield CityTask(CityData(id=city, prompt=f"Where is the {place}?", answer=city), self.config.task)

__all__ = ["CityTaskset"]
"""
NULL = {"agent": {"harness": {"id": "null"}}, "chat": {"max_tokens": 64}}


@pytest.fixture
def cities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stenograph_cities.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "verifiers:stenograph-cities"


async def test_an_episode_is_a_session_with_the_rewards_of_its_task(live: Live, cities: str) -> None:
    made = environment(cities, NULL)
    tasks = made.tasks(limit=None, seed=None)
    assert [task.id for task in tasks] == ["Paris", "Rome"]
    async with Client(live.url) as client:
        for said, reward in (("It is in Paris.", 2.0), ("I do not know.", 0.0)):
            live.says(said)
            async with client.session() as session:
                assert await made.run(tasks[0], session) == reward
                (sample,) = await session.samples()
                assert sample.response.startswith(said)
                assert len(sample.turns) == 1


async def test_a_server_that_refuses_is_the_episodes_error(live: Live, cities: str) -> None:
    made = environment(cities, {**NULL, "chat": {"max_tokens": -1}})
    (task,) = made.tasks(limit=1, seed=3)
    async with Client(live.url) as client, client.session() as session:
        with pytest.raises(Exception, match="max_tokens"):
            await made.run(task, session)


def test_what_is_no_taskset_and_a_wrong_option_are_refused(cities: str) -> None:
    for spec, options, said in (
        ("verifiers:nothing-here", {}, "taskset 'nothing-here' not found"),
        (cities, {"tasksett": 1}, "tasksett"),
        (cities, {"agent": {"harness": {"id": "nothing"}}}, "nothing"),
    ):
        with pytest.raises(WrongEnvironment, match=said):
            environment(spec, options)
