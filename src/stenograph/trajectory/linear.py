"""A history with exactly one line. Pure. A request extends it, or replaces its last turn, or is refused."""

import itertools
from array import array
from collections.abc import Iterator, Sequence

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import Asked
from stenograph.core.errors import HistoryMismatch, SessionInvariant
from stenograph.core.history_kinds import AfterLength
from stenograph.core.messages import Message
from stenograph.trajectory.history import (
    Attachment,
    answers,
    check_extension,
    check_ids_extension,
    continues,
    has_other_reply,
    is_continued,
    num_common,
)
from stenograph.trajectory.matching import Matcher
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext, line_ids


class LinearHistory:
    """A history with exactly one line. A request extends it, or replaces its last turn, or is refused.

    `ids` number the commits of a session, which may have several histories.
    """

    def __init__(
        self, matcher: Matcher, *, after_length: AfterLength = AfterLength.CLOSE, ids: Iterator[int] | None = None
    ) -> None:
        self._matcher = matcher
        self._ids = itertools.count() if ids is None else ids
        self._after_length = after_length
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

    def as_it_is(self) -> "LinearHistory":
        """A copy, which a worker may read while turns are committed here."""
        copy = LinearHistory(self._matcher, after_length=self._after_length, ids=self._ids)
        copy._nodes, copy._revision = list(self._nodes), self._revision
        return copy

    def after(self, parent: Node | None, messages: Sequence[Message]) -> Attachment | None:
        """The place of a turn that is known to come after `parent`; None if that is not on the line."""
        if parent is not None and (parent.depth > len(self._nodes) or self._nodes[parent.depth - 1] is not parent):
            return None
        return Attachment(parent=parent, new_messages=tuple(messages), revision=self._revision)

    def position(self, messages: Sequence[Message], context: PromptContext) -> Attachment:
        """Find where a request attaches. Changes nothing.

        Raises HistoryMismatch (two or more turns would have to be discarded, or nothing is added) and
        TruncatedGeneration (the turn to extend is not whole, and nothing may follow it).
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
        check_extension(parent, messages, self._after_length)
        return Attachment(
            parent=parent,
            new_messages=tuple(messages[num_messages:]),
            revision=self._revision,
            has_other_reply=num_turns < total and has_other_reply(self._nodes[-1], messages, context, self._matcher),
        )

    def position_after(self, node: Node, messages: Sequence[Message], context: PromptContext) -> Attachment | None:
        """The place of a request that begins with the messages of `node`'s request; None unless that is after it."""
        if node is not self.latest or not answers(node, messages, context, self._matcher):
            return None
        check_extension(node, messages, self._after_length)
        new = tuple(messages[node.num_messages :])
        return Attachment(parent=node, new_messages=new, revision=self._revision)

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
        return 0 if attachment.parent is None else attachment.parent.num_tokens

    def replaced_by(self, attachment: Attachment) -> Sequence[Node]:
        """The turn after the attachment's place, if there is one."""
        return tuple(self._nodes[0 if attachment.parent is None else attachment.parent.depth :])

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> Node:
        """Append `turn` at `attachment`, discarding the turn that it replaces, in one step.

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
                (i for i, pair in enumerate(zip(stored, given, strict=False)) if not self._matcher.matches(*pair)),
                len(given),
            )
            at += num_messages
            what = f"message {at} differs" if at < len(messages) else f"it ends before message {at}"
            blame = Blame(RequestPart.MESSAGES, min(at, len(messages) - 1))
        return HistoryMismatch(
            f"The request is not a continuation of its line: in turn {num_turns}, {what}. The last turn can be"
            f" replaced, but {discarded} would have to go.",
            blame=blame,
        )
