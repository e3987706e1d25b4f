"""The kinds of sessions and of their strands: values that dialects read, sessions follow and label with. Pure."""

import enum
from dataclasses import dataclass


class HistoryKind(enum.StrEnum):
    """The shape of a session: a line for each opening of a conversation, one line, or a tree."""

    STRANDS = "strands"
    LINEAR = "linear"
    TREE = "tree"


class Compat(enum.StrEnum):
    """Another server's contract that a session keeps to."""

    MILES = "miles"
    """`linear`, a turn that its token limit cut off is not extended, and what samples replay is int32. A tool message
    need not answer a call, and a request that ends with the last reply is answered by another one. A streamed chat is
    one event, and an error a text.
    """


class AfterLength(enum.StrEnum):
    """Treatment of a request that goes on after a reply that its token limit cut off."""

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
"""The strands whose turns `max_turns` counts."""

TRAINED_KINDS = (StrandKind.MAIN, StrandKind.AGENT, StrandKind.COMPACTION, StrandKind.UNKNOWN)
"""The strands that become samples unless a request asks for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The kind of a request, its client, and the name of the rule that said so. All None: no rule holds."""

    kind: StrandKind | None = None
    client: str | None = None
    rule: str | None = None


UNLABELLED = Label()


class ReplyMode(enum.StrEnum):
    """Parts that a client gets of a reply that the engine wrote: all, or all but the training-only payloads."""

    PASSTHROUGH = "passthrough"
    LEAN = "lean"


class SaltPolicy(enum.StrEnum):
    """The version that salts the cache of a session's turns."""

    PIN = "pin"
    """The one that the session began with: its line stays cached over an update, as the old weights computed it."""
    FOLLOW = "follow"
    """The one that samples now: nothing is read that other weights computed."""
    OFF = "off"
    """None: what is found in the cache may be of any weights."""
