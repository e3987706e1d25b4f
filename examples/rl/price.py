"""`--task price`: ask a tool for a price, then say it.

The tool gives a number that nobody can know before. A rollout's reward is (called + right item + 2 · said) / 4.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from agent import Ask, Task, function_tool

TOOL = function_tool("price", "Look up the price of an item.", "item", "string")


@dataclass(frozen=True, slots=True)
class PriceEpisode:
    """A question, and the price that its tool will give."""

    item: str
    price: int

    @classmethod
    def drawn(cls, item: str, chance: random.Random) -> "PriceEpisode":
        """An episode with a price of three digits."""
        return cls(item, chance.randrange(100, 1000))

    @property
    def question(self) -> str:
        """The first message."""
        return f"How much is the {self.item}? Look up its price with the tool, then say it."

    def run_tool(self, arguments: str) -> str:
        """The tool: the price of the item that is asked for, or of none."""
        return json.dumps({"price": self.price if asked_item(arguments) == self.item else None})

    async def played(self, ask: Ask) -> float:
        """Two turns, and the reward."""
        messages: list[Any] = [{"role": "user", "content": self.question}]
        called = await ask(messages)
        if not called.tool_calls:
            return 0.0
        call = called.tool_calls[0]
        is_right = call.function.name == "price" and asked_item(call.function.arguments) == self.item
        messages.append(called.model_dump(exclude_none=True))
        for one in called.tool_calls:
            result = self.run_tool(one.function.arguments)
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        said = str(self.price) in ((await ask(messages)).content or "")
        return (1 + is_right + 2 * (said and is_right)) / 4

    def demonstration(self) -> list[Any]:
        """The call, and the price said."""
        call = {"name": "price", "arguments": json.dumps({"item": self.item})}
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "call_1", "content": self.run_tool(call["arguments"])},
            {"role": "assistant", "content": f"The {self.item} costs {self.price}."},
        ]


def asked_item(arguments: str) -> str | None:
    """The item that a call names."""
    try:
        found = json.loads(arguments)["item"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


TASK = Task(tools=[TOOL], max_tokens=48, cold_steps=7, drawn=PriceEpisode.drawn)
