"""A session as it is read from the store: made again row by row, and held to the sums in its last row.

Owns no session and no store, and touches neither: a worker may make it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from stenograph.core.errors import ModelMismatch, SessionDamaged
from stenograph.offload.memory import untrack
from stenograph.session.session import Session
from stenograph.store.base import StoredSession, checked_payloads, damaged_at
from stenograph.store.codec.commits import (
    decode_commit,
    decode_opened,
    decode_outcome,
    outcome_idle_since,
)
from stenograph.store.codec.rows import OUTCOME, RowDamaged, Totals, row_kind
from stenograph.trajectory.commits import (
    LedgerRow,
    ModelMark,
    SessionCommit,
    SessionOpened,
)
from stenograph.trajectory.matching import Matcher
from stenograph.trajectory.strand import Strand
from stenograph.trajectory.turn import Node

MatcherOf = Callable[[str], Matcher | None]
"""The matcher of a name; None if there is none."""


class RestoredTurns:
    """A session made again row by row, with every turn ever committed, including replaced ones, and the numbers of
    their rows, by the ids of their nodes. `times` has, by the number of a row, the time in its payload, in seconds of
    the epoch."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.nodes: dict[int, Node] = {}
        self.rows: dict[int, int] = {}
        self.times: dict[int, float] = {}
        self.ledger: list[LedgerRow] = []
        self.outcome_seq = 0

    def add(self, seq: int, kind: int, payload: memoryview) -> None:
        """Make a row's addition. Raises RowDamaged or ValueError."""
        if kind == OUTCOME:
            self.session.outcome, self.outcome_seq = decode_outcome(payload), seq
            if (idle_since := outcome_idle_since(payload)) is not None:
                self.times[seq] = idle_since
            return
        commit = decode_commit(payload, self.nodes.__getitem__)
        made = self.session.replay(commit)
        self.times[seq] = commit.turns[-1].turn.committed_at
        for _, node in made:
            self.nodes[node.id] = node
            self.rows[node.id] = seq
            untrack(node.tracked_parts)
        self.ledger += [_ended(row, commit, made) for row in commit.ledger]


def restored_session(
    stored: StoredSession, *, matcher_of: MatcherOf, model: ModelMark | None, now: float, wall: float
) -> Session:
    """A session as it was when its last row was written. Touches nothing else: a worker may make it.

    `now` and `wall` are monotonic seconds and those of the epoch. A session made with another `model` can only be read;
    None: it is only read anyway. Raises SessionDamaged.
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
        opened.options,
        created_at=opened.created_at,
        now=now - (max(0.0, wall - stored.at) if stored.idle_s is None else stored.idle_s),
        matcher=_matcher(opened, matcher_of),
    )
    session.opened_by = opened.request
    if model is not None and opened.model.digest != model.digest:
        session.refusal = ModelMismatch(session.id, made_with=opened.model.name, served=model.name)
    restored = RestoredTurns(session)
    for seq, payload in enumerate(payloads[1:], start=1):
        try:
            restored.add(seq, row_kind(stored.rows[seq].body), payload)
        except (RowDamaged, ValueError) as error:
            raise damaged_at(session.id, seq, RowDamaged(str(error))) from error
    for row in sorted(restored.ledger, key=lambda row: row.number):
        session.ledger.restore(row)
    session.tail = stored.tail()
    _check_totals(session, restored.outcome_seq, session.tail.totals)
    return restored


def read_opened(stored_opening: StoredSession) -> SessionOpened:
    """The first row of a session, held to its digest. Raises SessionDamaged."""
    return _opened(stored_opening, checked_payloads(replace(stored_opening, rows=stored_opening.rows[:1]))[0])


def _opened(stored: StoredSession, payload: memoryview) -> SessionOpened:
    try:
        return decode_opened(payload)
    except RowDamaged as error:
        raise damaged_at(stored.session_id, 0, error) from error


def _matcher(opened: SessionOpened, matcher_of: MatcherOf) -> Matcher:
    name = opened.options.matcher
    if (matcher := matcher_of(name)) is not None:
        return matcher
    raise SessionDamaged(
        opened.session_id,
        place="its opening",
        problem=f"its matcher {name!r} is not one that this server has (--matcher)",
    )


def _ended(row: LedgerRow, commit: SessionCommit, made: Sequence[tuple[Strand, Node]]) -> LedgerRow:
    """The row of the request that made a commit, written before the request had ended."""
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
    """Raise SessionDamaged if a session's rows do not come to the sums in the last one."""
    found = structs.replace(session.totals, outcome_seq=outcome_seq)
    if found != totals:
        raise SessionDamaged(session.id, place="its last row", problem=f"its turns come to {found}, it says {totals}")
