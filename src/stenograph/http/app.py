"""The only place that wires things together: settings in, a running server out."""

import asyncio
import dataclasses
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stenograph.core.clock import Clock, SystemClock
from stenograph.core.day import Day
from stenograph.core.errors import InvalidRequest, StartupError, StorageLost
from stenograph.core.kinds import Compat
from stenograph.core.loaded import entry
from stenograph.core.settings import Switch
from stenograph.dialects.base import Spoken
from stenograph.dialects.common.errors import refusal_of
from stenograph.dialects.common.template_input import check_template_kwargs
from stenograph.engine.base import Engine
from stenograph.engine.settings import EngineKind
from stenograph.families.load import check_renderer, load_renderer
from stenograph.http.auth import Doorman
from stenograph.http.control_routes import LATE, ControlRoutes
from stenograph.http.count_route import CountRoute
from stenograph.http.create_route import CreateRoute
from stenograph.http.dialects import spoken_by
from stenograph.http.engines import make_engine
from stenograph.http.lifecycle import keep_house, start_engine
from stenograph.http.listen import url_of
from stenograph.http.metric_table import STORE_METRICS, Serving
from stenograph.http.metrics import Metrics
from stenograph.http.mounts import App
from stenograph.http.part import Core, Part
from stenograph.http.processes import Processes
from stenograph.http.rule_files import check_files, side_rules_of
from stenograph.http.server import run_uvicorn
from stenograph.http.settings import Settings
from stenograph.http.storage import held_folder, model_mark
from stenograph.http.turn_route import TurnRoute
from stenograph.http.weight_metrics import WEIGHT_METRICS
from stenograph.model.fetch import resolve_model
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.model.progress import Progress
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.loop_lag import LoopLag
from stenograph.offload.loop_share import LoopShare
from stenograph.offload.pool import CpuPool
from stenograph.session.admission import Limits
from stenograph.session.counting import PromptCounter
from stenograph.session.keyed_openings import KeyedOpenings
from stenograph.session.manager import SessionManager
from stenograph.session.services import TurnServices
from stenograph.session.storage import SessionStorage
from stenograph.session.weights import Weights
from stenograph.store.base import SessionStore
from stenograph.store.folder import DataFolder
from stenograph.text.renderer import Renderer
from stenograph.trajectory.commits import ModelMark
from stenograph.trajectory.matching import load_matcher

log = logging.getLogger(__name__)

OPENAPI = "stenograph.http.openapi.document:document_of"


def make_renderer(
    files: ModelFiles,
    family_name: str,
    *,
    kwargs: Mapping[str, object] | None = None,
    allows_special: bool = False,
    today: Day | None = None,
) -> Renderer:
    """Tokenizer, template and family of a model. Raises StartupError where they do not fit, or are not append-only.

    `kwargs` are template arguments that every turn will have, unless it says otherwise; `today` is the date that the
    template is tried with: each session has its own. Says in the log why a slower library is used than could be, where
    it is, and which of the arguments the template does not use.
    """
    kwargs = kwargs or {}
    loaded = load_renderer(files, family_name, allows_special=allows_special, strftime_now=today)
    for note in loaded.notes:
        log.warning("%s", note)
    check_renderer(files, loaded.renderer)
    check_renderer(files, loaded.renderer, kwargs)
    for name in sorted(kwargs.keys() - loaded.renderer.writer.read_by_template(kwargs)):
        log.warning("the chat template does not use %r, which --chat-template-kwargs sets", name)
    return loaded.renderer


def renderer_of(settings: Settings, files: ModelFiles, clock: Clock) -> Renderer:
    """The renderer of a model as the settings want it. Raises StartupError as `make_renderer` does."""
    return make_renderer(
        files,
        settings.family,
        kwargs=template_kwargs_of(settings),
        allows_special=settings.allow_special_in_text is Switch.ON,
        today=Day.of(clock.wall()),
    )


def template_kwargs_of(settings: Settings) -> Mapping[str, object]:
    """The server's own template arguments. Raises StartupError for one that no client may set either."""
    try:
        check_template_kwargs(settings.chat_template_kwargs, at="")
    except InvalidRequest as error:
        raise StartupError(f"--chat-template-kwargs: {error}") from error
    return settings.chat_template_kwargs


