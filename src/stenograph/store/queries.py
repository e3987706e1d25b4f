"""The questions to the SQLite file of a store: its sessions, one or a page of them. Asked on the store's thread.

Rows are read by one step: each step lets go of the GIL, and to get it back beside a busy loop takes up to 5 ms. All
raise StorageUnavailable where SQLite fails.
"""

import sqlite3

from stenograph.core.errors import SessionDamaged, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.base import StoredRow, StoredSession, StoredSummary
from stenograph.store.codec.rows import DIGEST_BYTES, HEAD_BYTES, RowDamaged, Totals
from stenograph.store.database import Database, sqlite_code

MAX_READ_BYTES = 256 * 2**20
"""The longest session read in one step. SQLite has values of up to 10^9 bytes."""

_SIZE = "SELECT coalesce(sum(length(body)), 0), max(seq), at FROM rows WHERE session = ?"
"""`at` is the last row's, as of any bare column beside `max`. Source: sqlite.org/lang_select.html#bareagg."""

_READ_AT_ONCE = (
    "SELECT count(*), group_concat(seq), group_concat(length(body)),"
    " CAST(group_concat(body, '') AS BLOB), CAST(group_concat(digest, '') AS BLOB)"
    " FROM (SELECT seq, body, digest FROM rows WHERE session = ? ORDER BY seq)"
)

_LAST = "SELECT {} FROM rows WHERE session = s.number ORDER BY seq DESC LIMIT 1"
_PAGE = (
    "SELECT s.number, s.id, s.body, s.digest,"
    f" coalesce(({_LAST.format('seq')}), 0), coalesce(({_LAST.format('at')}), s.at),"
    f" coalesce(({_LAST.format(f'substr(body, 1, {HEAD_BYTES})')}), substr(s.body, 1, {HEAD_BYTES}))"
    " FROM sessions s WHERE s.number > ? ORDER BY s.number LIMIT ?"
)
_BY_KEY = "SELECT number, id, at, body, digest FROM sessions WHERE key = ? ORDER BY number DESC LIMIT 1"
_ROW = "SELECT seq, body, digest FROM rows WHERE session = ? AND seq = ?"
_EXPIRED = (
    "SELECT s.id FROM sessions s WHERE s.ttl_s IS NOT NULL"
    f" AND coalesce(({_LAST.format('at')}), s.at) + s.ttl_s <= ? LIMIT ?"
)

_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_ROWS = "SELECT seq, body, digest FROM rows WHERE session = ? ORDER BY seq"


def read(database: Database, session_id: SessionId) -> StoredSession | None:
    """A session's rows; None if there is none. Raises SessionDamaged if SQLite cannot find its way to them."""
    try:
        found = database.asked("SELECT number, at, body, digest FROM sessions WHERE id = ?", (session_id,))
        if not found:
            return None
        number, opened_at, body, digest = found[0]
        rows, last_at = _rows(database, number)
    except StorageUnavailable as error:
        cause = error.__cause__
        if isinstance(cause, sqlite3.Error) and sqlite_code(cause) in _DAMAGE:
            raise SessionDamaged(session_id, place="the file's own structure", problem=str(cause)) from cause
        raise
    opening = StoredRow(seq=0, body=bytes(body), digest=bytes(digest))
    at = opened_at if last_at is None else last_at
    return StoredSession(session_id=session_id, number=number, at=at, rows=[opening, *rows])


def _rows(database: Database, number: int) -> tuple[list[StoredRow], float | None]:
    """The rows behind an opening, and when the last was written."""
    num_bytes, last_seq, last_at = database.asked(_SIZE, (number,))[0]
    if num_bytes > MAX_READ_BYTES:
        found = database.asked(_ROWS, (number,))
        return [StoredRow(seq=seq, body=body, digest=digest) for seq, body, digest in found], last_at
    if last_seq is None:
        return [], None
    num, seqs, lengths, bodies, digests = database.asked(_READ_AT_ONCE, (number,))[0]
    if len(digests) != num * DIGEST_BYTES:  # a damaged digest has another length: row by row it can be told which
        found = database.asked(_ROWS, (number,))
        return [StoredRow(seq=seq, body=bytes(body), digest=bytes(d)) for seq, body, d in found], last_at
    rows: list[StoredRow] = []
    start = 0
    for index, (seq, length) in enumerate(zip(seqs.split(","), map(int, lengths.split(",")), strict=True)):
        digest = digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        rows.append(StoredRow(seq=int(seq), body=bodies[start : start + length], digest=digest))
        start += length
    return rows, last_at


def find(database: Database, key: str) -> StoredSession | None:
    """As `SessionStore.find`."""
    found = database.asked(_BY_KEY, (key,))
    if not found:
        return None
    number, id_, at, body, digest = found[0]
    opening = StoredRow(seq=0, body=bytes(body), digest=bytes(digest))
    return StoredSession(session_id=SessionId(id_), number=number, at=at, rows=[opening])


def page(database: Database, *, limit: int, after: SessionId | None) -> list[StoredSummary]:
    """As `SessionStore.page`."""
    first = 0
    if after is not None:
        found = database.asked("SELECT number FROM sessions WHERE id = ?", (after,))
        if not found:
            return []
        first = found[0][0]
    return [
        StoredSummary(
            session_id=SessionId(id_),
            number=number,
            opened=StoredRow(seq=0, body=bytes(body), digest=bytes(digest)),
            last_head=bytes(head),
            last_seq=seq,
            at=at,
            outcome=_outcome(database, number, bytes(head)),
        )
        for number, id_, body, digest, seq, at, head in database.asked(_PAGE, (first, limit))
    ]


def _outcome(database: Database, number: int, last_head: bytes) -> StoredRow | None:
    """The row with a session's outcome; None if there is none, or if its number in the head is damaged."""
    try:
        seq = Totals.of(last_head).outcome_seq
    except RowDamaged:
        return None
    found = database.asked(_ROW, (number, seq)) if 0 < seq < 2**63 else []
    return StoredRow(seq=seq, body=bytes(found[0][1]), digest=bytes(found[0][2])) if found else None


def expired(database: Database, *, now: float, limit: int) -> list[SessionId]:
    """As `SessionStore.expired`."""
    return [SessionId(row[0]) for row in database.asked(_EXPIRED, (now, limit))]
