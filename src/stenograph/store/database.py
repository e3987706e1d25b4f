"""The SQLite file of a store: its schema, what is written to it, and the meaning of SQLite's errors. For one thread.

One connection locks the file for itself: no second one can write or move the log (older SQLites do not survive it), and
nothing of the log's index is in shared memory. Rows are written by one statement in autocommit. queries.py reads them.
"""

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from stenograph.core.errors import StartupError, StorageUnavailable
from stenograph.core.types import SessionId
from stenograph.store.base import FULL_RETRY_S, Ended, Sums
from stenograph.store.folder import keep_private
from stenograph.store.groups import NewRow, NewSession
from stenograph.store.settings import Durability

APPLICATION_ID = 0x53746E67
"""`Stng`, in `PRAGMA application_id`: the file is ours."""

LONG_LOG_BYTES = 16 * 2**20
"""The length at which a log is moved into the file. As many pages as SQLite's own default; but SQLite moves it within a
write, and keeps a failure of the move to itself."""

PAGE_BYTES = 2**14
"""A page of a new file; an older file keeps its own. In pages of 4 KiB a row of 2.3 KB takes a whole one."""

Migrations = Sequence[Sequence[str]]
"""The statements to bring a file from each schema to the next, from an empty one on."""

MIGRATIONS: Migrations = (
    (
        "CREATE TABLE sessions (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, ttl_s REAL, at REAL NOT NULL,"
        " body BLOB NOT NULL, digest BLOB NOT NULL, key TEXT)",
        "CREATE INDEX sessions_by_key ON sessions (key) WHERE key IS NOT NULL",
        "CREATE TABLE rows (place INTEGER PRIMARY KEY, session INTEGER NOT NULL, seq INTEGER NOT NULL,"
        " at REAL NOT NULL, body BLOB NOT NULL, digest BLOB NOT NULL)",
        "CREATE UNIQUE INDEX rows_of_session ON rows (session, seq)",
    ),
    ("CREATE TABLE sums (key TEXT PRIMARY KEY, num INTEGER NOT NULL) WITHOUT ROWID",),
)
_ROWS = "INSERT INTO rows (session, seq, at, body, digest) VALUES "
_OPENINGS = "INSERT INTO sessions (number, id, ttl_s, at, body, digest, key) VALUES "

_ADD = "INSERT INTO sums VALUES (?, ?) ON CONFLICT DO UPDATE SET num = num + excluded.num"

_FULL = sqlite3.SQLITE_FULL


class SqlConnection(Protocol):
    """The part of a connection to SQLite needed by a store. Raises sqlite3.Error."""

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement to its end; its rows."""
        ...

    def is_in_place(self) -> bool:
        """Whether written rows are found again: the file and its log are still there by their names."""
        ...

    def backup(self, path: Path, meanwhile: Callable[[], None]) -> None:
        """Copy all into a new file, a part at a time. `meanwhile` is called between parts, and may run statements."""
        ...

    def close(self) -> None: ...


Connect = Callable[[Path], SqlConnection]

_BACKUP_PAGES = 256
"""Pages copied by a backup before others may go on: 4 MiB, of an older file one."""


class FileConnection:
    """A connection to a file, by the standard library."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._file, self._log = str(path), f"{path}-wal"
        self._inodes: tuple[int, int] | None = None
        if not read_only:
            for file in (path, *path.parent.glob(f"{path.name}-*")):  # SQLite makes its log with the file's rights
                keep_private(file)
        way = _way_to_read(path) if read_only else "mode=rwc"
        uri = f"{path.absolute().as_uri()}?{way}"
        self._sqlite = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        if "vfs=" in way:
            self._sqlite.execute("PRAGMA locking_mode = EXCLUSIVE")

    def __repr__(self) -> str:
        return "<FileConnection>"

    def run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._sqlite.execute(sql, parameters).fetchall()
        except UnicodeDecodeError as error:  # of a damaged text
            raise sqlite3.DatabaseError(f"a text is not UTF-8: {error}") from error

    def is_in_place(self) -> bool:
        try:
            found = (os.stat(self._file).st_ino, os.stat(self._log).st_ino)
        except FileNotFoundError:
            return False
        if self._inodes is None:
            self._inodes = found
        return found == self._inodes

    def backup(self, path: Path, meanwhile: Callable[[], None]) -> None:
        keep_private(path)
        target = sqlite3.connect(path)
        try:
            self._sqlite.backup(target, pages=_BACKUP_PAGES, progress=lambda status, left, total: meanwhile())
        finally:
            target.close()

    def close(self) -> None:
        self._sqlite.close()


