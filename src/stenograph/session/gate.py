"""The gate of a strand: it decides who may run a turn there. All methods are synchronous.

Laws: one lease at a time where it is exclusive, else any number; whoever is refused holds nothing and so releases
nothing.
"""

from stenograph.core.errors import SessionBusy
from stenograph.core.types import SessionId


class Lease:
    """The right to run a turn. Release it on every exit; releasing twice is harmless."""

    __slots__ = ("_gate",)

    def __init__(self, gate: "Gate") -> None:
        self._gate: Gate | None = gate

    def release(self) -> None:
        """Give the right back."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.end(self)


class Gate:
    """Admits turns, one at a time if it is `exclusive`."""

    __slots__ = ("_exclusive", "_leases", "_session_id")

    def __init__(self, session_id: SessionId, *, exclusive: bool) -> None:
        self._session_id = session_id
        self._exclusive = exclusive
        self._leases: set[Lease] = set()

    def __repr__(self) -> str:
        return f"<Gate leases={len(self._leases)}>"

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs."""
        return bool(self._leases)

    def lease(self) -> Lease:
        """Take the right to run a turn. Raises SessionBusy while another runs that allows none beside it."""
        self.check()
        lease = Lease(self)
        self._leases.add(lease)
        return lease

    def check(self) -> None:
        """Raise what `lease` would."""
        if self._exclusive and self._leases:
            raise SessionBusy(self._session_id)

    def end(self, lease: Lease) -> None:
        """Take a lease back; `Lease.release` calls it, once."""
        assert lease in self._leases, "a lease ended that the gate did not give"
        self._leases.discard(lease)
