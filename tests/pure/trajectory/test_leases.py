"""The leases of a strand against a plain model: one at a time, refusals hold nothing."""

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stenograph.core.chat import ChatRequest
from stenograph.core.errors import SessionBusy
from stenograph.core.kinds import AfterLength, HistoryKind
from stenograph.core.messages import Message, Role
from stenograph.core.types import SessionId
from stenograph.trajectory.matching import StrictMatcher
from stenograph.trajectory.strand import Leases, Strands
from stenograph.trajectory.turn import PromptContext

REQUEST = ChatRequest(messages=(Message(role=Role.USER, content="a"),))


class LeaseMachine(RuleBasedStateMachine):
    """Leases and releases (also twice), in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.strands = Strands(SessionId("s"), HistoryKind.LINEAR, StrictMatcher(), AfterLength.CLOSE)
        self.held: Leases | None = None
        self.old: list[Leases] = []

    @rule()
    def lease(self) -> None:
        leases = Leases(self.strands)
        if self.held is not None:
            with pytest.raises(SessionBusy, match="Session s is generating another turn"):
                leases.of_chat(REQUEST, PromptContext())
            leases.give_back()
        else:
            leases.of_chat(REQUEST, PromptContext())
            self.held = leases

    @precondition(lambda self: self.held is not None)
    @rule()
    def release(self) -> None:
        assert self.held is not None
        self.held.give_back()
        self.old.append(self.held)
        self.held = None

    @precondition(lambda self: bool(self.old))
    @rule()
    def release_again(self) -> None:
        self.old[-1].give_back()

    @invariant()
    def agrees(self) -> None:
        assert self.strands.only is not None
        assert self.strands.only.num_running == (self.held is not None)


TestLeases = LeaseMachine.TestCase
