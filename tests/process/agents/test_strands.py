"""Real strands-agents: every token that was sampled for it is in one sample."""

import asyncio
from typing import Any

import pytest

from .conftest import Talking, call

# Warnings of the agent and of its packages, which are not ours.
pytestmark = [pytest.mark.agents, pytest.mark.filterwarnings("ignore")]

LOOK = "<think>\nLook first.\n</think>\n\nI look.\n" + call("shell", '{"command":  "ls -a"}')
LOOK_TWICE = call("shell", '{"command": "cat a"}') + "\n" + call("shell", '{"command": "break"}')


@pytest.fixture
def strands() -> Any:
    reason = "strands-agents is not installed: scripts/test-agents installs it"
    pytest.importorskip("strands.models.openai", reason=reason)
    return pytest.importorskip("strands")


def shell(command: str) -> str:
    """Runs a line in a shell."""
    if command == "break":
        raise RuntimeError("The shell broke.")
    return f"ran {command}"


def agent_of(strands: Any, base_url: str) -> Any:
    model = strands.models.openai.OpenAIModel(
        client_args={"base_url": base_url, "api_key": "none", "max_retries": 0}, model_id="tiny", params={"seed": 1}
    )
    return strands.Agent(model=model, tools=[strands.tool(shell)], system_prompt="Be brief.", callback_handler=None)


async def test_a_run_with_parallel_calls_and_a_second_task_is_one_sample(strands: Any, talking: Talking) -> None:
    async with talking(LOOK, LOOK_TWICE, " There is a. ", LOOK, "Still a.") as talk:
        base_url = await talk.open_session()
        agent = agent_of(strands, base_url)
        assert "There is a." in str(await asyncio.to_thread(agent, "What is here?"))
        assert "Still a." in str(await asyncio.to_thread(agent, "And now?"))
        samples = await talk.samples(base_url)
        talk.check_all_trained_once(samples)
        assert len(samples) == 1


async def test_two_agents_on_one_session_are_a_sample_each(strands: Any, talking: Talking) -> None:
    async with talking(LOOK, "There is a.", LOOK, "Still a.") as talk:
        base_url = await talk.open_session()
        await asyncio.to_thread(agent_of(strands, base_url), "What is here?")
        await asyncio.to_thread(agent_of(strands, base_url), "What is there?")
        samples = await talk.samples(base_url)
        talk.check_all_trained_once(samples)
        assert len(samples) == 2
