"""A node's lease, as the node sees it: the time until its memory is no longer current. Pure.

The lease runs by the database's clock, and the node does not ask for it. An answered renewal was done after it
was sent, so by the database the lease runs for at least `lease_s` from then. The node counts from there, by its own
monotonic clock, and stops a tenth sooner: its clock may be so much slower than the database's.
"""

from dataclasses import dataclass

HELD_SHARE = 0.9
"""The reliable part of a lease, for its node."""

RENEWALS = 3
"""Renewals begun in the time of one lease."""


@dataclass(slots=True, eq=False)
class OwnerLease:
    """A lease of one owner. `held_until` is in seconds of the node's clock."""

    owner: int
    lease_s: float
    held_until: float

    @classmethod
    def granted(cls, owner: int, *, lease_s: float, sent_at: float) -> "OwnerLease":
        """The lease asked for at `sent_at`."""
        return cls(owner, lease_s, sent_at + HELD_SHARE * lease_s)

    def is_over(self, now: float) -> bool:
        """Whether the node may no longer rely on it."""
        return now >= self.held_until

    def renewed(self, *, sent_at: float) -> None:
        """It was renewed by a question sent then."""
        self.held_until = max(self.held_until, sent_at + HELD_SHARE * self.lease_s)

    def remaining_s(self, now: float) -> float:
        """The time left for the node to rely on it."""
        return max(0.0, self.held_until - now)

    @property
    def renewal_period_s(self) -> float:
        """The time between two renewals."""
        return self.lease_s / RENEWALS
