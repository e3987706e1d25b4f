"""`--task errand`: three tools in a row, each asked for what the one before gave, then the last result is said.

Find an item's shelf, read the price on that shelf, pay that price, say the receipt's number: four turns and three
numbers that nobody can know before. A wrong call is answered with null and may be made again, in five turns at most. A
rollout's reward is (right steps in order + 2 · said) / 5.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent import Ask, Task, function_tool

MAX_TURNS = 5

TOOLS = [
    function_tool("find", "Find an item's shelf.", "item", "string"),
    function_tool("read", "Read the price on a shelf.", "shelf", "integer"),
    function_tool("pay", "Pay a price.", "price", "integer"),
]


@dataclass(frozen=True, slots=True)
class ErrandEpisode:
    """An item to buy, and what the tools will give."""

    item: str
    shelf: int
    price: int
    receipt: int

    @classmethod
    def drawn(cls, item: str, chance: random.Random) -> "ErrandEpisode":
        """An episode whose shelf has two digits, its price three, its receipt four."""
        return cls(item, chance.randrange(10, 100), chance.randrange(100, 1000), chance.randrange(1000, 10000))

    @property
    def question(self) -> str:
        """The first message."""
        return f"Buy the {self.item}: find its shelf, read its price, pay it, then say the receipt's number."

    @property
    def steps(self) -> Sequence[tuple[str, dict[str, object], dict[str, object]]]:
        """The calls that it takes, in order: the tool, its arguments, its result."""
        return (
            ("find", {"item": self.item}, {"shelf": self.shelf}),
            ("read", {"shelf": self.shelf}, {"price": self.price}),
            ("pay", {"price": self.price}, {"receipt": self.receipt}),
        )

    async def played(self, ask: Ask) -> float:
        """Turns until one has no call, and the reward."""
        messages: list[Any] = [{"role": "user", "content": self.question}]
        num_right = 0
        for _ in range(MAX_TURNS):
            reply = await ask(messages)
            if not reply.tool_calls:
                is_said = num_right == len(self.steps) and str(self.receipt) in (reply.content or "")
                return (num_right + 2 * is_said) / 5
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls:
                result, num_right = self.run_tool(call.function.name, call.function.arguments, num_right)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return num_right / 5

    def run_tool(self, name: str, arguments: str, num_right: int) -> tuple[str, int]:
        """A call's result, and how many steps are right after it. A step that is made again gives its result again."""
        try:
            asked = json.loads(arguments)
        except ValueError:
            asked = None
        for number, (tool, wanted, result) in enumerate(self.steps[: num_right + 1]):
            if name == tool and asked == wanted:
                return json.dumps(result), max(num_right, number + 1)
        return "null", num_right

    def demonstration(self) -> list[Any]:
        """The three calls, and the receipt said."""
        messages: list[Any] = [{"role": "user", "content": self.question}]
        for number, (tool, arguments, result) in enumerate(self.steps):
            called = {"name": tool, "arguments": json.dumps(arguments)}
            call = {"id": f"call_{number}", "type": "function", "function": called}
            messages.append({"role": "assistant", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
        messages.append({"role": "assistant", "content": f"The receipt's number is {self.receipt}."})
        return messages


TASK = Task(tools=TOOLS, max_tokens=48, cold_steps=14, drawn=ErrandEpisode.drawn)