def _way_to_read(path: Path) -> str:
    """The parameters for SQLite to read a file, also one in a read-only folder.

    There SQLite cannot make the index of a log. It needs none for a file without a log, and keeps it in memory where
    no lock is taken: nobody can write. Source: sqlite.org/uri.html, sqlite.org/wal.html#noshm.
    """
    if os.access(path.parent, os.W_OK):
        return "mode=ro"
    log = Path(f"{path}-wal")
    return "mode=ro&vfs=unix-none" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"


class Database:
    """One open file. Every method raises StorageUnavailable where SQLite fails, but for damage of rows being read."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability | None,
        connect: Connect = FileConnection,
        migrations: Migrations = MIGRATIONS,
    ) -> None:
        """Open or make the file. Raises StartupError for a foreign, newer, damaged or locked file.

        `durability` None: it is only looked at, and not changed. Its schema, in `PRAGMA user_version`, is the number of
        `migrations` made.
        """
        self._migrations = migrations
        self._connection: SqlConnection | None = None
        self._log_bytes, self._page_bytes = 0, PAGE_BYTES
        try:
            self._connection = connect(path)
            if durability is None:
                self._check_current(path)
            else:
                self._configure(durability)
                self._migrate(path)
            self.last_number: int = self._run("SELECT coalesce(max(number), 0) FROM sessions")[0][0]
            self._connection.is_in_place()  # as it is now
        except sqlite3.Error as error:
            self.close()
            raise StartupError(f"the file {str(path)!r} cannot be opened: {error}") from error
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Database open={self._connection is not None}>"

    def insert_rows(self, rows: Sequence[NewRow]) -> None:
        """Write rows, all or none, in one statement."""
        self.asked(_ROWS + ",".join(["(?,?,?,?,?)"] * len(rows)), list(chain.from_iterable(rows)))
        self._log_bytes += sum(len(body) for _, _, _, body, _ in rows) + self._page_bytes * (2 + len(rows))

    def insert_session(self, new: NewSession) -> None:
        """Write a session."""
        values = (new.number, new.session_id, new.ttl_s, new.at, new.body, new.digest, new.key)
        self.asked(_OPENINGS + "(?,?,?,?,?,?,?)", values)
        self._log_bytes += len(new.body) + 3 * self._page_bytes

    def delete(self, sums_of: Mapping[SessionId, Sums]) -> set[SessionId]:
        """Forget sessions and their rows in one transaction, with what each adds to the sums; the ones found."""
        session_ids = list(sums_of)
        try:
            found = self._run(f"SELECT number, id FROM sessions WHERE id IN ({_places(session_ids)})", session_ids)
            if not found:
                return set()
        except sqlite3.Error as error:
            raise _unavailable(error) from error
        numbers, adds = [number for number, _ in found], Counter[str]()
        for _, id_ in found:
            adds.update(sums_of[SessionId(id_)])
        self.change(
            (f"DELETE FROM rows WHERE session IN ({_places(numbers)})", numbers),
            (f"DELETE FROM sessions WHERE number IN ({_places(numbers)})", numbers),
            *((_ADD, (key, num)) for key, num in adds.items()),
            num_bytes=16 * self._page_bytes * len(found),
        )
        return {SessionId(id_) for _, id_ in found}

    def ended(self) -> Ended:
        """All that deletions have added, and the sessions there are: the file is this thread's, so both are of one
        moment. Raises StorageUnavailable."""
        there = {row[0] for row in self.asked("SELECT id FROM sessions")}
        return Ended(dict(self.asked("SELECT key, num FROM sums")), there)

    def change(self, *statements: tuple[str, Sequence[object]], num_bytes: int) -> None:
        """Run statements, all or none; the log grows by about so many bytes. Raises StorageUnavailable."""
        self._log_bytes += num_bytes
        try:
            self._in_transaction(*statements)
        except sqlite3.Error as error:
            raise _unavailable(error) from error

    def backup(self, path: Path, meanwhile: Callable[[], None]) -> None:
        """Copy all durable rows into a new file. Raises OSError."""
        assert self._connection is not None, "the file is open"
        try:
            self._connection.backup(path, meanwhile)
        except sqlite3.Error as error:
            raise OSError(str(error)) from error

    @property
    def is_log_long(self) -> bool:
        """Whether the log is long enough to be moved into the file, by an estimate."""
        return self._log_bytes >= LONG_LOG_BYTES

    def move_log(self, *, truncates: bool = False) -> None:
        """Move the log into the file: its next row goes to its start again; `truncates`: and its room given back.

        Raises StorageUnavailable; the log has everything still.
        """
        self._log_bytes = 0
        try:
            self._run(f"PRAGMA wal_checkpoint({'TRUNCATE' if truncates else 'PASSIVE'})")
        except sqlite3.Error as error:
            raise _unavailable(error) from error

    def close(self) -> None:
        """Close the file. Harmless when repeated."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _configure(self, durability: Durability) -> None:
        """The exclusive lock first: with it the log's index is in this process alone."""
        synchronous = "FULL" if durability is Durability.COMMIT else "NORMAL"
        for pragma in (
            "locking_mode = EXCLUSIVE",
            f"page_size = {PAGE_BYTES}",
            "journal_mode = WAL",
            f"synchronous = {synchronous}",
            "cell_size_check = ON",
            "cache_size = -16384",
            "journal_size_limit = 67108864",
            f"wal_autocheckpoint = {8 * LONG_LOG_BYTES // PAGE_BYTES}",  # should the estimate be far too low
            "temp_store = MEMORY",
        ):
            self._run(f"PRAGMA {pragma}")
        self._page_bytes = self._run("PRAGMA page_size")[0][0]

    def _check_ours(self, path: Path) -> int:
        """The schema of the file. Raises StartupError for a foreign or a newer file."""
        version = self._run("PRAGMA user_version")[0][0]
        theirs = self._run("PRAGMA application_id")[0][0]
        has_tables = bool(self._run("SELECT 1 FROM sqlite_schema LIMIT 1"))
        if has_tables and theirs != APPLICATION_ID:
            raise StartupError(f"the file {str(path)!r} is a database of another program: choose another folder")
        if version > (known := len(self._migrations)):
            raise StartupError(
                f"the file {str(path)!r} has schema {version}, and this server knows {known}: a newer"
                " stenograph has written it. Use that one, or another folder"
            )
        return int(version)

    def _check_current(self, path: Path) -> None:
        """Raise StartupError for a foreign file, or one of another schema: it cannot be looked at."""
        version, known = self._check_ours(path), len(self._migrations)
        if version == 0:
            raise StartupError(
                f"the file {str(path)!r} has no sessions: a server that made it ended before it wrote anything. Start a"
                " server on the folder, or delete the file"
            )
        if version != known:
            raise StartupError(
                f"the file {str(path)!r} has schema {version}, and this command knows {known}: start a server on the"
                " folder, which brings it up to date"
            )

    def _migrate(self, path: Path) -> None:
        version = self._check_ours(path)
        steps = [(sql, ()) for migration in self._migrations[version:] for sql in migration]
        if steps:
            marks = (f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {len(self._migrations)}")
            self._in_transaction(*steps, *((mark, ()) for mark in marks))
        self._run("BEGIN IMMEDIATE")  # a second connection to the file fails here, not later
        self._run("COMMIT")

    def _in_transaction(self, *statements: tuple[str, Sequence[object]]) -> None:
        self._run("BEGIN IMMEDIATE")
        try:
            for sql, parameters in statements:
                self._run(sql, parameters)
            self._run("COMMIT")
        except sqlite3.Error:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        """End a transaction, unless SQLite has ended it by itself."""
        try:
            self._run("ROLLBACK")
        except sqlite3.Error:
            return

    def asked(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of one statement. Raises StorageUnavailable."""
        try:
            return self._run(sql, parameters)
        except sqlite3.Error as error:
            raise _unavailable(error) from error

    def check_in_place(self) -> None:
        """Raise StorageUnavailable if the file was deleted or moved: SQLite would write into it to the end."""
        assert self._connection is not None, "the file is open"
        if not self._connection.is_in_place():
            raise StorageUnavailable(
                "The file of the store, or its log, was deleted or moved while the server used it; the server is about"
                " to end.",
                is_full=False,
            )

    def _run(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        assert self._connection is not None, "the file is open"
        return self._connection.run(sql, parameters)


def _places(values: Sequence[object]) -> str:
    """As many placeholders of a statement as there are values."""
    return ",".join("?" * len(values))


def sqlite_code(error: sqlite3.Error) -> int:
    """SQLite's primary code of an error; 0 where it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _unavailable(error: sqlite3.Error) -> StorageUnavailable:
    if sqlite_code(error) == _FULL:
        return StorageUnavailable(
            "The disk of --data-dir is full: nothing more can be kept. Delete sessions, or make room.",
            is_full=True,
            retry_after_s=FULL_RETRY_S,
        )
    if sqlite_code(error) == sqlite3.SQLITE_TOOBIG:
        return StorageUnavailable(f"The turn is larger than the store takes: {error}.", is_full=True)
    return StorageUnavailable(
        f"The store in --data-dir cannot be used any more ({error}); the server is about to end.", is_full=False
    )
