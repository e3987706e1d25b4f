"""The shared database of servers, as `--store` names it: opened and prepared, with the other servers and the metrics.

A server of one process without `--store` never imports it; with `--workers`, `Cluster` wires the processes as well.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

from starlette.types import ASGIApp, Scope

from stenograph.cluster.forwarding import PATIENCE_S, Forwarded, Forwarding
from stenograph.cluster.gathering import Gathering
from stenograph.cluster.leased_owners import LeasedOwners
from stenograph.cluster.owners import Owners
from stenograph.cluster.parts import SharedParts
from stenograph.cluster.peers import Peers
from stenograph.cluster.place import WorkerPlace
from stenograph.cluster.postgres.schema import check_connections, prepare
from stenograph.cluster.postgres.server import NUM_CONNECTIONS, PostgresRows
from stenograph.cluster.postgres.shared_rows import OwnerName
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.core.clock import SystemClock
from stenograph.core.errors import StorageUnavailable
from stenograph.http.bulk_parts import OwnParts, SessionParts
from stenograph.http.metric_table import COUNTER, GAUGE, row
from stenograph.http.metrics import Metrics
from stenograph.http.mounts import WebGuard
from stenograph.http.processes import LateParts, Processes, ServedApp
from stenograph.http.route import Route, Who
from stenograph.http.settings import Settings
from stenograph.parts import ClusterSettings, settings_of
from stenograph.session.keyed_sessions import KeyedSessions
from stenograph.session.manager import SessionManager
from stenograph.store.base import SessionStore
from stenograph.store.folder import DataFolder

MIN_TIMEOUT_S = 5.0
"""Longest time of a statement, where the lease is shorter."""

OWNER_METRICS = (
    row(
        "stenograph_lease_held",
        GAUGE,
        "1 while this server may answer for sessions in a shared database, 0 while it could not renew its lease.",
        PostgresStore,
        lambda store: store.owner.is_held,
    ),
    row(
        "stenograph_leases_lost_total",
        COUNTER,
        "Times that it could not be renewed, and all sessions left memory.",
        PostgresStore,
        lambda store: store.owner.num_lost,
    ),
    row(
        "stenograph_database_away_total",
        COUNTER,
        "Questions about the lease that the shared database did not answer.",
        PostgresStore,
        lambda store: store.owner.num_away,
    ),
    row(
        "stenograph_sessions_taken_over_total",
        COUNTER,
        "Sessions that this server took over from another, whose lease had run out.",
        PostgresStore,
        lambda store: store.num_taken,
    ),
    row(
        "stenograph_store_fenced_rows_total",
        COUNTER,
        "Rows that the shared database refused because their session was another server's by then.",
        PostgresStore,
        lambda store: store.num_refused,
    ),
    row(
        "stenograph_requests_passed_on_total",
        COUNTER,
        "Requests passed on to the server that has their session, and those of them that it did not answer.",
        Forwarded,
        lambda passed_on: {
            "answered": passed_on.num_passed_on - passed_on.num_refused,
            "unreachable": passed_on.num_refused,
        },
        label=("outcome", ("answered", "unreachable")),
    ),
)


@asynccontextmanager
async def shared_store(
    settings: Settings, url: str, address: str, place: WorkerPlace | None
) -> AsyncGenerator[PostgresStore]:
    """The store in a database shared with other servers. Raises StartupError. A worker is an owner of its own, in a
    database prepared by its parent: a restarted one waits for an absent database."""
    if place is None:
        await prepare_database(settings)
    shared = settings_of(ClusterSettings, settings)
    server = shared.advertise_url or address
    store = await PostgresStore.open(
        PostgresRows(url, timeout_s=_timeout_s(settings)),
        SystemClock(),
        url=str(OwnerName(server=server, worker=None if place is None else place.number)),
        lease_s=shared.lease_s,
        memory=place,
    )
    try:
        yield store
    finally:
        await store.aclose()


async def prepare_database(settings: Settings) -> None:
    """Try the connections to the database of `--store`, if there is one, and make its tables or bring them up to date.

    Raises StartupError.
    """
    shared = settings_of(ClusterSettings, settings)
    if shared.store is not None:
        timeout_s = _timeout_s(settings)
        await check_connections(shared.store, num=NUM_CONNECTIONS * shared.workers, timeout_s=timeout_s)
        await prepare(shared.store, timeout_s=timeout_s)


def _timeout_s(settings: Settings) -> float:
    return max(settings_of(ClusterSettings, settings).lease_s, MIN_TIMEOUT_S)


class Cluster(Processes):
    """A server among those on the database of `--store`; without one, alone. `place` is this process' among
    several of the server, if there are."""

    leases: LeasedOwners | None = None
    """The owners in the shared database."""

    def __init__(self, settings: Settings, place: WorkerPlace | None = None, *, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: the longest wait of a request for an absent worker."""
        super().__init__(None if place is None else place.instance_id)
        self._settings = settings
        self.shared = settings_of(ClusterSettings, settings)
        """Those of its settings that are of several servers."""
        self._place = place
        self.late: Callable[[], LateParts] | None = None
        self._patience_s = patience_s
        self._peers = Peers(() if place is None else place.sockets)
        self._forwarded, self._passed_on = Forwarded(), Forwarded()

    @asynccontextmanager
    async def opened_store(
        self,
        settings: Settings,
        folder: DataFolder | None,
        *,
        address: str,
        on_failed: Callable[[StorageUnavailable], None],
    ) -> AsyncGenerator[SessionStore | None]:
        """The store in the shared database, or in the folder."""
        if self.shared.store is not None:
            async with shared_store(settings, self.shared.store, address, self._place) as shared:
                yield shared
            return
        async with super().opened_store(settings, folder, address=address, on_failed=on_failed) as store:
            yield store

    def find_others(self, settings: Settings, manager: SessionManager, metrics: Metrics) -> None:
        storage = manager.sessions.storage
        if storage is None or not storage.store.is_shared:
            return
        store = cast("PostgresStore", storage.store)
        self.leases = LeasedOwners(manager, store, self._place)
        metrics.show(OWNER_METRICS, store, self._passed_on)

    def wire(self, app: ServedApp, keyed: KeyedSessions, late: Callable[[], LateParts]) -> None:
        self.late = late

    @property
    def rows(self) -> Sequence[Route]:
        """The rows of the routes."""
        assert self.late is not None, "it is wired before it is configured"
        return self.late().rows

    def all_parts(self, own: OwnParts) -> SessionParts:
        leases = self.leases
        if leases is None:
            return own
        return SharedParts(own=own, peers=self._peers, peer_of=leases.peer_of, timeout_s=self._answer_s)

    @property
    def _answer_s(self) -> float:
        """Longest time for another process to answer."""
        return self._settings.request_timeout_s + self._settings.abort_grace_s

    def serving(self, guarded: ASGIApp, app: ServedApp) -> ASGIApp:
        gathering = Gathering(
            guarded,
            app,
            self.rows,
            of_workers=self._of_workers(),
            peers=self._peers,
            own=self.number,
            leases=self.leases,
            check=self._check,
            by_credential=not self._settings.api_key,
            long_s=self._answer_s,
        )
        owners = self._owners()
        if owners is None:
            return gathering
        guard = cast("WebGuard", guarded)
        return Forwarding(
            gathering,
            app,
            owners=owners,
            peers=self._peers,
            of_server={row.path for row in self.rows if row.who is Who.SERVER},
            by_credential=not self._settings.api_key,
            objects=lambda scope: guard.judged(scope)[1] is not None,
            check=self._check,
            forwarded=self._forwarded,
            passed_on=self._passed_on,
            patience_s=self._patience_s,
            answer_s=self._answer_s,
        )

    def _check(self, scope: Scope) -> None:
        assert self.late is not None, "it is wired before it is configured"
        self.late().check_agent(scope)

    def _of_workers(self) -> ASGIApp | None:
        """The routes between the workers of the server; None: it has one process."""
        return None

    def _owners(self) -> Owners | None:
        """Knows the process of each session; None: this process has all."""
        return self.leases

    async def aclose(self) -> None:
        await self._peers.aclose()
