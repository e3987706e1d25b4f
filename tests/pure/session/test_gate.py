"""The gate against a plain model: one lease at a time, refusals hold nothing."""

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stenograph.core.errors import SessionBusy
from stenograph.core.types import SessionId
from stenograph.session.gate import Gate, Lease


class GateMachine(RuleBasedStateMachine):
    """Leases and releases (also twice), in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate(SessionId("s"), exclusive=True)
        self.held: Lease | None = None
        self.old: list[Lease] = []

    @rule()
    def lease(self) -> None:
        if self.held is not None:
            with pytest.raises(SessionBusy, match="Session s is generating another turn"):
                self.gate.lease()
        else:
            self.held = self.gate.lease()

    @precondition(lambda self: self.held is not None)
    @rule()
    def release(self) -> None:
        assert self.held is not None
        self.held.release()
        self.old.append(self.held)
        self.held = None

    @precondition(lambda self: bool(self.old))
    @rule()
    def release_again(self) -> None:
        self.old[-1].release()

    @invariant()
    def agrees(self) -> None:
        assert self.gate.is_busy == (self.held is not None)


TestGate = GateMachine.TestCase
