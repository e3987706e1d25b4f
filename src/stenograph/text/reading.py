"""The interface of reply parsers: what each is given, and what it promises.

Owns the seam between a family's parser and those who read replies with it. Knows nothing of any syntax.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from stenograph.core.chat import ParsedReply, TextView
from stenograph.core.messages import ReplyDelta, Tool
from stenograph.core.types import Finish, PromptEnd


class Reading(Struct, frozen=True, kw_only=True, gc=False):
    """One reply to be read. Without `tools` calls are text; calls get the ids `call_{id_prefix}{n}`.

    `prompt_end` says whether the prompt opened the reasoning. `text` is how the reply is shown; no stop string ends it
    that its first `min_tokens` ids complete. One of `stop_token_ids` that ends it is no text.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    text: TextView = TextView()
    tools: tuple[Tool, ...] = ()
    id_prefix: str = ""
    prompt_end: PromptEnd = PromptEnd.SILENT


class Inside(enum.StrEnum):
    """Place where a reply was cut off, if what closes a turn does not close that."""

    REASONING = "inside its reasoning"
    CALL = "inside a tool call"
    FRAME = "outside the text of its answer"


class PartKind(enum.StrEnum):
    """Kinds of a reply's pieces."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"
    END = "end"
    """The end of the reply: a stop token, a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """Ids `[start, end)` of a reply, its markers included. A token that two parts share is in both."""

    kind: PartKind
    start: int
    end: int


class Parser(Protocol):
    """Reads one reply; owned by its turn. `feed` as ids come, `finish` once. Any ids are accepted, nothing raises."""

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; what became certain by them."""
        ...

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end: what was still held back, and the whole message."""
        ...


class MessageParser(Parser, Protocol):
    """A parser that also reports where it saw what."""

    def ends_inside(self, finish: Finish) -> Inside | None:
        """In the place of `finish`: what the reply ends inside of; None if that is its text, or nothing."""
        ...

    def parts(self) -> tuple[ReplyPart, ...]:
        """The reply's parts in order, once it is finished: together they are all of its ids."""
        ...
