"""Batches of rollouts: groups, spares, failures, time limits, and nothing left behind."""

import asyncio
import io
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import numpy as np
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.client import (
    AgentFailure,
    BatchProgress,
    Client,
    InfraFailure,
    PrintedProgress,
    Rollout,
    RolloutSession,
    WrongRequest,
    silent,
)
from stenograph.core.errors import EngineUnavailable, UpstreamRefused
from stenograph.engine.base import GenerateRequest

from .conftest import END, Live, running, user

Serve = Callable[..., AbstractAsyncContextManager[Live]]

HANGS = 666
"""The seed of a turn that the engine never ends by itself."""


def model(request: GenerateRequest) -> Script:
    """Five tokens and an end, or, for the seed that hangs, three that nobody allows."""
    return Script(ids=(5, 6, 7), paused=True) if request.params.seed == HANGS else Script(ids=(5, 6, 7, 8, 9, END))


@pytest.fixture
async def live(serve: Serve, renderer: Any) -> Any:
    """A server whose engine answers every turn."""
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096, model=model)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


async def nothing_is_left(live: Live) -> None:
    """Wait until the engine runs nothing; then the server has no session."""
    await live.engine.idle()
    assert (await live.call("GET", "/sessions")).json()["sessions"] == []


class Agents:
    """Agents of two turns, of which some fail, and some hang in their first turn; the n-th of a task always does so."""

    def __init__(self, live: Live, *, failures: float, hangs: float) -> None:
        self.live, self.failures, self.hangs = live, failures, hangs
        self.num_begun: Counter[int] = Counter()
        self.num_hung = self.num_failed = 0

    async def __call__(self, task: int, session: RolloutSession) -> float:
        self.num_begun[task] += 1
        # Of this seed no group has more than four that hang.
        luck = random.Random(f"c{task} {self.num_begun[task]}").random()
        if luck < self.hangs:
            self.num_hung += 1
            await self.live.chat(session.id, user(f"task {task}"), seed=HANGS)
            raise AssertionError("it hangs")
        reply = await self.live.chat(session.id, user(f"task {task}"))
        if luck < self.hangs + self.failures:
            self.num_failed += 1
            raise ValueError("the agent broke")
        said = reply.json()["choices"][0]["message"]
        assert (await self.live.chat(session.id, user(f"task {task}"), said, user("more"))).status == 200
        return luck


async def test_256_rollouts_with_failures_hang_ups_and_over_sampling_leave_nothing(live: Live) -> None:
    agents = Agents(live, failures=0.2, hangs=0.1)
    async with Client(live.url) as client:
        batch = await client.rollouts(
            agents, range(32), group_size=8, spares=4, failed_reward=0.0, keep_groups=32, progress=silent, name="b"
        )
        await nothing_is_left(live)
    assert batch.is_complete
    assert (agents.num_hung > 15, agents.num_failed > 30) == (True, True)
    assert [group.name for group in batch.groups] == [f"b-{group.task}" for group in batch.groups]
    assert len({group.task for group in batch.groups}) == 32  # each once
    assert all(group.is_whole and len(group.rollouts) == 8 for group in batch.groups)
    assert len(batch.rollouts) == 256 == len({rollout.session_id for rollout in batch.rollouts})
    for rollout in batch.rollouts:
        is_failed = rollout.end == "agent_failed"
        assert isinstance(rollout.error, ValueError) if is_failed else rollout.end == "ok"
        assert (rollout.num_tries, rollout.reward == 0.0) == (1, is_failed)
        assert rollout.samples is not None
        (sample,) = rollout.samples
        assert sample.num_trained == (6 if is_failed else 12)  # one turn, or two
        assert (sample.reward, sample.metadata["group"]) == (rollout.reward, rollout.group)
    rest = [other for group in batch.groups for other in group.others]
    assert {other.end for other in rest} >= {"aborted"}
    assert all(other.samples is None for other in rest if other.end == "aborted")
    assert batch.others == ()


