"""Tasks of inspect-ai (PyPI `inspect-ai`): a dataset's samples, its solvers as agents, its scores as rewards.

`inspect:FILE.py@TASK`, or `inspect:PACKAGE/TASK` of an installed package such as inspect-evals. Options: `task`, the
task's arguments; `chat`, fields of inspect's GenerateConfig; `limits` of a sample (`message_limit`, `turn_limit`, …);
`roles`, models by role, such as a grader's: without it a scorer that asks a model asks the session's. inspect runs one
evaluation in a process, so each sample has a process of its own (`envs/apart`).
"""

import contextlib
import importlib
import math
import tempfile
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession
from stenograph.envs.apart import ApartFailed, apart, started
from stenograph.envs.base import Task, WrongEnvironment, chat_fields

MAKER = "stenograph.envs.inspect_tasks:InspectEval"
LIMITS = ("message_limit", "token_limit", "turn_limit", "time_limit", "working_limit")

inspect_ai: Any = importlib.import_module("inspect_ai")
for _part in ("model", "scorer"):
    importlib.import_module(f"inspect_ai.{_part}")


class Inspect:
    """One task of inspect's, with the samples of its dataset as tasks."""

    def __init__(self, which: str, options: Mapping[str, object]) -> None:
        """Raises WrongEnvironment for another option."""
        if unknown := sorted(set(options) - {"task", "chat", "limits", "roles"}):
            raise WrongEnvironment(f"inspect has no option {', '.join(unknown)}; it has task, chat, limits, roles")
        limits = cast("Mapping[str, object]", options.get("limits", {}))
        if unknown := sorted(set(limits) - set(LIMITS)):
            raise WrongEnvironment(f"inspect has no limit {', '.join(unknown)}; it has {', '.join(LIMITS)}")
        chat = chat_fields(options)
        if unknown := sorted(set(chat) - set(inspect_ai.model.GenerateConfig.model_fields)):
            raise WrongEnvironment(f"inspect has no request field {', '.join(unknown)}: see its GenerateConfig")
        self._which = which
        self._given: dict[str, object] = {
            "task_args": options.get("task", {}),
            "model_roles": options.get("roles"),
            "max_retries": 5,
            **chat,
            **limits,
        }

    def __repr__(self) -> str:
        return f"<Inspect {self._which}>"

    def tasks(self, *, limit: int | None, seed: int | None) -> Sequence[Task]:
        """The dataset's samples, in its order or shuffled by the seed. Raises WrongEnvironment without the task."""
        try:
            with started(MAKER, self._which, self._given) as dataset:
                ids = cast("list[int | str]", dataset.call_now("sample_ids", limit, seed))
        except ApartFailed as error:
            raise WrongEnvironment(f"inspect:{self._which}: {error}") from error
        return [Task(id=str(one), data=one) for one in ids]

    async def run(self, task: Task, session: RolloutSession) -> Reward | None:
        """One sample, solved and scored: a number, or numbers by scorer; None where a score is none."""
        async with apart(MAKER, self._which, self._given) as made:
            return cast("Reward | None", await made.call("score", task.data, session.base_url, session.api_key))


class InspectEval:
    """An evaluation in a process of its own."""

    def __init__(self, which: str, given: Mapping[str, Any]) -> None:
        self._which, self._given = which, given

    def sample_ids(self, limit: int | None, seed: int | None) -> Sequence[int | str]:
        """The ids of the dataset's samples."""
        with self._log(model=None, run_samples=False, limit=limit, sample_shuffle=seed) as log:
            return cast("Sequence[int | str]", log.eval.dataset.sample_ids)

    def score(self, sample_id: int | str, url: str, key: str) -> Reward | None:
        """Evaluate one sample before a session. Raises RuntimeError for a sample with an error."""
        model = inspect_ai.model.get_model("openai-api/stenograph/any", base_url=url, api_key=key)
        with self._log(model=model, sample_id=sample_id) as log:
            (sample,) = log.samples
        if sample.error is not None:
            raise RuntimeError(sample.error.message)
        to_float = inspect_ai.scorer.value_to_float()
        found: dict[str, float] = {}
        for scorer, score in cast("Mapping[str, Any]", sample.scores or {}).items():
            value = cast("object", score.value)
            if isinstance(value, dict):
                named = cast("dict[str, object]", value)
                found.update({f"{scorer}.{name}": to_float(one) for name, one in named.items()})
            else:
                found[scorer] = to_float(value)
        if any(map(math.isnan, found.values())):
            return None
        return next(iter(found.values())) if len(found) == 1 else found or None

    @contextlib.contextmanager
    def _log(self, **more: object) -> Generator[Any]:
        """The log of an evaluation, to be read inside. Raises RuntimeError for one that failed."""
        with tempfile.TemporaryDirectory() as folder:
            logs = inspect_ai.eval(self._which, display="none", log_dir=folder, **self._given, **more)
            if len(logs) != 1:
                raise RuntimeError(f"{len(logs)} tasks have this name: name one, as FILE.py@TASK")
            if logs[0].error is not None and not logs[0].samples:
                raise RuntimeError(logs[0].error.message)
            if unknown := sorted(set(self._given["task_args"]) - set(logs[0].eval.task_args)):
                raise RuntimeError(f"the task has no argument {', '.join(unknown)}")
            yield logs[0]
