"""The kinds of a session's strands: values that a session labels with and samples are picked by. Pure."""

import enum
from dataclasses import dataclass


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
