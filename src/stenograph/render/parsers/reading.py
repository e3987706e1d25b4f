"""What every parser of a reply is given and promises, and how its parts are found again in the reply's ids.

Owns the seam between a family's parser and those who read replies with it. Knows nothing of any syntax.
"""

import enum
from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from stenograph.core.chat import ParsedReply, ReplyDelta
from stenograph.core.messages import Tool
from stenograph.core.types import Finish, token_ids
from stenograph.render.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reply to be read. Without `tools` calls are text; calls get the ids `call_{id_prefix}{n}`.

    `prompt_end` is the text of the prompt's last tokens: whether it opened the reasoning already shows there.
    """

    stop: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    id_prefix: str = ""
    prompt_end: str = ""


class PartKind(enum.StrEnum):
    """What a piece of a reply is."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"
    END = "end"
    """What ended the reply: a stop token, a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
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
    """A parser that also tells where it saw what."""

    def parts(self) -> tuple[Part, ...]:
        """The reply's parts in order, once it is finished: together they are all of its ids."""
        ...


class IdSpans:
    """Finds the ids of a stretch of a reply's text. Decodes the reply once more, so only where somebody asks."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], keep: Collection[int]) -> None:
        stream = tokenizer.text_stream(skip_special=True, keep=keep)
        # Where the text ends after each id [T]; the last also has what is left of a broken character.
        self._ends: array[int] = token_ids(accumulate(len(stream.push(token_id)) for token_id in ids))
        if self._ends:
            self._ends[-1] += len(stream.flush())

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Ids [start, end) of the characters [start, end); those without text that come before are with them."""
        first = 0
        if start > 0:
            first = bisect_left(self._ends, start)
            first += first < len(self._ends) and self._ends[first] == start
        last = bisect_left(self._ends, end) + 1 if end > start else first
        return first, min(last, len(self._ends))
