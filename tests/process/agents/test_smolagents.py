"""Real smolagents: it sends its calls back as text, and every token that was sampled for it is in one sample."""

import asyncio
from typing import Any

import pytest

from .conftest import Reply, Talk, Talking, call

# Warnings of the agent and of its packages, which are not ours.
pytestmark = [pytest.mark.agents, pytest.mark.filterwarnings("ignore")]

LOOK = "I look.\n" + call("shell", '{"command":  "ls -a"}')
LOOK_TWICE = "Two more.\n" + call("shell", '{"command": "cat a"}') + "\n" + call("shell", '{"command": "cat b"}')
ANSWER = call("final_answer", '{"answer": "It\'s \\"a\\" and b.\\n"}')


@pytest.fixture
def smolagents() -> Any:
    return pytest.importorskip("smolagents", reason="smolagents is not installed: scripts/test-agents installs it")


def shell(command: str) -> str:
    """Runs a line in a shell.

    Args:
        command: The line.
    """
    if command == "break":
        raise RuntimeError("The shell broke.")
    return f"ran {command}"


def agent_of(smolagents: Any, base_url: str, *, kind: str = "ToolCallingAgent", **options: Any) -> Any:
    model = smolagents.OpenAIModel("tiny", api_base=base_url, api_key="none", client_kwargs={"max_retries": 0})
    return getattr(smolagents, kind)(tools=[smolagents.tool(shell)], model=model, verbosity_level=0, **options)


async def run(agent: Any, task: str, **options: Any) -> Any:
    return await asyncio.to_thread(agent.run, task, **options)


async def samples_of(talk: Talk, base_url: str) -> list[dict[str, Any]]:
    samples = await talk.samples(base_url)
    talk.check_all_trained_once(samples)
    return samples


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_with_parallel_calls_and_a_second_task_is_one_sample(
    smolagents: Any, talking: Talking, stream: bool
) -> None:
    async with talking(LOOK, LOOK_TWICE, ANSWER, LOOK, ANSWER) as talk:
        base_url = await talk.open_session()
        agent = agent_of(smolagents, base_url, stream_outputs=stream)
        assert await run(agent, "What is here?") == 'It\'s "a" and b.\n'
        assert await run(agent, "And now?", reset=False) == 'It\'s "a" and b.\n'
        assert len(await samples_of(talk, base_url)) == 1


async def test_arguments_that_look_like_json_come_back_as_it(smolagents: Any, talking: Talking) -> None:
    odd = call("shell", '{"command": "{\\"a\\": [1, 2.0, null, \\"[true]\\"]}"}')
    async with talking(odd, ANSWER) as talk:
        base_url = await talk.open_session()
        await run(agent_of(smolagents, base_url), "What is here?")
        assert len(await samples_of(talk, base_url)) == 1


async def test_the_answer_that_is_asked_for_when_steps_run_out_is_a_sample_of_its_own(
    smolagents: Any, talking: Talking
) -> None:
    async with talking(LOOK, LOOK_TWICE, "There is a.") as talk:
        base_url = await talk.open_session()
        assert await run(agent_of(smolagents, base_url, max_steps=2), "What is here?") == "There is a."
        assert len(await samples_of(talk, base_url)) == 2


async def test_plans_are_samples_of_their_own(smolagents: Any, talking: Talking) -> None:
    async with talking(LOOK, LOOK, ANSWER, side={"<end_plan>": "1. Look."}) as talk:
        base_url = await talk.open_session()
        await run(agent_of(smolagents, base_url, planning_interval=2), "What is here?")
        assert len(await samples_of(talk, base_url)) == 3


@pytest.mark.parametrize("history", ["strands", "tree"])
async def test_a_tool_s_error_loses_nothing(smolagents: Any, talking: Talking, history: str) -> None:
    """The calls are left out of the request after the error: it is a fork of the strand, another root of the tree."""
    async with talking("I break it.\n" + call("shell", '{"command": "break"}'), LOOK, ANSWER) as talk:
        base_url = await talk.open_session(history=history)
        await run(agent_of(smolagents, base_url), "What is here?")
        assert len(await samples_of(talk, base_url)) == 2


async def test_a_tool_s_error_replaces_the_turn_of_a_linear_session_and_says_so(
    smolagents: Any, talking: Talking
) -> None:
    broken = "I break it.\n" + call("shell", '{"command": "break"}')
    async with talking(broken, LOOK, ANSWER) as talk:
        base_url = await talk.open_session(history="linear")
        await run(agent_of(smolagents, base_url), "What is here?")
        (sample,) = await talk.samples(base_url)
        first = next(iter(talk.engine.drawn.values()))
        assert sample["metadata"]["discarded"] == {"turns": 1, "sampled_tokens": len(first)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_code_agent_s_run_is_one_sample(smolagents: Any, talking: Talking, stream: bool) -> None:
    replies = [
        Reply(text="Thought: list.\n<code>\nprint(shell('ls'))\n", stop="</code>"),
        Reply(text="Thought: wrong.\n<code>\nprint(nothing)\n", stop="</code>"),
        Reply(text="Thought: no code at all."),
        Reply(text='Thought: done.\n<code>\nfinal_answer("It\'s a.")\n', stop="</code>"),
    ]
    async with talking(*replies) as talk:
        base_url = await talk.open_session()
        agent = agent_of(smolagents, base_url, kind="CodeAgent", stream_outputs=stream)
        assert await run(agent, "What is here?") == "It's a."
        assert len(await samples_of(talk, base_url)) == 1
