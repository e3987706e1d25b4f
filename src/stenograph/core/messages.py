"""The messages of a conversation, in the one form that all dialects are read into and all renderers read.

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
    """A call that the model made. `arguments` is JSON text as it was spelled; it may be malformed."""

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
    """A function that the model may call. `json` is the whole tool as sent, `parameters_json` its JSON Schema."""

    name: str
    json: str
    parameters_json: str = "{}"
