"""The shape of an environment, and the table of those by others.

An environment has tasks, and runs an agent on one of them in a session; the reward is its word. It needs nothing of
ours but the session's address, so any agent loop fits: an SDK, a harness as a command, a simulator with tools.
"""

import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession
from stenograph.core.loaded import entry


class WrongEnvironment(Exception):
    """An environment is not there, lacks a package or an option, or is none. The message is a line with the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task. `id` names its group and its files: the same task has the same id in every run. `data` is the
    environment's own."""

    id: str
    data: object


class Environment(Protocol):
    """Tasks, and how one is run."""

    def tasks(self, *, limit: int | None, seed: int | None) -> Sequence[Task]:
        """The tasks, at most `limit`, the same for the same seed. Raises WrongEnvironment, also for a useless seed."""
        ...

    async def run(self, task: Task, session: RolloutSession) -> Reward | None:
        """Run an agent on the task with the session's address; its reward, None if there is none.

        Whatever it raises ends the rollout as failed: by the agent, or by infrastructure where the server's last
        answer says so (`stenograph.client`).
        """
        ...


ENVIRONMENTS: Mapping[str, str] = {
    "bfcl": "stenograph.envs.bfcl:Bfcl",
    "inspect": "stenograph.envs.inspect_tasks:Inspect",
    "reasoning-gym": "stenograph.envs.reasoning_gym:ReasoningGym",
    "verifiers": "stenograph.envs.verifiers:Verifiers",
}
"""Environments by others, each with an extra of its name: the entries of their makers, called with the text after the
colon and the options."""

NAMES = ", ".join([*(f"{name}:NAME" for name in ENVIRONMENTS), "a .py file"])


def environment(spec: str, options: Mapping[str, object]) -> Environment:
    """The environment of a text: `NAME:WHICH` of the table, or the path of a Python file. Raises WrongEnvironment."""
    name, _, which = spec.partition(":")
    if name in ENVIRONMENTS:
        try:
            maker = entry(ENVIRONMENTS[name])
        except ImportError as error:
            raise WrongEnvironment(
                f"{name} is not there ({error}): install the extra [{name}] of stenograph"
            ) from error
        made: Environment = maker(which, options)
        return made
    if not spec.endswith(".py"):
        raise WrongEnvironment(f"there is no environment {spec!r}; possible are {NAMES}")
    if options:
        raise WrongEnvironment(f"{spec} takes no options: a Python file has its own")
    return PythonFile(Path(spec))


class PythonFile:
    """A Python file as an environment: `tasks` gives values that JSON can hold, `async run(task, session)` the reward;
    with `retraces = True` its rollouts can have branches (branches.py).

    A task is named by its place, or by its `id` where it is a mapping with one.
    """

    def __init__(self, path: Path) -> None:
        """Runs the file. Raises WrongEnvironment for one without the two functions, or that raises."""
        module = _module(path)
        self._tasks = cast("Callable[[], Sequence[Any]] | None", getattr(module, "tasks", None))
        self._run = cast("Callable[[object, RolloutSession], Awaitable[Reward | None]]", getattr(module, "run", None))
        self._path = path
        self.retraces = getattr(module, "retraces", False) is True
        if not callable(self._tasks) or not inspect.iscoroutinefunction(self._run):
            raise WrongEnvironment(f"{path} is no environment: it needs def tasks() and async def run(task, session)")

    def __repr__(self) -> str:
        return f"<PythonFile {self._path}>"

    def tasks(self, *, limit: int | None, seed: int | None) -> Sequence[Task]:
        """Its tasks, in its order. Raises WrongEnvironment for a seed: the file has no place for one."""
        check_no_seed(str(self._path), seed)
        assert self._tasks is not None
        found = list(self._tasks())[:limit]
        return [Task(id=_id_of(one, index), data=one) for index, one in enumerate(found)]

    async def run(self, task: Task, session: RolloutSession) -> Reward | None:
        """The reward of its `run`, given the value that its `tasks` had."""
        return await self._run(task.data, session)


def check_no_seed(name: str, seed: int | None) -> None:
    """Raise WrongEnvironment for a seed: the environment has one order."""
    if seed is not None:
        raise WrongEnvironment(f"{name} takes no seed: its tasks come in its own order")


def chat_fields(options: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of each request, under `chat` among the options. Raises WrongEnvironment unless they are an object."""
    fields = options.get("chat", {"max_tokens": 1024})
    if not isinstance(fields, Mapping):
        raise WrongEnvironment(f'chat is an object of request fields, such as {{"max_tokens": 200}}, got {fields!r}')
    return cast("Mapping[str, object]", fields)


def _id_of(task: object, index: int) -> str:
    named = cast("Mapping[str, object]", task).get("id") if isinstance(task, Mapping) else None
    return str(index if named is None else named)


def _module(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"environment {path.stem}", path)
    if found is None or found.loader is None or not path.is_file():
        raise WrongEnvironment(f"{path} is no file")
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)  # dataclasses look for it there
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise WrongEnvironment(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module
