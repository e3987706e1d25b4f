"""The account of a session's sampled tokens, from rows beside its turns: lost turns, claims, receipts. Pure.

Owns the entries and their sum, `Account`. session/fates.py derives each token's fate from it and from the turns.
"""

import math
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from stenograph.core.outcome import TokenFate


class LostTurn(Struct, frozen=True, array_like=True, tag="lost", gc=False):
    """A turn that sampled tokens and is not in the session, and the cause: an error's code, or the client's leaving."""

    fate: TokenFate
    cause: str
    num_tokens: int


class AbortedTurn(Struct, frozen=True, array_like=True, tag="aborted", gc=False):
    """A turn in the session that ended early, and the cause."""

    node: int
    num_tokens: int
    cause: str


class Claim(Struct, frozen=True, array_like=True, tag="claim", gc=False):
    """A trainer's lease on the session's samples for a step, until a time in seconds of the epoch.

    It is on the turns with a node id below `end`: of an older server, on all.
    """

    id: str
    step: int
    until: float
    max_seq_len: int | None = None
    end: int | None = None


class Receipt(Struct, frozen=True, array_like=True, tag="receipt", gc=False):
    """The samples of a claim were trained: so many sampled tokens of each turn, by node id, its first ones."""

    claim: str
    step: int
    trained: Mapping[int, int]


class Abandoned(Struct, frozen=True, array_like=True, tag="abandoned", gc=False):
    """Nobody wants the session's tokens any more. It takes no turns."""

    fate: TokenFate
    cause: str


Entry = LostTurn | AbortedTurn | Claim | Receipt | Abandoned


class Account:
    """The sum of a session's entries. The last claim, receipt and abandonment stand."""

    def __init__(self) -> None:
        self.lost = Counter[tuple[TokenFate, str]]()
        """Tokens of turns outside the session, by fate and cause."""
        self.aborted: dict[int, AbortedTurn] = {}
        """Turns that ended early, by node id; later turns may have replaced some."""
        self.claim: Claim | None = None
        self.receipt: Receipt | None = None
        self.abandoned: Abandoned | None = None

    def __repr__(self) -> str:
        return f"<Account {self.lost.total()} lost, {self.claim=}, {self.abandoned=}>"

    def add(self, entry: Entry) -> None:
        """Add an entry behind all others."""
        match entry:
            case LostTurn():
                self.lost[entry.fate, entry.cause] += entry.num_tokens
            case AbortedTurn():
                self.aborted[entry.node] = entry
            case Claim():
                self.claim = entry
            case Receipt():
                self.receipt = entry
            case Abandoned():
                self.abandoned = entry

    @property
    def is_over(self) -> bool:
        """Whether no trainer may claim the samples any more."""
        return self.receipt is not None or self.abandoned is not None

    @property
    def held_until(self) -> float:
        """The end of the last claim's lease, in seconds of the epoch; of none, or once it has its end, long ago."""
        return -math.inf if self.claim is None or self.is_over else self.claim.until
