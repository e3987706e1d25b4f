"""Conversations of every kind possible in a session, rendered by proofs and checks of a template.

Owns the matrix. Each text occurs in no template, so it can be found in an output. Knows nothing of templates or
families.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from stenograph.core.messages import Message, Role, Tool, ToolCall

_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}},
    "required": ["city"],
}

WEATHER = Tool(
    name="look_up_zq",
    json=json.dumps(
        {
            "type": "function",
            "function": {"name": "look_up_zq", "description": "Looks up 'zq' <now>.", "parameters": _SCHEMA},
        },
        ensure_ascii=False,
    ),
    parameters_json=json.dumps(_SCHEMA),
)

ARGUMENTS = '{"city": "Zürich \\"zq\\"", "days": 3, "options": {"deep": [1, null, true, 0.5]}}'
ODD_ARGUMENTS = (
    '{"city": "a\\n\\tb", "flag": true, "none": null, "half": 0.5, "whole": 2.0, "list": ["x", {"y": false}]}'
)


ODD_TEXT = " \x1c\u2028\tWhat <b>of</b> 'zq', \"é𝄞\"? {{ x }}\r\n\x1f "
"""White space trimmed differently by engines, and text like markup."""


def call(number: int, arguments: str = ARGUMENTS) -> ToolCall:
    """A call of WEATHER, with an id of nine letters and digits: some templates take no other."""
    return ToolCall(id=f"callzq{number:03d}", name=WEATHER.name, arguments=arguments)


def user(text: str) -> Message:
    """A user's message."""
    return Message(role=Role.USER, content=text)


def said(text: str | None, *calls: ToolCall, reasoning: str | None = None) -> Message:
    """An assistant's message."""
    return Message(role=Role.ASSISTANT, content=text, reasoning=reasoning, tool_calls=calls)


def result(of: ToolCall, text: str) -> Message:
    """A tool's result."""
    return Message(role=Role.TOOL, content=text, tool_call_id=of.id, name=of.name)


def openings(*, has_tools: bool) -> Iterator[tuple[Message, ...]]:
    """Messages before a reply."""
    system = Message(role=Role.SYSTEM, content="Be brief, zq.")
    yield (user("What of zq?"),)
    yield (system, user(ODD_TEXT))
    yield (user("First zq."), said("Answer zq."), user("Second zq."))
    yield (system, user("First zq."), said("Answer zq.", reasoning="Thought zq."), user("Second zq."))
    if has_tools:
        first, second = call(1), call(2, ODD_ARGUMENTS)
        yield (user("Look up zq."), said(None, first), result(first, "Found zq."))
        yield (
            user("Look up zq."),
            said("Looking.", first, second, reasoning="Thought zq."),
            result(first, "Found zq."),
            result(second, ""),
        )


def replies(*, has_tools: bool) -> Iterator[Message]:
    """Replies of a model."""
    yield said("Reply zq.", reasoning="Thought\n\nof zq.")
    yield said("Reply zq.")
    yield said("")
    if has_tools:
        yield said(None, call(3))
        yield said(None, call(3, ODD_ARGUMENTS), reasoning="Thought of zq.")
        yield said("Looking zq.", call(3), call(4, ODD_ARGUMENTS))


def appended(reply: Message) -> Iterator[tuple[Message, ...]]:
    """Messages after a reply, before the next."""
    yield ()
    yield (user("More zq."),)
    if reply.tool_calls:
        results = tuple(result(one, f"Result {one.id}.") for one in reply.tool_calls)
        yield results
        yield (*results, user("And zq?"))
        yield (*results, said("Injected zq."), user("And zq?"))
        return
    yield (user("More zq."), user("And more."))
    yield (Message(role=Role.SYSTEM, content="Late zq."),)
    yield (Message(role=Role.DEVELOPER, content="Late zq."), user("More zq."))
    yield (user("More zq."), said("Injected zq.", reasoning="Thought"), user("And zq?"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleExchange:
    """A conversation up to a reply, the reply, and the tools."""

    opening: tuple[Message, ...]
    reply: Message
    tools: tuple[Tool, ...]


def exchanges(*, has_tools: bool) -> Iterator[ExampleExchange]:
    """Every opening with every reply; with tools, both with and without a list of them."""
    for tools in ((), (WEATHER,)) if has_tools else ((),):
        for opening in openings(has_tools=bool(tools)):
            for reply in replies(has_tools=bool(tools)):
                yield ExampleExchange(opening=opening, reply=reply, tools=tools)
