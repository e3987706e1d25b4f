"""reasoning-gym's procedural tasks (PyPI `reasoning-gym`): its questions, its system prompt, its scoring.

`reasoning-gym:leg_counting` is one of its datasets; options are its own (`min_animals`, …) and, under `chat`, those
of the request (`max_tokens`, `temperature`, …). One turn: the question; the reward is the dataset's own score of the
text between `<answer>` and `</answer>`.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession
from stenograph.envs.apart import ApartTooMuch, Bounds, apart
from stenograph.envs.base import Task, WrongEnvironment, chat_fields
from stenograph.envs.chat import chat

BOUNDS = Bounds(cpu_s=30, call_s=60, memory_bytes=1 << 30)
"""Those of a score."""

gym: Any = importlib.import_module("reasoning_gym")


class ReasoningGym:
    """One dataset of reasoning-gym."""

    retraces = True

    def __init__(self, which: str, options: Mapping[str, object]) -> None:
        """Raises WrongEnvironment for a dataset that the package does not have."""
        known = sorted(cast("Mapping[str, object]", gym.factory.DATASETS))
        if which not in known:
            near = get_close_matches(which, known, n=8, cutoff=0.3) or known[:8]
            raise WrongEnvironment(f"reasoning-gym has no dataset {which!r}; of its {len(known)} are {', '.join(near)}")
        self._which = which
        self._fields = chat_fields(options)
        self._options = {name: value for name, value in options.items() if name != "chat"}
        self._dataset: Any = None

    def __repr__(self) -> str:
        return f"<ReasoningGym {self._which}>"

    def tasks(self, *, limit: int | None, seed: int | None) -> Sequence[Task]:
        """Its questions: as many as asked for, 500 without a limit, by reasoning-gym's own seed, 0 without one."""
        size, seed = 500 if limit is None else limit, seed or 0
        try:
            self._dataset = gym.create_dataset(self._which, size=size, seed=seed, **self._options)
            entries = list(self._dataset)
        except (TypeError, ValueError, AssertionError) as error:
            raise WrongEnvironment(f"reasoning-gym cannot make {self._which} with {self._options}: {error}") from error
        return [Task(id=f"{self._which}-{seed}-{index}", data=one) for index, one in enumerate(entries)]

    async def run(self, task: Task, session: RolloutSession) -> Reward:
        """Ask once; the dataset's score of the answer, 0 to 1, and 0 where computing it takes more than `BOUNDS`."""
        entry = cast("dict[str, Any]", task.data)
        prompt = gym.utils.SYSTEM_PROMPTS["default"]
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": entry["question"]}]
        async with chat(session, self._fields) as talk:
            said = await talk.say(messages)
        answer = gym.utils.extract_answer(str(said.get("content") or ""))
        async with apart("stenograph.envs.reasoning_gym:DatasetScores", self._dataset, bounds=BOUNDS) as scores:
            try:
                return float(await scores.call("score", answer, entry))
            except ApartTooMuch:
                return 0.0


@dataclass(frozen=True, slots=True)
class DatasetScores:
    """A dataset that scores an answer in a process of its own: some evaluate it, as a program or a formula."""

    dataset: Any

    def score(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        """The dataset's own score."""
        return float(self.dataset.score_answer(answer, entry))
