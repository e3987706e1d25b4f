"""The services of a server's turns, and the manager of its sessions."""

from stenograph.core.clock import Clock
from stenograph.core.loaded import entry
from stenograph.engine.base import Engine
from stenograph.http.metric_table import COUNTER, GAUGE, Serving, row
from stenograph.http.metrics import Metrics
from stenograph.http.processes import Processes
from stenograph.http.rule_files import side_rules_of
from stenograph.http.settings import Settings
from stenograph.offload.pool import CpuPool, LoopShare
from stenograph.session.admission import Limits
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices
from stenograph.session.storage import SessionStorage
from stenograph.session.weights import Weights
from stenograph.store.base import SessionStore
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark
from stenograph.trajectory.matching import load_matcher

STORE_METRICS = (
    row(
        "stenograph_store_rows_total",
        COUNTER,
        "Requests whose turns the store has written.",
        SessionStorage,
        lambda storage: storage.store.stats.num_rows,
    ),
    row(
        "stenograph_store_groups_total",
        COUNTER,
        "Groups that they were written in; a group is synced once.",
        SessionStorage,
        lambda storage: storage.store.stats.num_groups,
    ),
    row(
        "stenograph_store_bytes_total",
        COUNTER,
        "Bytes of these rows.",
        SessionStorage,
        lambda storage: storage.store.stats.num_bytes,
    ),
    row(
        "stenograph_store_busy_seconds_total",
        COUNTER,
        "Seconds that the store's thread was at work.",
        SessionStorage,
        lambda storage: storage.store.stats.write_s,
    ),
    row(
        "stenograph_store_failures_total",
        COUNTER,
        "Writes that failed: because the disk was full, or for any other reason, after which the server ends.",
        SessionStorage,
        lambda storage: {"full": storage.store.stats.num_full, "failed": storage.store.stats.num_failed},
        label=("reason", ("full", "failed")),
    ),
    row(
        "stenograph_store_sessions_read_total",
        COUNTER,
        "Sessions that were read from the store, to go on or to be looked at.",
        SessionStorage,
        lambda storage: storage.num_read,
    ),
    row(
        "stenograph_store_sessions_damaged_total",
        COUNTER,
        "Reads that found a session damaged.",
        SessionStorage,
        lambda storage: storage.num_damaged,
    ),
    row(
        "stenograph_sessions_evicted_total",
        COUNTER,
        "Sessions that left memory and stayed in the store, because of --max-held-tokens or --max-sessions.",
        SessionManager,
        lambda manager: manager.sessions.num_evicted,
    ),
    row(
        "stenograph_store_usable",
        GAUGE,
        "1 while the store takes turns, 0 after it has failed.",
        SessionStorage,
        lambda storage: storage.store.failure is None,
    ),
)
"""The metrics of a server with a store. Without one there are none: absent is not zero."""


def services_of(
    settings: Settings, engine: Engine, renderer: Renderer, pool: CpuPool, share: LoopShare, clock: Clock
) -> TurnServices:
    """The services of all turns. Raises StartupError for an unreadable file of rules."""
    rules = side_rules_of(settings)
    return TurnServices(
        engine=engine,
        renderer=renderer,
        pool=pool,
        clock=clock,
        timeout_s=settings.request_timeout_s,
        abort_grace_s=settings.abort_grace_s,
        over_budget=settings.over_budget,
        template_kwargs=settings.chat_template_kwargs,
        share=share,
        tokenizer=engine if engine.tokenizes else None,
        kind_rules=rules.kinds,
        rewrite_rules=rules.rewrites,
        canonical=rules.canonical,
        weights=_weights_of(settings, engine),
        cache_salt=settings.cache_salt,
    )


def _weights_of(settings: Settings, engine: Engine) -> Weights:
    """The weights; loads of LoRAs are kept in the folder of sessions."""
    weights = Weights(settings.weight_version)
    weights.kept_loras = lambda: entry("stenograph.session.policies:LoraFile")(settings.data_dir, engine)
    return weights


def manager_of(
    settings: Settings,
    services: TurnServices,
    metrics: Metrics,
    store: SessionStore | None,
    mark: ModelMark,
    processes: Processes,
) -> SessionManager:
    """The manager. It reports its events to the metrics, and is the source of their gauges."""
    engine = services.engine
    limits = Limits(
        max_sessions=settings.max_sessions,
        max_in_flight=settings.max_in_flight,
        max_held_tokens=settings.max_held_tokens,
        max_strands=settings.max_strands,
    )
    storage = None
    if store is not None:
        matchers = {settings.matcher: load_matcher(settings.matcher)}
        storage = processes.storage_type(store, clock=services.clock, pool=services.pool, model=mark, matchers=matchers)
    manager = processes.manager_type(
        services=services,
        limits=limits,
        telemetry=metrics,
        storage=storage,
        capacity=processes.capacity(limits, evicts=storage is not None),
        digits=processes.digits,
    )
    if settings.max_staleness is not None:
        services.weights.on_taken = entry("stenograph.session.stale:stale_sessions")(manager, settings.max_staleness)
    if storage is not None:
        metrics.show(STORE_METRICS, storage, manager)
    engine.report_grammar_times(metrics.grammar_took)
    metrics.bind(Serving(manager=manager, engine=engine))
    return manager
