"""One process of a server, and the seam to the part for one server of several: workers on one port, servers on one
database. `Processes` is a process serving alone; a server of several has another class in its place.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from stenograph.core.errors import StenographError, StorageUnavailable
from stenograph.dialects.base import Refusal, Refuse
from stenograph.http.metrics import Metrics
from stenograph.http.route import Route
from stenograph.http.settings import Settings
from stenograph.session.admission import Capacity, Limits
from stenograph.session.keyed_sessions import KeyedSessions, OpenedElsewhere
from stenograph.session.manager import SessionManager
from stenograph.session.storage import SessionStorage
from stenograph.session.weights import Followers, SyncState, Weights
from stenograph.store.base import SessionStore
from stenograph.store.files import open_files
from stenograph.store.folder import DataFolder

if TYPE_CHECKING:  # of routes that are loaded late
    from stenograph.http.bulk_parts import OwnParts, SessionParts

EVERY_S = 1.0
"""Between two moments of a stream."""
FRESH_S = 0.5
"""For so long the moment is not read again: viewers share it."""


class Moments(Protocol):
    """The server at this moment, as JSON of a `ConsoleNow`."""

    async def now(self) -> bytes:
        """The moment."""
        ...

    def watch(self) -> AsyncGenerator[bytes, None]:
        """A moment each second, until the server drains. Close it at the end."""
        ...


class Board(Moments, Protocol):
    """This process at this moment."""

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        ...

    def read(self) -> bytes:
        """The moment, as JSON."""
        ...


class ServedApp(Protocol):
    """A worker's application."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def refuse(self) -> Refuse: ...

    def refuse_at(self, path: str, error: StenographError) -> Refusal: ...


class SharedWeights(Protocol):
    """The weights of this process, for its followers."""

    @property
    def weights(self) -> Weights:
        """As turns see them."""
        ...

    def follow(self, state: SyncState) -> None:
        """Take over a state."""
        ...

    def abort_all(self) -> Awaitable[int]:
        """End every turn here with its tokens so far."""
        ...


class SharedEngines(Protocol):
    """The engines of this process."""

    async def follow(self, addresses: Sequence[str]) -> None:
        """Use those at these addresses; return when the turns at the removed ones have ended. Raises StartupError."""
        ...


class LateParts(Protocol):
    """The late routes, for whoever answers other processes by them."""

    @property
    def own_parts(self) -> "OwnParts":
        """The sessions of this process."""
        ...

    @property
    def rows(self) -> Sequence[Route]:
        """The rows of all routes but the turns."""
        ...

    def check_agent(self, scope: Scope) -> str | None:
        """As the authenticator."""
        ...

    def open_parts(self) -> None:
        """Have the parts share their services with other processes."""
        ...


class EngineProcess(Protocol):
    """The process of an engine shared by all workers of a server. Their parent owns it: see `Part.shared_engine`."""

    socket: Path
    """Its address for the workers."""
    due: float | None
    """The time to start it again; None while it runs."""

    def start(self) -> None:
        """Start it, and wait until its model is loaded. Raises StartupError."""
        ...

    def start_if_due(self) -> None:
        """Start it again once its pause is over."""
        ...

    def take_end(self) -> None:
        """Note its end, if it has ended."""
        ...

    def let_go(self) -> None:
        """In a worker: close the parent's files, above all its input: its end ends the process."""
        ...

    def close(self) -> None:
        """End it: by closing its input, and after a while by force."""
        ...


class Processes:
    """A server of one process. The part for one server of several has a class of the same methods."""

    digits: str | None = None
    """The beginning of its new sessions' ids; None: any."""
    engine: Path | None = None
    """The socket of the engine's process that all share."""
    folder: Path | None = None
    """The folder that all of its server have; None: there are no others."""
    number = 0
    files_before: Sequence[int] = ()
    """The numbers of all files possibly held by processes before it."""
    storage_type: Callable[..., SessionStorage] = SessionStorage
    manager_type: Callable[..., SessionManager] = SessionManager
    followers: Followers | None = None
    """The processes taking over its weights."""

    def __init__(self, instance_id: str | None = None) -> None:
        self.instance_id = instance_id or uuid.uuid4().hex

    def engine_urls(self) -> tuple[str, ...] | None:
        """The addresses of the server's engines now; None: those of its settings."""
        return None

    def files(self, there: list[int]) -> list[int]:
        """The numbers of the files for its own sessions, from those of the existing files."""
        return sorted({0, *there})

    @asynccontextmanager
    async def opened_store(
        self,
        settings: Settings,
        folder: DataFolder | None,
        *,
        address: str,
        on_failed: Callable[[StorageUnavailable], None],
    ) -> AsyncGenerator[SessionStore | None]:
        """The store of its files in a folder; None without one. Raises StartupError.

        The server listens at `address`; `on_failed` is called when the store has failed for good.
        """
        if folder is None:
            yield None
            return
        numbers = self.files(folder.numbers())
        store = await open_files(folder, numbers, durability=settings.kept, on_failed=on_failed)
        try:
            yield store
        finally:
            await store.aclose()

    def capacity(self, limits: Limits, *, evicts: bool) -> Capacity:
        """Its part of the server's limits."""
        return Capacity(limits, evicts=evicts)

    def find_others(self, settings: Settings, manager: SessionManager, metrics: Metrics) -> None:
        """Find the other servers, where the sessions of `manager` are in a shared store."""

    def opened_elsewhere(self, *, has_store: bool) -> OpenedElsewhere | None:
        """Finds sessions opened with a key by other processes; None where there is nothing to find."""
        return None

    def all_parts(self, own: "OwnParts") -> "SessionParts":
        """The sessions of all processes, its `own` among them."""
        return own

    def moments(self, board: Board) -> Moments:
        """The moments of all processes; `board` has its own."""
        return board

    def share_weights(self, sync: SharedWeights, engines: SharedEngines) -> None:
        """Have the weights and the engines of this process follow those of the others, and those theirs."""

    def wire(self, app: ServedApp, keyed: KeyedSessions, late: Callable[[], LateParts]) -> None:
        """Take the services for clients, and for the other processes."""

    def serving(self, guarded: ASGIApp, app: ServedApp) -> ASGIApp:
        """The application, behind the answers common to all processes."""
        return guarded

    async def listen(self, config: uvicorn.Config, state: ServerState) -> Sequence[asyncio.Server]:
        """Take the connections of the other processes."""
        return ()

    async def aclose(self) -> None:
        """Hang up on the other processes."""
