"""A session's committed turns, and where a request attaches to them. Pure: no clock, no I/O, no engine.

Owns the tokens of a session: a turn's prompt is the ids of its parent, untouched (but for a stop token that the next
opener replaces), plus `new_prompt_ids`. Knows nothing of how a reply is sampled or shown. Rules: SPEC 4. The history
with one line is here, the one with many in tree.py.
"""

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from stenograph.core.chat import Asked, ParsedReply, ToolChoice
from stenograph.core.errors import HistoryMismatch, SessionInvariant, TruncatedGeneration
from stenograph.core.messages import Message, Tool
from stenograph.core.types import FinishReason, RequestId, SampledTurn, SamplingParams, StageTimes, token_ids
from stenograph.render.day import STRFTIME_NOW, Day
from stenograph.session.matching import Matcher


class TurnStatus(enum.StrEnum):
    """How a turn, and a sample that ends with it, is marked for the trainer. The values are miles' `Sample.Status`."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"

    @staticmethod
    def of(reason: FinishReason) -> "TurnStatus":
        """The status of a turn that finished for `reason`."""
        return _STATUS_OF[reason]


_STATUS_OF = {
    FinishReason.STOP: TurnStatus.COMPLETED,
    FinishReason.LENGTH: TurnStatus.TRUNCATED,
    FinishReason.ABORT: TurnStatus.ABORTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContext:
    """What stands in the prompt beside the messages. Turns with different contexts do not share a prefix.

    `kwargs_json` is `template_kwargs` with sorted keys, by which they are compared: `true` and `1` are not the same.
    `day` is the session's, for a template that writes the date.
    """

    tools: tuple[Tool, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    day: Day | None = None
    kwargs_json: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        encoded = msgspec.json.encode(self.template_kwargs, order="sorted") if self.template_kwargs else b"{}"
        object.__setattr__(self, "kwargs_json", encoded)

    @property
    def arguments(self) -> Mapping[str, object]:
        """What the template is given beside messages and tools."""
        return self.template_kwargs if self.day is None else {**self.template_kwargs, STRFTIME_NOW: self.day}

    @property
    def num_bytes(self) -> int:
        """About how much it brings to a template."""
        return len(self.kwargs_json) + sum(len(tool.json) for tool in self.tools)

    def is_same(self, other: "PromptContext") -> bool:
        """Whether both put the same into a prompt."""
        return self is other or (self.kwargs_json == other.kwargs_json and self.tools == other.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedTurn:
    """One turn, as it is kept: only what it added to the turn before it.

    `new_prompt_ids` are the ids of this turn's prompt after the ids of its parent (the whole prompt for a root), of
    which the last `num_trimmed` were left out; `messages` are the request's messages after those of the parent, none if
    a completion was `asked` for: its prompt is ids, and its reply a text that no conversation has.
    `params` are those that the engine was given, `request_json` the rest of what the client sent (the model's name,
    recorded fields) as a JSON object.
    `stages` is the turn's own clock, which the reply still marks after the commit. `reply_id` is what the client
    knows the reply by.
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
    requested_at: float = 0.0
    committed_at: float = 0.0
    stages: StageTimes = field(default_factory=lambda: StageTimes(start=0.0))

    @property
    def num_tokens(self) -> int:
        """Tokens that this turn adds to its line."""
        return len(self.new_prompt_ids) - self.num_trimmed + len(self.sampled.ids)


class Node:
    """A committed turn in its place. `id` counts the commits of its session. It knows its parent, not its children: so
    a session that is dropped is given back at once, without the collector of cycles.

    `num_tokens`, `num_messages` and `depth` (turns) are those of the whole line down to this node.
    """

    __slots__ = ("depth", "id", "num_messages", "num_tokens", "parent", "turn")

    def __init__(self, *, id_: int, turn: CommittedTurn, parent: "Node | None") -> None:
        self.id = id_
        self.turn = turn
        self.parent = parent
        self.depth: int = 1 + (parent.depth if parent else 0)
        self.num_tokens: int = turn.num_tokens + (parent.num_tokens if parent else 0)
        self.num_messages: int = len(turn.messages) + 1 + (parent.num_messages if parent else 0)

    def __repr__(self) -> str:
        return f"<Node {self.id} depth {self.depth}, {self.num_tokens} tokens>"

    def line(self) -> "list[Node]":
        """The path from the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def line_ids(node: Node | None) -> "array[int]":
    """All ids [T] of the line down to `node`, prompts and samples as the engine saw them last."""
    ids = token_ids()
    for step in node.line() if node is not None else ():
        if step.turn.num_trimmed:
            del ids[-step.turn.num_trimmed :]
        ids.extend(step.turn.new_prompt_ids)
        ids.extend(step.turn.sampled.ids)
    return ids


def line_messages(node: Node | None) -> list[Message]:
    """The messages of the line down to `node`, replies included, as they are stored."""
    steps = node.line() if node is not None else ()
    return [message for step in steps for message in (*step.turn.messages, step.turn.reply.message)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Where a request attaches: after `parent` (None: as a root), with these messages that are not in its line yet.

    `revision` is the history's when the position was taken; where only one turn may run, a commit checks that it holds.
    """

    parent: Node | None
    new_messages: tuple[Message, ...]
    revision: int


