"""Tasks of inspect-ai by the real package: its solvers speak to a session, its scorers' values are the rewards."""

from pathlib import Path

import pytest

from stenograph.client import Client
from stenograph.envs.base import WrongEnvironment, environment

from .conftest import Live

pytestmark = pytest.mark.envs

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool

@tool
def lookup():
    async def execute(place: str):
        '''Say where a place is.

        Args:
            place: The place.
        '''
        return f"The {place} is in Paris."

    return execute

@task
def cities(system: str = "Be brief."):
    samples = [
        Sample(input="Where is the Louvre?", target="Paris", id="louvre"),
        Sample(input="Where is the Forum?", target="Rome", id=7),
    ]
    solver = [system_message(system), use_tools(lookup()), generate()]
    return Task(dataset=MemoryDataset(samples), solver=solver, scorer=[includes(), match()])
"""


@pytest.fixture
def cities(tmp_path: Path) -> str:
    file = tmp_path / "cities.py"
    file.write_text(TASKS)
    return f"inspect:{file}@cities"


async def test_a_sample_is_a_session_and_its_scores_are_rewards_by_scorer(live: Live, cities: str) -> None:
    made = environment(cities, {"chat": {"max_tokens": 64}, "task": {"system": "Answer."}})
    tasks = made.tasks(limit=None, seed=None)
    assert [task.id for task in tasks] == ["louvre", "7"]
    live.says('<tool_call>\n{"name": "lookup", "arguments": {"place": "Louvre"}}\n</tool_call>')
    live.says("It is in Paris, I think.")
    async with Client(live.url) as client, client.session() as session:
        assert await made.run(tasks[0], session) == {"includes": 1.0, "match": 0.0}
        (sample,) = await session.samples()
        assert len(sample.turns) == 2
        assert "The Louvre is in Paris." in sample.response
        (record, _) = (await session.view())["records"]  # type: ignore[misc]
        assert record["request"]["messages"][0] == {"role": "system", "content": "Answer."}  # type: ignore[index]


async def test_a_server_that_refuses_is_the_samples_error(live: Live, cities: str) -> None:
    made = environment(cities, {"chat": {"temperature": -1}})
    (task,) = made.tasks(limit=1, seed=3)
    async with Client(live.url) as client, client.session() as session:
        with pytest.raises(Exception, match="temperature"):
            await made.run(task, session)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("inspect:nothing.py@here", {}, "nothing"),
        ("{}x", {}, "Task named 'citiesx' not found"),
        ("{}", {"task": {"sistem": "x"}}, "sistem"),
        ("{}", {"chat": {"max_tokenz": 3}}, "no request field max_tokenz"),
        ("{}", {"tasks": {}}, "inspect has no option tasks"),
        ("{}", {"limits": {"message_limits": 3}}, "inspect has no limit message_limits"),
    ],
)
def test_what_is_no_task_and_a_wrong_option_are_refused(
    cities: str, spec: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(WrongEnvironment, match=said):
        environment(spec.format(cities), options).tasks(limit=None, seed=None)
