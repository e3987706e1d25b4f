"""The store of a server: opened as the settings say, backed up on request, closed when the server has ended."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.clock import SystemClock
from stenograph.core.errors import Forbidden, InvalidRequest, RouteNotFound, StorageUnavailable
from stenograph.core.json_types import Count
from stenograph.dialects.sessions import decode_backup
from stenograph.http.settings import Settings
from stenograph.http.wire import json_response, read_json
from stenograph.session.shelf import Shelf
from stenograph.store.base import SessionStore
from stenograph.store.folder import DataFolder, file_of
from stenograph.store.postgres.schema import prepare
from stenograph.store.postgres.server import PostgresRows
from stenograph.store.postgres.store import PostgresStore
from stenograph.store.sqlite import SqliteStore

MIN_TIMEOUT_S = 5.0
"""Longest time that a statement may take, where the lease is shorter."""


@asynccontextmanager
async def opened_store(
    settings: Settings, *, address: str, on_failed: Callable[[StorageUnavailable], None]
) -> AsyncGenerator[SessionStore | None]:
    """The store of `--data-dir` or `--store`, None without one. Raises StartupError.

    `address` is where the server listens; `on_failed` is called when the store has failed for good.
    """
    if settings.store is not None:
        async with _shared_store(settings, settings.store, address) as shared:
            yield shared
        return
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


@asynccontextmanager
async def _shared_store(settings: Settings, url: str, address: str) -> AsyncGenerator[PostgresStore]:
    """The store in a database that other servers share. Raises StartupError."""
    timeout_s = max(settings.lease_s, MIN_TIMEOUT_S)
    await prepare(url, timeout_s=timeout_s)
    store = await PostgresStore.open(
        PostgresRows(url, timeout_s=timeout_s),
        SystemClock(),
        url=settings.advertise_url or address,
        lease_s=settings.lease_s,
    )
    try:
        yield store
    finally:
        await store.aclose()


class BackedUp(TypedDict):
    """A backup: its file, and how large it is."""

    file: str
    bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupRoute:
    """`POST /backup`. Whoever may chat may not make the server write files, so with keys it is refused."""

    shelf: Shelf | None
    has_keys: bool
    max_body_bytes: int

    async def backup(self, request: Request) -> Response:
        """Copy all that is durable into a folder, by the connection that writes it, while turns go on."""
        if self.has_keys:
            raise Forbidden("A backup writes files on the server's machine: a server with --api-key makes none.")
        wire = decode_backup(await read_json(request.scope, request.receive, max_bytes=self.max_body_bytes))
        if self.shelf is None:
            raise RouteNotFound("This server keeps no sessions on disk: start it with --data-dir.")
        folder = Path(wire.path)
        try:
            await asyncio.to_thread(_make_empty, folder)
            num_bytes = await self.shelf.backup(file_of(folder))
        except OSError as error:
            problem = error.strerror or str(error)
            raise InvalidRequest(f"No backup can be written to {wire.path!r}: {problem}.", param="/path") from error
        made: BackedUp = {"file": str(file_of(folder)), "bytes": num_bytes}
        return json_response(made)


def _make_empty(folder: Path) -> None:
    """Make a folder, or take one that is empty. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(17, "the folder is not empty")
