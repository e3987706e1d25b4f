"""reasoning-gym by the real package: its score of a right answer, and of one whose computing does not end."""

from typing import Any

import pytest

from stenograph.client import Client
from stenograph.envs.apart import Bounds
from stenograph.envs.base import WrongEnvironment, environment

from .conftest import Live

pytestmark = pytest.mark.envs


def test_options_by_which_no_task_can_be_made_are_refused() -> None:
    made = environment("reasoning-gym:countdown", {"min_numbers": 2, "max_numbers": 2, "max_value": 9})
    with pytest.raises(WrongEnvironment, match="reasoning-gym cannot make countdown"):
        made.tasks(limit=3, seed=7)


async def test_an_answer_gets_its_score_and_one_without_end_gets_none(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stenograph.envs.reasoning_gym.BOUNDS", Bounds(cpu_s=5, call_s=60, memory_bytes=1 << 30))
    made = environment("reasoning-gym:countdown", {})
    (task,) = made.tasks(limit=1, seed=7)
    entry: Any = task.data
    async with Client(live.url) as client:
        for answer, reward in ((entry["metadata"]["expression"], 1.0), ("9**9**9**9", 0.0)):
            live.says(f"<answer>{answer}</answer>")
            async with client.session() as session:
                assert await made.run(task, session) == reward
