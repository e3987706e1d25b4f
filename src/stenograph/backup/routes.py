"""`POST /backup`: a copy of the store, while turns go on."""

import asyncio
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from stenograph.core.errors import Forbidden, InvalidRequest, RouteNotFound, StorageUnavailable
from stenograph.core.json_types import Count
from stenograph.dialects.sessions import BackupRequest, decode_backup
from stenograph.http.late_routes import Late
from stenograph.http.processes import Processes
from stenograph.http.responses import json_response
from stenograph.http.route import All, Asking, Needs, route
from stenograph.http.wire import read_json
from stenograph.session.storage import SessionStorage
from stenograph.store.folder import NUM_FILES, file_of, make_private


class BackedUp(TypedDict):
    """A backup: its file, of several the first, and how large they are."""

    file: str
    bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupRoute:
    """`POST /backup`, an administrator's: whoever may chat may not make the server write files."""

    storage: SessionStorage | None
    max_body_bytes: int
    processes: Processes

    @route(
        "POST /backup",
        "backUp",
        "Copy the store into a folder",
        BackedUp,
        body=BackupRequest,
        errors=(Forbidden, RouteNotFound, StorageUnavailable),
        needs=Needs.ADMIN,
        who=All(merge="stenograph.http.merging:sums", ask=Asking.IN_TURN),
    )
    async def backup(self, request: Request) -> Response:
        """Copy all durable data into a folder, by the connection of its writer, while turns go on."""
        wire = decode_backup(await read_json(request.scope, request.receive, max_bytes=self.max_body_bytes))
        if self.storage is None:
            raise RouteNotFound("This server keeps no sessions on disk: start it with --data-dir.")
        if self.storage.store.is_shared:
            raise InvalidRequest("Sessions are in PostgreSQL: back the database up, for instance by pg_dump.")
        folder = Path(wire.path)
        try:
            number, others = self.processes.number, self.processes.files_before
            await asyncio.to_thread(_make_empty, folder, others)
            num_bytes = await self.storage.backup(file_of(folder, number))
        except OSError as error:
            problem = error.strerror or str(error)
            raise InvalidRequest(f"No backup can be written to {wire.path!r}: {problem}.", param="/path") from error
        made: BackedUp = {"file": str(file_of(folder, number)), "bytes": num_bytes}
        return json_response(made)


def backup_groups(late: Late) -> Sequence[object]:
    """The object with the row in its class."""
    core = late.core
    return (
        BackupRoute(
            storage=core.manager.sessions.storage, max_body_bytes=core.settings.max_body_bytes, processes=core.processes
        ),
    )


def _make_empty(folder: Path, others: Container[int]) -> None:
    """Make a folder, or take one empty but for the files of these numbers. Raises OSError."""
    make_private(folder)
    theirs = {file_of(folder, number) for number in range(NUM_FILES) if number in others}
    if any(path not in theirs for path in folder.iterdir()):
        raise FileExistsError(17, "the folder is not empty")
