"""The task and its agent: ask a tool for a price, then say it. The official OpenAI SDK, and nothing of ours.

The tool really runs: it gives a number that nobody can know before. A rollout's reward is (called + right item +
2 · said) / 4.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

MAX_TOKENS = 48
"""Of each turn."""

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up the price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
}

ITEMS = [
    "apple", "banana", "bread", "butter", "candle", "carrot", "chair", "cheese", "clock", "coat", "coffee",
    "cookie", "cup", "desk", "door", "dress", "egg", "fish", "flour", "fork", "glass", "glove", "grape",
    "guitar", "hammer", "hat", "honey", "jacket", "jam", "juice", "kettle", "key", "knife", "ladder", "lamp",
    "lemon", "map", "melon", "milk", "mirror", "mug", "nail", "oil", "onion", "orange", "oven", "paint", "pan",
    "paper", "peach", "pear", "pen", "pencil", "pepper", "phone", "piano", "pillow", "plate", "potato", "radio",
    "rice", "ring", "rope", "rug", "salt", "scarf", "shirt", "shoe", "soap", "sofa", "soup", "spoon", "sugar",
    "table", "tea", "tent", "tomato", "towel", "train", "umbrella", "vase", "violin", "watch", "water", "wheel",
    "window",
]  # fmt: skip
HELD_OUT = ITEMS[1::3]
DEMONSTRATED = [item for item in ITEMS[0::8] if item not in HELD_OUT]
TRAINED = [item for item in ITEMS if item not in DEMONSTRATED and item not in HELD_OUT]
"""Three sets without a common item: those of the cold start, of the steps, and of the measurement."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A question, and the price that its tool will give."""

    item: str
    price: int

    @classmethod
    def drawn(cls, item: str, chance: random.Random) -> "Episode":
        """An episode with a price of three digits."""
        return cls(item, chance.randrange(100, 1000))

    @property
    def question(self) -> str:
        """The first message."""
        return f"How much is the {self.item}? Look up its price with the tool, then say it."

    def run_tool(self, arguments: str) -> str:
        """The tool: the price of the item that is asked for, or of none."""
        return json.dumps({"price": self.price if asked_item(arguments) == self.item else None})


def asked_item(arguments: str) -> str | None:
    """The item that a call names."""
    try:
        found = json.loads(arguments)["item"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


@dataclass(slots=True)
class PriceAgent:
    """Runs episodes. `views` has, if asked for, each session's records before it is deleted."""

    chat: AsyncOpenAI
    keeps_views: bool = False
    views: dict[str, Any] = field(default_factory=dict)

    async def __call__(self, episode: Episode, session: Any) -> float:
        chat = self.chat.with_options(base_url=session.base_url, api_key=session.api_key)
        try:
            return await self.converse(chat, episode)
        finally:
            if self.keeps_views:
                self.views[session.id] = await session.view()

    async def converse(self, chat: AsyncOpenAI, episode: Episode) -> float:
        """Two turns, and the reward."""
        messages: Any = [{"role": "user", "content": episode.question}]
        called = await self.ask(chat, messages)
        if not called.tool_calls:
            return 0.0
        call = called.tool_calls[0]
        is_right = call.function.name == "price" and asked_item(call.function.arguments) == episode.item
        messages.append(called.model_dump(exclude_none=True))
        for one in called.tool_calls:
            result = episode.run_tool(one.function.arguments)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        said = str(episode.price) in ((await self.ask(chat, messages)).content or "")
        return (1 + is_right + 2 * (said and is_right)) / 4

    async def ask(self, chat: AsyncOpenAI, messages: Any) -> Any:
        """One turn."""
        reply = await chat.chat.completions.create(
            model="any", messages=messages, tools=[TOOL], max_tokens=MAX_TOKENS, temperature=1.0
        )
        return reply.choices[0].message
