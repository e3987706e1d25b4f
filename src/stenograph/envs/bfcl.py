"""Tasks of the Berkeley Function-Calling Leaderboard v4 (PyPI `bfcl-eval`), with its own simulators and checks.

`bfcl:multi_turn_base` and its kin: a user's messages turn by turn, tools of simulated services (files, tickets, cars, a
trading desk). The reward is 1 where the package's `multi_turn_checker` finds the services in the state of its ground
truth after each turn, and the results that it wants; else 0. The loop is that of its `base_handler` for calling models:
at most 20 steps a turn, then the task has failed. `bfcl:simple_python` and its kin: one request, whose calls the
package's `ast_checker` compares with its answers.

A call gets to the simulators only with the name of a tool and literals as arguments, and into a process with bounds
(`envs/apart`): a task with a call beyond them has failed.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession
from stenograph.envs.apart import Apart, ApartTooMuch, Bounds, apart, started
from stenograph.envs.base import Task, WrongEnvironment, chat_fields, check_no_seed
from stenograph.envs.chat import SessionChat, chat

MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
SINGLE_TURN = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
BOUNDS = Bounds(cpu_s=30, call_s=60, memory_bytes=1 << 30)
"""Those of a task's calls and its check."""

JUDGE = "stenograph.envs.bfcl_judge:BfclJudge"


class Bfcl:
    """One category."""

    def __init__(self, which: str, options: Mapping[str, object]) -> None:
        """Raises WrongEnvironment without the package, for another category and another option."""
        if which not in MULTI_TURN + SINGLE_TURN:
            raise WrongEnvironment(f"there is no bfcl:{which}; there are {', '.join(MULTI_TURN + SINGLE_TURN)}")
        if unknown := sorted(set(options) - {"chat"}):
            raise WrongEnvironment(f"bfcl has no option {', '.join(unknown)}; it has chat")
        if importlib.util.find_spec("bfcl_eval") is None:
            raise WrongEnvironment(
                "bfcl-eval is not there: pip install -e '.[bfcl]', and the wheel bfcl-eval with --no-deps"
            )
        self._which = which
        self._fields = chat_fields(options)

    def __repr__(self) -> str:
        return f"<Bfcl {self._which}>"

    def tasks(self, *, limit: int | None, seed: int | None) -> Sequence[Task]:
        """The category's tasks, in the package's order. Raises WrongEnvironment for a seed."""
        check_no_seed("bfcl", seed)
        with started(JUDGE) as judge:
            found = cast("list[tuple[Mapping[str, Any], object]]", judge.call_now("tasks", self._which, limit))
        return [Task(id=one["id"], data=(one, truth)) for one, truth in found]

    async def run(self, task: Task, session: RolloutSession) -> Reward:
        """Play the task; 1.0 or 0.0 by the package's check."""
        entry, truth = cast("tuple[dict[str, Any], object]", task.data)
        async with apart(JUDGE, bounds=BOUNDS) as judge, chat(session, self._fields) as talk:
            try:
                if self._which in SINGLE_TURN:
                    return await single_turn(judge, talk, entry, truth, self._which)
                play = TaskPlay(judge, entry)
                return float(await play.run(talk) and await judge.call("turns_are_right", entry, play.calls, truth))
            except ApartTooMuch:
                return 0.0


async def single_turn(judge: Apart, talk: SessionChat, entry: Mapping[str, Any], truth: object, category: str) -> float:
    """Ask once; whether the calls are those of an answer."""
    tools = await judge.call("tools", entry["function"])
    said = await talk.say(entry["question"][0], tools=tools)
    calls = [one["function"] for one in cast("list[dict[str, Any]]", said.get("tool_calls") or ())]
    given = [call_arguments(one) for one in calls]
    if None in given:
        return 0.0
    named = [{one["name"]: arguments} for one, arguments in zip(calls, given, strict=True)]
    return float(await judge.call("calls_are_right", entry, category, named, truth))


@dataclass(slots=True)
class TaskPlay:
    """A task of several turns, being played. `calls` are those of each turn, by step, as the check wants them."""

    judge: Apart
    entry: Mapping[str, Any]
    calls: list[list[list[str]]] = field(default_factory=list[list[list[str]]])

    async def run(self, talk: SessionChat) -> bool:
        """Play the turns; False where one took too many steps."""
        said_with_more, max_steps = cast("tuple[str, int]", await self.judge.call("rules"))
        messages: list[Mapping[str, object]] = []
        functions: list[dict[str, Any]] = self.entry["function"]
        for number, asked in enumerate(cast("list[list[dict[str, object]]]", self.entry["question"])):
            later = self.entry.get("missed_function", {}).get(str(number), ())
            functions = [*functions, *later]
            messages += [{"role": "user", "content": said_with_more}] if later else asked
            if not await self._turn(talk, messages, functions, max_steps):
                return False
        return True

    async def _turn(
        self,
        talk: SessionChat,
        messages: list[Mapping[str, object]],
        functions: Sequence[Mapping[str, Any]],
        max_steps: int,
    ) -> bool:
        """Let the model call until it answers; whether it did in time."""
        tools, names = await self.judge.call("tools", functions), {str(one["name"]) for one in functions}
        steps: list[list[str]] = []
        self.calls.append(steps)
        for _ in range(max_steps + 1):
            said = await talk.say(messages, tools=tools)
            messages.append(said)
            asked = cast("list[dict[str, Any]]", said.get("tool_calls") or ())
            if not asked:
                return True
            texts = [call_text(one["function"], names) for one in asked]
            good = [text for text in texts if text is not None]
            results = iter(cast("list[str]", await self.judge.call("execute", self.entry, good)))
            steps.append(good)
            for one, text in zip(asked, texts, strict=True):
                content = "Error: no such function, or arguments that are no object" if text is None else next(results)
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": content})
        return False


def call_arguments(function: Mapping[str, Any]) -> dict[str, object] | None:
    """The arguments of a call; None where they are no object."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", arguments) if isinstance(arguments, dict) else None


def call_text(function: Mapping[str, Any], names: set[str]) -> str | None:
    """A call as Python text, `name(key=literal, …)`; None for an unknown name and arguments other than an object of
    identifiers. Nothing of the model's text stands outside of a literal."""
    named = call_arguments(function)
    if named is None or function["name"] not in names or not all(key.isidentifier() for key in named):
        return None
    return f"{function['name']}({','.join(f'{key}={value!r}' for key, value in named.items())})"
