"""Several stores as one: a session's id begins with the digits of its file.

A server opens several files where its number of workers has changed since they were made. New sessions are in the file
named by their ids. A list has the sessions file by file.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from stenograph.core.errors import StorageUnavailable
from stenograph.core.messages import MediaItem
from stenograph.core.types import SessionId
from stenograph.store.base import (
    NO_SUMS,
    Done,
    Ended,
    MediaStore,
    SessionStore,
    StoredSession,
    StoredSummary,
    StoreStats,
    Sums,
    Tail,
)
from stenograph.store.codec.rows import COMMIT, Totals
from stenograph.store.folder import DataFolder, file_of
from stenograph.store.settings import Durability
from stenograph.store.sqlite import SqliteStore


async def open_files(
    folder: DataFolder,
    numbers: Sequence[int],
    *,
    durability: Durability,
    on_failed: Callable[[StorageUnavailable], None],
) -> SessionStore:
    """The store of these files of a folder held by this process. Raises StartupError."""
    opened: dict[int, SessionStore] = {}
    try:
        for number in numbers:
            opened[number] = await SqliteStore.open(folder, durability=durability, on_failed=on_failed, number=number)
    except BaseException:
        for store in opened.values():
            await store.aclose()
        raise
    return next(iter(opened.values())) if len(opened) == 1 else FilesStore(opened)


class FilesStore:
    """The stores of several files, by their numbers."""

    def __init__(self, stores: Mapping[int, SessionStore]) -> None:
        self._stores = {number: stores[number] for number in sorted(stores)}

    def __repr__(self) -> str:
        return f"<FilesStore of {', '.join(f'{number:02x}' for number in self._stores)}>"

    is_shared = False

    @property
    def failure(self) -> StorageUnavailable | None:
        return next((store.failure for store in self._stores.values() if store.failure is not None), None)

    @property
    def stats(self) -> StoreStats:
        all_stats = [store.stats for store in self._stores.values()]
        return StoreStats(
            **{one.name: sum(getattr(stats, one.name) for stats in all_stats) for one in fields(StoreStats)}
        )

    @property
    def media(self) -> MediaStore:
        return self

    async def put(self, session_id: SessionId, items: Sequence[MediaItem]) -> None:
        if (store := self._of(session_id)) is not None:
            await store.media.put(session_id, items)

    async def get(self, session_id: SessionId, sha256: str) -> MediaItem | None:
        store = self._of(session_id)
        return None if store is None else await store.media.get(session_id, sha256)

    async def create(
        self, session_id: SessionId, payload: bytes, *, at: float, ttl_s: float | None, key: str | None = None
    ) -> Tail:
        store = self._of(session_id)
        assert store is not None, f"a new session's id names one of our files, not {session_id[:2]}"
        return await store.create(session_id, payload, at=at, ttl_s=ttl_s, key=key)

    async def find(self, key: str) -> StoredSession | None:
        found = [one for store in self._stores.values() if (one := await store.find(key)) is not None]
        return max(found, key=lambda one: one.at, default=None)

    def append(self, tail: Tail, payload: bytes, *, adds: Totals, at: float, done: Done, kind: int = COMMIT) -> None:
        store = self._of(tail.session_id)
        assert store is not None, f"a session that was read has its file, {tail.session_id[:2]}"
        store.append(tail, payload, adds=adds, at=at, done=done, kind=kind)

    def check_owned(self, tail: Tail) -> None:
        """A folder has one server, so its sessions stay its own."""

    async def take(self, session_id: SessionId) -> StoredSession | None:
        store = self._of(session_id)
        return None if store is None else await store.take(session_id)

    async def load(self, session_id: SessionId) -> StoredSession | None:
        store = self._of(session_id)
        return None if store is None else await store.load(session_id)

    async def delete(self, session_id: SessionId, adds: Sums = NO_SUMS) -> bool:
        store = self._of(session_id)
        return False if store is None else await store.delete(session_id, adds)

    def discard(self, session_id: SessionId, adds: Sums = NO_SUMS) -> None:
        if (store := self._of(session_id)) is not None:
            store.discard(session_id, adds)

    async def ended(self) -> Ended:
        """A session stays in its file: each file's moment is enough."""
        sums, there = Counter[str](), set[str]()
        for store in self._stores.values():
            found = await store.ended()
            sums.update(found.sums)
            there |= found.there
        return Ended(sums, there)

    async def page(self, *, limit: int, after: SessionId | None) -> Sequence[StoredSummary]:
        found: list[StoredSummary] = []
        first = 0 if after is None else _number_of(after)
        if first is None or (after is not None and first not in self._stores):
            return found
        for number, store in self._stores.items():
            if number >= first and len(found) < limit:
                found += await store.page(limit=limit - len(found), after=after if number == first else None)
                if not found and number == first and after is not None and await store.load(after) is None:
                    return found
        return found

    async def expired(self, *, now: float, limit: int) -> Sequence[SessionId]:
        found: list[SessionId] = []
        for store in self._stores.values():
            found += await store.expired(now=now, limit=limit - len(found)) if len(found) < limit else ()
        return found

    async def backup(self, path: Path) -> int:
        """Write each file beside `path`, under its own name."""
        sizes = [await store.backup(file_of(path.parent, number)) for number, store in self._stores.items()]
        return sum(sizes)

    async def aclose(self) -> None:
        for store in self._stores.values():
            await store.aclose()

    def _of(self, session_id: SessionId) -> SessionStore | None:
        number = _number_of(session_id)
        return None if number is None else self._stores.get(number)


def _number_of(session_id: str) -> int | None:
    """The number of the file named by an id; None for anything but an id."""
    try:
        return int(session_id[:2], 16)
    except ValueError:
        return None
