"""Step 9 of a turn, its first half: writing to the store before memory. Rows beside them are in said.py.

Owns no session and no store. The written rows are settled when they are handed over; `then` commits the turns in memory
in the callback of their durability, in the order of the store, so memory and disk never differ.
"""

import asyncio
from collections.abc import Callable, Sequence

from stenograph.core.errors import StenographError
from stenograph.session.ledger import OpenRow
from stenograph.session.retries import RequestIdentity
from stenograph.session.session import Session
from stenograph.session.steps import RunningTurn
from stenograph.session.turn import RequestRun, TurnOutcome
from stenograph.store.base import SessionStore
from stenograph.store.codec.commits import encode_commit
from stenograph.store.codec.rows import Totals
from stenograph.trajectory.commits import PlacedTurn, SessionCommit, StrandOpened


def write_turns(
    store: SessionStore,
    session: Session,
    identity: RequestIdentity | None,
    row: OpenRow,
    run: RequestRun,
    then: Callable[[], TurnOutcome],
) -> "asyncio.Future[TurnOutcome]":
    """Write a request's sampled turns, and call `then` in the event-loop step in which they are known to be durable,
    after all earlier writes. The future has its outcome, or the store's error; cancelling it takes nothing back.

    Raises the cause if they are unwritable.
    """
    tail = session.tail
    assert tail is not None, "a session is in the store before its turns are"
    future: asyncio.Future[TurnOutcome] = asyncio.get_running_loop().create_future()
    so_far, turns = row.so_far(), run.turns
    placed = [_placed(turn) for turn in turns]
    payload = encode_commit(
        SessionCommit(
            turns=tuple(placed),
            label=run.leases.label,
            reply_id=run.joint_reply_id,
            request=None
            if identity is None
            else identity.mark(
                order=session.order_of(run.request_id), num_begun=session.num_started, budget=run.remaining
            ),
            ledger=() if so_far is None else (so_far,),
        )
    )

    def done(error: StenographError | None) -> None:
        try:
            if error is not None:
                raise error
            for turn in turns:
                turn.stored()
            outcome = then()
        except Exception as failed:  # noqa: BLE001 -- the request's task raises it
            if not future.done():
                future.set_exception(failed)
        else:
            if not future.done():
                future.set_result(outcome)

    at = placed[-1].turn.committed_at
    store.append(tail, payload, adds=_added(session, turns, placed), at=at, done=done)
    return future


def _placed(turn: RunningTurn) -> PlacedTurn:
    strand = turn.builder.strand
    opened = StrandOpened(
        key=strand.key,
        agent_id=strand.agent_id,
        continues=None if strand.continues is None else strand.continues.number,
        fork_of=None if strand.fork_of is None else strand.fork_of.number,
    )
    return PlacedTurn(
        turn=turn.made(),
        parent=turn.attachment.parent,
        strand=strand.number,
        opened=opened if strand.number is None else StrandOpened(),
    )


def _added(session: Session, turns: Sequence[RunningTurn], placed: Sequence[PlacedTurn]) -> Totals:
    """The session's sums after these turns, less those before."""
    added = Totals()
    for turn, one in zip(turns, placed, strict=True):
        gone = turn.builder.strand.history.replaced_by(turn.attachment)
        opens_one = one.strand is None and session.strands.only is None
        added = added.plus(
            Totals(
                num_strands=int(opens_one),
                num_turns=1 - len(gone),
                num_tokens=one.turn.num_effective - sum(node.turn.num_effective for node in gone),
                num_discarded_turns=len(gone),
                num_discarded_tokens=sum(len(node.turn.sampled.ids) - node.turn.num_inherited for node in gone),
            )
        )
    return added
