"""The gate of a session: it decides who may run a turn, and whether anybody still may. All methods are synchronous.

Laws: one lease at a time on a linear session, any number on a tree; whoever is refused holds nothing and so releases
nothing; closing beats busy.
"""

from stenograph.core.errors import SessionBusy, SessionNotFound
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
    """Admits turns, one at a time if it is `exclusive`, until it is closed for good."""

    def __init__(self, session_id: SessionId, *, exclusive: bool) -> None:
        self._session_id = session_id
        self._exclusive = exclusive
        self._leases: set[Lease] = set()
        self._closing = False

    def __repr__(self) -> str:
        return f"<Gate leases={len(self._leases)} closing={self._closing}>"

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs."""
        return bool(self._leases)

    @property
    def is_full(self) -> bool:
        """Whether no other turn is admitted beside one that runs."""
        return self._exclusive and bool(self._leases)

    @property
    def is_closing(self) -> bool:
        """Whether the session is being deleted; nothing is committed from then on."""
        return self._closing

    def lease(self) -> Lease:
        """Take the right to run a turn. Raises SessionNotFound when closing, SessionBusy while another runs."""
        self.check()
        lease = Lease(self)
        self._leases.add(lease)
        return lease

    def check(self) -> None:
        """Raise what `lease` would."""
        if self._closing:
            raise SessionNotFound(self._session_id)
        if self._exclusive and self._leases:
            raise SessionBusy(self._session_id)

    def close(self) -> None:
        """Refuse every turn from now on. Those that run keep their leases until they end."""
        self._closing = True

    def end(self, lease: Lease) -> None:
        """Take a lease back; `Lease.release` calls it, once."""
        assert lease in self._leases, "a lease ended that the gate did not give"
        self._leases.discard(lease)
