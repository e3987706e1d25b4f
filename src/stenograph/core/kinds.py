"""The kinds of sessions and of their strands: values for dialects to read, sessions to follow and label with. Pure."""

import enum
from dataclasses import dataclass


class HistoryKind(enum.StrEnum):
    """The shape of a session: a line for each opening of a conversation, one line, or a tree."""

    STRANDS = "strands"
    LINEAR = "linear"
    TREE = "tree"


class Compat(enum.StrEnum):
    """Another server's contract, kept by a session."""

    MILES = "miles"
    """`linear`, a turn cut off by its token limit is not extended, and samples replay int32. A tool message need not
    answer a call, and a request ending with the last reply is answered by another one. A streamed chat is one event,
    and an error a text.
    """


class AfterLength(enum.StrEnum):
    """Treatment of a request after a reply cut off by its token limit."""

    CLOSE = "close"
    REFUSE = "refuse"


class StrandKind(enum.StrEnum):
    """The purpose of a request and of its strand. Those that TRAINED_KINDS lacks are side requests."""

    MAIN = "main"
    AGENT = "agent"
    COMPACTION = "compaction"
    TITLE = "title"
    ROUTER = "router"
    PLANNER = "planner"
    PROBE = "probe"
    QUOTA = "quota"
    CLASSIFIER = "classifier"
    AUXILIARY = "auxiliary"
    ECHO = "echo"
    UNKNOWN = "unknown"


WORK_KINDS = (StrandKind.MAIN, StrandKind.UNKNOWN)
"""The strands with turns counted by `max_turns`."""

TRAINED_KINDS = (StrandKind.MAIN, StrandKind.AGENT, StrandKind.COMPACTION, StrandKind.UNKNOWN)
"""The strands for samples, unless a request asks for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The kind of a request, its client, and the name of the matching rule. All None: no rule holds."""

    kind: StrandKind | None = None
    client: str | None = None
    rule: str | None = None


UNLABELLED = Label()


class ReplyMode(enum.StrEnum):
    """Parts of an engine's own reply for a client: all, or all but the training-only payloads."""

    PASSTHROUGH = "passthrough"
    LEAN = "lean"


class SaltMode(enum.StrEnum):
    """The version to salt the cache of a session's turns with."""

    PIN = "pin"
    """The session's first: its line stays cached over an update, as the old weights computed it."""
    FOLLOW = "follow"
    """The present one: nothing computed by other weights is read."""
    OFF = "off"
    """None: cached values may be of any weights."""
