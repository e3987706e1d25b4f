"""The sessions of a folder without a server: read without changing anything, and checked by SQLite.

A file is opened for reading alone. SQLite then keeps the index of the log in a file beside it, removed again later; in
a read-only folder the index is kept in memory.
"""

import os
import sqlite3
import struct
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

from stenograph.core.errors import StartupError, StorageUnavailable
from stenograph.core.loaded import entry
from stenograph.core.types import SessionId
from stenograph.store import queries
from stenograph.store.base import SessionColumns, StoredSession, StoredSummary
from stenograph.store.database import MIGRATIONS, Database, FileConnection
from stenograph.store.folder import looked_at

_PAGE = 256
"""Sessions listed at once."""

_TABLES = f"SELECT {', '.join(f'CAST({c} AS BLOB)' for c in ('type', 'name', 'tbl_name', 'sql'))} FROM sqlite_schema"
_ORPHANS = "SELECT session, count(*) FROM rows WHERE session NOT IN (SELECT number FROM sessions) GROUP BY session"

_LOG_HEAD = struct.Struct(">8I")
"""Magic, version, page size, sequence, two salts, two checksums. Source: sqlite.org/fileformat2.html#walformat."""

_FRAME_HEAD = struct.Struct(">6I")
"""Page, pages of the file after a commit (else 0), two salts, two checksums."""

_LOG_MAGIC = (0x377F0682, 0x377F0683)

_JOURNAL_MODE = slice(18, 20)
"""Bytes of a file's head that say how to write and to read it: 2 is with a log, 1 without one.
Source: sqlite.org/fileformat2.html#file_format_version_numbers."""


class StoreLook:
    """One file, opened for reading."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError."""
        self.path = path
        self._database = Database(path, durability=None, connect=partial(FileConnection, read_only=True))

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    def __repr__(self) -> str:
        return f"<StoreLook at {str(self.path)!r}>"

    def summaries(self) -> Iterator[StoredSummary]:
        """All sessions in the order of their creation. Raises StorageUnavailable."""
        after: SessionId | None = None
        last = 0
        while page := queries.page(self._database, limit=_PAGE, after=after):
            for one in page:
                if one.number <= last:
                    raise StorageUnavailable(
                        "its list of sessions goes in a circle: an index is damaged", is_full=False
                    )
                last = one.number
                yield one
            after = page[-1].session_id

    def read(self, session_id: SessionId) -> StoredSession | None:
        """A session's rows. Raises SessionDamaged or StorageUnavailable."""
        return queries.read(self._database, session_id)

    def columns(self, session_id: SessionId) -> SessionColumns:
        """The columns beside a session's rows. Raises StorageUnavailable."""
        asked = self._database.asked
        ((number, ttl_s, at, key),) = asked("SELECT number, ttl_s, at, key FROM sessions WHERE id = ?", (session_id,))
        times = dict(asked("SELECT seq, at FROM rows WHERE session = ?", (number,)))
        return SessionColumns(ttl_s=ttl_s, key=key, times={0: at, **times})

    def media(self, session_id: SessionId) -> Collection[str]:
        """The hashes of a session's media. Raises StorageUnavailable."""
        return cast("Collection[str]", entry("stenograph.store.media:media_of")(self._database, session_id))

    def faults(self) -> list[str]:
        """Faults of the file's own structure: of its pages, its index and its log, rows without a session, and media
        that are not what their hashes say."""
        found = [f"structure: {problem}" for problem in self._problems()]
        try:
            found += [f"structure: {problem}" for problem in self._other_schema()]
            for number, num in self._database.asked(_ORPHANS):
                found.append(f"session number {number} is gone, but {num} rows of it are there")
            found += entry("stenograph.store.media:media_faults")(self._database)
        except StorageUnavailable as error:
            found.append(f"structure: rows without a session cannot be looked for: {error.__cause__}")
        with self.path.open("rb") as file:
            modes = file.read(_JOURNAL_MODE.stop)[_JOURNAL_MODE]
        if modes != b"\2\2":
            found.append(f"structure: its journal mode is {modes.hex()}, not 0202, so its log is not read")
        return [*found, *log_faults(Path(f"{self.path}-wal"))]

    def close(self) -> None:
        self._database.close()

    def _problems(self) -> list[str]:
        """Faults found by SQLite in the file's own structure."""
        try:
            found = [str(row[0]) for row in self._database.asked("PRAGMA integrity_check(100)")]
        except StorageUnavailable as error:
            return [str(error.__cause__)]
        return [] if found == ["ok"] else found

    def _other_schema(self) -> list[str]:
        """Differences between the schema of the file and this server's. Raises StorageUnavailable."""
        fresh = sqlite3.connect(":memory:")
        for sql in (*chain.from_iterable(MIGRATIONS), *entry("stenograph.store.media:tables_of")(self._database)):
            fresh.execute(sql)
        expected, found = fresh.execute(_TABLES).fetchall(), self._database.asked(_TABLES)
        fresh.close()
        return [] if found == expected else ["its tables are not those of this schema"]


@contextmanager
def looks(folder: Path) -> Generator[list[StoreLook]]:
    """The files of a folder. Raises StartupError for a folder held by a server, or without files."""
    with looked_at(folder) as paths, ExitStack() as cleanup:
        for index in (Path(f"{path}-shm") for path in paths):
            if not index.exists() and os.access(folder, os.W_OK):
                cleanup.callback(index.unlink, missing_ok=True)
        try:
            yield [cleanup.enter_context(closing(StoreLook(path))) for path in paths]
        except StorageUnavailable as error:
            raise StartupError(f"the folder {str(folder)!r} cannot be read: {error.__cause__ or error}") from error


def log_faults(path: Path) -> list[str]:
    """Damage of a log. SQLite takes it for the log's end: whole transactions may stand behind it, and be lost.

    A transaction cut off by the end of the process is no damage: nothing committed follows it.
    """
    content = path.read_bytes() if path.exists() else b""
    if len(content) < _LOG_HEAD.size:
        return []
    magic, _, page_size, _, *salts, first, second = _LOG_HEAD.unpack_from(content)
    order = ">" if magic & 1 else "<"
    if magic not in _LOG_MAGIC or _checksum(content[:24], (0, 0), order) != (first, second):
        return [f"log: the head of {path.name} is damaged"]
    sums, is_whole, num_lost = (first, second), True, 0
    for start in range(_LOG_HEAD.size, len(content) - _FRAME_HEAD.size - page_size + 1, _FRAME_HEAD.size + page_size):
        _, num_pages, *rest = _FRAME_HEAD.unpack_from(content, start)
        if rest[0] != salts[0] and rest[1] != salts[1]:
            is_whole = False  # of an earlier log, which this one is written over: the end, or a damaged frame
            continue
        page = content[start + _FRAME_HEAD.size : start + _FRAME_HEAD.size + page_size]
        if is_whole:
            sums = _checksum(page, _checksum(content[start : start + 8], sums, order), order)
            is_whole = list(sums) == rest[2:] and rest[:2] == salts
        num_lost += not is_whole and num_pages > 0
    return [f"log: {path.name} is damaged, and {num_lost} transactions stand behind the damage"] if num_lost else []


def _checksum(content: bytes, before: tuple[int, int], order: str) -> tuple[int, int]:
    """The checksum of a log. Source: sqlite.org/fileformat2.html#checksum_algorithm."""
    first, second = before
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return first, second