class History(Protocol):
    """A session's committed turns. `position` changes nothing; `commit` is one step."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The committed turns, oldest commit first. A view: do not keep it across a commit."""
        ...

    @property
    def latest(self) -> Node | None:
        """The turn that was committed last."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns, those that several lines share once."""
        ...

    def position(self, messages: Sequence[Message], context: PromptContext) -> Attachment:
        """Find where a request attaches. Raises HistoryMismatch or TruncatedGeneration."""
        ...

    def position_after(self, node: Node, messages: Sequence[Message], context: PromptContext) -> Attachment | None:
        """The same for a request that is known to begin with the messages of `node`'s request. None: ask `position`.

        Raises HistoryMismatch or TruncatedGeneration.
        """
        ...

    def position_ids(self, ids: "array[int]") -> Attachment:
        """Find where a prompt attaches that was given as ids: after a turn whose line's ids it begins with.

        A turn that drew nothing is no such place. Raises HistoryMismatch or TruncatedGeneration.
        """
        ...

    def num_tokens_before(self, attachment: Attachment) -> int:
        """Tokens of all turns that will stay if a turn is committed there."""
        ...

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> Node:
        """Keep a turn where it was positioned. Raises SessionInvariant if that place is no more."""
        ...


class LinearHistory:
    """A history with exactly one line. A request extends it, or replaces its last turn, or is refused."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._nodes: list[Node] = []
        self._revision = 0

    def __repr__(self) -> str:
        return f"<LinearHistory {len(self._nodes)} turns, revision {self._revision}>"

    @property
    def nodes(self) -> Sequence[Node]:
        return self._nodes

    @property
    def latest(self) -> Node | None:
        return self._nodes[-1] if self._nodes else None

    @property
    def num_tokens(self) -> int:
        return self._nodes[-1].num_tokens if self._nodes else 0

    def position(self, messages: Sequence[Message], context: PromptContext) -> Attachment:
        """Find where a request attaches. Changes nothing.

        Raises HistoryMismatch (two or more turns would have to be discarded, or nothing is added) and
        TruncatedGeneration (the turn to extend ended by length or abort).
        """
        num_turns, num_messages = 0, 0
        for node in self._nodes:
            if not continues(node, messages, context, self._matcher):
                break
            num_turns, num_messages = num_turns + 1, node.num_messages
        total = len(self._nodes)
        if num_turns < total - 1:
            raise self._mismatch(messages, context, num_turns, num_messages)
        parent = self._nodes[num_turns - 1] if num_turns else None
        check_extension(parent, messages)
        return Attachment(parent=parent, new_messages=tuple(messages[num_messages:]), revision=self._revision)

    def position_after(self, node: Node, messages: Sequence[Message], context: PromptContext) -> Attachment | None:
        """Where a request attaches that begins with the messages of `node`'s request; None unless that is after it."""
        if node is not self.latest or not answers(node, messages, context, self._matcher):
            return None
        check_extension(node, messages)
        new = tuple(messages[node.num_messages :])
        return Attachment(parent=node, new_messages=new, revision=self._revision)

    def position_ids(self, ids: "array[int]") -> Attachment:
        """After the last turn, or in its place. Changes nothing.

        Raises HistoryMismatch (two or more turns would have to be discarded, or nothing is added) and
        TruncatedGeneration (the turn to extend ended by length or abort).
        """
        last = self.latest
        parent = last if last is None or is_continued(last, ids) else last.parent
        if parent is not None and parent is not last and not is_continued(parent, ids):
            at = num_common(ids, 0, line_ids(parent))
            what = f"token {at} differs" if at < len(ids) else f"it ends before token {at}"
            raise HistoryMismatch(
                f"The prompt is not a continuation of this session: {what}. A linear session can replace its last turn,"
                " but more would have to go.",
                param="/prompt",
            )
        check_ids_extension(parent, ids)
        return Attachment(parent=parent, new_messages=(), revision=self._revision)

    def num_tokens_before(self, attachment: Attachment) -> int:
        return 0 if attachment.parent is None else attachment.parent.num_tokens

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> Node:
        """Append `turn` at `attachment`, discarding the turn that it replaces, in one step.

        Raises SessionInvariant if the history moved since the position was taken; nothing is changed then.
        """
        if attachment.revision != self._revision:
            raise SessionInvariant(
                f"the history is at revision {self._revision}, the turn was positioned at {attachment.revision}"
            )
        parent = attachment.parent
        node = Node(id_=self._revision, turn=turn, parent=parent)
        del self._nodes[parent.depth if parent is not None else 0 :]
        self._nodes.append(node)
        self._revision += 1
        return node

    def _mismatch(
        self, messages: Sequence[Message], context: PromptContext, num_turns: int, num_messages: int
    ) -> HistoryMismatch:
        turn = self._nodes[num_turns].turn
        discarded = len(self._nodes) - num_turns
        if turn.asked is Asked.COMPLETION:
            what, param = "a completion stands, which no message can follow", "/messages"
        elif not turn.context.is_same(context):
            param = "/chat_template_kwargs" if turn.context.tools == context.tools else "/tools"
            what = "its tools or chat_template_kwargs differ from the stored turn's"
        else:
            stored = (*turn.messages, turn.reply.message)
            given = messages[num_messages : num_messages + len(stored)]
            at = next(
                (i for i, pair in enumerate(zip(stored, given, strict=False)) if not self._matcher.matches(*pair)),
                len(given),
            )
            at += num_messages
            what = f"message {at} differs" if at < len(messages) else f"it ends before message {at}"
            param = f"/messages/{min(at, len(messages) - 1)}"
        return HistoryMismatch(
            f"The request is not a continuation of this session: in turn {num_turns}, {what}. A linear session can"
            f" replace its last turn, but {discarded} would have to go.",
            param=param,
        )


