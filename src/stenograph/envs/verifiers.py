"""Environments of verifiers (PyPI `verifiers`, its v1 stack): tasksets and harnesses, run as `vf-eval` would run them.

`verifiers:NAME` is an installed taskset. Options are its own configuration, the `[env]` block, such as `{"taskset":
{…}, "agent": {"harness": {"id": "null"}}}`; under `chat` are the fields of a request. Each episode has a process of its
own (`envs/apart`), so its endpoint and key are its session's. The reward is that of the trained traces, by name where
there are several.
"""

import asyncio
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession
from stenograph.envs.apart import apart
from stenograph.envs.base import Task, WrongEnvironment, chat_fields

KEY = "STENOGRAPH_SESSION_API_KEY"
"""The environment variable with the session's key. Harnesses do not get it: verifiers leaves out names with API_KEY."""

vf: Any = importlib.import_module("verifiers.v1")


class Verifiers:
    """One taskset, with its agents."""

    def __init__(self, which: str, options: Mapping[str, object]) -> None:
        """Raises WrongEnvironment without the taskset, and for a wrong configuration."""
        self._which, self._chat = which, dict(chat_fields(options))
        given = {name: value for name, value in options.items() if name != "chat"}
        given["taskset"] = {**cast("Mapping[str, object]", given.get("taskset", {})), "id": which}
        try:
            self._config = _local(given)
            self._taskset: Any = vf.load_environment(vf.resolve_env_config(self._config)).taskset
            vf.SamplingConfig(**self._chat)
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise WrongEnvironment(f"verifiers:{which}: {error}") from error

    def __repr__(self) -> str:
        return f"<Verifiers {self._which}>"

    def tasks(self, *, limit: int | None, seed: int | None) -> Sequence[Task]:
        """The tasks in the taskset's order, or shuffled by the seed. Raises WrongEnvironment if they have no end."""
        view = self._taskset
        try:
            view = view if seed is None else view.shuffle(seed)
            view = view if limit is None else view.take(limit)
        except ValueError as error:
            raise WrongEnvironment(f"verifiers:{self._which} takes no seed: {error}") from error
        if not view.bounded:
            raise WrongEnvironment(f"verifiers:{self._which} has tasks without end: give --num-tasks")
        return [Task(id=one.data.id or f"{one.data.idx}-{one.key[:16]}", data=one) for one in view]

    async def run(self, task: Task, session: RolloutSession) -> Reward | None:
        """One episode; its reward as verifiers found it."""
        given = self._config, self._chat, session.base_url, session.api_key
        async with apart("stenograph.envs.verifiers:VerifiersEpisode", *given) as episode:
            return cast("Reward | None", await episode.call("run", task.data))


def _local(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with each agent on this machine unless it says where: verifiers would take a paid sandbox."""
    found = dict(config)
    of_env = vf.env_config_type(found["taskset"]["id"], found.get("id", ""))
    for name, field in of_env.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            found[name] = {"runtime": {"type": "subprocess"}, **found.get(name, {})}
    return found


class VerifiersEpisode:
    """The environment in an episode's own process, before a session."""

    def __init__(self, config: Mapping[str, object], chat: Mapping[str, object], url: str, key: str) -> None:
        os.environ[KEY] = key
        self._env = vf.load_environment(vf.resolve_env_config(dict(config)))
        client = vf.EvalClientConfig(base_url=url, api_key_var=KEY)
        self._context = vf.ModelContext(model="any", client=client, sampling=vf.SamplingConfig(**chat))

    def run(self, task: Any) -> Reward | None:
        """Play the task. Raises RuntimeError with the last error of an episode that failed."""
        return asyncio.run(self._run(task))

    async def _run(self, task: Any) -> Reward | None:
        async with self._env.serving():
            (slot,) = self._env.slots(task)
            episode = await self._env.run_slot(slot, self._context)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not whole")
        found: dict[str, float] = {}
        for trace in episode.traces:
            scores = trace.rewards.items() if trace.agent.trainable else ()
            for name, reward in scores:
                found[name] = found.get(name, 0.0) + (0.0 if reward is None else reward.value)
        return sum(found.values()) if len(found) == 1 else found or None
