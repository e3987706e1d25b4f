"""The multi-turn tasks of the Berkeley Function-Calling Leaderboard v4 (PyPI `bfcl-eval`), with its own simulators.

`bfcl:multi_turn_base` and its kin: a user's messages turn by turn, tools of simulated services (files, tickets, cars, a
trading desk). The reward is 1 where the package's `multi_turn_checker` finds the services in the state of its ground
truth after each turn, and the results that it wants; else 0. The loop is that of its `base_handler` for calling models:
at most 20 steps a turn, then the task has failed.

The simulators evaluate calls as Python text: a call gets there only with the name of a tool and literals as arguments.
"""

import asyncio
import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession
from stenograph.envs.base import Task, WrongEnvironment, chat_fields, check_no_seed
from stenograph.envs.chat import SessionChat, chat

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")


@dataclass(frozen=True, slots=True)
class Bench:
    """The used modules of the package."""

    utils: Any
    prompts: Any
    types: Mapping[str, str]
    simulators: Any
    checker: Any


def _bench() -> Bench:
    """The package. Raises WrongEnvironment where it is not there. It makes folders for results when it is imported."""
    if "BFCL_PROJECT_ROOT" not in os.environ:
        os.environ["BFCL_PROJECT_ROOT"] = tempfile.mkdtemp(prefix="bfcl-")
    try:
        return Bench(
            utils=importlib.import_module("bfcl_eval.utils"),
            prompts=importlib.import_module("bfcl_eval.constants.default_prompts"),
            types=importlib.import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI,
            simulators=importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"),
            checker=importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"),
        )
    except ImportError as error:
        raise WrongEnvironment(
            f"bfcl-eval is not there ({error}): pip install -e '.[bfcl]', and the wheel bfcl-eval with --no-deps"
        ) from error


class Bfcl:
    """One category."""

    def __init__(self, which: str, options: Mapping[str, object]) -> None:
        """Raises WrongEnvironment without the package, for another category and another option."""
        if which not in CATEGORIES:
            raise WrongEnvironment(f"there is no bfcl:{which}; there are {', '.join(CATEGORIES)}")
        if unknown := sorted(set(options) - {"chat"}):
            raise WrongEnvironment(f"bfcl has no option {', '.join(unknown)}; it has chat")
        self._which = which
        self._fields = chat_fields(options)
        self._bench = _bench()

    def __repr__(self) -> str:
        return f"<Bfcl {self._which}>"

    def tasks(self, *, limit: int | None, seed: int | None) -> Sequence[Task]:
        """The category's tasks (200), in the package's order. Raises WrongEnvironment for a seed."""
        check_no_seed("bfcl", seed)
        entries = self._bench.utils.load_dataset_entry(self._which)
        truths = {one["id"]: one["ground_truth"] for one in self._bench.utils.load_ground_truth_entry(self._which)}
        return [Task(id=one["id"], data=(one, truths[one["id"]])) for one in entries[:limit]]

    async def run(self, task: Task, session: RolloutSession) -> Reward:
        """Play all turns; 1.0 or 0.0 by the package's check. Simulators run on threads."""
        entry, truth = cast("tuple[dict[str, Any], list[list[str]]]", task.data)
        play = TaskPlay(self._bench, deepcopy(entry), name=f"session_{session.id}")
        with play.simulated():
            async with chat(session, self._fields) as talk:
                if not await play.run(talk):
                    return 0.0
            return float(await asyncio.to_thread(play.is_right, truth))


@dataclass(slots=True)
class TaskPlay:
    """One task being played. `calls` are those of each turn, by step, as the check wants them. `name` keeps this
    session's simulators apart: the package has them by name."""

    bench: Bench
    entry: dict[str, Any]
    name: str
    calls: list[list[list[str]]] = field(default_factory=list[list[list[str]]])

    @contextlib.contextmanager
    def simulated(self) -> Generator[None]:
        """While inside, the simulators are there; the package keeps them among its globals."""
        try:
            yield
        finally:
            kept = cast("dict[str, object]", vars(self.bench.simulators))
            for name in [name for name in [*kept] if name.startswith(self.name)]:  # other sessions' threads add to it
                del kept[name]

    async def run(self, talk: SessionChat) -> bool:
        """Play the turns; False where one took too many steps."""
        messages: list[Mapping[str, object]] = []
        functions: list[dict[str, Any]] = self.entry["function"]
        said_with_more = self.bench.prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
        for number, asked in enumerate(cast("list[list[dict[str, object]]]", self.entry["question"])):
            later = self.entry.get("missed_function", {}).get(str(number), ())
            functions = [*functions, *later]
            messages += [{"role": "user", "content": said_with_more}] if later else asked
            if not await self._turn(talk, messages, functions):
                return False
        return True

    async def _turn(
        self, talk: SessionChat, messages: list[Mapping[str, object]], functions: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Let the model call until it answers; whether it did in time."""
        tools, names = [self._tool(one) for one in functions], {str(one["name"]) for one in functions}
        steps: list[list[str]] = []
        self.calls.append(steps)
        for _ in range(self.bench.prompts.MAXIMUM_STEP_LIMIT + 1):
            said = await talk.say(messages, tools=tools)
            messages.append(said)
            asked = cast("list[dict[str, Any]]", said.get("tool_calls") or ())
            if not asked:
                return True
            texts = [call_text(one["function"], names) for one in asked]
            good = [text for text in texts if text is not None]
            results = iter(await asyncio.to_thread(self._execute, good))
            steps.append(good)
            for one, text in zip(asked, texts, strict=True):
                content = "Error: no such function, or arguments that are no object" if text is None else next(results)
                messages.append({"role": "tool", "tool_call_id": one["id"], "content": content})
        return False

    def _execute(self, calls: Sequence[str]) -> list[str]:
        """Run calls in this session's simulators; their results as text."""
        results, _ = self.bench.simulators.execute_multi_turn_func_call(
            list(calls),
            self.entry.get("initial_config", {}),
            self.entry["involved_classes"],
            self.name,
            self.entry["id"],
            long_context="long_context" in self.entry["id"],
        )
        return cast("list[str]", results)

    def is_right(self, truth: Sequence[Sequence[str]]) -> bool:
        """The package's word on all turns."""
        category = str(self.entry["id"]).rpartition("_")[0]
        found = self.bench.checker.multi_turn_checker(self.calls, truth, self.entry, category, self.name)
        return bool(found["valid"])

    def _tool(self, function: Mapping[str, Any]) -> dict[str, object]:
        shown = {name: function[name] for name in ("name", "description")}
        return {"type": "function", "function": {**shown, "parameters": self._schema(function["parameters"])}}

    def _schema(self, schema: object) -> object:
        """A JSON Schema of the package's own: its types have other names."""
        if isinstance(schema, list):
            return [self._schema(one) for one in cast("list[object]", schema)]
        if not isinstance(schema, dict):
            return schema
        found = {name: self._schema(value) for name, value in cast("dict[str, object]", schema).items()}
        if isinstance(kind := found.get("type"), str):
            found["type"] = self.bench.types.get(kind, "string")
        return found


def call_text(function: Mapping[str, Any], names: set[str]) -> str | None:
    """A call as Python text, `name(key=literal, …)`; None for an unknown name and arguments other than an object of
    identifiers. Nothing of the model's text stands outside of a literal."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None
    if function["name"] not in names or not isinstance(arguments, dict):
        return None
    named = cast("dict[str, object]", arguments)
    if not all(key.isidentifier() for key in named):
        return None
    return f"{function['name']}({','.join(f'{key}={value!r}' for key, value in named.items())})"
