"""The interface of a session's histories, and the checks that they share: where a request attaches, what may follow.

A turn's prompt is the ids of its parent, untouched (but for a stop token that the next opener replaces), plus its
`new_prompt_ids`. Rules: docs/http-api.md. The history with one line is linear.py, the one with many is tree.py. Pure.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import Asked
from stenograph.core.errors import HistoryMismatch, NothingToAnswer, TruncatedGeneration
from stenograph.core.history_kinds import AfterLength
from stenograph.core.messages import Message, Role
from stenograph.trajectory.matching import Matcher
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus, line_ids


class Attachment(Struct, frozen=True, kw_only=True, gc=False):
    """Place where a request attaches: after `parent` (None: as a root), with messages not yet in its line.

    `revision` is the history's when the position was taken; where only one turn may run, a commit checks that it holds.
    `has_other_reply`: a turn would be replaced by what is no other try of it.
    """

    parent: Node | None
    new_messages: tuple[Message, ...]
    revision: int
    has_other_reply: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """Turns that commits took out of a history, and the sampled tokens in them."""

    num_turns: int = 0
    num_tokens: int = 0

    def with_turns(self, nodes: "Sequence[Node]") -> "Discarded":
        """The same, and these."""
        num_tokens = self.num_tokens + sum(len(node.turn.sampled.ids) for node in nodes)
        return Discarded(num_turns=self.num_turns + len(nodes), num_tokens=num_tokens)


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

    def as_it_is(self) -> "History":
        """One with the same turns, to which nothing that is committed from now on comes."""
        ...

    def after(self, parent: Node | None, messages: Sequence[Message]) -> Attachment | None:
        """The place of a turn that is known to come after `parent`, with these messages; None if that is no place."""
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

        A turn that sampled nothing is no such place. Raises HistoryMismatch or TruncatedGeneration.
        """
        ...

    def num_tokens_before(self, attachment: Attachment) -> int:
        """Tokens of all turns that will stay if a turn is committed there."""
        ...

    def replaced_by(self, attachment: Attachment) -> Sequence[Node]:
        """The turns that a commit there discards, oldest first."""
        ...

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> Node:
        """Keep a turn where it was positioned. Raises SessionInvariant if that place is no more."""
        ...


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


def has_other_reply(node: Node, messages: Sequence[Message], context: PromptContext, matcher: Matcher) -> bool:
    """Whether a request that goes on after `node`'s parent, and not after the node, is no other try of the node's turn:
    it has another message in the reply's place, or parts from the turn earlier and has a reply after that. A retry,
    and another try, also in other words, end before the reply."""
    stored = (*node.turn.messages, node.turn.reply.message)
    given = messages[node.num_messages - len(stored) :]
    pairs = enumerate(zip(stored, given, strict=False))
    at = next((index for index, pair in pairs if not matcher.matches(*pair)), len(given))
    return (
        node.turn.asked is Asked.CHAT
        and node.turn.context.is_same(context)
        and (at == len(stored) - 1 < len(given) or any(message.role is Role.ASSISTANT for message in given[at:]))
    )


def check_extension(parent: Node | None, messages: Sequence[Message], after_length: AfterLength) -> None:
    """Check that a turn can follow `parent`.

    Raises NothingToAnswer if the request adds nothing to its line, TruncatedGeneration if its reply is not whole and
    nothing may follow it.
    """
    if parent is None:
        return
    if parent.num_messages == len(messages):
        raise NothingToAnswer(
            "The request ends with a reply that this session generated: there is nothing to answer."
            " Add a message, or leave the last reply out to generate it again.",
            node_id=parent.id,
            blame=Blame(RequestPart.MESSAGES, max(0, parent.num_messages - 1)),
        )
    _check_whole(parent.turn, after_length, blame=Blame(RequestPart.MESSAGES, parent.num_messages - 1))


def _check_whole(turn: CommittedTurn, after_length: AfterLength, *, blame: Blame) -> None:
    """Raise TruncatedGeneration for a turn that nothing may follow. Where a cut one can be closed is not known here."""
    if turn.status is TurnStatus.ABORTED:
        raise TruncatedGeneration(
            "The turn to go on after was aborted: its reply is not whole, so nothing can follow it. Leave the reply"
            " out to generate it again.",
            blame=blame,
        )
    if turn.status is TurnStatus.TRUNCATED and after_length is AfterLength.REFUSE:
        raise TruncatedGeneration(
            "The turn to go on after was cut off by its token limit, and this session does not extend such turns"
            " (after_length 'refuse'). Leave the reply out to generate it again.",
            blame=blame,
        )


def num_common(ids: "array[int]", start: int, segment: "array[int]") -> int:
    """Number of ids of `segment` that stand in `ids` from `start` on, before the first that differs."""
    found = ids[start : start + len(segment)]
    if found == segment:
        return len(segment)
    same = np.frombuffer(found, dtype=np.int32) == np.frombuffer(segment, dtype=np.int32)[: len(found)]
    return len(found) if same.all() else int(same.argmin())


def is_continued(node: Node, ids: "array[int]") -> bool:
    """Whether a prompt given as ids goes on after `node`: it begins with all ids of its line.

    After a turn that sampled nothing none does: by ids, that would be the same as asking for it again.
    """
    sampled, end = node.turn.sampled.ids, node.num_tokens
    if not sampled or end > len(ids) or ids[end - len(sampled) : end] != sampled:
        return False  # most lines differ in what was sampled: only then is the whole one made
    return ids[:end] == line_ids(node)


def check_ids_extension(parent: Node | None, ids: "array[int]", after_length: AfterLength) -> None:
    """Check that a turn whose prompt is ids can follow `parent`. Raises as `check_extension`."""
    if parent is None:
        return
    if parent.num_tokens == len(ids):
        raise HistoryMismatch(
            "The prompt ends with a reply that this session generated: there is nothing to answer. Add tokens, or leave"
            " the last reply's out to generate it again.",
            blame=Blame(RequestPart.PROMPT),
        )
    _check_whole(parent.turn, after_length, blame=Blame(RequestPart.PROMPT))