async def test_a_failed_agent_counts_with_the_reward_that_it_is_given(live: Live) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        await live.chat(session.id, user("hi"))
        if task == 0:
            raise ValueError("broke")
        if task == 1:
            raise AgentFailure("gave up", reward=-1.0)
        return 1.0

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, range(3), failed_reward=0.0, progress=silent)
        assert [rollout.reward for rollout in batch.rollouts] == [0.0, -1.0, 1.0]
        assert [str(rollout.error) for rollout in batch.rollouts] == ["broke", "gave up", "None"]
        assert [rollout.samples[0].outcome for rollout in batch.rollouts if rollout.samples] == [
            "agent_failed", "agent_failed", "ok",
        ]  # fmt: skip
        batch = await client.rollouts(agent, range(3), progress=silent)
        assert [group.task for group in batch.groups] == [2]
        assert not batch.is_complete
        await nothing_is_left(live)


@pytest.mark.parametrize("how", ["engine", "raised", "named"])
async def test_a_failure_of_the_infrastructure_is_run_again_in_a_new_session(live: Live, how: str) -> None:
    seen: list[str] = []

    async def agent(task: int, session: RolloutSession) -> float:
        seen.append(session.id)
        if how == "raised" and len(seen) < 3:
            raise InfraFailure("no container")
        if how == "named" and len(seen) < 3:
            raise LookupError("the tool's server")
        if (await live.chat(session.id, user("hi"))).status != 200:
            raise ValueError("the SDK's error")
        return 1.0

    if how == "engine":
        live.engine.plan(*(Script(ids=(5,), error=EngineUnavailable("gone")) for _ in range(2)))
    async with Client(live.url) as client:
        batch = await client.rollouts(agent, [0], infra_errors=(LookupError,), progress=silent)
        (rollout,) = batch.rollouts
        assert (rollout.end, rollout.num_tries, rollout.session_id) == ("ok", 3, seen[2])
        assert len(set(seen)) == 3
        seen.clear()
        if how == "engine":
            live.engine.plan(Script(ids=(5,), error=EngineUnavailable("gone")))
        batch = await client.rollouts(agent, [0], infra_errors=(LookupError,), infra_retries=0, progress=silent)
        ((lost,),) = (group.others for group in batch.others)
        assert (lost.end, lost.reward, lost.samples) == ("infra_failed", None, None)
        await nothing_is_left(live)


async def test_a_server_that_is_gone_is_no_fault_of_the_agent(live: Live, serve: Serve) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        await session.delete()
        raise ValueError("the SDK's error")

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, [0], progress=silent)
    ((lost,),) = (group.others for group in batch.others)
    assert (lost.end, lost.num_tries) == ("infra_failed", 3)


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_a_busy_engine_is_no_fault_of_the_agent(live: Live, status: int) -> None:
    refused = UpstreamRefused(status=status, content_type="application/json", headers=(), body=b"{}")
    live.engine.plan(Script(ids=(5,), error=refused))

    async def agent(task: int, session: RolloutSession) -> float:
        answer = await live.call("POST", f"/sessions/{session.id}/v1/chat/completions", {"messages": [user("a")]})
        raise ValueError(f"the SDK's error of {answer.status}")

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, [0], infra_retries=0, progress=silent)
    ((lost,),) = (group.others for group in batch.others)
    assert lost.end == "infra_failed"


async def test_an_agent_that_is_too_late_has_failed(live: Live) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        await live.chat(session.id, user("hi"), seed=HANGS if task else None)
        return 1.0

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, range(2), timeout_s=2.0, progress=silent)
        await nothing_is_left(live)
    ((late,),) = (group.others for group in batch.others)
    assert (late.task, late.end, type(late.error)) == (1, "agent_failed", TimeoutError)


