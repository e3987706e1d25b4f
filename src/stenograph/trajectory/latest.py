"""A strand's latest line and request, kept so that the next turn costs no more for its history. Pure.

An agent sends its whole history with each turn, as a rule spelled as before: of a request that begins with the text of
the last one only the rest is decoded and compared. And an engine whose requests carry the ids as JSON is sent all of
them with each turn: writing 100k ids costs 4 ms, joining what is there a tenth of one. Only the line that was committed
last is kept: it is the one that the next turn extends, as a rule.
"""

from stenograph.core.chat import ChatRequest, KnownMessages
from stenograph.core.ids_json import encode_ids
from stenograph.core.types import Prompt, SampledTurn
from stenograph.trajectory.turn import Node, line_messages


class LineJson:
    """At most one line's ids, as fragments of JSON without brackets: whoever sends them joins them, once a turn."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._fragments: tuple[bytes, ...] = ()

    def __repr__(self) -> str:
        return f"<LineJson of {self._node!r}, {sum(map(len, self._fragments))} bytes>"

    def of(self, node: Node | None) -> tuple[bytes, ...] | None:
        """The ids of the line down to `node`; None if they are not at hand. None's line is empty."""
        if node is None:
            return ()
        return self._fragments if node is self._node else None

    def extend(self, prompt: Prompt, sampled: SampledTurn, node: Node) -> None:
        """Keep the line of the turn that has just been committed as `node`, in place of the one before it.

        Does nothing if the prompt came without its text: then no engine has asked for it.
        """
        if prompt.ids_json is not None:
            self._node, self._fragments = node, (prompt.ids_json, encode_ids(sampled.ids))


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
        self._node, self._known = node, None
        if request.text_print is not None:
            self._known = KnownMessages(
                dialect=request.spelling.dialect,
                text_print=request.text_print,
                list_start=request.list_start,
                of_line=lambda: line_messages(node)[:-1],
                num_messages=node.num_messages - 1,
                gaps=request.gaps,
                system_blocks=request.system_blocks,
            )
