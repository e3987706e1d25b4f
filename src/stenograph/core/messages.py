"""The messages of a conversation, in one form for all dialects and all renderers.

Owns what a message is. Knows neither a wire format nor a template.
"""

import enum

from msgspec import Struct


class Role(enum.StrEnum):
    """The author of a message. Dialects map their own words onto these; a family says which of them it can render."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(Struct, frozen=True, kw_only=True, gc=False):
    """A call by the model. `arguments` is JSON text as it was spelled; it may be malformed."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """One message. `content` None and "" render alike, but are kept apart because the wire keeps them apart.

    `tool_calls` and `reasoning` only on an assistant's, `tool_call_id` only on a tool's.
    """

    role: Role
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role is not Role.ASSISTANT and (self.tool_calls or self.reasoning is not None):
            raise ValueError(f"a {self.role} message has no tool calls and no reasoning")
        if self.role is not Role.TOOL and self.tool_call_id is not None:
            raise ValueError(f"a {self.role} message answers no tool call")


class Tool(Struct, frozen=True, kw_only=True, gc=False):
    """A function for the model to call. `json` is the whole tool as sent, `parameters_json` its JSON Schema."""

    name: str
    json: str
    parameters_json: str = "{}"


class ToolCallDelta(Struct, frozen=True, kw_only=True, gc=False):
    """A piece of the tool call number `index`; `id` and `name` come once, with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ReplyDelta(Struct, frozen=True, kw_only=True, gc=False):
    """A stream's addition to a message. The deltas of a turn, joined, are its `ParsedReply.message`."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def whole_delta(message: Message) -> ReplyDelta:
    """A message as a single delta."""
    return ReplyDelta(
        content=message.content or "",
        reasoning=message.reasoning or "",
        tool_calls=tuple(
            ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
            for index, call in enumerate(message.tool_calls)
        ),
    )