@pytest.mark.parametrize("partial", ["drop", "keep"])
async def test_a_rollout_that_is_not_needed_any_more_keeps_what_it_sampled_if_asked(live: Live, partial: Any) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        if task == 0:
            await live.engine.begun(1)
            live.engine.step(2)
            while sum(map(len, live.engine.drawn.values())) < 2:  # noqa: ASYNC110 - the engine has no word for it
                await asyncio.sleep(0)
        await live.chat(session.id, user("hi"), seed=HANGS if task else None)
        return 1.0

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, [1, 0], keep_groups=1, partial=partial, progress=silent)
        await nothing_is_left(live)
    assert [group.task for group in batch.groups] == [0]
    ((rollout,),) = (group.others for group in batch.others)
    assert rollout.end == "aborted"
    if partial == "keep":
        assert rollout.samples is not None
        assert [(one.status, one.num_trained, one.outcome) for one in rollout.samples] == [("aborted", 2, "aborted")]
    else:
        assert rollout.samples is None


async def test_a_cancelled_batch_leaves_nothing(live: Live) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        await live.chat(session.id, user("hi"), seed=HANGS)
        return 1.0

    async with Client(live.url) as client:
        task = asyncio.create_task(client.rollouts(agent, range(5), progress=silent))
        await live.engine.begun(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await nothing_is_left(live)


async def test_groups_that_cannot_become_whole_are_given_up_for_others(live: Live) -> None:
    turns = itertools.count()

    async def agent(task: int, session: RolloutSession) -> float:
        next(turns)
        if task < 2:
            raise ValueError("always")
        return 1.0

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, range(4), group_size=4, keep_groups=2, concurrency=1, progress=silent)
    assert [group.task for group in batch.groups] == [2, 3]
    assert next(turns) == 1 + 1 + 4 + 4


async def test_progress_is_told_as_a_value_and_as_a_line(live: Live) -> None:
    seen: list[BatchProgress] = []

    async def agent(task: int, session: RolloutSession) -> dict[str, float]:
        if task == 1:
            raise ValueError("broke")
        return {"tests": 1.0}

    async with Client(live.url) as client:
        await client.rollouts(agent, range(3), concurrency=2, progress=seen.append)
    assert max(progress.num_running for progress in seen) == 2
    assert str(seen[-1]) == "rollouts: 2 of 3 groups, 2 ok, 1 failed, 0 running"
    assert [progress.is_over for progress in seen] == [False] * (len(seen) - 1) + [True]
    stream = io.StringIO()
    printed = PrintedProgress(stream)
    for progress in seen:
        printed(progress)
    *told, last = stream.getvalue().splitlines()
    assert last == str(seen[-1])  # no terminal: the other lines are not due
    assert told[0] == "the first rollout that failed:"
    assert re.search(r", in agent$", told[2])  # the traceback begins in the agent
    assert (told[-1], seen[-1].num_distinct_errors) == ("ValueError: broke", 1)


