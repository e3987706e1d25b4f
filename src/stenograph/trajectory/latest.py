"""A strand's latest line and request: with them the next turn costs no more for its history. Pure.

An agent sends its whole history with each turn, as a rule spelled as before: if a request begins with the text of the
last one, only the rest is decoded and compared. And an engine with the ids as JSON in its requests is sent all of them
with each turn: writing 100k ids costs 4 ms, joining the pieces a tenth of one. Only the latest committed line is kept:
the next turn extends it, as a rule.
"""

from array import array
from collections.abc import Sequence

from msgspec import Struct, field

from stenograph.core.chat import ChatRequest, KnownMessages
from stenograph.core.messages import Message
from stenograph.core.types import Prompt, token_ids
from stenograph.trajectory.turn import Node, line_messages

MOST_FRAGMENTS = 16

LineText = tuple[tuple[bytes, ...], "array[int]"]
"""The ids of a line: fragments of JSON, and the ids after those, not written yet."""


class LatestLine(Struct, eq=False):
    """A strand's latest line, as text and ids, and its latest request.

    `node` is the line's last. Its ids are `fragments` of JSON without brackets, and after those the `unwritten` ids.
    These may never be sent: their sender writes them, and joins all, once a turn. `known` are the messages of the
    latest chat, in its client's spelling, for a decoder to skip, and `answered` is the node made of this chat.
    """

    node: Node | None = None
    fragments: tuple[bytes, ...] = ()
    unwritten: "array[int]" = field(default_factory=token_ids)
    known: KnownMessages | None = None
    answered: Node | None = None

    def __repr__(self) -> str:
        return f"<LatestLine of {self.node!r}, {sum(map(len, self.fragments))} bytes>"

    def text_of(self, node: Node | None, num_trimmed: int = 0) -> LineText | None:
        """The ids of the line down to `node` but for the last `num_trimmed`: fragments, and the ids after those. None
        if they are not at hand. None's line is empty."""
        if node is None:
            return (), token_ids()
        if node is not self.node or num_trimmed > len(self.unwritten):
            return None
        return self.fragments, self.unwritten[: len(self.unwritten) - num_trimmed]

    def node_of(self, request: ChatRequest) -> Node | None:
        """The node of the request at this one's beginning, if it is still the last node; else None."""
        return self.answered if request.known is not None and request.known is self.known else None

    def extend(self, node: Node, prompt: Prompt, request: ChatRequest | None) -> None:
        """Keep the line and the chat, if it was one, of the turn just committed as `node`. If a prompt came without its
        text, no engine has asked for the text."""
        if prompt.json_fragments is not None:
            self.node = node
            many = len(prompt.json_fragments) > MOST_FRAGMENTS
            self.fragments = merged_fragments(prompt.json_fragments) if many else prompt.json_fragments
            self.unwritten = node.turn.sampled.ids
        if request is None:
            return
        before, self.known = self.known, None
        parent, self.answered = self.answered, node
        if request.text_print is not None:
            if before is not None and request.known is before and parent is not None and node.parent is parent:
                stored = [parent.turn.reply.message, *node.turn.messages]
            else:
                stored = line_messages(node)[:-1]
            self.known = KnownMessages(
                dialect=request.spelling.dialect,
                text_print=request.text_print,
                list_start=request.list_start,
                messages=_shared(request.messages, stored),
                gaps=request.gaps,
                system_blocks=request.system_blocks,
            )


def _shared(messages: Sequence[Message], stored: Sequence[Message]) -> tuple[Message, ...]:
    """A request's messages, the last of them matched with the `stored`: the stored objects where they are equal.

    One that only matched stays as the client spelled it: the same bytes may begin a request elsewhere.
    """
    start = len(messages) - len(stored)
    pairs = zip(messages[start:], stored, strict=True)
    return (*messages[:start], *(own if own == given else given for given, own in pairs))


def merged_fragments(fragments: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The same text in few fragments, for more than `MOST_FRAGMENTS`. Each becomes more than twice as long as the next:
    a text growing at its end is copied a logarithm of times in all, not once each time."""
    kept: list[bytes] = []
    for fragment in filter(None, fragments):
        kept.append(fragment)
        while len(kept) > 1 and 2 * len(kept[-1]) >= len(kept[-2]):
            last = kept.pop()
            kept[-1] = b",".join((kept[-1], last))
    return tuple(kept)
