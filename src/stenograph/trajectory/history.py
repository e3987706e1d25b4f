"""The histories of a session: where a request attaches, which turns may follow, and the history with exactly one line.

A turn's prompt is the ids of its parent, untouched (but for a stop token replaced by the next opener), plus its
`new_prompt_ids`. Rules: docs/http-api.md. The history with many lines is tree.py. Pure.
"""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq
from typing import Protocol

from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import Asked
from stenograph.core.errors import HistoryMismatch, Rollback, SessionInvariant, TruncatedGeneration
from stenograph.core.kinds import AfterLength, Compat
from stenograph.core.messages import Message, Role
from stenograph.trajectory.matching import Matcher
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, TurnStatus, line_ids

_COMPARED_IDS = 4096
"""Ids compared at once."""

_MEDIA = attrgetter("media")


class Attachment(Struct, frozen=True, kw_only=True, gc=False):
    """Place where a request attaches: after `parent` (None: as a root), with messages not yet in its line.

    `revision` is the history's when the position was taken; where only one turn may run, a commit checks it.
    `has_other_reply`: the request would replace a turn, and is no other try of it. `adds_nothing`: the request ends
    with `parent`'s reply, and leaves nothing to answer.
    """

    parent: Node | None
    new_messages: tuple[Message, ...]
    revision: int
    has_other_reply: bool = False
    adds_nothing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """Turns removed from a history by commits, and the tokens sampled for this session in them."""

    num_turns: int = 0
    num_tokens: int = 0

    def with_turns(self, nodes: "Sequence[Node]") -> "Discarded":
        """The same, and these."""
        num_tokens = self.num_tokens + sum(len(node.turn.sampled.ids) - node.turn.num_inherited for node in nodes)
        return Discarded(num_turns=self.num_turns + len(nodes), num_tokens=num_tokens)


class History(Protocol):
    """A session's committed turns. `position` changes nothing; `commit` is one step."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The committed turns, oldest commit first. A view: do not keep it across a commit."""
        ...

    @property
    def latest(self) -> Node | None:
        """The latest committed turn."""
        ...

    @property
    def num_tokens(self) -> int:
        """Effective tokens of all turns; those shared by several lines count once."""
        ...

    def as_it_is(self) -> "History":
        """The same turns, for a worker to read while turns are committed here."""
        ...

    def after(self, parent: Node | None, messages: Sequence[Message]) -> Attachment | None:
        """The place of a turn known to come after `parent`, with these messages; None if there is no such place."""
        ...

    def position(self, messages: Sequence[Message], context: PromptContext) -> Attachment:
        """Find where a request attaches. Raises HistoryMismatch or TruncatedGeneration."""
        ...

    def position_after(self, node: Node, messages: Sequence[Message], context: PromptContext) -> Attachment | None:
        """The same for a request known to begin with the messages of `node`'s request. None: ask `position`.

        Raises HistoryMismatch or TruncatedGeneration.
        """
        ...

    def position_ids(self, ids: "array[int]") -> Attachment:
        """Find where a prompt given as ids attaches: after a turn, if it begins with the ids of the turn's line.

        A turn without sampled tokens is no such place. Raises HistoryMismatch or TruncatedGeneration.
        """
        ...

    def num_tokens_before(self, attachment: Attachment) -> int:
        """Effective tokens of all turns kept by a commit there."""
        ...

    def replaced_by(self, attachment: Attachment) -> Sequence[Node]:
        """The turns discarded by a commit there, oldest first."""
        ...

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> Node:
        """Keep a turn where it was positioned. Raises SessionInvariant if the place is gone."""
        ...


def continues(node: Node, messages: Sequence[Message], context: PromptContext, matcher: Matcher) -> bool:
    """Whether the request goes on after `node`, if it does so after the node's parent."""
    stored = (*node.turn.messages, node.turn.reply.message)
    start = node.num_messages - len(stored)
    return (
        node.num_messages <= len(messages)
        and node.turn.asked is Asked.CHAT
        and node.turn.context.is_same(context)
        # The reply first: it is what siblings differ by.
        and matcher.matches(stored[-1], messages[node.num_messages - 1])
        and all(map(matcher.matches, stored, given := messages[start : node.num_messages - 1]))
        and (all(map(eq, map(_MEDIA, stored), map(_MEDIA, given))) or all(map(has_same_media, stored, given)))
    )


