"""`errand` as an environment of `stenograph rollout`: errand.py's tasks, with a chat's replies in an SDK's place.

    stenograph rollout examples/rl/errand_env.py --out DIR --group-size 4 --fork-at entropy:4

Its tools are functions of the model's calls, so a rollout's state is rebuilt by its recorded replies (`retraces`).
"""

import random
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from errand import TOOLS, ErrandEpisode
from items import DEMONSTRATED

from stenograph.client.session import RolloutSession
from stenograph.envs.chat import chat

retraces = True


def tasks() -> list[dict[str, Any]]:
    """An episode for each item; their numbers come from a fixed seed."""
    chance = random.Random(0)
    return [{"id": item, **asdict(ErrandEpisode.drawn(item, chance))} for item in DEMONSTRATED]


async def run(task: dict[str, Any], session: RolloutSession) -> float:
    """The share of the right steps, as in training."""
    episode = ErrandEpisode(**{name: value for name, value in task.items() if name != "id"})
    async with chat(session, {"max_tokens": 48}) as talk:

        async def ask(messages: list[Any]) -> Any:
            return _reply(await talk.say(messages, tools=TOOLS))

        return await episode.played(ask)


def _reply(message: dict[str, Any]) -> Any:
    """A message as the OpenAI SDK's object has it."""
    calls = [
        SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
        for call in message.get("tool_calls") or ()
    ]

    def model_dump(*, exclude_none: bool) -> dict[str, Any]:
        return {name: value for name, value in message.items() if value is not None or not exclude_none}

    return SimpleNamespace(content=message.get("content"), tool_calls=calls, model_dump=model_dump)
