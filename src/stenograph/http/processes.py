"""The seam to the part that makes one server of several processes: workers on one port, servers on one database.
A server of one process has none of it, and loads none of it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from stenograph.core.errors import StenographError
from stenograph.dialects.base import Refusal, Refuse
from stenograph.http.metrics import Metrics
from stenograph.session.admission import Capacity, Limits
from stenograph.session.keyed_openings import KeyedOpenings, OpenedElsewhere
from stenograph.session.manager import SessionManager
from stenograph.session.weight_sync import Followers, WeightSync
from stenograph.store.base import SessionStore

if TYPE_CHECKING:  # of routes that are loaded late
    from stenograph.http.bulk_parts import OwnParts, SessionParts
    from stenograph.http.engine_routes import EngineRoutes

RefuseAt = Callable[[str, StenographError], Refusal]
"""The error of a request that came to a path."""


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


class ProcessPlace(Protocol):
    """A worker's place among several. `engine` is the socket of the embedded engine that all share."""

    @property
    def number(self) -> int:
        """Its number."""
        ...

    @property
    def sockets(self) -> tuple[Path, ...]:
        """The sockets of all workers, in order."""
        ...

    @property
    def engine(self) -> Path | None:
        """The socket of the embedded engine that all share; None where engines have addresses of their own."""
        ...

    @property
    def instance_id(self) -> str:
        """The server's."""
        ...

    @property
    def digits(self) -> str:
        """The beginning of its new sessions' ids."""
        ...

    @property
    def files_before(self) -> Sequence[int]:
        """The numbers of all files that workers before it may have."""
        ...

    def files(self, there: list[int]) -> list[int]:
        """The numbers of the files that it opens, of those that are there."""
        ...


class OtherServers(Protocol):
    """The other servers that share a database."""

    async def answered(self, scope: Scope, receive: Receive, send: Send, refuse_at: RefuseAt) -> bool:
        """Answer a request for a session that another server has; False for every other one, of which nothing was
        read."""
        ...

    def parts(self, own: "OwnParts") -> "SessionParts":
        """The sessions of all servers, its `own` among them."""
        ...

    def gathering(self, served: ASGIApp, app: "ServedApp") -> ASGIApp:
        """An application, with the routes of all servers before it."""
        ...

    async def aclose(self) -> None:
        """Close the connections to other servers."""
        ...


class SharedStorage(Protocol):
    """The database of `--store`, which other servers share."""

    def opened(self, address: str, place: ProcessPlace | None) -> AbstractAsyncContextManager[SessionStore]:
        """The store of a server that listens at `address`, or of one of its workers. Raises StartupError."""
        ...

    def others(
        self, manager: SessionManager, metrics: Metrics, store: SessionStore, place: ProcessPlace | None
    ) -> OtherServers:
        """The other servers that share the database of `store`; their metrics are registered."""
        ...


class ServedApp(Protocol):
    """The application that a worker serves."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def nodes(self) -> OtherServers | None: ...

    @property
    def refuse(self) -> Refuse: ...

    def refuse_at(self, path: str, error: StenographError) -> Refusal: ...


class ServingWorker(Protocol):
    """One process of a server that has several."""

    config: uvicorn.Config | None
    """Set when the server is configured."""

    @property
    def place(self) -> ProcessPlace:
        """Its place."""
        ...

    @property
    def others(self) -> Followers | None:
        """Those that follow it, if it is the first."""
        ...

    def engine_urls(self) -> tuple[str, ...] | None:
        """The addresses of the engines that the server has now; None: those of its settings."""
        ...

    def capacity(self, limits: Limits, *, evicts: bool) -> Capacity:
        """Its part of the server's limits."""
        ...

    def opened_elsewhere(self, *, has_store: bool) -> OpenedElsewhere | None:
        """Finds sessions that other workers opened with a key; None where there is nothing to find."""
        ...

    def all_parts(self, own: "OwnParts") -> "SessionParts":
        """The sessions of all workers, its `own` among them."""
        ...

    def moments(self, board: Board) -> Moments:
        """The moments of all workers; `board` has its own."""
        ...

    def wire(
        self,
        app: ServedApp,
        *,
        openings: KeyedOpenings,
        parts: "OwnParts",
        board: Board,
        sync: WeightSync,
        engines: "EngineRoutes",
    ) -> None:
        """Take what it serves to clients, and to the other workers."""
        ...

    def gathering(self, guarded: ASGIApp, app: ServedApp) -> ASGIApp:
        """Its application, with the routes of all workers before it."""
        ...

    def connections(self, app: ServedApp) -> type[asyncio.Protocol]:
        """Makes the connections of clients, which pass requests on."""
        ...

    async def listen(self, state: ServerState) -> asyncio.Server:
        """Take the connections of other workers."""
        ...

    async def aclose(self) -> None:
        """Hang up on the other workers."""
        ...
