"""A folder with many sessions that are copies of one: under ids of their own, each row's digest computed anew."""

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.kit.processes import CannotMeasure
from stenograph.core.types import SessionId
from stenograph.store.base import StoredSession
from stenograph.store.codec.commits import encode_opened
from stenograph.store.codec.rows import OPENED, Totals, row_body, row_digest
from stenograph.store.folder import file_of
from stenograph.store.look import looks
from stenograph.store.restored import read_opened

Row = tuple[int, int, float, bytes, bytes]

_SESSIONS = "INSERT INTO sessions (number, id, ttl_s, at, body, digest) VALUES (?, ?, NULL, ?, ?, ?)"
_ROWS = "INSERT INTO rows (session, seq, at, body, digest) VALUES (?, ?, ?, ?, ?)"
_AT_ONCE = 200


def fill(folder: Path, session_id: str, num_sessions: int) -> list[str]:
    """Copy a session of a folder that no server holds until there are so many; the ids of all. Raises StartupError."""
    with looks(folder) as (look,):
        stored = look.read(SessionId(session_id))
    if stored is None:
        raise CannotMeasure(f"the session {session_id} is not in {folder}")
    chosen = random.Random(num_sessions)
    ids = [f"00{chosen.getrandbits(120):030x}" for _ in range(num_sessions - 1)]
    raw = sqlite3.connect(file_of(folder), isolation_level=None)
    raw.execute("PRAGMA synchronous = OFF")
    for start in range(0, len(ids), _AT_ONCE):
        raw.execute("BEGIN")
        for index in range(start, min(start + _AT_ONCE, len(ids))):
            opening, *rows = _copied(stored, SessionId(ids[index]), stored.number + 1 + index)
            number, _, at, body, digest = opening
            raw.execute(_SESSIONS, (number, ids[index], at, body, digest))
            raw.executemany(_ROWS, rows)
        raw.execute("COMMIT")
    raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw.close()
    return [session_id, *ids]


def _copied(stored: StoredSession, session_id: SessionId, number: int) -> Iterator[Row]:
    """A session's rows under another id, the opening first."""
    payload = encode_opened(replace(read_opened(stored), session_id=session_id))
    digest = b""
    for row in stored.rows:
        body = row_body(OPENED, Totals(), payload) if row.seq == 0 else row.body
        digest = row_digest(digest, session_id, row.seq, body)
        yield number, row.seq, stored.at, body, digest
