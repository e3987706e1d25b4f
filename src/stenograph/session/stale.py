"""Sessions that nobody wants any more: abandoned by a trainer's word, or for their age in versions of the weights."""

import asyncio
from collections.abc import Callable

from stenograph.core.errors import SessionAbandoned
from stenograph.core.outcome import TokenFate
from stenograph.core.types import SessionId
from stenograph.session.fates import add_entry, enter
from stenograph.session.manager import SessionManager
from stenograph.session.session import Session
from stenograph.trajectory.account import Abandoned, Account, Entry
from stenograph.trajectory.turn import CommittedTurn

STALE, DECIDED, LEFT_OUT = "stale", "decided", "left_out"

LOOKED_AT_TURNS = 2000
"""Turns looked at in one event-loop iteration: about 2 ms."""

_WHY = {
    STALE: "its oldest tokens are older than --max-staleness allows",
    DECIDED: "its group is decided without it",
    LEFT_OUT: "its trainer left it out",
}


def refusal_of(abandoned: Abandoned) -> SessionAbandoned:
    """The error of each later request."""
    return SessionAbandoned(f"The session is abandoned: {_WHY[abandoned.cause]}. End this rollout.")


def abandoned_for(cause: str) -> Abandoned:
    """The entry of an abandoned session."""
    return Abandoned(TokenFate.STALE if cause == STALE else TokenFate.DISCARDED, cause)


def add_again(session: Session, unkept: Entry) -> None:
    """Add an entry to a session as it was read: the store has not taken it."""
    add_entry(session, unkept)
    if isinstance(unkept, Abandoned):
        session.refusal = refusal_of(unkept)


def end_turns(session: Session) -> None:
    """Refuse further turns of an abandoned session, and end the running ones by the same error."""
    abandoned = None if session.account is None else session.account.abandoned
    assert abandoned is not None, "it is abandoned"
    session.refusal = refusal_of(abandoned)
    for turn in session.running:
        turn.abandon(session.refusal)


def is_stale(session: Session, manager: SessionManager, max_staleness: int) -> bool:
    """Whether the oldest version in a session that may be trained still is more than so many changes old."""
    account = session.account or Account()
    if account.receipt is not None or account.abandoned is not None:
        return False
    weights = manager.weights.of(session.options.stated.policy)
    versions = {_oldest_version(node.turn) for node in session.nodes}
    ages = [age for one in versions if one is not None and (age := weights.age_of(one)) is not None]
    return max(ages, default=0) > max_staleness


def _oldest_version(turn: CommittedTurn) -> str | None:
    """The oldest weights of the tokens sampled for the turn's own session; None where it is not known."""
    if turn.sampled.mixed is not None or not turn.num_inherited:
        return turn.sampled.oldest_version
    return next((span.version for span in turn.sampled.weights if span.end > turn.num_inherited), None)


class StaleSessions:
    """Abandons the stale sessions in memory after each change of the weights; a trainer's claim finds the others.

    It looks at a few thousand turns in one event-loop iteration, and goes on in the next.
    """

    def __init__(self, manager: SessionManager, max_staleness: int) -> None:
        self._manager = manager
        self._max_staleness = max_staleness
        self._left: list[SessionId] = []
        """Sessions to be looked at, the next one last."""

    def __repr__(self) -> str:
        return f"<StaleSessions {len(self._left)} to be looked at>"

    def look(self) -> None:
        """Look at all sessions, from the oldest on; those of an earlier change not looked at yet are among them."""
        is_looking = bool(self._left)
        self._left = [*self._manager.sessions][::-1]
        if not is_looking:
            self._look_on()

    def _look_on(self) -> None:
        num_turns = 0
        while self._left and num_turns < LOOKED_AT_TURNS:
            session_id = self._left.pop()
            if self._manager.sessions.has(session_id):
                session = self._manager.sessions.get(session_id)
                num_turns += 1 + session.strands.num_turns
                self._look_at(session)
        if self._left:
            asyncio.get_running_loop().call_soon(self._look_on)

    def _look_at(self, session: Session) -> None:
        """Abandon a session, if it is stale and no trainer has it."""
        sessions = self._manager.sessions
        is_held = session.refusal is not None or sessions.clock.monotonic() < session.held_until
        if is_held or not is_stale(session, self._manager, self._max_staleness):
            return
        enter(session, abandoned_for(STALE), storage=sessions.storage, clock=sessions.clock)
        end_turns(session)


def stale_sessions(manager: SessionManager, max_staleness: int) -> Callable[[], None]:
    """To be called after each change of the weights."""
    return StaleSessions(manager, max_staleness).look
