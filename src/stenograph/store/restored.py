"""A session as its rows made it, for whoever goes on with it or only looks: its turns, made again row by row, and held
to the sums in the last one. A worker may make it.

Knows nothing of a session that is in memory, nor of what runs on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from msgspec import structs

from stenograph.core.errors import SessionDamaged
from stenograph.core.loaded import entry
from stenograph.core.outcome import Annotation, SessionOutcome
from stenograph.core.types import SessionId
from stenograph.store.base import StoredSession, StoredSummary, checked_payloads, damaged_at
from stenograph.store.codec.commits import decode_commit, decode_opened, decode_outcome, outcome_idle_since
from stenograph.store.codec.rows import ENTRY, OUTCOME, SCORES, RowDamaged, Totals, row_kind, row_payload
from stenograph.trajectory.commits import LedgerRow, SessionCommit, SessionOpened, SessionOptions
from stenograph.trajectory.matching import Matcher
from stenograph.trajectory.strand import Strand, Strands
from stenograph.trajectory.turn import Node

if TYPE_CHECKING:
    from stenograph.trajectory.account import Account  # loaded by the first entry

MatcherOf = Callable[[str], Matcher | None]
"""The matcher of a name; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSession:
    """A session outside of memory, in a list: as it was opened, its sums, its outcome if it has one, and the number of
    its last row. `is_busy` None: another process may have it, and run a turn."""

    opened: SessionOpened
    totals: Totals
    outcome: SessionOutcome | None
    last_seq: int
    is_busy: bool | None = False

    @property
    def id(self) -> SessionId:
        """Its id."""
        return self.opened.session_id

    @property
    def created_at(self) -> float:
        """When it was opened, in seconds of the epoch."""
        return self.opened.created_at

    @property
    def options(self) -> SessionOptions:
        """Its options."""
        return self.opened.options


def listed_session(summary: StoredSummary) -> ListedSession:
    """A session of a list. Raises SessionDamaged."""
    row = StoredSession(session_id=summary.session_id, number=summary.number, at=summary.at, rows=[summary.opened])
    opened, written = read_opened(row), summary.outcome
    try:
        outcome = None if written is None else decode_outcome(row_payload(written.body, OUTCOME))
        totals = Totals.of(summary.last_head)
        return ListedSession(opened=opened, totals=totals, outcome=outcome, last_seq=summary.last_seq)
    except RowDamaged as error:
        seq = summary.last_seq if written is None else written.seq
        raise damaged_at(summary.session_id, seq, error) from error


class RestoredTurns:
    """A session as its rows made it; `restored_turns` reads it whole.

    `commits` are in order, each with its nodes and their strands; `nodes` are all turns ever committed, replaced ones
    too, by id, `rows` the numbers of their rows. `times` has, by the number of a row, the time in its payload, in
    seconds of the epoch. `ledger` has the requests, in order.
    """

    def __init__(self, opened: SessionOpened, strands: Strands) -> None:
        self.opened = opened
        self.strands = strands
        self.outcome: SessionOutcome | None = None
        self.outcome_seq = 0
        self.annotations: dict[str, Annotation] = {}
        self.account: Account | None = None
        self.commits: list[tuple[SessionCommit, list[tuple[Strand, Node]]]] = []
        self.nodes: dict[int, Node] = {}
        self.rows: dict[int, int] = {}
        self.times: dict[int, float] = {}
        self.ledger: list[LedgerRow] = []

    def __repr__(self) -> str:
        return f"<RestoredTurns {self.opened.session_id} {self.strands!r}>"

    def _is_inherited(self, seq: int) -> bool:
        """Whether a row was written as its session was forked."""
        fork = self.opened.options.fork
        return fork is not None and seq <= fork.num_turns

    def check_whole(self) -> None:
        """Raise SessionDamaged for a fork without all turns that it begins with."""
        fork, num_turns = self.opened.options.fork, len(self.commits)
        if fork is not None and num_turns < fork.num_turns:
            raise SessionDamaged(
                self.opened.session_id,
                place="its last row",
                problem=f"the server stopped while it was forked: {num_turns} of {fork.num_turns} turns",
                was_given=False,
            )

    def add(self, seq: int, kind: int, payload: memoryview) -> None:
        """Make a row's addition. Raises RowDamaged or ValueError."""
        if kind == OUTCOME:
            self.outcome, self.outcome_seq = decode_outcome(payload), seq
            if (idle_since := outcome_idle_since(payload)) is not None:
                self.times[seq] = idle_since
            return
        if kind == SCORES:
            annotation, idle_since = entry("stenograph.store.codec.annotations:decode_annotation")(payload)
            self.annotations[annotation.name] = annotation
            if idle_since is not None:
                self.times[seq] = idle_since
            return
        if kind == ENTRY:
            one, self.times[seq] = entry("stenograph.store.codec.entries:decode_entry")(payload)
            account: Account = self.account or entry("stenograph.trajectory.account:Account")()
            account.add(one)
            self.account = account
            return
        commit = decode_commit(payload, self.nodes.__getitem__)
        made = [self.strands.replay(one, commit.label) for one in commit.turns]
        self.commits.append((commit, made))
        self.times[seq] = self.opened.created_at if self._is_inherited(seq) else commit.turns[-1].turn.committed_at
        for _, node in made:
            self.nodes[node.id] = node
            self.rows[node.id] = seq
        self.ledger += [_ended(row, commit, made) for row in commit.ledger]


def restored_turns(stored: StoredSession, matcher_of: MatcherOf) -> RestoredTurns:
    """A session as it was when its last row was written. Raises SessionDamaged."""
    payloads = checked_payloads(stored)
    opened = _opened(stored, payloads[0])
    found = RestoredTurns(opened, Strands.of(stored.session_id, opened.options, _matcher(opened, matcher_of)))
    for seq, payload in enumerate(payloads[1:], start=1):
        try:
            found.add(seq, row_kind(stored.rows[seq].body), payload)
        except (RowDamaged, ValueError) as error:
            raise damaged_at(stored.session_id, seq, RowDamaged(str(error))) from error
    found.ledger.sort(key=lambda row: row.number)
    _check_totals(found, stored)
    return found


def read_opened(stored_opened: StoredSession) -> SessionOpened:
    """The first row of a session, held to its digest. Raises SessionDamaged."""
    return _opened(stored_opened, checked_payloads(replace(stored_opened, rows=stored_opened.rows[:1]))[0])


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


def _check_totals(found: RestoredTurns, stored: StoredSession) -> None:
    """Raise SessionDamaged if a session's rows do not come to the sums in the last one."""
    sums = totals_of(found.strands, found.outcome_seq)
    try:
        found.check_whole()
        told = stored.tail().totals
        if sums != told:
            raise RowDamaged(f"its turns come to {sums}, it says {told}")
    except RowDamaged as error:
        raise SessionDamaged(stored.session_id, place="its last row", problem=str(error)) from error


def totals_of(strands: Strands, outcome_seq: int = 0) -> Totals:
    """The sums of a session; `outcome_seq` is the number of the row of its outcome, 0 if there is none."""
    return Totals(
        num_strands=len(strands.kept) if strands.only is None else 0,
        num_turns=strands.num_turns,
        num_tokens=strands.num_tokens,
        num_discarded_turns=strands.discarded.num_turns,
        num_discarded_tokens=strands.discarded.num_tokens,
        outcome_seq=outcome_seq,
    )
