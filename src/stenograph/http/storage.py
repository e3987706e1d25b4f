"""The store of a server: opened as the settings say, backed up on request, closed when the server has ended."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.clock import SystemClock
from stenograph.core.errors import InvalidRequest, RouteNotFound, StorageUnavailable
from stenograph.core.json_types import Count
from stenograph.dialects.sessions import decode_backup
from stenograph.http.metrics import Metrics
from stenograph.http.nodes import Nodes
from stenograph.http.settings import Settings
from stenograph.http.store_metrics import OwnerMetrics
from stenograph.http.wire import json_response, read_json
from stenograph.http.workers.place import WorkerPlace
from stenograph.model.files import ModelFiles
from stenograph.session.manager import SessionManager
from stenograph.session.ownership import SharedOwnership
from stenograph.session.shelf import Shelf
from stenograph.store.base import SessionStore
from stenograph.store.files import open_files
from stenograph.store.folder import NUM_FILES, DataFolder, file_of, make_private
from stenograph.store.postgres.owner_name import OwnerName
from stenograph.store.postgres.schema import check_connections, prepare
from stenograph.store.postgres.server import NUM_CONNECTIONS, PostgresRows
from stenograph.store.postgres.store import PostgresStore
from stenograph.trajectory.commits import ModelMark

MIN_TIMEOUT_S = 5.0
"""Longest time that a statement may take, where the lease is shorter."""


@asynccontextmanager
async def held_folder(settings: Settings, *, address: str) -> AsyncGenerator[DataFolder | None]:
    """The folder of `--data-dir`, None without one. Raises StartupError. `address` is where the server listens."""
    folder = None if settings.data_dir is None else DataFolder(settings.data_dir, address=address)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


@asynccontextmanager
async def opened_store(
    settings: Settings,
    folder: DataFolder | None,
    place: WorkerPlace | None,
    *,
    address: str,
    on_failed: Callable[[StorageUnavailable], None],
) -> AsyncGenerator[SessionStore | None]:
    """The store in a folder, of a worker the files that are its own, or that of `--store`; None without either.

    Raises StartupError. The server listens at `address`; `on_failed` is called when the store has failed for good.
    """
    if settings.store is not None:
        async with _shared_store(settings, settings.store, address, place) as shared:
            yield shared
        return
    if folder is None:
        yield None
        return
    numbers = sorted({0, *folder.numbers()}) if place is None else place.files(folder.numbers())
    store = await open_files(folder, numbers, durability=settings.kept, on_failed=on_failed)
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def _shared_store(
    settings: Settings, url: str, address: str, place: WorkerPlace | None
) -> AsyncGenerator[PostgresStore]:
    """The store in a database that other servers share. Raises StartupError. A worker is an owner of its own, in a
    database that its parent has prepared: one that is started again waits for a database that is away."""
    if place is None:
        await prepare_database(settings)
    store = await PostgresStore.open(
        PostgresRows(url, timeout_s=_timeout_s(settings)),
        SystemClock(),
        url=str(OwnerName(server=server_address(settings, address), worker=None if place is None else place.number)),
        lease_s=settings.lease_s,
        seat=place,
    )
    try:
        yield store
    finally:
        await store.aclose()


async def prepare_database(settings: Settings) -> None:
    """Try the connections to the database of `--store`, if there is one, and make its tables or bring them up to date.

    Raises StartupError.
    """
    if settings.store is not None:
        timeout_s, num_processes = _timeout_s(settings), settings.workers
        await check_connections(settings.store, num=NUM_CONNECTIONS * num_processes, timeout_s=timeout_s)
        await prepare(settings.store, timeout_s=timeout_s)


def _timeout_s(settings: Settings) -> float:
    return max(settings.lease_s, MIN_TIMEOUT_S)


def server_address(settings: Settings, address: str) -> str:
    """The address under which other servers reach this one, which listens at `address`."""
    return settings.advertise_url or address


def other_nodes(
    settings: Settings,
    manager: SessionManager,
    metrics: Metrics,
    store: SessionStore | None,
    place: WorkerPlace | None,
) -> Nodes | None:
    """The other servers, where a database is shared with them; their metrics are registered."""
    if not isinstance(store, PostgresStore):
        return None
    nodes = Nodes(
        SharedOwnership(manager, store),
        metrics=metrics,
        by_credential=not settings.api_key,
        timeout_s=settings.request_timeout_s + settings.abort_grace_s,
        sockets=() if place is None else place.sockets,
    )
    metrics.register(OwnerMetrics(store, nodes))
    return nodes


class BackedUp(TypedDict):
    """A backup: its file, of several the first, and how large they are."""

    file: str
    bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupRoute:
    """`POST /backup`, an administrator's: whoever may chat may not make the server write files."""

    shelf: Shelf | None
    max_body_bytes: int
    place: WorkerPlace | None = None

    async def backup(self, request: Request) -> Response:
        """Copy all that is durable into a folder, by the connection that writes it, while turns go on."""
        wire = decode_backup(await read_json(request.scope, request.receive, max_bytes=self.max_body_bytes))
        if self.shelf is None:
            raise RouteNotFound("This server keeps no sessions on disk: start it with --data-dir.")
        if isinstance(self.shelf.store, PostgresStore):
            raise InvalidRequest("Sessions are in PostgreSQL: back the database up, for instance by pg_dump.")
        folder = Path(wire.path)
        try:
            number, others = (0, ()) if self.place is None else (self.place.number, self.place.files_before)
            await asyncio.to_thread(_make_empty, folder, others)
            num_bytes = await self.shelf.backup(file_of(folder, number))
        except OSError as error:
            problem = error.strerror or str(error)
            raise InvalidRequest(f"No backup can be written to {wire.path!r}: {problem}.", param="/path") from error
        made: BackedUp = {"file": str(file_of(folder, number)), "bytes": num_bytes}
        return json_response(made)


def backup_route(settings: Settings, shelf: Shelf | None, place: WorkerPlace | None) -> BackupRoute:
    """The route of a server, or of a worker at its place."""
    return BackupRoute(shelf=shelf, max_body_bytes=settings.max_body_bytes, place=place)


def _make_empty(folder: Path, others: Container[int]) -> None:
    """Make a folder, or take one that is empty, but for the files of these numbers. Raises OSError."""
    make_private(folder)
    theirs = {file_of(folder, number) for number in range(NUM_FILES) if number in others}
    if any(path not in theirs for path in folder.iterdir()):
        raise FileExistsError(17, "the folder is not empty")


def model_mark(files: ModelFiles) -> ModelMark:
    """The mark of a model's tokenizer and chat template, by which a session knows whether it was made with them."""
    digest = hashlib.sha256()
    for text in (files.tokenizer_json, files.chat_template or "", files.encoder_source or "", files.bos_token or ""):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded) + encoded)
    return ModelMark(name=files.name, digest=digest.digest())
