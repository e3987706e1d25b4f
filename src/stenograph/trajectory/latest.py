"""A strand's latest line and request, kept so that the next turn costs no more for its history. Pure.

An agent sends its whole history with each turn, as a rule spelled as before: of a request that begins with the text of
the last one only the rest is decoded and compared. And an engine whose requests carry the ids as JSON is sent all of
them with each turn: writing 100k ids costs 4 ms, joining what is there a tenth of one. Only the line that was committed
last is kept: it is the one that the next turn extends, as a rule.
"""

from array import array

from stenograph.core.chat import ChatRequest, KnownMessages
from stenograph.core.ids_json import merged_fragments
from stenograph.core.types import Prompt, SampledTurn, token_ids
from stenograph.trajectory.turn import Node, line_messages

LineText = tuple[tuple[bytes, ...], "array[int]"]
"""The ids of a line: fragments of JSON, and the ids after those, which are not written yet."""


class LineJson:
    """At most one line's ids: as fragments of JSON without brackets, and as ids the last ones, which may never be sent.
    Whoever sends them writes these, and joins all, once a turn."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._fragments: tuple[bytes, ...] = ()
        self._unwritten = token_ids()

    def __repr__(self) -> str:
        return f"<LineJson of {self._node!r}, {sum(map(len, self._fragments))} bytes>"

    def of(self, node: Node | None, num_trimmed: int = 0) -> LineText | None:
        """The ids of the line down to `node` but for the last `num_trimmed`: fragments, and the ids after those. None
        if they are not at hand. None's line is empty."""
        if node is None:
            return (), token_ids()
        if node is not self._node or num_trimmed > len(self._unwritten):
            return None
        return self._fragments, self._unwritten[: len(self._unwritten) - num_trimmed]

    def extend(self, prompt: Prompt, sampled: SampledTurn, node: Node) -> None:
        """Keep the line of the turn that has just been committed as `node`, in place of the one before it.

        Does nothing if the prompt came without its text: then no engine has asked for it.
        """
        if prompt.json_fragments is not None:
            self._node = node
            self._fragments, self._unwritten = merged_fragments(prompt.json_fragments), sampled.ids


class RecentRequest:
    """The last request of a strand that was committed, and the node that it became."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._known: KnownMessages | None = None

    def __repr__(self) -> str:
        return f"<RecentRequest of {self._node!r}>"

    @property
    def known(self) -> KnownMessages | None:
        """The messages that a decoder may skip."""
        return self._known

    def node_of(self, request: ChatRequest) -> Node | None:
        """The node whose request this one begins with, if that is still the last one; else None."""
        return self._node if request.known is not None and request.known is self._known else None

    def extend(self, request: ChatRequest, node: Node) -> None:
        """Keep the request of the turn that has just been committed as `node`. The messages are the stored ones."""
        before, self._known = self._known, None
        parent, self._node = self._node, node
        if request.text_print is not None:
            if before is not None and parent is not None and node.parent is parent:
                messages = (*before.messages, parent.turn.reply.message, *node.turn.messages)
            else:
                messages = tuple(line_messages(node)[:-1])
            self._known = KnownMessages(
                dialect=request.spelling.dialect,
                text_print=request.text_print,
                list_start=request.list_start,
                messages=messages,
                gaps=request.gaps,
                system_blocks=request.system_blocks,
            )
