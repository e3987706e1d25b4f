"""The way of a request's turns to the store, and back: a commit as it is written, a session as it is read.

Owns no session and no store. What is written is settled when it is handed over; the turns are committed in memory in
the callback that says that they are durable, in the order of the store, so that memory and disk never differ.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import structs

from stenograph.core.errors import ModelMismatch, SessionDamaged, StenographError
from stenograph.core.outcome import SessionOutcome
from stenograph.offload.memory import untrack
from stenograph.session.ledger import LedgerNote
from stenograph.session.retries import RequestIdentity, print_of
from stenograph.session.session import Session, SessionOptions
from stenograph.session.steps import TurnRun
from stenograph.session.strand import Seats, Strand
from stenograph.session.turn import RequestRun
from stenograph.store.base import SessionStore, StoredSession, checked_payloads, damaged_at
from stenograph.store.codec.commits import (
    decode_commit,
    decode_opened,
    decode_outcome,
    encode_commit,
    encode_outcome,
    outcome_idle_since,
)
from stenograph.store.codec.rows import OUTCOME, RowDamaged, Totals, row_kind
from stenograph.trajectory.commits import (
    LedgerRow,
    ModelMark,
    PlacedTurn,
    RequestMark,
    SessionCommit,
    SessionOpened,
    StrandOpened,
)
from stenograph.trajectory.matching import Matcher
from stenograph.trajectory.turn import Node

T = TypeVar("T")

MatcherOf = Callable[[str], Matcher | None]
"""The matcher of a name; None if there is none."""


class Keeper:
    """Makes the turns of one request durable."""

    def __init__(
        self,
        store: SessionStore,
        session: Session,
        *,
        seats: Seats,
        identity: RequestIdentity | None,
        note: LedgerNote,
    ) -> None:
        self._store = store
        self._session = session
        self._seats = seats
        self._identity = identity
        self._note = note

    def __repr__(self) -> str:
        return f"<Keeper of {self._session!r}>"

    def keep(self, run: RequestRun, commit: Callable[[], T]) -> "asyncio.Future[T]":
        """Write a request's sampled turns, and `commit` them when they are durable. The future has what that returns,
        or the error of the store. Cancelling it takes nothing back."""
        tail = self._session.tail
        assert tail is not None, "a session is in the store before its turns are"
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        row, turns = self._note.row(), run.turns
        placed = [self._placed(turn) for turn in turns]
        payload = encode_commit(
            SessionCommit(
                turns=tuple(placed),
                label=self._seats.label,
                reply_id=run.joint_reply_id,
                request=self._mark(run),
                ledger=() if row is None else (row,),
            )
        )

        def done(error: StenographError | None) -> None:
            try:
                if error is not None:
                    raise error
                for turn in turns:
                    turn.stored()
                outcome = commit()
            except Exception as failed:  # noqa: BLE001 -- the request's task raises it
                if not future.done():
                    future.set_exception(failed)
            else:
                if not future.done():
                    future.set_result(outcome)

        at = placed[-1].turn.committed_at
        self._store.append(tail, payload, adds=self._added(turns, placed), at=at, done=done)
        return future

    def _placed(self, turn: TurnRun) -> PlacedTurn:
        strand = turn.opening.strand
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

    def _mark(self, run: RequestRun) -> RequestMark | None:
        if self._identity is None:
            return None
        return RequestMark(
            route=self._identity.route,
            body_print=print_of(self._identity.body),
            num_body_bytes=len(self._identity.body),
            key=self._identity.key,
            order=self._session.order_of(run.request_id),
            num_begun=self._session.num_started,
            budget=run.remaining,
        )

    def _added(self, turns: Sequence[TurnRun], placed: Sequence[PlacedTurn]) -> Totals:
        """The session's sums after these turns, less those before."""
        added = Totals()
        for turn, one in zip(turns, placed, strict=True):
            gone = turn.opening.strand.history.replaced_by(turn.attachment)
            opens_one = one.strand is None and self._session.strands.only is None
            added = added.plus(
                Totals(
                    num_strands=int(opens_one),
                    num_turns=1 - len(gone),
                    num_tokens=one.turn.num_tokens - sum(node.turn.num_tokens for node in gone),
                    num_discarded_turns=len(gone),
                    num_discarded_tokens=sum(len(node.turn.sampled.ids) for node in gone),
                )
            )
        return added


