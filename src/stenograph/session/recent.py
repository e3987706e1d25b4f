"""What the last committed request looked like, so that the next one need not be read from its beginning. Pure.

An agent sends its whole history with each turn, as a rule spelled as before. Of a request that begins with the text of
the last one only the rest is decoded and compared: a turn's cost hardly grows with its history.
"""

from stenograph.core.chat import ChatRequest, KnownMessages
from stenograph.session.history import Node, line_messages


class RecentRequest:
    """The last request of a session that was committed, and the node that it became."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._known: KnownMessages | None = None

    def __repr__(self) -> str:
        return f"<RecentRequest of {self._node!r}>"

    @property
    def known(self) -> KnownMessages | None:
        """What a decoder may skip."""
        return self._known

    def node_of(self, request: ChatRequest) -> Node | None:
        """The node whose request this one begins with, if that is still the last one; else None."""
        return self._node if request.known is not None and request.known is self._known else None

    def extend(self, request: ChatRequest, node: Node) -> None:
        """Keep the request of the turn that has just been committed as `node`. The messages are the stored ones."""
        self._node, self._known = node, None
        if request.text_print is not None:
            self._known = KnownMessages(
                text_print=request.text_print,
                list_start=request.list_start,
                of_line=lambda: line_messages(node)[:-1],
            )
