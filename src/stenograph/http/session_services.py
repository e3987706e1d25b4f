"""The services of a server's turns, and the manager of its sessions."""

from functools import partial

from stenograph.core.clock import Clock
from stenograph.core.loaded import entry
from stenograph.engine.base import Engine
from stenograph.http.metric_table import STORE_METRICS, Serving
from stenograph.http.metrics import Metrics
from stenograph.http.processes import Processes
from stenograph.http.rule_files import side_rules_of
from stenograph.http.settings import Settings
from stenograph.offload.pool import CpuPool, LoopShare
from stenograph.session.admission import Limits
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices
from stenograph.session.weights import Weights
from stenograph.store.base import SessionStore
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark
from stenograph.trajectory.matching import load_matcher


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
        weights=Weights(settings.weight_version),
        cache_salt=settings.cache_salt,
    )


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
        abandon = entry("stenograph.session.stale:abandon_stale")
        services.weights.on_taken = partial(abandon, manager, settings.max_staleness)
    if storage is not None:
        metrics.show(STORE_METRICS, storage, manager)
    engine.report_grammar_times(metrics.grammar_took)
    metrics.bind(Serving(manager=manager, engine=engine))
    return manager
