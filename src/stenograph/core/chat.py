"""A turn's request and its reply, in any dialect.

Knows neither a wire format nor a template.
"""

import enum
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import msgspec
import xxhash
from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.messages import MediaItem, MediaRef, Message, ReplyDelta, Tool
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.routing import Routing
from stenograph.core.stages import Stage
from stenograph.core.types import Chunk, EngineReply, FinishReason, Prompt, SampledTurn, SamplingParams, Usage


class Asked(enum.StrEnum):
    """Kinds of requests: for the next message of a conversation, or the continuation of a prompt."""

    CHAT = "chat"
    COMPLETION = "completion"


class ToolMode(enum.StrEnum):
    """`tool_choice` of a request; NAMED comes with a name."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(Struct, frozen=True, kw_only=True, gc=False):
    """Whether and which tool the model must call."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.mode is ToolMode.NAMED) != (self.name is not None):
            raise ValueError("a name belongs to the mode NAMED, and to no other")

    @property
    def forces(self) -> bool:
        """Whether a tool must be called."""
        return self.mode is ToolMode.REQUIRED or self.mode is ToolMode.NAMED


class ReplyOptions(Struct, frozen=True, kw_only=True, gc=False):
    """The client's options for the reply; none of them changes the sampling."""

    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    """Logprobs name each token `token_id:N` instead of showing its text."""
    as_miles: bool = False
    """A streamed chat is one event with the whole reply, and an error a text, as its session's contract has it."""


class TextView(Struct, frozen=True, kw_only=True, gc=False):
    """Options for showing a reply's ids as text; none changes the sampling, and ids are always whole.

    Control tokens are left out with `skips_special`. The stop string at the reply's end stays with `keeps_stop`.
    Without `separates_reasoning` a chat's reasoning stays in its content, markers and all, as the model wrote it.
    """

    skips_special: bool = True
    keeps_stop: bool = False
    separates_reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """The kept part of a prompt: `num_tokens` at its end, or (`keeps_end` False) at its beginning.

    None keeps as many as fit the context together with those to be sampled.
    """

    num_tokens: int | None
    keeps_end: bool = True

    def __post_init__(self) -> None:
        if self.num_tokens is not None and self.num_tokens < 1:
            raise ValueError("a prompt has at least one token")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemBlocks:
    """The texts, in order, joined into the first message: the system text, sent in several blocks.

    Rules look at each; one may drop a block. Block 2 is blamed as `Blame(RequestPart.MESSAGES, 0, ("content", 2))`.
    """

    texts: tuple[str, ...]
    separator: str = ""

    @property
    def joined(self) -> str:
        """The content of the first message, before any rule."""
        return self.separator.join(self.texts)


class TextPrint:
    """A text's length and its hash, XXH3 of 128 bits: a long text is known again by it, and need not be kept. It goes
    on: a longer text's is made of it.

    It protects no secret: a client that makes two texts with the same print confuses only its own session.
    """

    __slots__ = ("_state", "length")

    def __init__(self) -> None:
        self.length = 0
        self._state = xxhash.xxh3_128()

    def __repr__(self) -> str:
        return f"<TextPrint of {self.length} bytes>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TextPrint):
            return NotImplemented
        return self.length == other.length and self._state.digest() == other._state.digest()

    def __hash__(self) -> int:
        return hash((self.length, self._state.digest()))

    def then(self, text: "bytes | memoryview") -> Self:
        """The print of this text with `text` after it."""
        later = self.__new__(type(self))  # without a state of its own
        later.length = self.length + len(text)
        later._state = self._state.copy()
        later._state.update(text)
        return later

    def begins(self, text: bytes) -> bool:
        """Whether `text` begins with this text."""
        beginning = memoryview(text)[: self.length]
        return len(beginning) == self.length and xxhash.xxh3_128_digest(beginning) == self._state.digest()


