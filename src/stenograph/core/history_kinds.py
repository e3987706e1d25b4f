"""The kinds of history that a session may have: values that a dialect reads and a trajectory follows. Pure."""

import enum


class HistoryKind(enum.StrEnum):
    """The number of lines that a session's history may have: one or many."""

    LINEAR = "linear"
    TREE = "tree"


class AfterLength(enum.StrEnum):
    """Treatment of a request that goes on after a reply that its token limit cut off."""

    CLOSE = "close"
    REFUSE = "refuse"