def make_app(
    settings: Settings,
    *,
    engine: Engine,
    renderer: Renderer,
    pool: CpuPool,
    model: str,
    clock: Clock,
    moe_shape: tuple[int, int] | None = None,
    body_slots: BodySlots | None = None,
    spoken: Spoken | None = None,
    store: SessionStore | None = None,
    mark: ModelMark | None = None,
    processes: Processes | None = None,
    parts: tuple[Part, ...] = (),
) -> tuple[App, SessionManager]:
    """The application around an engine, and the manager that has to be drained at its end. Raises StartupError.

    `spoken` is what it speaks with clients; None: what the settings say.
    Sessions are kept in `store`, by the `mark` of the model; None: in memory alone. `processes` None: the server
    has one. `parts` are what it has beside the core.
    """
    processes = processes or Processes()
    metrics, share, body_slots = Metrics(), LoopShare(), body_slots or BodySlots(settings.body_slots)
    services = _services(settings, engine, renderer, pool, share, clock)
    spoken = spoken or spoken_by(settings, renderer, model)
    manager = _make_manager(settings, services, metrics, store, mark or ModelMark(name=model), processes)
    doorman = Doorman(api_keys=settings.api_key, manager=manager, admin_keys=settings.admin_key)
    processes.find_others(settings, manager, metrics)
    metrics.show(WEIGHT_METRICS, services.weights)
    openings = KeyedOpenings(manager, processes.opened_elsewhere(has_store=store is not None))
    core = Core(
        settings=settings,
        services=services,
        doorman=doorman,
        metrics=metrics,
        processes=processes,
        spoken=spoken,
        model=model,
        moe_shape=moe_shape,
        parts=parts,
    )
    late = cache(lambda: entry(LATE)(core))
    control = ControlRoutes(
        core=core,
        late=late,
        create=CreateRoute.of(settings, services, openings, doorman),
        body_slots=body_slots,
        started_at=int(clock.wall()),
        openapi=cache(lambda: entry(OPENAPI)(core)),
    )
    tracing = next((part.tracing for part in parts if part.tracing and part.is_wanted(settings)), None)
    app = App(
        turns=_turn_routes(settings, spoken, services, doorman=doorman, metrics=metrics, body_slots=body_slots),
        control=control.app(),
        metrics=metrics,
        refuse=refusal_of(settings.compat),
        nodes=processes.nodes,
        tracing=None if tracing is None else entry(tracing)(core),
    )
    processes.wire(app, openings, late)
    return app, manager


def _turn_routes(
    settings: Settings,
    spoken: Spoken,
    services: TurnServices,
    *,
    doorman: Doorman,
    metrics: Metrics,
    body_slots: BodySlots,
) -> list[TurnRoute | CountRoute]:
    """The routes of the dialects: those that make turns, and those that only count."""
    counter = PromptCounter(doorman.manager, services)
    sought_headers = frozenset(name.encode() for name in services.kind_rules.headers)
    turns = [
        TurnRoute(
            dialect=dialect,
            manager=doorman.manager,
            doorman=doorman,
            engine=services.engine,
            metrics=metrics,
            clock=services.clock,
            max_body_bytes=settings.max_body_bytes,
            pool=services.pool,
            share=services.share,
            body_slots=body_slots,
            sought_headers=sought_headers,
            as_miles=settings.compat is Compat.MILES,
        )
        for dialect in spoken.turns
    ]
    counts = [
        CountRoute(
            dialect=dialect,
            counter=counter,
            doorman=doorman,
            metrics=metrics,
            clock=services.clock,
            max_body_bytes=settings.max_body_bytes,
            pool=services.pool,
            body_slots=body_slots,
            sought_headers=sought_headers,
        )
        for dialect in spoken.counters
    ]
    return [*turns, *counts]


def _services(
    settings: Settings, engine: Engine, renderer: Renderer, pool: CpuPool, share: LoopShare, clock: Clock
) -> TurnServices:
    """The services of all turns. Raises StartupError for a file of rules that cannot be read."""
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


