"""A conversation, in the one form that all dialects are read into and all renderers read.

Owns what a message is. Knows neither a wire format nor a template.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from stenograph.core.types import Chunk, Prompt, SampledTurn, SamplingParams, Stage, Usage


class Role(enum.StrEnum):
    """Who speaks. Dialects map their own words onto these; a family says which of them it can show."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON text as it was spelled; it may be malformed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `json` is the whole tool as sent, `parameters_json` its JSON Schema."""

    name: str
    json: str
    parameters_json: str = "{}"


class ToolMode(enum.StrEnum):
    """`tool_choice` of a request; NAMED comes with a name."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether and which tool the model must call."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.mode is ToolMode.NAMED) != (self.name is not None):
            raise ValueError("a name belongs to the mode NAMED, and to no other")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """What the client wants to see of the reply; none of it changes what is sampled."""

    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A generation request, whatever dialect it came in.

    `template_kwargs` go to the chat template; `recorded` are fields that are kept in the record without effect on
    sampling, as the JSON text they came as. Both are part of the value, never changed after it is made.
    """

    messages: tuple[Message, ...]
    model: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    params: SamplingParams = SamplingParams()
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    reply: ReplyOptions = ReplyOptions()
    recorded: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("a conversation has at least one message")


class ParseProblem(enum.StrEnum):
    """What was wrong with a model's output, seen as a message. An outcome, never an exception."""

    NONE = "none"
    TOOL_CALL_UNCLOSED = "tool_call_unclosed"
    TOOL_CALL_NOT_JSON = "tool_call_not_json"
    TOOL_CALL_WRONG_SHAPE = "tool_call_wrong_shape"
    REASONING_UNCLOSED = "reasoning_unclosed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Sampled tokens seen as a message, and what was wrong with them as one."""

    message: Message
    problem: ParseProblem = ParseProblem.NONE
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of the tool call number `index`; `id` and `name` come once, with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyDelta:
    """What a stream adds to a message. The deltas of a turn, joined, are its `ParsedReply.message`."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What a reader of a stream is given at once: text that became certain, and the chunks that were drawn.

    Text lags the ids: what could still become a marker or a stop string is held back, its ids are not.
    """

    delta: ReplyDelta
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A finished turn as its client is told of it, in any dialect. `created` is in whole seconds of the epoch."""

    id: str
    created: int
    model: str
    prompt: Prompt
    parsed: ParsedReply
    sampled: SampledTurn
    usage: Usage
    stages_s: Mapping[Stage, float] = field(default_factory=dict[Stage, float])
