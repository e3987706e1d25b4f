"""The sessions of a shared database, for a look without changes: servers may go on meanwhile.

`PostgresLook` is the counterpart of `store/look.py` for a file: each call runs the statements to their end.
"""

import asyncio
from collections.abc import Collection, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from stenograph.cluster.postgres.connection import Lane
from stenograph.cluster.postgres.schema import check_schema
from stenograph.cluster.postgres.server import PostgresRows
from stenograph.cluster.postgres.shared_rows import DatabaseAway
from stenograph.core.errors import StartupError, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.base import SessionColumns, StoredSession, StoredSummary

T = TypeVar("T")

TIMEOUT_S = 30.0
_PAGE = 256

_FAULTS = (
    (
        "session {} has no row that says where it ends",
        "SELECT id FROM stenograph_sessions s"
        " WHERE NOT EXISTS (SELECT FROM stenograph_ends e WHERE e.session = s.number) ORDER BY number",
    ),
    (
        "session number {} is gone, but {} rows of it are there",
        "SELECT session, count(*) FROM stenograph_rows r"
        " WHERE NOT EXISTS (SELECT FROM stenograph_sessions s WHERE s.number = r.session)"
        " GROUP BY session ORDER BY session",
    ),
    (
        "session {} ends at row {} by its end, and at row {} by its rows",
        "SELECT s.id, e.seq, coalesce(max(r.seq), 0) FROM stenograph_sessions s"
        " JOIN stenograph_ends e ON e.session = s.number LEFT JOIN stenograph_rows r ON r.session = s.number"
        " GROUP BY s.id, s.number, e.seq HAVING e.seq <> coalesce(max(r.seq), 0) ORDER BY s.number",
    ),
    (
        "media {} is damaged: its bytes do not have this hash",
        "SELECT sha256 FROM stenograph_media WHERE encode(sha256(body), 'hex') <> sha256 ORDER BY sha256",
    ),
    (
        "media {} is of no session",
        "SELECT sha256 FROM stenograph_media m"
        " WHERE NOT EXISTS (SELECT FROM stenograph_session_media l WHERE l.sha256 = m.sha256) ORDER BY sha256",
    ),
)
"""Faults of the tables among themselves: the words for each, and the statement to find them."""


class PostgresLook:
    """One database."""

    name = "database"

    def __init__(self, url: str, runner: asyncio.Runner) -> None:
        """Raises StartupError."""
        self._runner = runner
        runner.run(check_schema(url, timeout_s=TIMEOUT_S))
        self._rows = PostgresRows(url, timeout_s=TIMEOUT_S)
        self._lane = Lane(url, name="check", timeout_s=TIMEOUT_S)

    def __repr__(self) -> str:
        return f"<PostgresLook of {self._rows!r}>"

    def summaries(self) -> Iterator[StoredSummary]:
        """All sessions in the order of their creation. Raises StorageUnavailable."""
        after: SessionId | None = None
        while page := self._run(self._rows.page(limit=_PAGE, after=after)):
            yield from page
            after = page[-1].session_id

    def read(self, session_id: SessionId) -> StoredSession | None:
        """A session's rows. Raises StorageUnavailable."""
        return self._run(self._rows.read(session_id))

    def columns(self, session_id: SessionId) -> SessionColumns:
        """The columns beside a session's rows. Raises StorageUnavailable."""
        ((number, ttl_s, at, key),) = self._run(
            self._lane.fetch("SELECT number, ttl_s, at, key FROM stenograph_sessions WHERE id = $1", session_id)
        )
        rows = self._run(self._lane.fetch("SELECT seq, at FROM stenograph_rows WHERE session = $1", number))
        return SessionColumns(ttl_s=ttl_s, key=key, times={0: at, **dict(rows)})

    def media(self, session_id: SessionId) -> Collection[str]:
        """The hashes of a session's media. Raises StorageUnavailable."""
        return self._run(self._rows.media_of(session_id))

    def faults(self) -> list[str]:
        """Faults of the tables among themselves."""
        return [said.format(*row) for said, query in _FAULTS for row in self._run(self._lane.fetch(query))]

    def close(self) -> None:
        self._runner.run(self._rows.aclose())
        self._runner.run(self._lane.aclose())

    def _run(self, question: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(question)
        except DatabaseAway as error:
            raise StorageUnavailable(f"The database does not answer: {error}.", is_full=False) from error


@contextmanager
def looked_at_database(url: str) -> Generator[PostgresLook]:
    """A database, looked at. Raises StartupError if there is none, or it has no sessions, or does not answer."""
    with asyncio.Runner() as runner:
        look = PostgresLook(url, runner)
        try:
            yield look
        except StorageUnavailable as error:
            raise StartupError(str(error)) from error
        finally:
            look.close()
