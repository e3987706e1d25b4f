"""The media of the sessions of a file, as the file's thread writes and reads them.

Their tables are made with a file's first medium; a file without one is as it was. Triggers delete a content with the
last session that has it, whoever deletes the session.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

from stenograph.core.base64_text import decoded, encoded
from stenograph.core.messages import MediaItem, MediaKind, MediaRef
from stenograph.core.types import SessionId
from stenograph.store.database import Database

T = TypeVar("T")

TABLES = (
    "CREATE TABLE media (number INTEGER PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,"
    " media_type TEXT NOT NULL, body BLOB NOT NULL)",
    "CREATE TABLE session_media (session INTEGER NOT NULL, media INTEGER NOT NULL,"
    " PRIMARY KEY (session, media)) WITHOUT ROWID",
    "CREATE INDEX sessions_of_media ON session_media (media)",
    "CREATE TRIGGER session_gone AFTER DELETE ON sessions BEGIN"
    " DELETE FROM session_media WHERE session = old.number; END",
    "CREATE TRIGGER media_unused AFTER DELETE ON session_media"
    " WHEN NOT EXISTS (SELECT 1 FROM session_media WHERE media = old.media) BEGIN"
    " DELETE FROM media WHERE number = old.media; END",
)
_HAS_TABLES = "SELECT 1 FROM sqlite_schema WHERE name = 'media'"
_UNUSED = "SELECT sha256 FROM media WHERE number NOT IN (SELECT media FROM session_media)"
_ASTRAY = (
    "SELECT session FROM session_media"
    " WHERE session NOT IN (SELECT number FROM sessions) OR media NOT IN (SELECT number FROM media)"
)
_OF_SESSION = (
    "SELECT media.sha256 FROM sessions JOIN session_media ON session = sessions.number"
    " JOIN media ON media.number = media WHERE sessions.id = ?"
)
_PUT = (
    "INSERT INTO media (sha256, kind, media_type, body) SELECT ?, ?, ?, ? FROM sessions WHERE id = ?"
    " ON CONFLICT DO NOTHING"
)
_LINK = (
    "INSERT INTO session_media (session, media) SELECT sessions.number, media.number FROM sessions, media"
    " WHERE sessions.id = ? AND media.sha256 = ? ON CONFLICT DO NOTHING"
)
_HAS = (
    "SELECT media.kind, media.media_type, {} FROM media JOIN session_media ON media = media.number"
    " JOIN sessions ON session = sessions.number WHERE sessions.id = ? AND media.sha256 = ?"
)
_KNOWN, _WHOLE = _HAS.format("1"), _HAS.format("media.body")

_ROOM_BYTES = 16 * 4096
"""Pages of the tables and indexes for one medium, beside its content."""


class FileThread(Protocol):
    """The thread of a file."""

    async def call(self, work: Callable[[Database], T]) -> T:
        """Do work with the file. Raises StorageUnavailable."""
        ...


class FileMedia:
    """A `MediaStore` in a file. A session has its media from `put` on, also if its turn fails."""

    def __init__(self, file: FileThread) -> None:
        self._file = file

    def __repr__(self) -> str:
        return f"<FileMedia of {self._file!r}>"

    async def put(self, session_id: SessionId, items: Sequence[MediaItem]) -> None:
        await self._file.call(partial(_put, session_id, items))

    async def get(self, session_id: SessionId, sha256: str) -> MediaItem | None:
        return await self._file.call(partial(_get, session_id, sha256))


def tables_of(database: Database) -> Sequence[str]:
    """The statements that made the file's tables of media; none before its first medium. Raises StorageUnavailable."""
    return TABLES if database.asked(_HAS_TABLES) else ()


def media_of(database: Database, session_id: SessionId) -> Collection[str]:
    """The hashes of a session's media. Raises StorageUnavailable."""
    return {row[0] for row in database.asked(_OF_SESSION, (session_id,))} if tables_of(database) else ()


def media_faults(database: Database) -> Iterator[str]:
    """Contents that do not have their hashes, each read once, and links from or to nothing. Raises
    StorageUnavailable."""
    if not tables_of(database):
        return
    for number, sha256 in database.asked("SELECT number, sha256 FROM media ORDER BY number"):
        ((body,),) = database.asked("SELECT CAST(body AS BLOB) FROM media WHERE number = ?", (number,))
        if hashlib.sha256(body).hexdigest() != sha256:
            yield f"media {sha256} is damaged: its bytes do not have this hash"
    yield from (f"media {sha256} is of no session" for (sha256,) in database.asked(_UNUSED))
    yield from (f"session number {number} is gone, or has media that are" for (number,) in database.asked(_ASTRAY))


def _put(session_id: SessionId, items: Sequence[MediaItem], database: Database) -> None:
    statements: list[tuple[str, Sequence[object]]] = []
    if not tables_of(database):
        statements += [(sql, ()) for sql in TABLES]
    else:  # a request brings the images of its whole line: only new ones are decoded and written
        items = [item for item in items if not database.asked(_KNOWN, (session_id, item.ref.sha256))]
        if not items:
            return
    num_bytes = _ROOM_BYTES * len(items)
    for item in items:
        ref = item.ref
        statements += [
            (_PUT, (ref.sha256, ref.kind, ref.media_type, decoded(item.base64), session_id)),
            (_LINK, (session_id, ref.sha256)),
        ]
        num_bytes += ref.num_bytes
    database.change(*statements, num_bytes=num_bytes)


def _get(session_id: SessionId, sha256: str, database: Database) -> MediaItem | None:
    for kind, media_type, body in database.asked(_WHOLE, (session_id, sha256)) if tables_of(database) else ():
        ref = MediaRef(sha256=sha256, kind=MediaKind(kind), media_type=media_type, num_bytes=len(body))
        return MediaItem(ref=ref, base64=encoded(body))
    return None