def is_same(matcher: Matcher, stored: Message, given: Message) -> bool:
    """Whether a message is the stored one, whatever its matcher: the same text with another picture is another."""
    return matcher.matches(stored, given) and has_same_media(stored, given)


def has_same_media(stored: Message, given: Message) -> bool:
    """Whether two messages have the same media in the same order; white space around a text may move their places."""
    return stored.media == given.media or [one.ref.sha256 for one in stored.media] == [
        one.ref.sha256 for one in given.media
    ]


def answers(node: Node, messages: Sequence[Message], context: PromptContext, matcher: Matcher) -> bool:
    """Whether a request goes on with `node`'s reply, if it begins with the messages of `node`'s request."""
    return (
        node.num_messages <= len(messages)
        and node.turn.context.is_same(context)
        and matcher.matches(node.turn.reply.message, messages[node.num_messages - 1])
    )


def has_other_reply(node: Node, messages: Sequence[Message], context: PromptContext, matcher: Matcher) -> bool:
    """Whether a request after `node`'s parent, and not after the node, is no other try of the node's turn: it has
    another message in the reply's place, or parts from the turn earlier and has a later reply. A retry, and another
    try, also in other words, end before the reply."""
    stored = (*node.turn.messages, node.turn.reply.message)
    given = messages[node.num_messages - len(stored) :]
    pairs = enumerate(zip(stored, given, strict=False))
    at = next((index for index, pair in pairs if not is_same(matcher, *pair)), len(given))
    return (
        node.turn.asked is Asked.CHAT
        and node.turn.context.is_same(context)
        and (at == len(stored) - 1 < len(given) or any(message.role is Role.ASSISTANT for message in given[at:]))
    )


def attached(
    parent: Node | None,
    messages: Sequence[Message],
    *,
    revision: int,
    after_length: AfterLength,
    compat: Compat | None = None,
    has_other_reply: bool = False,
) -> Attachment:
    """The place of a chat after `parent`; the chat begins with its line. `compat` MILES samples another reply where
    nothing is added.

    Raises TruncatedGeneration if the parent's reply is not whole and nothing may follow it.
    """
    num_messages = 0 if parent is None else parent.num_messages
    adds_nothing = parent is not None and num_messages == len(messages) and compat is not Compat.MILES
    if parent is not None and not adds_nothing and parent.turn.status is not TurnStatus.COMPLETED:
        _check_whole(parent.turn, after_length, blame=Blame(RequestPart.MESSAGES, num_messages - 1))
    return Attachment(
        parent=parent,
        new_messages=tuple(messages[num_messages:]),
        revision=revision,
        has_other_reply=has_other_reply,
        adds_nothing=adds_nothing,
    )


def goes_on(
    nodes: Sequence[Node],
    messages: Sequence[Message],
    context: PromptContext,
    matcher: Matcher,
    after_length: AfterLength,
) -> bool:
    """Whether a request adds to the line of these turns, and may."""
    return (
        bool(nodes)
        and nodes[-1].num_messages < len(messages)
        and _why_closed(nodes[-1].turn, after_length) is None
        and all(continues(node, messages, context, matcher) for node in nodes)
    )


def _check_whole(turn: CommittedTurn, after_length: AfterLength, *, blame: Blame) -> None:
    """Raise TruncatedGeneration for a turn that nothing may follow. Where a cut one can be closed is not known here."""
    if (why := _why_closed(turn, after_length)) is not None:
        raise TruncatedGeneration(why, blame=blame)


def _why_closed(turn: CommittedTurn, after_length: AfterLength) -> str | None:
    if turn.status is TurnStatus.ABORTED:
        return (
            "The turn to go on after was aborted: its reply is not whole, so nothing can follow it. Leave the reply"
            " out to generate it again."
        )
    if turn.status is TurnStatus.TRUNCATED and after_length is AfterLength.REFUSE:
        return (
            "The turn to go on after was cut off by its token limit, and this session does not extend such turns"
            " (after_length 'refuse'). Leave the reply out to generate it again."
        )
    return None


