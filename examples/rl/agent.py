"""The agent: the official OpenAI SDK, and nothing of ours. It plays the episodes of a task, whose tools really run."""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from openai import AsyncOpenAI

Ask = Callable[[list[Any]], Awaitable[Any]]
"""Sends the conversation; gives the model's next message."""


class Episode(Protocol):
    """One question about an item, with what its tools will answer. The rollouts of a group play the same one."""

    @property
    def item(self) -> str:
        """Which."""
        ...

    async def played(self, ask: Ask) -> float:
        """Play it to its end; returns the reward, 1.0 for full success."""
        ...

    def demonstration(self) -> list[Any]:
        """The messages of a conversation as it should go."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A kind of episodes. `cold_steps` is how many steps on demonstrations it needs for some success."""

    tools: Sequence[Any]
    max_tokens: int
    cold_steps: int
    drawn: Callable[[str, random.Random], Episode]


@dataclass(frozen=True, slots=True)
class SeenSession:
    """What the server said of a session before it was deleted: its records, and its drift report."""

    view: Any
    drift: Any


@dataclass(slots=True)
class ToolAgent:
    """Plays episodes. `seen` has, if asked for, what became of each session.

    `seed`, the episode's place among `episodes`, its member and its turn decide the seed of each request. Which of a
    group's sessions is which member is left to chance, and of no matter: a member's tokens follow from its seeds. With
    `forced_calls` an episode's first turn has to call a tool, under the engine's grammar.
    """

    chat: AsyncOpenAI
    task: Task
    seed: str
    episodes: Sequence[Episode]
    keeps_seen: bool = False
    forced_calls: bool = False
    seen: dict[str, SeenSession] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    begun: Counter[int] = field(default_factory=Counter)

    def member_of(self, rollout: Any) -> int:
        """Which member of its group a rollout was."""
        return self.members[rollout.session_id]

    async def __call__(self, episode: Episode, session: Any) -> float:
        place = next(index for index, one in enumerate(self.episodes) if one is episode)
        member, turns = self.begun[place], itertools.count()
        self.begun[place] += 1
        self.members[session.id] = member
        chat = self.chat.with_options(base_url=session.base_url, api_key=session.api_key)

        async def ask(messages: list[Any]) -> Any:
            forced = self.forced_calls and len(messages) == 1
            reply = await chat.chat.completions.create(
                model="any",
                messages=messages,
                tools=self.task.tools,
                tool_choice="required" if forced else "auto",
                max_tokens=self.task.max_tokens,
                seed=seed_of(self.seed, place, member, next(turns)),
            )
            return reply.choices[0].message

        try:
            reward = await episode.played(ask)
        except Exception:
            await self.keep(session)
            raise
        await self.keep(session)
        return reward

    async def keep(self, session: Any) -> None:
        """Ask what became of a session, while it is there."""
        if self.keeps_seen:
            self.seen[session.id] = SeenSession(await session.view(), await session.drift())


def seed_of(*parts: object) -> int:
    """A seed of a request, below 2 ** 31, that all of these decide."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:4], "big") >> 1


def function_tool(name: str, description: str, argument: str, type_: str) -> Any:
    """A tool of one argument, as OpenAI's API takes it."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": type_}}, "required": [argument]},
        },
    }
