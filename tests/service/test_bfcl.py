"""BFCL's tasks by the real package: its ground truth, called by an agent, gets the reward, less does not."""

import ast
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from stenograph.client import Client
from stenograph.envs.base import Task, environment
from stenograph.envs.bfcl import BOUNDS, MULTI_TURN, SINGLE_TURN, call_text
from stenograph.text.renderer import Renderer

from .conftest import Live, ScriptedEngine, running

NAMES = {"cd", "ls"}


@pytest.fixture
async def wide(renderer: Renderer) -> AsyncIterator[Live]:
    """A server whose model has room for a million tokens: a tool's results may be long."""
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=1_000_000)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("cd", '{"folder": "a\'b"}', 'cd(folder="a\'b")'),
        ("ls", "", "ls()"),
        ("ls", '{"a": true, "b": [null, {"c": 1.5}]}', "ls(a=True,b=[None, {'c': 1.5}])"),
        ("rm", "{}", None),
        ("cd", '{"folder=__import__(\\"os\\").abort()#": 1}', None),
        ("cd", "[1]", None),
        ("cd", "{", None),
        ("cd", '{"a": ' + "[" * 100_000, None),
        ("__import__('os').abort", "{}", None),
    ],
)
def test_a_call_is_a_tool_with_literals_or_nothing(name: str, arguments: str, text: str | None) -> None:
    assert call_text({"name": name, "arguments": arguments}, NAMES) == text


def reply(text: str, functions: Sequence[dict[str, Any]]) -> str:
    """A call of the ground truth as the model would write it."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    (function,) = [one for one in functions if one["name"] == call.func.id]
    named = zip(function["parameters"]["properties"], call.args, strict=False)
    arguments = {name: ast.literal_eval(value) for name, value in named}
    arguments |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return f"<tool_call>\n{json.dumps({'name': call.func.id, 'arguments': arguments})}\n</tool_call>"


def script(live: Live, task: Task, *, leave_out: int = 0) -> int:
    """Have the engine call the ground truth but for its last calls; how many calls there are."""
    entry, truth = task.data  # type: ignore[misc]
    held_back = [one for later in entry.get("missed_function", {}).values() for one in later]
    functions = [*entry["function"], *held_back]
    num_calls = sum(map(len, truth))
    left = num_calls - leave_out
    for turn in truth:
        for text in turn[: max(0, left)]:
            live.says(reply(text, functions))
        left -= len(turn)
        live.says("Done.")
    return num_calls


@pytest.mark.envs
@pytest.mark.parametrize("category", MULTI_TURN)
async def test_the_ground_truth_gets_its_reward_and_less_does_not(wide: Live, category: str) -> None:
    made = environment(f"bfcl:{category}", {"chat": {"max_tokens": 9000}})
    tasks = made.tasks(limit=20, seed=None)
    assert len(made.tasks(limit=None, seed=None)) == 200
    async with Client(wide.url) as client:
        for task in tasks:
            async with client.session() as session:
                num_calls = script(wide, task)
                assert await made.run(task, session) == 1.0, task.id
                samples = await session.samples()
                num_turns = len(task.data[1])  # type: ignore[index]
                assert sum(len(sample.turns) for sample in samples) == num_calls + num_turns
                assert len(samples) == 1 + len(task.data[0].get("missed_function", ()))  # type: ignore[index]
            async with client.session() as session:
                script(wide, task, leave_out=num_calls)
                assert await made.run(task, session) == 0.0, task.id


@pytest.mark.envs
async def test_a_model_that_never_answers_has_failed(wide: Live) -> None:
    made = environment("bfcl:multi_turn_base", {})
    (task,) = made.tasks(limit=1, seed=None)
    for _ in range(30):
        wide.says('<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>')
    async with Client(wide.url) as client, client.session() as session:
        assert await made.run(task, session) == 0.0
        assert len(await session.ledger()) == 21


def answer(truth: Any) -> str:
    """The calls of an answer as the model would write them, each argument by its first possibility."""
    calls: list[dict[str, Any]] = [
        {"name": name.replace(".", "_"), "arguments": first([given])} for one in truth for name, given in one.items()
    ]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def first(values: Any) -> Any:
    """One value of the possible ones; within an object each key has possibilities of its own. "" is for left out."""
    found: Any = values[0]
    if isinstance(found, dict):
        named: dict[str, Any] = found
        return {key: first(value) for key, value in named.items() if first(value) != ""}
    if isinstance(found, list):
        listed: list[Any] = found
        return [first([one]) if isinstance(one, dict) else one for one in listed]
    return found


@pytest.mark.envs
@pytest.mark.parametrize("category", SINGLE_TURN)
async def test_a_right_call_gets_its_reward_and_another_does_not(wide: Live, category: str) -> None:
    made = environment(f"bfcl:{category}", {"chat": {"max_tokens": 9000}})
    async with Client(wide.url) as client:
        for task in made.tasks(limit=4, seed=None):
            entry, truth = task.data  # type: ignore[misc]
            name = entry["function"][0]["name"].replace(".", "_")
            call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
            wants_none = "irrelevance" in category
            right = "I cannot." if wants_none else call if truth is None else answer(truth)
            wrong = call if wants_none else "I cannot."
            for said, reward in ((right, 1.0), (wrong, 0.0)):
                wide.says(said)
                async with client.session() as session:
                    assert await made.run(task, session) == reward, (task.id, said)


@pytest.mark.envs
async def test_a_call_that_computes_without_end_ends_its_task_alone(
    wide: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stenograph.envs.bfcl.BOUNDS", replace(BOUNDS, cpu_s=3))
    made = environment("bfcl:multi_turn_base", {"chat": {"max_tokens": 9000}})
    (task,) = [
        one
        for one in made.tasks(limit=None, seed=None)
        if "MathAPI" in one.data[0]["involved_classes"]  # type: ignore[index]
    ][:1]
    wide.says('<tool_call>\n{"name": "power", "arguments": {"base": 9, "exponent": 9999999999}}\n</tool_call>')
    async with Client(wide.url) as client, client.session() as session:
        assert await made.run(task, session) == 0.0
