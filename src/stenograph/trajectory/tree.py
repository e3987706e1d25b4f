"""A history with any number of lines. Pure. A request is never refused for diverging: it attaches where it fits.

Retries, branches, compactions and side requests become siblings or roots; the export chooses among them for training
when samples are made (strand_facts.py), not here.
"""

from array import array
from collections.abc import Sequence

from stenograph.core.kinds import AfterLength
from stenograph.core.messages import Message
from stenograph.trajectory.history import (
    Attachment,
    answers,
    attached,
    check_ids_extension,
    continues,
    num_common,
)
from stenograph.trajectory.matching import Matcher
from stenograph.trajectory.turn import CommittedTurn, Node, PromptContext


class TreeHistory:
    """All turns ever committed. Nothing is discarded; concurrent turns from one parent become siblings."""

    def __init__(self, matcher: Matcher, *, after_length: AfterLength = AfterLength.CLOSE) -> None:
        self._matcher = matcher
        self._after_length = after_length
        self._nodes: list[Node] = []
        self._children: dict[int | None, list[Node]] = {}
        self._num_tokens = 0

    def __repr__(self) -> str:
        return f"<TreeHistory {len(self._nodes)} nodes, {len(self.children_of(None))} roots>"

    @property
    def nodes(self) -> Sequence[Node]:
        return self._nodes

    @property
    def latest(self) -> Node | None:
        return self._nodes[-1] if self._nodes else None

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def as_it_is(self) -> "TreeHistory":
        """Itself: it only grows, and a place once found is always there."""
        return self

    def after(self, parent: Node | None, messages: Sequence[Message]) -> Attachment | None:
        """The place of a turn known to come after `parent`; None if `parent` is not in the tree."""
        if parent is not None and (parent.id >= len(self._nodes) or self._nodes[parent.id] is not parent):
            return None
        return Attachment(parent=parent, new_messages=tuple(messages), revision=len(self._nodes))

    def position(self, messages: Sequence[Message], context: PromptContext) -> Attachment:
        """The deepest node whose whole line is a prefix of the request, ties to the latest; else a new root.

        Raises TruncatedGeneration if its last turn is not whole and nothing may follow it. Changes nothing.
        """
        parent = self._deepest_match(messages, context)
        return attached(parent, messages, revision=len(self._nodes), after_length=self._after_length)

    def position_after(self, node: Node, messages: Sequence[Message], context: PromptContext) -> Attachment | None:
        """The place of a request beginning with the messages of `node`'s request; None unless it is after `node`.

        Only in a tree with one line, where no other node can match as well.
        """
        if node is not self.latest or node.depth != len(self._nodes):
            return None
        if not answers(node, messages, context, self._matcher):
            return None
        return attached(node, messages, revision=len(self._nodes), after_length=self._after_length)

    def position_ids(self, ids: "array[int]") -> Attachment:
        """The turn with the longest line at the prompt's beginning, of equal ones the latest; else a new root."""
        parent = self._longest_match(ids)
        check_ids_extension(parent, ids, self._after_length)
        return Attachment(parent=parent, new_messages=(), revision=len(self._nodes))

    def num_tokens_before(self, attachment: Attachment) -> int:
        return self._num_tokens

    def replaced_by(self, attachment: Attachment) -> Sequence[Node]:
        """None: a turn generated again stands beside the first attempt."""
        return ()

    def commit(self, attachment: Attachment, turn: CommittedTurn) -> Node:
        """Append `turn` under its parent. The tree only grows, so the place is always there."""
        parent = attachment.parent
        node = Node(id_=len(self._nodes), turn=turn, parent=parent)
        self._children.setdefault(None if parent is None else parent.id, []).append(node)
        self._nodes.append(node)
        self._num_tokens += turn.num_effective
        return node

    def children_of(self, node: Node | None) -> list[Node]:
        """The turns right after `node`, oldest first; of None, the roots."""
        return list(self._children.get(None if node is None else node.id, ()))

    def _deepest_match(self, messages: Sequence[Message], context: PromptContext) -> Node | None:
        best: Node | None = None
        open_nodes = self.children_of(None)
        while open_nodes:
            node = open_nodes.pop()
            if not continues(node, messages, context, self._matcher):
                continue
            if best is None or (node.num_messages, node.id) > (best.num_messages, best.id):
                best = node
            open_nodes.extend(self.children_of(node))
        return best

    def _longest_match(self, ids: "array[int]") -> Node | None:
        best: Node | None = None
        open_nodes = self.children_of(None)
        while open_nodes:
            node = open_nodes.pop()
            children = self.children_of(node)
            num_matched = _num_matched(ids, node, children)
            is_whole = num_matched == node.num_tokens and node.turn.sampled.ids
            if is_whole and (best is None or (node.num_tokens, node.id) > (best.num_tokens, best.id)):
                best = node
            open_nodes.extend(child for child in children if num_matched >= node.num_tokens - child.turn.num_trimmed)
        return best


def _num_matched(ids: "array[int]", node: Node, children: Sequence[Node]) -> int:
    """Number of ids of the line down to `node` at the prompt's beginning, if those before `node`'s own are there.

    A smaller number where it is too few to go on after the node or after one of its `children`: the sampled part is
    compared first, because siblings differ by it, and a long prompt shared by them is not compared for each.
    """
    turn = node.turn
    sampled_at = node.num_tokens - len(turn.sampled.ids)
    num_sampled = num_common(ids, sampled_at, turn.sampled.ids)
    if len(turn.sampled.ids) - num_sampled > max((child.turn.num_trimmed for child in children), default=0):
        return 0
    prompt_at = sampled_at - len(turn.new_prompt_ids)
    if ids[prompt_at:sampled_at] != turn.new_prompt_ids:
        return 0
    return sampled_at + num_sampled