async def test_a_batch_says_why_its_agents_fail(live: Live) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        if task == 0:
            raise LookupError(f"no item in {session.id}")
        if task < 4:
            raise ValueError(f"broke in {session.id}")
        return 1.0

    stream = io.StringIO()
    async with Client(live.url) as client:
        batch = await client.rollouts(agent, range(5), concurrency=1, progress=PrintedProgress(stream))
    assert [(type(one.error), one.count, dict(one.ends)) for one in batch.errors()] == [
        (ValueError, 3, {"agent_failed": 3}),
        (LookupError, 1, {"agent_failed": 1}),
    ]
    told = stream.getvalue()
    assert told.index("no item in") < told.index("rollouts: 1 of 5 groups")
    assert "raise LookupError" in told
    assert "raise ValueError" not in told
    assert told.endswith("2 distinct errors: batch.errors() has them all\n")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks": "abc"}, r"tasks is one str, 'abc': give a list, such as \['abc'\]"),
        ({"tasks": {"question": 1}}, "tasks is one dict"),
        ({"tasks": 3}, "tasks is 3, of int: give a list"),
        ({"agent": "agent"}, "agent must be callable, got 'agent'"),
        ({"progress": 1}, "progress must be callable"),
        ({"session": "s"}, "session must be a mapping"),
        ({"samples": ["max_seq_len"]}, "samples must be a mapping"),
        ({"group_size": "8"}, "group_size must be an int, got '8'"),
        ({"spares": True}, "spares must be an int, got True"),
        ({"concurrency": None}, "concurrency must be an int, got None"),
        ({"keep_groups": 1.0}, "keep_groups must be an int"),
        ({"timeout_s": "60"}, "timeout_s must be a number, got '60'"),
        ({"name": 7}, "name must be a str, got 7"),
        ({"infra_errors": LookupError}, "infra_errors must be a tuple of exception classes"),
        ({"failed_reward": "much"}, "failed_reward: a reward is a number"),
        ({"groupsize": 8}, "rollouts has no option groupsize; it has group_size, "),
    ],
)
async def test_arguments_of_another_type_are_an_error_before_anything_runs(wrong: dict[str, Any], message: str) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        raise AssertionError("it must not run")

    async with Client("http://127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=message):
            await client.rollouts(**{"agent": agent, "tasks": range(3), "progress": silent, **wrong})


async def test_an_agent_that_is_no_async_function_is_an_error_of_the_batch(live: Live) -> None:
    def agent(task: int, session: RolloutSession) -> Any:
        return 1.0

    async with Client(live.url) as client:
        with pytest.raises(TypeError, match=r"returned 1\.0, which cannot be awaited.*SyncClient"):
            await client.rollouts(agent, range(3), progress=silent)
    await nothing_is_left(live)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"keep_groups": 0}, "keep_groups must be at least 1"),
        ({"keep_groups": 4}, "keep_groups is 4, but there are 3 tasks"),
        ({"timeout_s": 0.0}, "timeout_s must be above 0"),
        ({"partial": "some"}, "partial must be 'drop' or 'keep'"),
    ],
)
async def test_options_that_make_no_batch_are_refused(options: Any, message: str) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        return 1.0

    async with Client("http://127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=message):
            await client.rollouts(agent, range(3), **options)


async def test_a_call_of_the_batch_that_the_server_refuses_is_raised_once(live: Live) -> None:
    async def agent(task: int, session: RolloutSession) -> float:
        await live.chat(session.id, user("hi"))
        return 1.0

    async with Client(live.url) as client:
        with pytest.raises(WrongRequest, match="max_turns"):
            await client.rollouts(agent, range(3), session={"max_turns": 0}, progress=silent)
        with pytest.raises(WrongRequest, match="max_seq_len"):
            await client.rollouts(agent, range(3), samples={"max_seq_len": 0}, progress=silent)
        await nothing_is_left(live)
    with pytest.raises(RuntimeError, match="async with"):
        await Client(live.url).rollouts(agent, range(3), progress=silent)


@pytest.mark.parametrize("reward", [float("nan"), "much", {"a": None}, [1.0]])
async def test_a_reward_that_is_none_is_the_agent_s_failure(live: Live, reward: Any) -> None:
    async def agent(task: int, session: RolloutSession) -> Any:
        await live.chat(session.id, user("hi"))
        if task == 0:
            raise AgentFailure("gave up", reward=reward)
        return reward if task == 1 else np.float32(0.5)

    async with Client(live.url) as client:
        batch = await client.rollouts(agent, range(3), progress=silent)
        async with client.session() as session:
            with pytest.raises(ValueError, match="a reward is"):
                await session.outcome(reward)
    assert [rollout.reward for rollout in batch.rollouts] == [0.5]
    assert [type(other.error) for group in batch.others for other in group.others] == [ValueError, ValueError]


def test_a_rollout_is_a_value() -> None:
    rollout = Rollout(
        task=1, group="g", session_id=None, end="ok", reward=None, error=None, samples=None, seconds=0.0, num_tries=1
    )
    with pytest.raises(AttributeError):
        rollout.reward = 1.0  # type: ignore[misc]