def keep_outcome(
    store: SessionStore, session: Session, outcome: SessionOutcome, *, at: float
) -> "asyncio.Future[None]":
    """Write a session's outcome, which it has when that is durable. The future has the error of the store. Cancelling
    it takes nothing back. `at`: the time since which the session is idle, which an outcome does not change."""
    assert session.tail is not None, "a session is in the store before its outcome is"
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: StenographError | None) -> None:
        if error is None:
            session.outcome = outcome
        if future.done():  # whoever waited has left
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    payload = encode_outcome(outcome, idle_since=at)
    store.append(session.tail, payload, adds=Totals(), at=at, done=done, kind=OUTCOME)
    return future


def opening_of(session: Session, model: ModelMark) -> SessionOpened:
    """A session as it is written when it is opened."""
    options = session.options
    return SessionOpened(
        session_id=session.id,
        created_at=session.created_at,
        model=model,
        history=options.history,
        matcher=options.matcher_name,
        after_length=options.after_length,
        metadata=options.metadata,
        ttl_s=options.ttl_s,
        budgets=options.budgets,
        max_nodes=options.max_nodes,
        template_kwargs=options.template_kwargs,
        sampling=options.sampling,
        canonical=options.canonical,
        group=options.group,
        request=session.opened_by,
        support=options.support,
        compat=options.compat,
        cache_salt=options.cache_salt,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredTurns:
    """A session as its rows made it, with every turn that was ever committed, those that were replaced included, and
    the number of the row that each is in, by the ids of their nodes. `times` has, by the number of a row, the time in
    its payload, in seconds of the epoch."""

    session: Session
    nodes: Mapping[int, Node]
    rows: Mapping[int, int]
    times: Mapping[int, float]


def restored_session(
    stored: StoredSession, *, matcher_of: MatcherOf, model: ModelMark | None, now: float, wall: float
) -> Session:
    """A session as it was when its last row was written. Touches nothing else: a worker may make it.

    `now` and `wall` are monotonic seconds and those of the epoch. A session that was made with another `model` can only
    be read; None: it is only read anyway. Raises SessionDamaged.
    """
    return restored_turns(stored, matcher_of=matcher_of, model=model, now=now, wall=wall).session


def restored_turns(
    stored: StoredSession, *, matcher_of: MatcherOf, model: ModelMark | None, now: float, wall: float
) -> RestoredTurns:
    """As `restored_session`, with all of its turns."""
    payloads = checked_payloads(stored)
    opened = _opened(stored, payloads[0])
    session = Session(
        stored.session_id,
        _options(opened, matcher_of),
        created_at=opened.created_at,
        now=now - (max(0.0, wall - stored.at) if stored.idle_s is None else stored.idle_s),
    )
    session.opened_by = opened.request
    if model is not None and opened.model.digest != model.digest:
        session.refusal = ModelMismatch(session.id, made_with=opened.model.name, served=model.name)
    replayed = _Replayed(session)
    for seq, payload in enumerate(payloads[1:], start=1):
        try:
            replayed.row(seq, row_kind(stored.rows[seq].body), payload)
        except (RowDamaged, ValueError) as error:
            raise damaged_at(session.id, seq, RowDamaged(str(error))) from error
    for row in sorted(replayed.ledger, key=lambda row: row.number):
        session.ledger.restore(row)
    session.tail = stored.tail()
    _check_totals(session, replayed.outcome_seq, session.tail.totals)
    return RestoredTurns(session=session, nodes=replayed.nodes, rows=replayed.row_of, times=replayed.times)


class _Replayed:
    """A session that is made again row by row."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.nodes: dict[int, Node] = {}
        self.row_of: dict[int, int] = {}
        self.times: dict[int, float] = {}
        self.ledger: list[LedgerRow] = []
        self.outcome_seq = 0

    def row(self, seq: int, kind: int, payload: memoryview) -> None:
        """Make a row's addition. Raises RowDamaged or ValueError."""
        if kind == OUTCOME:
            self._session.outcome, self.outcome_seq = decode_outcome(payload), seq
            if (idle_since := outcome_idle_since(payload)) is not None:
                self.times[seq] = idle_since
            return
        commit = decode_commit(payload, self.nodes.__getitem__)
        made = self._session.replay(commit)
        self.times[seq] = commit.turns[-1].turn.committed_at
        for _, node in made:
            self.nodes[node.id] = node
            self.row_of[node.id] = seq
            untrack(node.tracked_parts)
        self.ledger += [_ended(row, commit, made) for row in commit.ledger]


def read_opening(stored_opening: StoredSession) -> SessionOpened:
    """A session's opening, held to its digest. Raises SessionDamaged."""
    return _opened(stored_opening, checked_payloads(replace(stored_opening, rows=stored_opening.rows[:1]))[0])


def _opened(stored: StoredSession, payload: memoryview) -> SessionOpened:
    try:
        return decode_opened(payload)
    except RowDamaged as error:
        raise damaged_at(stored.session_id, 0, error) from error


def _options(opened: SessionOpened, matcher_of: MatcherOf) -> SessionOptions:
    matcher = matcher_of(opened.matcher)
    if matcher is None:
        raise SessionDamaged(
            opened.session_id,
            place="its opening",
            problem=f"its matcher {opened.matcher!r} is not one that this server has (--matcher)",
        )
    return SessionOptions(
        history=opened.history,
        matcher=matcher,
        matcher_name=opened.matcher,
        after_length=opened.after_length,
        metadata=opened.metadata,
        ttl_s=opened.ttl_s,
        budgets=opened.budgets,
        max_nodes=opened.max_nodes,
        template_kwargs=opened.template_kwargs,
        sampling=opened.sampling,
        canonical=opened.canonical,
        group=opened.group,
        support=opened.support,
        compat=opened.compat,
        cache_salt=opened.cache_salt,
    )


def _ended(row: LedgerRow, commit: SessionCommit, made: Sequence[tuple[Strand, Node]]) -> LedgerRow:
    """The row of the request that made a commit, which was written before it had ended."""
    if row.ended_s is not None:
        return row
    strand, first = made[0]
    turns = [node.turn for _, node in made]
    num_sampled = sum(len(turn.sampled.ids) for turn in turns)
    rewrites = tuple(dict.fromkeys(one.rule for one in first.turn.rewrites))
    return structs.replace(
        row,
        ended_s=turns[0].committed_at,
        status=200,
        strand=strand.number,
        turn=first.id,
        num_prompt_tokens=sum(node.num_tokens for _, node in made) - num_sampled,
        num_cached_tokens=sum(turn.sampled.num_cached_tokens for turn in turns),
        num_sampled_tokens=num_sampled,
        rewrites=rewrites,
        label=commit.label,
    )


def _check_totals(session: Session, outcome_seq: int, totals: Totals) -> None:
    """Raise SessionDamaged if a session's rows do not come to the sums that the last one has."""
    strands = session.strands
    found = Totals(
        num_strands=len(strands.kept) if strands.only is None else 0,
        num_turns=strands.num_turns,
        num_tokens=strands.num_tokens,
        num_discarded_turns=strands.discarded.num_turns,
        num_discarded_tokens=strands.discarded.num_tokens,
        outcome_seq=outcome_seq,
    )
    if found != totals:
        raise SessionDamaged(session.id, place="its last row", problem=f"its turns come to {found}, it says {totals}")
