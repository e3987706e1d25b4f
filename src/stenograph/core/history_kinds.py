"""The kinds of history that a session may have: values that a dialect reads and a session follows. Pure."""

import enum


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
