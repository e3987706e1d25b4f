"""The store of a server: opened as the settings say, closed when the server has ended."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from stenograph.core.errors import StorageUnavailable
from stenograph.http.settings import Settings
from stenograph.store.base import SessionStore
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore


@asynccontextmanager
async def opened_store(
    settings: Settings, *, address: str, on_failed: Callable[[StorageUnavailable], None]
) -> AsyncIterator[SessionStore | None]:
    """The store of `--data-dir`, None without one. Raises StartupError.

    `address` is where the server listens; `on_failed` is called when the store has failed for good.
    """
    if settings.data_dir is None:
        yield None
        return
    folder = DataFolder(settings.data_dir, address=address)
    try:
        store = await SqliteStore.open(folder, durability=settings.kept, on_failed=on_failed)
        try:
            yield store
        finally:
            await store.aclose()
    finally:
        folder.close()
