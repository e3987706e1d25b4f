"""The database that servers share, as `--store` names it: opened and prepared, with the other servers and the metrics.

What a server without `--store` never imports.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from stenograph.core.clock import SystemClock
from stenograph.http.metric_table import Metric, MetricType
from stenograph.http.metrics import Metrics
from stenograph.http.nodes import Nodes
from stenograph.http.ownership import SharedOwnership
from stenograph.http.settings import Settings
from stenograph.http.store_metrics import families
from stenograph.http.workers.place import WorkerPlace
from stenograph.session.manager import SessionManager
from stenograph.store.postgres.owner_name import OwnerName
from stenograph.store.postgres.schema import check_connections, prepare
from stenograph.store.postgres.server import NUM_CONNECTIONS, PostgresRows
from stenograph.store.postgres.store import PostgresStore

MIN_TIMEOUT_S = 5.0
"""Longest time that a statement may take, where the lease is shorter."""

LEASE = Metric(
    name="stenograph_lease_held",
    type=MetricType.GAUGE,
    help="1 while this server may answer for sessions in a shared database, 0 while it could not renew its lease.",
)
LEASES_LOST = Metric(
    name="stenograph_leases_lost_total",
    type=MetricType.COUNTER,
    help="Times that it could not be renewed, and all sessions left memory.",
)
DATABASE_AWAY = Metric(
    name="stenograph_database_away_total",
    type=MetricType.COUNTER,
    help="Questions about the lease that the shared database did not answer.",
)
TAKEN_OVER = Metric(
    name="stenograph_sessions_taken_over_total",
    type=MetricType.COUNTER,
    help="Sessions that this server took over from another, whose lease had run out.",
)
FENCED = Metric(
    name="stenograph_store_fenced_rows_total",
    type=MetricType.COUNTER,
    help="Rows that the shared database refused because their session was another server's by then.",
)
PASSED_ON = Metric(
    name="stenograph_requests_passed_on_total",
    type=MetricType.COUNTER,
    help="Requests passed on to the server that has their session, and those of them that it did not answer.",
    label="outcome",
    values=("answered", "unreachable"),
)

OWNER_METRICS = (LEASE, LEASES_LOST, DATABASE_AWAY, TAKEN_OVER, FENCED, PASSED_ON)


@asynccontextmanager
async def shared_store(
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
    settings: Settings, manager: SessionManager, metrics: Metrics, store: PostgresStore, place: WorkerPlace | None
) -> Nodes:
    """The other servers that share the database of `store`; their metrics are registered."""
    nodes = Nodes(
        SharedOwnership(manager, store),
        metrics=metrics,
        by_credential=not settings.api_key,
        timeout_s=settings.request_timeout_s + settings.abort_grace_s,
        sockets=() if place is None else place.sockets,
    )
    metrics.register(OwnerMetrics(store, nodes))
    return nodes


class OwnerMetrics(Collector):
    """Reads the counts of a server that shares a database with others."""

    def __init__(self, store: PostgresStore, nodes: Nodes) -> None:
        self._store = store
        self._nodes = nodes

    def __repr__(self) -> str:
        return f"<OwnerMetrics of {self._store!r}>"

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The families of `OWNER_METRICS`, in that order."""
        owner, nodes = self._store.owner, self._nodes
        passed_on = {"answered": nodes.num_passed_on - nodes.num_unreachable, "unreachable": nodes.num_unreachable}
        yield from families(
            {
                LEASE: {"": owner.is_held},
                LEASES_LOST: {"": owner.num_lost},
                DATABASE_AWAY: {"": owner.num_away},
                TAKEN_OVER: {"": self._store.num_taken},
                FENCED: {"": self._store.num_refused},
                PASSED_ON: passed_on,
            }
        )