def continues(node: Node, messages: Sequence[Message], context: PromptContext, matcher: Matcher) -> bool:
    """Whether the request goes on after `node`, given that it does so after the node's parent."""
    stored = (*node.turn.messages, node.turn.reply.message)
    start = node.num_messages - len(stored)
    return (
        node.num_messages <= len(messages)
        and node.turn.asked is Asked.CHAT
        and node.turn.context.is_same(context)
        # The reply first: it is what siblings differ by.
        and matcher.matches(stored[-1], messages[node.num_messages - 1])
        and all(map(matcher.matches, stored[:-1], messages[start:]))
    )


def answers(node: Node, messages: Sequence[Message], context: PromptContext, matcher: Matcher) -> bool:
    """Whether a request that begins with the messages of `node`'s request goes on with its reply."""
    return (
        node.num_messages <= len(messages)
        and node.turn.context.is_same(context)
        and matcher.matches(node.turn.reply.message, messages[node.num_messages - 1])
    )


def check_extension(parent: Node | None, messages: Sequence[Message]) -> None:
    """Check that a turn can follow `parent`.

    Raises HistoryMismatch if the request adds nothing to its line, TruncatedGeneration if its reply is not whole.
    """
    if parent is None:
        return
    if parent.num_messages == len(messages):
        raise HistoryMismatch(
            "The request ends with a reply that this session generated: there is nothing to answer."
            " Add a message, or leave the last reply out to generate it again.",
            param=f"/messages/{max(0, parent.num_messages - 1)}",
        )
    if parent.turn.status is not TurnStatus.COMPLETED:
        raise TruncatedGeneration(
            f"The last turn is {parent.turn.status}: its reply is not whole, so no message can follow it."
            " Leave the reply out to generate it again.",
            param=f"/messages/{parent.num_messages - 1}",
        )


def num_common(ids: "array[int]", start: int, segment: "array[int]") -> int:
    """How many ids of `segment` stand in `ids` from `start` on, before the first that differs."""
    found = ids[start : start + len(segment)]
    if found == segment:
        return len(segment)
    same = np.frombuffer(found, dtype=np.int32) == np.frombuffer(segment, dtype=np.int32)[: len(found)]
    return len(found) if same.all() else int(same.argmin())


def is_continued(node: Node, ids: "array[int]") -> bool:
    """Whether a prompt given as ids goes on after `node`: it begins with all ids of its line.

    After a turn that drew nothing none does: by ids, that would be the same as asking for it again.
    """
    return bool(node.turn.sampled.ids) and node.num_tokens <= len(ids) and ids[: node.num_tokens] == line_ids(node)


def check_ids_extension(parent: Node | None, ids: "array[int]") -> None:
    """Check that a turn whose prompt is ids can follow `parent`. Raises as `check_extension`."""
    if parent is None:
        return
    if parent.num_tokens == len(ids):
        raise HistoryMismatch(
            "The prompt ends with a reply that this session generated: there is nothing to answer. Add tokens, or leave"
            " the last reply's out to generate it again.",
            param="/prompt",
        )
    if parent.turn.status is not TurnStatus.COMPLETED:
        raise TruncatedGeneration(
            f"The turn that the prompt goes on after is {parent.turn.status}: its reply is not whole, so nothing can"
            " follow it. Leave the reply out to generate it again.",
            param="/prompt",
        )
