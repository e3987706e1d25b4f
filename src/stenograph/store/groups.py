"""Rows waiting to be written, as a group: their numbers and digests are settled together, at the write."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from stenograph.core.errors import StenographError
from stenograph.core.types import SessionId
from stenograph.store.base import Done, Tail
from stenograph.store.codec.rows import COMMIT, Totals, row_body, row_digest

Other = TypeVar("Other")

MAX_GROUP_ROWS = 256
"""Rows of one statement; it has five parameters a row, and SQLite takes 32,766."""

MAX_GROUP_BYTES = 8 * 2**20
"""Bytes of one statement; a single row may be larger."""


class NewRow(NamedTuple):
    """A row to be written, in the order of the file's columns."""

    session: int
    seq: int
    at: float
    body: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A session to be written, by its opening."""

    number: int
    session_id: SessionId
    ttl_s: float | None
    at: float
    body: bytes
    digest: bytes
    key: str | None = None


class RowAppend:
    """A row to be written behind a session's last."""

    __slots__ = ("adds", "at", "done", "error", "kind", "payload", "tail")

    def __init__(self, tail: Tail, kind: int, payload: bytes, adds: Totals, at: float, done: Done) -> None:
        self.tail = tail
        self.kind = kind
        self.payload = payload
        self.adds = adds
        self.at = at
        self.done = done
        self.error: StenographError | None = None

    def tell(self) -> None:
        self.done(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEnd:
    """The end of a session's rows as it will be, and whether a turn is among the new ones: its life begins anew."""

    tail: Tail
    seq: int
    digest: bytes
    totals: Totals
    has_turn: bool

    def move(self) -> None:
        """The rows are there: the session ends here."""
        self.tail.seq, self.tail.digest, self.tail.totals = self.seq, self.digest, self.totals


@dataclass(slots=True)
class RowGroup:
    """Rows of a group as they would be, and the ends of their sessions after them, by the identities of their tails."""

    rows: list[NewRow]
    ends: dict[int, RowEnd]

    @staticmethod
    def of(jobs: Sequence[RowAppend]) -> "RowGroup":
        """The rows of these jobs, each behind the one before it of its session."""
        group = RowGroup(rows=[], ends={})
        for job in jobs:
            tail, end = job.tail, group.ends.get(id(job.tail))
            before = tail if end is None else end
            seq = before.seq + 1
            totals = before.totals.after(job.kind, seq, job.adds)
            body = row_body(job.kind, totals, job.payload)
            digest = row_digest(before.digest, tail.session_id, seq, body)
            group.rows.append(NewRow(session=tail.number, seq=seq, at=job.at, body=body, digest=digest))
            has_turn = job.kind == COMMIT or (end is not None and end.has_turn)
            group.ends[id(tail)] = RowEnd(tail=tail, seq=seq, digest=digest, totals=totals, has_turn=has_turn)
        return group

    def move_ends(self) -> None:
        """All of it is there."""
        for end in self.ends.values():
            end.move()


def statements(jobs: Sequence[RowAppend | Other]) -> Iterator[list[RowAppend] | Other]:
    """Jobs in their order, consecutive rows together, as many as one statement takes."""
    rows: list[RowAppend] = []
    num_bytes = 0
    for job in jobs:
        if not isinstance(job, RowAppend):
            if rows:
                yield rows
            rows, num_bytes = [], 0
            yield job
            continue
        if len(rows) == MAX_GROUP_ROWS or num_bytes >= MAX_GROUP_BYTES:
            yield rows
            rows, num_bytes = [], 0
        rows.append(job)
        num_bytes += len(job.payload)
    if rows:
        yield rows
