"""The interface of reply parsers: the input of each, and its guarantees.

Owns the seam between a family's parser and the readers of replies with it. Knows nothing of any syntax.
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

    `prompt_end` says whether the prompt opened the reasoning. `text` is how the reply is shown; a stop string completed
    by its first `min_tokens` ids does not end it. One of `stop_token_ids` at its end is no text.
    """

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    text: TextView = TextView()
    tools: tuple[Tool, ...] = ()
    id_prefix: str = ""
    prompt_end: PromptEnd = PromptEnd.SILENT


class Inside(enum.StrEnum):
    """Place where a reply was cut off, if the close of a turn does not close it."""

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
    """Ids `[start, end)` of a reply, its markers included. A token shared by two parts is in both."""

    kind: PartKind
    start: int
    end: int


class Parser(Protocol):
    """Reads one reply; owned by its turn. `feed` as ids come, `finish` once. Any ids are accepted, nothing raises."""

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; return everything made certain by them."""
        ...

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end: the rest, held back until now, and the whole message."""
        ...


class MessageParser(Parser, Protocol):
    """A parser that also reports the reply's parts."""

    def ends_inside(self, finish: Finish) -> Inside | None:
        """In the place of `finish`: the part around the reply's end; None if it is its text, or nothing."""
        ...

    def parts(self) -> tuple[ReplyPart, ...]:
        """The reply's parts in order, once it is finished: together they are all of its ids."""
        ...
