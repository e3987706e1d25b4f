"""The agent: the official OpenAI SDK, and nothing of ours. It plays the episodes of a task, whose tools really run."""

import random
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
    """Plays episodes. `seen` has, if asked for, what became of each session."""

    chat: AsyncOpenAI
    task: Task
    keeps_seen: bool = False
    seen: dict[str, SeenSession] = field(default_factory=dict)

    async def __call__(self, episode: Episode, session: Any) -> float:
        chat = self.chat.with_options(base_url=session.base_url, api_key=session.api_key)

        async def ask(messages: list[Any]) -> Any:
            reply = await chat.chat.completions.create(
                model="any", messages=messages, tools=self.task.tools, max_tokens=self.task.max_tokens, temperature=1.0
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
