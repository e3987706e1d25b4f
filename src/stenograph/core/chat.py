"""What a turn is asked for and what its client is told, whatever dialect it comes in.

Knows neither a wire format nor a template.
"""

import enum
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stenograph.core.messages import Message, Tool
from stenograph.core.text_print import TextPrint
from stenograph.core.types import Chunk, EngineReply, Prompt, SampledTurn, SamplingParams, Stage, Usage


class Asked(enum.StrEnum):
    """What a turn was asked for: the next message of a conversation, or the continuation of a prompt."""

    CHAT = "chat"
    COMPLETION = "completion"


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownMessages:
    """Messages that a request may begin with, and the print of its body up to the end of the last one.

    Their list begins at the byte `list_start` of the body.
    """

    text_print: TextPrint
    list_start: int
    of_line: Callable[[], Sequence[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A generation request, whatever dialect it came in.

    `template_kwargs` go to the chat template; `recorded` are fields that are kept in the record without effect on
    sampling, as the JSON text they came as. Both are part of the value, never changed after it is made.
    `max_tokens_param` and `grammar_param` point at the fields that `params.max_tokens` and `params.grammar` came from.
    `text_print` is that of its body up to the end of the last message, whose list begins at `list_start`; `known` is
    what the body was seen to begin with. `messages_json` is the messages as an OpenAI list, for engines that parse
    replies by it.
    """

    messages: tuple[Message, ...]
    messages_json: bytes | memoryview = b"[]"
    text_print: TextPrint | None = None
    list_start: int = 0
    known: KnownMessages | None = None
    model: str | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    params: SamplingParams = SamplingParams()
    max_tokens_param: str = "/max_tokens"
    grammar_param: str = "/response_format"
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    reply: ReplyOptions = ReplyOptions()
    recorded: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("a conversation has at least one message")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Which ids of a prompt are kept: `num_tokens` at its end, or (`keeps_end` False) at its beginning.

    None keeps as many as the context has room for, with what is to be drawn.
    """

    num_tokens: int | None
    keeps_end: bool = True

    def __post_init__(self) -> None:
        if self.num_tokens is not None and self.num_tokens < 1:
            raise ValueError("a prompt has at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Prompts that are to be continued, each a text or ids [T] int32; each makes a turn.

    `is_list` tells whether the client wrote them as a list, which pointers into them need. In the text of a reply
    control tokens are skipped with `skips_special`; the stop string that ended it stays with `keeps_stop`. The other
    fields are those of `ChatRequest`.
    """

    prompts: tuple["str | array[int]", ...]
    is_list: bool = False
    truncation: Truncation | None = None
    model: str | None = None
    params: SamplingParams = SamplingParams()
    max_tokens_param: str = "/max_tokens"
    grammar_param: str = "/response_format"
    skips_special: bool = True
    keeps_stop: bool = False
    reply: ReplyOptions = ReplyOptions()
    recorded: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("there is at least one prompt")

    def prompt_param(self, index: int) -> str:
        """The JSON pointer of a prompt."""
        return f"/prompt/{index}" if self.is_list else "/prompt"


TurnRequest = ChatRequest | CompletionRequest
"""What can be asked for."""


class ParseProblem(enum.StrEnum):
    """What was wrong with a model's output, seen as a message. An outcome, never an exception."""

    NONE = "none"
    TOOL_CALL_UNCLOSED = "tool_call_unclosed"
    TOOL_CALL_NOT_JSON = "tool_call_not_json"
    TOOL_CALL_WRONG_SHAPE = "tool_call_wrong_shape"
    REASONING_UNCLOSED = "reasoning_unclosed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseFault:
    """One thing that was wrong: what was `seen`, cut, and where: ids `[start, end)` of the reply."""

    problem: ParseProblem
    seen: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """Sampled tokens seen as a message, and what was wrong with them as one, in the order of the reply."""

    message: Message
    faults: tuple[ParseFault, ...] = ()
    num_reasoning_tokens: int = 0

    @property
    def problem(self) -> ParseProblem:
        """The first thing that was wrong."""
        return self.faults[0].problem if self.faults else ParseProblem.NONE


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


def whole_delta(message: Message) -> ReplyDelta:
    """A message as the one delta that makes it."""
    return ReplyDelta(
        content=message.content or "",
        reasoning=message.reasoning or "",
        tool_calls=tuple(
            ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
            for index, call in enumerate(message.tool_calls)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPiece:
    """What a reader of a stream is given at once: text that became certain, and the chunks that were drawn.

    Text lags the ids: what could still become a marker or a stop string is held back, its ids are not. `index` is that
    of the prompt, in a request with several.
    """

    delta: ReplyDelta
    chunks: tuple[Chunk, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """How many tokens may still come: in the model's context, and in the session. None: no limit that is known."""

    context_tokens: int | None = None
    session_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A finished turn as its client is told of it, in any dialect. `created` is in whole seconds of the epoch.

    `written` is the engine's own reply where the engine writes it: a client that does not stream gets just that.
    """

    id: str
    created: int
    model: str
    prompt: Prompt
    parsed: ParsedReply
    sampled: SampledTurn
    usage: Usage
    written: EngineReply | None = None
    stages_s: Mapping[Stage, float] = field(default_factory=dict[Stage, float])
