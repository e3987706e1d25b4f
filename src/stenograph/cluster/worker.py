"""One worker of several: its connections, its routes of all workers, its part of the limits. Made from its place."""

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from stenograph.cluster.all_moments import AllMoments
from stenograph.cluster.forwarding import PATIENCE_S, Forwarded
from stenograph.cluster.gathering import opened_elsewhere
from stenograph.cluster.other_workers import OtherWorkers
from stenograph.cluster.owners import FIRST, Owners, number_of
from stenograph.cluster.parts import WorkerParts
from stenograph.cluster.peer_connection import PeerConnection
from stenograph.cluster.peer_routes import PeerRoutes
from stenograph.cluster.place import WorkerPlace
from stenograph.cluster.shared_capacity import SharedCapacity
from stenograph.cluster.shared_store import Cluster
from stenograph.cluster.state_file import StateFile
from stenograph.core.errors import StenographError
from stenograph.http.bulk_parts import OwnParts, SessionParts
from stenograph.http.connection import connections_of
from stenograph.http.metric_table import COUNTER, row
from stenograph.http.processes import Board, LateParts, ServedApp, SharedEngines, SharedWeights
from stenograph.http.settings import Settings
from stenograph.session.admission import Limits
from stenograph.session.keyed_sessions import KeyedSessions, OpenedElsewhere
from stenograph.session.weights import SyncState

log = logging.getLogger(__name__)

IN_DOUBT = (
    "a change of weights was cut off by the end of this process, and which weights the engines have is not known: turns"
    " wait until it is sent again, or until POST /continue_generation lets them go on with what there is"
)

WORKER_METRICS = (
    row(
        "stenograph_requests_forwarded_total",
        COUNTER,
        "Requests that this process passed on to the one that has their session.",
        Forwarded,
        lambda forwarded: forwarded.num_passed_on,
    ),
    row(
        "stenograph_forwards_failed_total",
        COUNTER,
        "Those of them whose process was away for too long, or ended before it had answered.",
        Forwarded,
        lambda forwarded: forwarded.num_refused,
    ),
    row(
        "stenograph_worker_restarts_total",
        COUNTER,
        "Times that this process was started again after it had ended.",
        WorkerPlace,
        lambda place: place.page.num_restarts(place.number),
    ),
)


class Worker(Cluster):
    """One process of a server with several. Close it at the end."""

    def __init__(self, place: WorkerPlace, settings: Settings, *, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: the longest wait of a request for an absent worker."""
        super().__init__(settings, place, patience_s=patience_s)
        self.place = place
        self.number, self.digits, self.engine = place.number, place.digits, place.engine
        self.files_before = place.files_before
        self.folder = place.sockets[0].parent
        self.file = StateFile(self.folder)
        self._others = OtherWorkers(
            self._peers, self.file, own=place.number, long_s=settings.request_timeout_s, hear_s=patience_s
        )
        self._telling: asyncio.Task[None] | None = None
        self._routes: PeerRoutes | None = None
        self._shared: tuple[SharedWeights, SharedEngines] | None = None
        self._moments: AllMoments | None = None
        self._app: ServedApp | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.place.number} of {len(self.place.sockets)}>"

    def capacity(self, limits: Limits, *, evicts: bool) -> SharedCapacity:
        """Its part of the server's limits."""
        return SharedCapacity(limits, evicts=evicts, page=self.place.page, worker=self.place.number)

    def opened_elsewhere(self, *, has_store: bool) -> OpenedElsewhere | None:
        """Finds sessions opened with a key by other workers. Without a store the key's own worker has them all; in a
        shared database each worker finds them."""
        has_files = has_store and self.shared.store is None
        return opened_elsewhere(self._peers, own=self.place.number) if has_files else None

    @property
    def is_first(self) -> bool:
        """Whether it speaks for all to the engines."""
        return self.place.number == FIRST

    @property
    def followers(self) -> OtherWorkers | None:  # type: ignore[override]
        """Its followers, if it is the first."""
        return self._others if self.is_first else None

    def engine_urls(self) -> tuple[str, ...] | None:
        """The addresses of the server's engines now; None: those of its settings."""
        state = self.file.read()
        return None if state is None else state.addresses or None

    def files(self, there: list[int]) -> list[int]:
        return self.place.files(there)

    def all_parts(self, own: OwnParts) -> SessionParts:
        if self.leases is not None:
            return super().all_parts(own)
        return WorkerParts(own=own, peers=self._peers, peer_of=self._worker_of, timeout_s=self._answer_s)

    async def _worker_of(self, session_id: str) -> int | None:
        """The other worker with a session; this one refuses an invalid id."""
        number = number_of(session_id, self._peers.num)
        return None if number == self.number else number

    def moments(self, board: Board) -> AllMoments:
        """The moments of all workers; `board` has its own."""
        self._moments = AllMoments(board, self._peers, own=self.place.number)
        return self._moments

    def share_weights(self, sync: SharedWeights, engines: SharedEngines) -> None:
        self._shared = sync, engines

    def wire(self, app: ServedApp, keyed: KeyedSessions, late: Callable[[], LateParts]) -> None:
        super().wire(app, keyed, late)
        self._app = app
        late().open_parts()
        assert self._moments is not None, "the console shares the moment"
        assert self._shared is not None, "weights are shared"
        sync, engines = self._shared
        self._routes = PeerRoutes(
            keyed=keyed,
            parts=late().own_parts,
            board=self._moments.board,
            sync=sync,
            engines=engines,
            file=self.file,
        )
        self._routes.follow()
        app.metrics.show(WORKER_METRICS, self._forwarded, self.place)

    def _of_workers(self) -> ASGIApp:
        assert self._routes is not None, "a worker is wired before it is configured"
        return self._routes.app()

    def _owners(self) -> Owners:
        return self.leases or self.place.owners

    async def listen(self, config: uvicorn.Config, state: ServerState) -> Sequence[asyncio.Server]:
        app = self._app
        assert app is not None
        assert self._routes is not None
        state_now = self._routes.follow()  # from here on it hears of every other
        if self.is_first and state_now is not None:
            if state_now.is_changing:
                log.error(IN_DOUBT)
            self._telling = asyncio.get_running_loop().create_task(self._tell(state_now), name="tell-others")
        made = connections_of(self._settings, app.metrics, app.refuse, PeerConnection)
        factory = functools.partial(made, config, state, {})  # type: ignore[call-arg]
        server = await asyncio.get_running_loop().create_unix_server(
            cast("type[asyncio.Protocol]", factory), sock=self.place.listener, backlog=2048
        )
        return (server,)

    async def _tell(self, state: SyncState) -> None:
        """Have the others follow the previous process's last state: it may have told only some of them."""
        await self._others.tell()
        with suppress(StenographError):  # an engine that a worker cannot reach is its own to say
            await self._others.change_engines(state)

    async def aclose(self) -> None:
        """Hang up on the other workers."""
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.wait({self._telling})
        if self._moments is not None:
            await self._moments.aclose()
        await super().aclose()
