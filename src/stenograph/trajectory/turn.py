"""A committed turn, as it is kept, and its node in its line, for a store to write and an export to read. Pure.

Owns the tokens added by a turn to its line, and how it was asked for. Knows neither the rules for the order of turns
(history.py) nor how a reply was sampled or shown.
"""

import enum
from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter

import msgspec
from msgspec import Struct, field
from msgspec.structs import force_setattr

from stenograph.core.chat import Asked, ParsedReply, ToolChoice
from stenograph.core.day import STRFTIME_NOW, Day
from stenograph.core.messages import Expansion, Message, Tool
from stenograph.core.rewrites import AppliedRewrite
from stenograph.core.stages import StageTimes
from stenograph.core.types import FinishReason, RequestId, SampledTurn, SamplingParams, token_ids


class TurnStatus(enum.StrEnum):
    """The mark of a turn, and of a sample that ends with it, for the trainer. The values are miles' `Sample.Status`."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


STATUS_OF = {
    FinishReason.STOP: TurnStatus.COMPLETED,
    FinishReason.LENGTH: TurnStatus.TRUNCATED,
    FinishReason.ABORT: TurnStatus.ABORTED,
}
"""The status of a turn, by its finish reason."""


class PromptContext(Struct, frozen=True, kw_only=True, gc=False):
    """Everything in the prompt beside the messages. Turns with different contexts do not share a prefix.

    `kwargs_json` is `template_kwargs` with sorted keys, for comparison: `true` and `1` are not the same. `day` is the
    session's, for a template that writes the date.
    """

    tools: tuple[Tool, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    day: Day | None = None
    kwargs_json: bytes = b""

    def __post_init__(self) -> None:
        encoded = msgspec.json.encode(self.template_kwargs, order="sorted") if self.template_kwargs else b"{}"
        force_setattr(self, "kwargs_json", encoded)

    @property
    def arguments(self) -> Mapping[str, object]:
        """The template's arguments beside messages and tools."""
        return self.template_kwargs if self.day is None else {**self.template_kwargs, STRFTIME_NOW: self.day}

    @property
    def num_bytes(self) -> int:
        """About how much it brings to a template."""
        return len(self.kwargs_json) + sum(len(tool.json) for tool in self.tools)

    def is_same(self, other: "PromptContext") -> bool:
        """Whether both put the same into a prompt."""
        return self is other or (self.kwargs_json == other.kwargs_json and self.tools == other.tools)


class CommittedTurn(Struct, frozen=True, kw_only=True, gc=False):
    """One turn, as it is kept: only its additions to the turn before it.

    `new_prompt_ids` are the ids of this turn's prompt after the ids of its parent (the whole prompt for a root); the
    parent's last `num_trimmed` ids were left out. `messages` are the request's messages after those of the parent, none
    if a completion was `asked` for: its prompt is ids, and its reply a text of no conversation. The engine was given
    `params`; `request_json` is the rest of the client's request (the model's name, recorded fields) as a JSON object.
    `stages` is the turn's own clock, still marked by the reply after the commit. The client knows the reply by
    `reply_id`. `rewrites` are the changes to the client's request. `policy` is the model or LoRA that sampled, as its
    engine calls it; "" where it is not known. `trace_id` is the turn's trace; "" where none was made. All ids are
    logical ones; `media` are the expansions of the media in its `messages`, by their positions in the line. The first
    `num_inherited` sampled ids of a fork's turn were sampled in the session before the fork.
    """

    request_id: RequestId
    new_prompt_ids: "array[int]"
    sampled: SampledTurn
    status: TurnStatus
    messages: tuple[Message, ...]
    reply: ParsedReply
    context: PromptContext
    asked: Asked = Asked.CHAT
    num_trimmed: int = 0
    params: SamplingParams = SamplingParams()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    reply_id: str = ""
    request_json: bytes = b"{}"
    rewrites: tuple[AppliedRewrite, ...] = ()
    policy: str = ""
    requested_at: float = 0.0
    committed_at: float = 0.0
    stages: StageTimes = field(default_factory=lambda: StageTimes(start=0.0))
    trace_id: str = ""
    media: tuple[Expansion, ...] = ()
    num_inherited: int = 0

    @property
    def num_tokens(self) -> int:
        """Logical tokens added to its line by this turn."""
        return len(self.new_prompt_ids) - self.num_trimmed + len(self.sampled.ids)

    @property
    def num_effective(self) -> int:
        """Tokens of forward passes added to its line by this turn."""
        return self.num_tokens + sum(len(one.ids) - 1 for one in self.media)


