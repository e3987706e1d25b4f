"""A node's lease, as the node sees it: until when what it has in memory is current. Pure.

The lease runs by the database's clock, and that clock is not asked for. A renewal that is answered was done after it
was sent, so that by the database the lease runs for at least `lease_s` from then. The node counts from there, by a
clock of its own that never goes back, and stops a tenth sooner: its clock may be that much slower than the database's.
"""

from dataclasses import dataclass

HELD_SHARE = 0.9
"""The part of a lease that its node relies on."""

RENEWALS = 3
"""Renewals that are begun in the time of one lease."""


@dataclass(slots=True, eq=False)
class OwnerLease:
    """A lease of one owner. `held_until` is in seconds of the node's clock."""

    owner: int
    lease_s: float
    held_until: float

    @classmethod
    def granted(cls, owner: int, *, lease_s: float, sent_at: float) -> "OwnerLease":
        """The lease that was asked for at `sent_at`."""
        return cls(owner, lease_s, sent_at + HELD_SHARE * lease_s)

    def is_over(self, now: float) -> bool:
        """Whether the node may no longer rely on it."""
        return now >= self.held_until

    def renewed(self, *, sent_at: float) -> None:
        """It was renewed by a question that was sent then."""
        self.held_until = max(self.held_until, sent_at + HELD_SHARE * self.lease_s)

    def remaining_s(self, now: float) -> float:
        """The time for which the node may rely on it."""
        return max(0.0, self.held_until - now)

    @property
    def renewal_period_s(self) -> float:
        """The time between two renewals."""
        return self.lease_s / RENEWALS
