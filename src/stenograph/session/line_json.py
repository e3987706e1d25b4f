"""The ids of a session's latest line as JSON text, for engines that are sent it. Pure.

Writing 100k ids costs 4 ms, joining what is there a tenth of one; so a turn's cost does not grow with its history. Only
the line that was committed last is kept: it is the one that the next turn extends, as a rule.
"""

from stenograph.core.ids_json import encode_ids, join_ids
from stenograph.core.types import Prompt, SampledTurn
from stenograph.session.history import Node


class LineJson:
    """At most one line's ids, as JSON without brackets."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._text = b""

    def __repr__(self) -> str:
        return f"<LineJson of {self._node!r}, {len(self._text)} bytes>"

    def of(self, node: Node | None) -> bytes | None:
        """The ids of the line down to `node`; None if they are not at hand. None's line is empty."""
        if node is None:
            return b""
        return self._text if node is self._node else None

    def extend(self, prompt: Prompt, sampled: SampledTurn, node: Node) -> None:
        """Keep the line of the turn that has just been committed as `node`, in place of the one before it.

        Does nothing if the prompt came without its text: then no engine has asked for it.
        """
        if prompt.ids_json is not None:
            self._node, self._text = node, join_ids((prompt.ids_json, encode_ids(sampled.ids)))