class Node:
    """A committed turn in its place. `id` counts the commits of its session.

    It knows its parent, not its children, so a dropped session is freed without the garbage collector. `num_tokens`,
    `num_messages`, `depth` (turns), `media` and `num_effective` (tokens of forward passes) are those of the whole line
    down to this node; `has_calls`: it has a tool call.
    """

    __slots__ = ("depth", "has_calls", "id", "media", "num_effective", "num_messages", "num_tokens", "parent", "turn")

    def __init__(self, *, id_: int, turn: CommittedTurn, parent: "Node | None") -> None:
        self.id = id_
        self.turn = turn
        self.parent = parent
        self.depth: int = 1 + (parent.depth if parent else 0)
        self.num_tokens: int = turn.num_tokens + (parent.num_tokens if parent else 0)
        self.num_messages: int = len(turn.messages) + 1 + (parent.num_messages if parent else 0)
        self.media: tuple[Expansion, ...] = (() if parent is None else parent.media) + turn.media
        self.num_effective: int = turn.num_effective + (parent.num_effective if parent else 0)
        calling = any(map(attrgetter("tool_calls"), (*turn.messages, turn.reply.message)))
        self.has_calls: bool = calling or (parent is not None and parent.has_calls)

    @property
    def tracked_parts(self) -> tuple[object, ...]:
        """The parts of a new turn tracked by the garbage collector: this node, and the arrays. It does not track the
        structs, and untracks tuples by itself."""
        turn, sampled = self.turn, self.turn.sampled
        new_ids, ids, logprobs = turn.new_prompt_ids, sampled.ids, sampled.logprobs
        return self, new_ids, ids, logprobs, sampled.sampling_logprobs, sampled.tempered_logprobs

    def __repr__(self) -> str:
        return f"<Node {self.id} depth {self.depth}, {self.num_tokens} tokens>"

    def line(self) -> "list[Node]":
        """The path from the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def line_ids(node: Node | None) -> "array[int]":
    """All ids [T] of the line down to `node`, prompts and samples as the engine saw them last."""
    return _joined([step.turn for step in node.line()] if node is not None else ())


def last_line_ids(node: Node | None, num: int) -> "array[int]":
    """The last ids of the line down to `node`: at least `num`, or all of it."""
    if node is not None and len(node.turn.sampled.ids) >= num:
        return node.turn.sampled.ids[-num:]
    turns: list[CommittedTurn] = []
    before = 0 if node is None else node.num_tokens - num
    while node is not None and (not turns or node.num_tokens > before):
        turns.append(node.turn)
        node = node.parent
    return _joined(turns[::-1])


def _joined(turns: Sequence[CommittedTurn]) -> "array[int]":
    ids = token_ids()
    for turn in turns:
        if turn.num_trimmed:
            del ids[-turn.num_trimmed :]
        ids.extend(turn.new_prompt_ids)
        ids.extend(turn.sampled.ids)
    return ids


def line_messages(node: Node | None) -> list[Message]:
    """The messages of the line down to `node`, replies included, as they are stored."""
    steps = node.line() if node is not None else ()
    return [message for step in steps for message in (*step.turn.messages, step.turn.reply.message)]