def _make_manager(
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
        storage = SessionStorage(store, clock=services.clock, pool=services.pool, model=mark, matchers=matchers)
    manager = SessionManager(
        services=services,
        limits=limits,
        telemetry=metrics,
        storage=storage,
        capacity=processes.capacity(limits, evicts=storage is not None),
        digits=processes.digits,
    )
    if storage is not None:
        metrics.show(STORE_METRICS, storage, manager)
    engine.report_grammar_times(metrics.grammar_took)
    metrics.bind(Serving(manager=manager, engine=engine))
    return manager


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model as a server speaks it: loaded once, also for several processes."""

    path: Path
    files: ModelFiles
    renderer: Renderer


def load_model(settings: Settings, clock: Clock, progress: Progress) -> LoadedModel:
    """Fetch and load the model. Raises StartupError. Takes seconds, and blocks."""
    has_weights = settings.engine is EngineKind.EMBEDDED
    path = resolve_model(settings.model, cache_dir=settings.cache_dir, progress=progress, weights=has_weights)
    files = load_model_files(path)
    return LoadedModel(path=path, files=files, renderer=renderer_of(settings, files, clock))


async def serve(
    listener: socket.socket,
    settings: Settings,
    *,
    announce: Callable[[str], None],
    progress: Progress,
    parts: tuple[Part, ...],
    processes: Processes | None = None,
) -> signal.Signals | None:
    """Run the server until SIGTERM or SIGINT, and return which it was; raises StorageLost if its store has failed.

    `announce` gets one line when it is ready, `progress` long work before. `parts` are what it has beside the
    core. `processes` None: the server has one. Raises StartupError if it does not start.
    """
    clock = SystemClock()
    check_files(settings)
    async with held_folder(settings, address=url_of(listener)) as folder:

        async def loaded() -> LoadedModel:
            return await asyncio.to_thread(load_model, settings, clock, progress)

        alone = processes or Processes()
        return await serve_on(listener, settings, loaded, folder, alone, clock=clock, announce=announce, parts=parts)


async def serve_on(
    listener: socket.socket,
    settings: Settings,
    loaded: Callable[[], Awaitable[LoadedModel]],
    folder: DataFolder | None,
    processes: Processes,
    *,
    clock: Clock,
    announce: Callable[[str], None],
    parts: tuple[Part, ...],
) -> signal.Signals | None:
    """Serve until a signal comes, and return it; raises StorageLost if the store of `folder` has failed."""
    failed = asyncio.Event()
    address = url_of(listener)
    async with processes.opened_store(settings, folder, address=address, on_failed=lambda _: failed.set()) as store:
        try:
            args = (listener, settings, await loaded(), store, failed, processes)
            ended_by = await _serve_model(*args, clock=clock, announce=announce, parts=parts)
        finally:
            await processes.aclose()
        if failed.is_set() and store is not None and store.failure is not None:
            raise StorageLost(f"the store of --data-dir has failed: {store.failure.__cause__ or store.failure}")
        return ended_by


async def _serve_model(
    listener: socket.socket,
    settings: Settings,
    loaded: LoadedModel,
    store: SessionStore | None,
    failed: asyncio.Event,
    processes: Processes,
    *,
    clock: Clock,
    announce: Callable[[str], None],
    parts: tuple[Part, ...],
) -> signal.Signals | None:
    """Serve a model until a signal comes or `failed` is set."""
    files, renderer = loaded.files, loaded.renderer
    body_slots = BodySlots(settings.body_slots)
    urls = processes.engine_urls()
    engine = make_engine(
        settings if urls is None else dataclasses.replace(settings, engine_url=urls),
        files,
        loaded.path,
        body_slots,
        clock,
        renderer.tokenizer,
        shared=processes.engine,
    )
    pool = CpuPool(settings.cpu_workers)
    try:
        app, manager = make_app(
            settings,
            engine=engine,
            renderer=renderer,
            pool=pool,
            model=files.name,
            clock=clock,
            moe_shape=files.moe_shape,
            body_slots=body_slots,
            store=store,
            mark=model_mark(files),
            processes=processes,
            parts=parts,
        )
        await start_engine(engine, manager)
        lag = LoopLag(app.metrics.loop_lagged, name_culprits=settings.loop_watchdog is Switch.ON)
        lag.start()
        housekeeper = asyncio.get_running_loop().create_task(keep_house(manager, pool), name="keep-house")
        try:
            return await run_uvicorn(settings, app, manager, engine, listener, announce, failed, processes=processes)
        finally:
            housekeeper.cancel()
            await asyncio.wait({housekeeper})
            lag.close()
            await app.aclose()
    finally:
        await engine.aclose()
        pool.close()
