"""A session's committed turns, and where a request attaches to them. Pure: no clock, no I/O, no engine.

Owns the tokens of a session: turn n's prompt is the ids of turn n-1, untouched, plus `new_prompt_ids`. Knows nothing
of how a reply is sampled or shown. Rules: SPEC 4.
"""

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from stenograph.core.chat import Message, ParsedReply, Tool
from stenograph.core.errors import HistoryMismatch, SessionInvariant, TruncatedGeneration
from stenograph.core.types import FinishReason, RequestId, SampledTurn, Stage, token_ids
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
    """What stands in the prompt beside the messages. Turns with different contexts do not share a prefix."""

    tools: tuple[Tool, ...] = ()
    template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])

    def is_same(self, other: "PromptContext") -> bool:
        """Whether both put the same into a prompt; `true` and `1` are not the same."""
        return self.tools == other.tools and self._kwargs_json() == other._kwargs_json()

    def _kwargs_json(self) -> bytes:
        return msgspec.json.encode(self.template_kwargs, order="sorted") if self.template_kwargs else b"{}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedTurn:
    """One turn, as it is kept: only what it added to the turn before it.

    `new_prompt_ids` are the ids of this turn's prompt after the ids of its parent (the whole prompt for the first
    turn); `messages` are the request's messages after those of the parent. `request_json` is what the client asked
    for beside the messages (parameters and recorded fields) as JSON text. `stages_s` are seconds per stage.
    """

    request_id: RequestId
    new_prompt_ids: "array[int]"
    sampled: SampledTurn
    status: TurnStatus
    messages: tuple[Message, ...]
    reply: ParsedReply
    context: PromptContext
    request_json: bytes = b"{}"
    requested_at: float = 0.0
    committed_at: float = 0.0
    stages_s: Mapping[Stage, float] = field(default_factory=dict[Stage, float])

    @property
    def num_tokens(self) -> int:
        """Tokens that this turn adds to its line."""
        return len(self.new_prompt_ids) + len(self.sampled.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Where a request attaches: after the first `num_turns` turns, with these messages that are not in them yet.

    `revision` is the history's when the position was taken; a commit checks that it still holds.
    """

    num_turns: int
    new_messages: tuple[Message, ...]
    revision: int


class LinearHistory:
    """A history with exactly one line. A request extends it, or replaces its last turn, or is refused."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._turns: list[CommittedTurn] = []
        self._revision = 0

    def __repr__(self) -> str:
        return f"<LinearHistory {len(self._turns)} turns, revision {self._revision}>"

    @property
    def turns(self) -> Sequence[CommittedTurn]:
        """The committed turns, oldest first. A view: do not keep it across a commit."""
        return self._turns

    def line_ids(self, num_turns: int | None = None) -> "array[int]":
        """All ids [T] of the first `num_turns` turns (default: all), prompts and samples as the engine saw them."""
        ids = token_ids()
        for turn in self._turns[:num_turns]:
            ids.extend(turn.new_prompt_ids)
            ids.extend(turn.sampled.ids)
        return ids

    def position(self, messages: Sequence[Message], context: PromptContext) -> Attachment:
        """Find where a request attaches. Changes nothing.

        Raises HistoryMismatch (two or more turns would have to be discarded, or nothing is added) and
        TruncatedGeneration (the turn to extend ended by length or abort).
        """
        num_turns, num_messages = self._longest_match(messages, context)
        total = len(self._turns)
        if num_turns < total - 1:
            raise self._mismatch(messages, context, num_turns, num_messages)
        if num_messages == len(messages):
            raise HistoryMismatch(
                "The request ends with a reply that this session generated: there is nothing to answer."
                " Add a message, or leave the last reply out to generate it again.",
                param=f"/messages/{max(0, num_messages - 1)}",
            )
        if num_turns and num_turns == total and self._turns[-1].status is not TurnStatus.COMPLETED:
            raise TruncatedGeneration(
                f"The last turn is {self._turns[-1].status}: its reply is not whole, so no message can follow it."
                " Leave the reply out to generate it again.",
                param=f"/messages/{num_messages - 1}",
            )
        return Attachment(num_turns=num_turns, new_messages=tuple(messages[num_messages:]), revision=self._revision)

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> None:
        """Append `turn` at `attachment`, discarding the turn that it replaces, in one step.

        Raises SessionInvariant if the history moved since the position was taken; nothing is changed then.
        """
        if attachment.revision != self._revision:
            raise SessionInvariant(
                f"the history is at revision {self._revision}, the turn was positioned at {attachment.revision}"
            )
        del self._turns[attachment.num_turns :]
        self._turns.append(turn)
        self._revision += 1

    def _longest_match(self, messages: Sequence[Message], context: PromptContext) -> tuple[int, int]:
        """How many turns, and messages in them, are a prefix of the request."""
        num_messages = 0
        for index, turn in enumerate(self._turns):
            stored = (*turn.messages, turn.reply.message)
            end = num_messages + len(stored)
            if not turn.context.is_same(context) or end > len(messages):
                return index, num_messages
            if not all(map(self._matcher.matches, stored, messages[num_messages:end])):
                return index, num_messages
            num_messages = end
        return len(self._turns), num_messages

    def _mismatch(
        self, messages: Sequence[Message], context: PromptContext, num_turns: int, num_messages: int
    ) -> HistoryMismatch:
        turn = self._turns[num_turns]
        discarded = len(self._turns) - num_turns
        if not turn.context.is_same(context):
            what, param = "its tools or chat_template_kwargs differ from the stored turn's", "/tools"
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
