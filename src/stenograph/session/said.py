"""Rows beside a session's turns: its outcome, scores of its tokens, entries of its account. Each is durable first, but
for an entry: nobody else may take a session between its claim and its row."""

import asyncio
from collections.abc import Callable

from stenograph.core.errors import StenographError
from stenograph.core.outcome import Annotation, SessionOutcome
from stenograph.session.session import Session
from stenograph.session.sessions import Sessions
from stenograph.store.base import SessionStore
from stenograph.store.codec.annotations import encode_annotation
from stenograph.store.codec.commits import encode_outcome
from stenograph.store.codec.entries import encode_entry
from stenograph.store.codec.rows import ENTRY, OUTCOME, SCORES, Totals
from stenograph.trajectory.account import Entry


async def put_outcome(sessions: Sessions, session_id: str, outcome: SessionOutcome) -> None:
    """Set a session's outcome, in place of an earlier one. Raises as `wake`, and StorageUnavailable."""

    def then(session: Session) -> None:
        session.outcome = outcome

    await _keep(sessions, session_id, OUTCOME, lambda at: encode_outcome(outcome, idle_since=at), then)


async def annotate(sessions: Sessions, session_id: str, annotation: Annotation) -> None:
    """Give a session an annotation, in place of an earlier one of its name. Raises as `put_outcome`."""

    def then(session: Session) -> None:
        session.annotations[annotation.name] = annotation
        sessions.count_tokens(session)

    await _keep(sessions, session_id, SCORES, lambda at: encode_annotation(annotation, idle_since=at), then)


async def keep_entry(sessions: Sessions, session: Session, entry: Entry) -> None:
    """Make an entry of a session durable that it has in memory already. Raises StorageUnavailable."""
    if sessions.storage is None or session.tail is None:
        return
    at = session.idle_since(sessions.clock)
    payload = encode_entry(entry, idle_since=at)
    await _row(sessions.storage.store, session, ENTRY, payload, at=at, then=lambda: None)


async def _keep(
    sessions: Sessions,
    session_id: str,
    kind: int,
    encode: Callable[[float], bytes],
    then: Callable[[Session], None],
) -> None:
    """Do `then` once it is durable, where there is a store. `encode` makes the row of this kind, with the start of the
    session's idle time, which the row does not change."""
    session = await sessions.wake(session_id)
    if sessions.storage is None or session.tail is None:
        then(session)
        return
    at = session.idle_since(sessions.clock)
    await _row(sessions.storage.store, session, kind, encode(at), at=at, then=lambda: then(session))


def _row(
    store: SessionStore, session: Session, kind: int, payload: bytes, *, at: float, then: Callable[[], None]
) -> "asyncio.Future[None]":
    """Write a row beside a session's turns; `then` is called once it is durable. The future has the error of the store.
    Cancelling it takes nothing back. `at`: the start of the session's idle time; the row does not change it."""
    assert session.tail is not None, "a session is in the store before its rows are"
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: StenographError | None) -> None:
        if error is None:
            then()
        if future.done():  # whoever waited has left
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    store.append(session.tail, payload, adds=Totals(), at=at, done=done, kind=kind)
    return future