def num_common(ids: "array[int]", start: int, segment: "array[int]") -> int:
    """Number of ids of `segment` found in `ids` from `start` on, before the first difference."""
    found = ids[start : start + len(segment)]
    if found == segment:
        return len(segment)
    for at in range(0, len(found), _COMPARED_IDS):
        one, other = found[at : at + _COMPARED_IDS], segment[at : at + _COMPARED_IDS]
        if one != other[: len(one)]:
            pairs = zip(one, other, strict=False)
            return at + next(place for place, (left, right) in enumerate(pairs) if left != right)
    return len(found)


def begins_with_line(ids: "array[int]", node: Node) -> bool:
    """Whether a prompt given as ids begins with all ids of the line down to `node`."""
    sampled, end = node.turn.sampled.ids, node.num_tokens
    if end > len(ids) or ids[end - len(sampled) : end] != sampled:
        return False  # most lines differ in what was sampled: only then is the whole one made
    return ids[:end] == line_ids(node)


def is_continued(node: Node, ids: "array[int]") -> bool:
    """Whether a prompt given as ids goes on after `node`. None goes on after a turn without sampled tokens: it asks for
    this turn again."""
    return bool(node.turn.sampled.ids) and begins_with_line(ids, node)


def check_ids_extension(parent: Node | None, ids: "array[int]", after_length: AfterLength) -> None:
    """Check that a turn with ids as its prompt can follow `parent`. Raises HistoryMismatch where nothing is added, and
    TruncatedGeneration as `attached`."""
    if parent is None:
        return
    if parent.num_tokens == len(ids):
        raise HistoryMismatch(
            "The prompt ends with a reply that this session generated: there is nothing to answer. Add tokens, or leave"
            " the last reply's out to generate it again.",
            blame=Blame(RequestPart.PROMPT),
        )
    _check_whole(parent.turn, after_length, blame=Blame(RequestPart.PROMPT))


