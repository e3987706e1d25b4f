"""Sessions that nobody wants any more: abandoned by a trainer's word, or for their age in versions of the weights."""

from stenograph.core.errors import SessionAbandoned
from stenograph.core.outcome import TokenFate
from stenograph.session.fates import enter
from stenograph.session.manager import SessionManager
from stenograph.session.session import Session
from stenograph.trajectory.account import Abandoned, Account
from stenograph.trajectory.turn import CommittedTurn

STALE, DECIDED, LEFT_OUT = "stale", "decided", "left_out"

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


def abandon_stale(manager: SessionManager, max_staleness: int) -> None:
    """Abandon the stale sessions in memory; a trainer's claim finds the others."""
    store = None if manager.sessions.storage is None else manager.sessions.storage.store
    for session_id in [*manager.sessions]:
        session = manager.sessions.get(session_id) if manager.sessions.has(session_id) else None
        if session is None or session.refusal is not None or not is_stale(session, manager, max_staleness):
            continue
        if session.account is not None and not session.account.is_free(manager.sessions.clock.wall()):
            continue  # a trainer has it
        enter(session, abandoned_for(STALE), store=store, clock=manager.sessions.clock)
        end_turns(session)