class KnownMessages(Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Possible first messages of a request, and the print of its body up to the end of the last one.

    Their list begins at the byte `list_start` of the body; the body is of this `dialect`. `messages` are as the body
    has them, rewrites made, with the `gaps` and the `system_blocks` of `ChatRequest`.
    """

    dialect: str
    text_print: TextPrint
    list_start: int
    messages: tuple[Message, ...]
    gaps: tuple[int, ...] = ()
    system_blocks: SystemBlocks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PastLine:
    """The messages up to a turn, its reply the last, and the record of its request as its dialect wrote it."""

    messages: Sequence[Message]
    request_json: bytes


class PastTurns(Protocol):
    """The turns of a session, by the ids of their requests, for a request with the id of one of them."""

    def line_of(self, request_id: str) -> PastLine | None:
        """The line of a turn; None if there is no such turn, or it is no chat's."""
        ...

    def reply_of(self, request_id: str) -> Message | None:
        """The reply of a turn; None as above."""
        ...


class Spelling(Protocol):
    """A dialect's spelling of the values in the rooms below it. Made with the request, by its decoder."""

    @property
    def dialect(self) -> str:
        """Its dialect. Bytes with a meaning in one dialect mean nothing in another."""
        ...

    @property
    def id_prefix(self) -> str:
        """The part of the reply's id before the request's."""
        ...

    @property
    def keeps_engine_id(self) -> bool:
        """Whether a reply written by its engine has the engine's id instead."""
        ...

    def pointer(self, blame: Blame) -> str | None:
        """The pointer of a part of the request, in the client's own terms; None if it has no place there."""
        ...


@dataclass(frozen=True, slots=True)
class PlainSpelling:
    """The spelling of a request read by no dialect."""

    dialect: str = ""
    id_prefix: str = ""
    keeps_engine_id: bool = True

    def pointer(self, blame: Blame) -> str | None:
        return None


class ChatRequest(Struct, frozen=True, kw_only=True, gc=False):
    """A generation request, in any dialect.

    `template_kwargs` go to the chat template; `recorded` are fields kept in the record without effect on sampling, as
    the JSON text they came as; `sent` are the sampling fields likewise, by the client's names. All are part of the
    value, never changed after it is made. `said` names the fields of `params` given by the client under any name: every
    dialect names all of them. `imposed` names the fields with values set by the session in their place. `spelling` is
    its dialect's, for errors and replies. `text` is how the reply is shown. Some of the prompt's ids are left out with
    `truncation`. `routing` goes to the engine as it is; None: no hint was given. `text_print` is the print of its body
    up to the end of the last message; the list of messages begins at `list_start`; `known` is the known beginning of
    the body. `messages_json` is the messages as an OpenAI list, for engines that parse replies by it. `system_blocks`
    are the blocks joined into the first message; None: its text came as one, or it is no system's. `late_tools` can be
    called, but are no part of the prompt's beginning: a message shows them. `thinks` says whether the model is to
    reason, and `effort` how much, as a word; None: as the model does by itself. `replies_of` are requests with replies
    among the messages, by the client's account: a hint, never decisive for a match. `rewrites` are the changes to the
    client's request: first those its dialect had to make, then those of rules. Where messages have been joined with
    others, `gaps` has the index of the message after each removed one, in order: `place_of` gives a message's number
    for its client. With `takes_echo`, a request ending with its strand's last reply is answered with no message, not
    refused: the client lost the end of this reply. `media` are those sent, each once; `earlier_media` are found.
    """

    messages: tuple[Message, ...]
    messages_json: bytes | memoryview = b"[]"
    text_print: TextPrint | None = None
    list_start: int = 0
    known: KnownMessages | None = None
    model: str | None = None
    tools: tuple[Tool, ...] = ()
    late_tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    params: SamplingParams = SamplingParams()
    spelling: Spelling = PlainSpelling()
    template_kwargs: Mapping[str, object] = msgspec.field(default_factory=dict[str, object])
    thinks: bool | None = None
    effort: str | None = None
    replies_of: frozenset[str] = frozenset()
    truncation: Truncation | None = None
    routing: Routing | None = None
    text: TextView = TextView()
    reply: ReplyOptions = ReplyOptions()
    recorded: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    sent: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    said: frozenset[str] = frozenset()
    imposed: frozenset[str] = frozenset()
    system_blocks: SystemBlocks | None = None
    rewrites: tuple[AppliedRewrite, ...] = ()
    gaps: tuple[int, ...] = ()
    takes_echo: bool = False
    media: tuple[MediaItem, ...] = ()
    earlier_media: tuple[MediaRef, ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("a conversation has at least one message")

    def place_of(self, index: int) -> int:
        """The number of a message among those read from the body by the dialect."""
        return index + bisect_right(self.gaps, index)

    def blame_of_client(self, blame: Blame | None) -> Blame | None:
        """The same part of the request as it was read from the body."""
        if blame is None or blame.part is not RequestPart.MESSAGES or blame.index is None or not self.gaps:
            return blame
        return Blame(blame.part, self.place_of(blame.index), blame.path)


class CompletionRequest(Struct, frozen=True, kw_only=True, gc=False):
    """Prompts to be continued, each a text or ids [T] int32; each makes a turn.

    The other fields are those of `ChatRequest`.
    """

    prompts: tuple["str | array[int]", ...]
    truncation: Truncation | None = None
    model: str | None = None
    params: SamplingParams = SamplingParams()
    spelling: Spelling = PlainSpelling()
    routing: Routing | None = None
    text: TextView = TextView()
    reply: ReplyOptions = ReplyOptions()
    recorded: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    sent: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    said: frozenset[str] = frozenset()
    imposed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("there is at least one prompt")


TurnRequest = ChatRequest | CompletionRequest
"""Any request for a turn."""


class ParseProblem(enum.StrEnum):
    """A fault of a model's output as a message. An outcome, never an exception."""

    TOOL_CALL_UNCLOSED = "tool_call_unclosed"
    TOOL_CALL_NOT_JSON = "tool_call_not_json"
    TOOL_CALL_WRONG_SHAPE = "tool_call_wrong_shape"
    REASONING_UNCLOSED = "reasoning_unclosed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseFault:
    """One fault: the text `seen`, cut, and its place: ids `[start, end)` of the reply."""

    problem: ParseProblem
    seen: str
    start: int
    end: int


class ParsedReply(Struct, frozen=True, kw_only=True, gc=False):
    """Sampled tokens seen as a message, and its faults, in the order of the reply."""

    message: Message
    faults: tuple[ParseFault, ...] = ()
    num_reasoning_tokens: int = 0

    @property
    def problem(self) -> ParseProblem | None:
        """The first fault's problem; None without faults."""
        return self.faults[0].problem if self.faults else None


class StreamPiece(Struct, frozen=True, kw_only=True, gc=False):
    """A piece of a stream, for its reader: newly certain text, and the sampled chunks.

    Text lags the ids: the possible beginning of a marker or a stop string is held back, its ids are not. `index` is the
    prompt's, in a request with several.
    """

    delta: ReplyDelta
    chunks: tuple[Chunk, ...] = ()
    index: int = 0


class Remaining(Struct, frozen=True, kw_only=True, gc=False):
    """Number of tokens still allowed: in the model's context, and in the session. None: no known limit."""

    context_tokens: int | None = None
    session_tokens: int | None = None


class ChatReply(Struct, frozen=True, kw_only=True, gc=False):
    """A finished turn for its client, in any dialect. `created` is in whole seconds of the epoch.

    `params` are those it was sampled with, the session's rules applied. `written` is the engine's own reply where the
    engine writes it: a client that does not stream gets just this. `fills_context`: the model's context has no room
    after it.
    """

    id: str
    created: int
    model: str
    prompt: Prompt
    params: SamplingParams
    parsed: ParsedReply
    sampled: SampledTurn
    usage: Usage
    written: EngineReply | None = None
    stages_s: Mapping[Stage, float] = msgspec.field(default_factory=dict[Stage, float])
    fills_context: bool = False


TextFinish = Literal["stop", "length", "abort"]

FINISHES: Mapping[FinishReason, TextFinish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}

ReplyFinish = Literal["stop", "length", "abort", "tool_calls"]


def finish_of(reason: FinishReason, message: Message) -> ReplyFinish:
    """The finish of a reply to a chat."""
    return "tool_calls" if reason is FinishReason.STOP and message.tool_calls else FINISHES[reason]