class LinearHistory:
    """A history with exactly one line. A request extends it, or replaces its last turn, or is refused.

    `ids` number the commits of a session, over all of its histories.
    """

    def __init__(
        self,
        matcher: Matcher,
        *,
        after_length: AfterLength = AfterLength.CLOSE,
        ids: Iterator[int] | None = None,
        compat: Compat | None = None,
    ) -> None:
        self._matcher = matcher
        self._ids = itertools.count() if ids is None else ids
        self._after_length = after_length
        self._compat = compat
        self._nodes: list[Node] = []
        self.latest: Node | None = None
        self.num_tokens = 0
        self._revision = 0

    def __repr__(self) -> str:
        return f"<LinearHistory {len(self._nodes)} turns, revision {self._revision}>"

    @property
    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def as_it_is(self) -> "LinearHistory":
        """A copy, for a worker to read while turns are committed here."""
        copy = LinearHistory(self._matcher, after_length=self._after_length, ids=self._ids, compat=self._compat)
        copy._nodes, copy._revision = list(self._nodes), self._revision
        copy.latest, copy.num_tokens = self.latest, self.num_tokens
        return copy

    def after(self, parent: Node | None, messages: Sequence[Message]) -> Attachment | None:
        """The place of a turn known to come after `parent`; None if `parent` is not on the line."""
        if parent is not None and (parent.depth > len(self._nodes) or self._nodes[parent.depth - 1] is not parent):
            return None
        return Attachment(parent=parent, new_messages=tuple(messages), revision=self._revision)

    def position(self, messages: Sequence[Message], context: PromptContext) -> Attachment:
        """Find where a request attaches. Changes nothing.

        Raises HistoryMismatch (two or more turns would have to be discarded) and TruncatedGeneration (the turn to
        extend is not whole, and nothing may follow it).
        """
        num_turns, num_messages = 0, 0
        for node in self._nodes:
            if not continues(node, messages, context, self._matcher):
                break
            num_turns, num_messages = num_turns + 1, node.num_messages
        total = len(self._nodes)
        if num_turns < total - 1:
            raise self._mismatch(messages, context, num_turns, num_messages)
        return attached(
            self._nodes[num_turns - 1] if num_turns else None,
            messages,
            revision=self._revision,
            after_length=self._after_length,
            compat=self._compat,
            has_other_reply=num_turns < total and has_other_reply(self._nodes[-1], messages, context, self._matcher),
        )

    def position_after(self, node: Node, messages: Sequence[Message], context: PromptContext) -> Attachment | None:
        """The place of a request beginning with the messages of `node`'s request; None unless it is after `node`."""
        if node is not self.latest or not answers(node, messages, context, self._matcher):
            return None
        return attached(node, messages, revision=self._revision, after_length=self._after_length, compat=self._compat)

    def position_ids(self, ids: "array[int]") -> Attachment:
        """After the last turn, or in its place. Changes nothing.

        Raises HistoryMismatch (two or more turns would have to be discarded, or nothing is added) and
        TruncatedGeneration (the turn to extend is not whole, and nothing may follow it).
        """
        last = self.latest
        parent = last if last is None or is_continued(last, ids) else last.parent
        if parent is not None and parent is not last and not is_continued(parent, ids):
            at = num_common(ids, 0, line_ids(parent))
            what = f"token {at} differs" if at < len(ids) else f"it ends before token {at}"
            raise HistoryMismatch(
                f"The prompt is not a continuation of its line: {what}. The last turn can be replaced, but more would"
                " have to go.",
                blame=Blame(RequestPart.PROMPT),
            )
        check_ids_extension(parent, ids, self._after_length)
        return Attachment(parent=parent, new_messages=(), revision=self._revision)

    def num_tokens_before(self, attachment: Attachment) -> int:
        return 0 if attachment.parent is None else attachment.parent.num_effective

    def replaced_by(self, attachment: Attachment) -> Sequence[Node]:
        """The turn after the attachment's place, if there is one."""
        return tuple(self._nodes[0 if attachment.parent is None else attachment.parent.depth :])

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> Node:
        """Append `turn` at `attachment`, discarding the replaced turn, in one step.

        Raises SessionInvariant if the history moved since the position was taken; nothing is changed then.
        """
        if attachment.revision != self._revision:
            raise SessionInvariant(
                f"the history is at revision {self._revision}, the turn was positioned at {attachment.revision}"
            )
        parent = attachment.parent
        node = Node(id_=next(self._ids), turn=turn, parent=parent)
        del self._nodes[parent.depth if parent is not None else 0 :]
        self._nodes.append(node)
        self.latest, self.num_tokens = node, node.num_effective
        self._revision += 1
        return node

    def _mismatch(
        self, messages: Sequence[Message], context: PromptContext, num_turns: int, num_messages: int
    ) -> HistoryMismatch:
        turn = self._nodes[num_turns].turn
        discarded = len(self._nodes) - num_turns
        if turn.asked is Asked.COMPLETION:
            what, blame = "a completion stands, which no message can follow", Blame(RequestPart.MESSAGES)
        elif not turn.context.is_same(context):
            blame = Blame(RequestPart.TEMPLATE_KWARGS if turn.context.tools == context.tools else RequestPart.TOOLS)
            what = "its tools or chat_template_kwargs differ from the stored turn's"
        else:
            stored = (*turn.messages, turn.reply.message)
            given = messages[num_messages : num_messages + len(stored)]
            at = next(
                (i for i, pair in enumerate(zip(stored, given, strict=False)) if not is_same(self._matcher, *pair)),
                len(given),
            )
            at += num_messages
            what = f"message {at} differs" if at < len(messages) else f"it ends before message {at}"
            blame = Blame(RequestPart.MESSAGES, min(at, len(messages) - 1))
        return HistoryMismatch(
            f"The request is not a continuation of its line: in turn {num_turns}, {what}. The last turn can be"
            f" replaced, but {discarded} would have to go.",
            blame=blame,
            rollback=Rollback(discarded, num_stored=self._nodes[-1].num_messages, num_given=len(messages)),
        )
