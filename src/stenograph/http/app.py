"""The only place that wires things together: settings in, a running server out."""

import asyncio
import hashlib
import logging
import signal
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from stenograph import __version__
from stenograph.core.clock import Clock, SystemClock
from stenograph.core.day import Day
from stenograph.core.errors import InvalidJson, InvalidRequest, StartupError, StorageLost
from stenograph.core.history_kinds import AfterLength, Compat, HistoryKind
from stenograph.core.sampling_rules import SamplingRules
from stenograph.core.settings import Switch
from stenograph.core.types import LogprobsKind
from stenograph.dialects.anthropic.dialect import CountTokensDialect, MessagesDialect
from stenograph.dialects.base import CountDialect, Dialect
from stenograph.dialects.gemini.dialect import GeminiCounter, GeminiDialect
from stenograph.dialects.openai.dialect import ChatDialect, CompletionDialect
from stenograph.dialects.openai.errors import refusal
from stenograph.dialects.openai.sampling_rules import decode_rules
from stenograph.dialects.responses.dialect import ResponsesDialect
from stenograph.dialects.template_kwargs import check_template_kwargs
from stenograph.engine.base import Engine, EngineState
from stenograph.engine.settings import EngineKind
from stenograph.export.replay import ReplayShape
from stenograph.families.load import check_renderer, load_renderer
from stenograph.http.auth import Doorman
from stenograph.http.control_routes import ControlRoutes
from stenograph.http.count_route import CountRoute
from stenograph.http.engines import make_engine
from stenograph.http.lifecycle import keep_house
from stenograph.http.metrics import Metrics
from stenograph.http.mounts import App
from stenograph.http.nodes import Nodes
from stenograph.http.openapi.document import openapi_document
from stenograph.http.openapi.schemas import Described
from stenograph.http.response_route import HeldResponses
from stenograph.http.server import listen, run_uvicorn, url_of
from stenograph.http.session_routes import SessionDefaults, SessionRoutes
from stenograph.http.settings import Settings
from stenograph.http.storage import BackupRoute, opened_store
from stenograph.http.store_metrics import OwnerMetrics, StoreMetrics
from stenograph.http.turn_route import TurnRoute
from stenograph.model.fetch import resolve_model
from stenograph.model.files import ModelFiles, load_model_files
from stenograph.model.progress import Progress
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.loop_lag import LoopLag
from stenograph.offload.loop_share import LoopShare
from stenograph.offload.pool import CpuPool
from stenograph.render.renderer import Renderer
from stenograph.session.admission import Limits
from stenograph.session.counting import PromptCounter
from stenograph.session.keyed_openings import KeyedOpenings
from stenograph.session.kinds import SHIPPED_RULES, BadSideRules, KindRules
from stenograph.session.manager import SessionManager
from stenograph.session.ownership import SharedOwnership
from stenograph.session.rewrite_rules import RewriteRules, UnknownRewrite
from stenograph.session.shelf import Shelf
from stenograph.session.turn import TurnServices
from stenograph.store.base import SessionStore
from stenograph.store.postgres.store import PostgresStore
from stenograph.trajectory.canonical import Canonical
from stenograph.trajectory.commits import ModelMark
from stenograph.trajectory.matching import MATCHERS, load_matcher

log = logging.getLogger(__name__)


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


class SideRules(NamedTuple):
    """The rules of sessions: those that label requests, those that rewrite them, and which of these are chosen."""

    kinds: KindRules
    rewrites: RewriteRules
    canonical: Canonical


def side_rules_of(settings: Settings) -> SideRules:
    """The rules of `--side-rules`, then the shipped ones. Raises StartupError, with the file and the rule."""
    file, texts = repr(str(settings.side_rules)), [SHIPPED_RULES]
    try:
        if settings.side_rules is not None:
            texts.insert(0, settings.side_rules.read_text(encoding="utf-8"))
        rewrites = RewriteRules.read(*texts)
        return SideRules(KindRules.read(*texts), rewrites, rewrites.chosen(settings.canonical))
    except UnknownRewrite as error:
        raise StartupError(f"--canonical: {error}") from error
    except OSError as error:
        raise StartupError(f"--side-rules: cannot read the file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"--side-rules: the file {file} is not UTF-8") from error
    except BadSideRules as error:
        raise StartupError(f"--side-rules: the file {file}: {error}") from error


def sampling_of(settings: Settings) -> SamplingRules | None:
    """The sampling of all sessions, from the file of `--sampling`. Raises StartupError, with the file and the field."""
    if settings.sampling is None:
        return None
    file = repr(str(settings.sampling))
    try:
        return decode_rules(settings.sampling.read_bytes())
    except OSError as error:
        raise StartupError(f"--sampling: cannot read the file {file}: {error.strerror}") from error
    except InvalidJson as error:
        raise StartupError(f"--sampling: the file {file} is not JSON: {error.__cause__}") from error
    except InvalidRequest as error:
        where = "" if error.param is None else f"{error.param} of "
        raise StartupError(f"--sampling: {where}the file {file}: {error}") from error


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
    dialects: Sequence[Dialect] | None = None,
    counters: Sequence[CountDialect] | None = None,
    store: SessionStore | None = None,
    mark: ModelMark | None = None,
) -> tuple[App, SessionManager]:
    """The application around an engine, and the manager that has to be drained at its end. Raises StartupError.

    `dialects` are what it speaks with clients, and `counters` those whose requests only count; None for all there are.
    Sessions are kept in `store`, by the `mark` of the model; None: in memory alone.
    """
    body_slots = body_slots or BodySlots(settings.body_slots)
    metrics = Metrics(version=__version__)
    share = LoopShare()
    services = _services(settings, engine, renderer, pool, share, clock)
    manager = _make_manager(settings, services, metrics, store, mark or ModelMark(name=model))
    doorman = Doorman(api_keys=settings.api_key, manager=manager)
    sessions = _session_routes(settings, services, manager=manager, metrics=metrics, moe_shape=moe_shape)
    held = ResponsesDialect(
        token_text=renderer.tokenizer.token_text, model=model, unknown_fields=settings.unknown_fields
    ).held
    control = ControlRoutes(
        sessions=sessions,
        backup=BackupRoute(
            shelf=manager.shelf, has_keys=bool(settings.api_key), max_body_bytes=settings.max_body_bytes
        ),
        responses=HeldResponses(doorman=doorman, share=share, model=model, write=held),
        doorman=doorman,
        metrics=metrics,
        engine=engine,
        tokenizer=renderer.tokenizer,
        pool=pool,
        share=share,
        body_slots=body_slots,
        model=model,
        started_at=int(clock.wall()),
        instance_id=uuid.uuid4().hex,
        max_body_bytes=settings.max_body_bytes,
        proxy_allow=settings.proxy_allow,
        timeout_s=settings.request_timeout_s,
        openapi=openapi_document(_described(settings, services)),
        refuse=refusal,
    )
    spoken = all_dialects(settings, renderer, model) if dialects is None else dialects
    turns = _turn_routes(
        settings,
        spoken,
        all_counters(settings) if counters is None else counters,
        services=services,
        manager=manager,
        doorman=doorman,
        metrics=metrics,
        body_slots=body_slots,
    )
    nodes = _nodes(settings, manager, metrics, store)
    return App(turns=turns, control=control.app(), metrics=metrics, refuse=refusal, nodes=nodes), manager


def _nodes(settings: Settings, manager: SessionManager, metrics: Metrics, store: SessionStore | None) -> Nodes | None:
    """The other servers, where a database is shared with them."""
    if not isinstance(store, PostgresStore):
        return None
    nodes = Nodes(
        SharedOwnership(manager, store),
        metrics=metrics,
        by_credential=not settings.api_key,
        timeout_s=settings.request_timeout_s + settings.abort_grace_s,
    )
    metrics.register(OwnerMetrics(store, nodes))
    return nodes


def _turn_routes(
    settings: Settings,
    dialects: Sequence[Dialect],
    counters: Sequence[CountDialect],
    *,
    services: TurnServices,
    manager: SessionManager,
    doorman: Doorman,
    metrics: Metrics,
    body_slots: BodySlots,
) -> list[TurnRoute | CountRoute]:
    """The routes of the dialects: those that make turns, and those that only count."""
    counter = PromptCounter(manager, services)
    sought_headers = frozenset(name.encode() for name in services.kind_rules.headers)
    turns = [
        TurnRoute(
            dialect=dialect,
            manager=manager,
            doorman=doorman,
            metrics=metrics,
            clock=services.clock,
            max_body_bytes=settings.max_body_bytes,
            pool=services.pool,
            share=services.share,
            body_slots=body_slots,
            sought_headers=sought_headers,
        )
        for dialect in dialects
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
        for dialect in counters
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
        weight_version=settings.weight_version,
    )


def _make_manager(
    settings: Settings, services: TurnServices, metrics: Metrics, store: SessionStore | None, mark: ModelMark
) -> SessionManager:
    """The manager. It reports its events to the metrics, and is the source of their gauges."""
    engine = services.engine
    limits = Limits(
        max_sessions=settings.max_sessions,
        max_in_flight=settings.max_in_flight,
        max_held_tokens=settings.max_held_tokens,
    )
    shelf = None
    if store is not None:
        matchers = {settings.matcher: load_matcher(settings.matcher)}
        shelf = Shelf(store, clock=services.clock, pool=services.pool, model=mark, matchers=matchers)
    manager = SessionManager(services=services, limits=limits, telemetry=metrics, shelf=shelf)
    if shelf is not None:
        metrics.register(StoreMetrics(shelf, manager))
    engine.report_grammar_times(metrics.grammar_took)
    metrics.bind(
        num_sessions=lambda: manager.num_sessions,
        num_in_flight=lambda: manager.num_in_flight,
        engine_ready=lambda: engine.health().state is EngineState.READY,
        engines=engine.statuses,
    )
    return manager


def all_dialects(settings: Settings, renderer: Renderer, model: str) -> tuple[Dialect, ...]:
    """The dialects that every server speaks."""
    token_text, unknown_fields = renderer.tokenizer.token_text, settings.unknown_fields
    return (
        ChatDialect(token_text=token_text, model=model, unknown_fields=unknown_fields),
        CompletionDialect(token_text=token_text, model=model, unknown_fields=unknown_fields),
        MessagesDialect(model=model, unknown_fields=unknown_fields),
        ResponsesDialect(token_text=token_text, model=model, unknown_fields=unknown_fields),
        GeminiDialect(token_text=token_text, model=model, unknown_fields=unknown_fields),
    )


def all_counters(settings: Settings) -> tuple[CountDialect, ...]:
    """The dialects whose requests only count tokens."""
    unknown_fields = settings.unknown_fields
    return (CountTokensDialect(unknown_fields=unknown_fields), GeminiCounter(unknown_fields=unknown_fields))


def _session_routes(
    settings: Settings,
    services: TurnServices,
    *,
    manager: SessionManager,
    metrics: Metrics,
    moe_shape: tuple[int, int] | None,
) -> SessionRoutes:
    """The sessions' own routes. Raises StartupError for a matcher or a file of sampling that cannot be loaded, or a
    history that is against the contract to keep to."""
    is_miles = settings.compat is Compat.MILES
    if is_miles and settings.history is HistoryKind.TREE:
        raise StartupError("compat miles makes sessions linear: leave history tree out, or compat")
    return SessionRoutes(
        manager=manager,
        openings=KeyedOpenings(manager),
        metrics=metrics,
        renderer=services.renderer,
        pool=services.pool,
        share=services.share,
        defaults=SessionDefaults(
            history=HistoryKind.LINEAR if is_miles else settings.history,
            after_length=AfterLength.REFUSE if is_miles else settings.after_length,
            matcher=load_matcher(settings.matcher),
            matcher_name=settings.matcher,
            ttl_s=settings.session_ttl_s,
            max_nodes=settings.max_nodes,
            sampling=sampling_of(settings),
            canonical=services.canonical,
        ),
        rewrite_rules=services.rewrite_rules,
        replay_shape=None if moe_shape is None else ReplayShape(layers=moe_shape[0], top_k=moe_shape[1]),
        required_logprobs=None if settings.require_logprobs is None else LogprobsKind(settings.require_logprobs),
        max_body_bytes=settings.max_body_bytes,
    )


def _described(settings: Settings, services: TurnServices) -> Described:
    """The facts of this server for its OpenAPI document."""
    return Described(
        has_keys=bool(settings.api_key),
        unknown_fields=settings.unknown_fields,
        matchers=tuple(dict.fromkeys([*MATCHERS, settings.matcher])),
        rewrites=services.rewrite_rules.names,
        vocab_size=services.renderer.tokenizer.vocab_size,
        proxy_allow=settings.proxy_allow,
        forwards=services.engine.forwards,
    )


def model_mark(files: ModelFiles) -> ModelMark:
    """The mark of a model's tokenizer and chat template, by which a session knows whether it was made with them."""
    digest = hashlib.sha256()
    for text in (files.tokenizer_json, files.chat_template or "", files.encoder_source or "", files.bos_token or ""):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(encoded) + encoded)
    return ModelMark(name=files.name, digest=digest.digest())


async def serve(settings: Settings, *, announce: Callable[[str], None], progress: Progress) -> signal.Signals | None:
    """Run the server until SIGTERM or SIGINT, and return which it was; raises StorageLost if its store has failed.

    `announce` gets one line when it is ready, `progress` long work before. Raises StartupError for whatever stops the
    start: the port first, so that it is known before anything is loaded.
    """
    clock, failed = SystemClock(), asyncio.Event()
    with listen(settings.host, settings.port) as listener:
        sampling_of(settings)  # a bad file ends the start before a model is fetched and loaded
        side_rules_of(settings)
        async with opened_store(settings, address=url_of(listener), on_failed=lambda _: failed.set()) as store:
            ended_by = await _serve_on(
                listener, settings, store, failed, clock=clock, announce=announce, progress=progress
            )
            if failed.is_set() and store is not None and store.failure is not None:
                raise StorageLost(f"the store of --data-dir has failed: {store.failure.__cause__ or store.failure}")
            return ended_by


async def _serve_on(
    listener: socket.socket,
    settings: Settings,
    store: SessionStore | None,
    failed: asyncio.Event,
    *,
    clock: Clock,
    announce: Callable[[str], None],
    progress: Progress,
) -> signal.Signals | None:
    """Load the model, and serve until a signal comes or `failed` is set."""
    name, cache, has_weights = settings.model, settings.cache_dir, settings.engine is EngineKind.EMBEDDED
    path = await asyncio.to_thread(resolve_model, name, cache_dir=cache, progress=progress, weights=has_weights)
    files = await asyncio.to_thread(load_model_files, path)
    renderer = await asyncio.to_thread(renderer_of, settings, files, clock)
    body_slots = BodySlots(settings.body_slots)
    engine = make_engine(settings, files, path, body_slots, clock, renderer.tokenizer.encoder)
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
        )
        await engine.start()
        lag = LoopLag(app.metrics.loop_lagged, name_culprits=settings.loop_watchdog is Switch.ON)
        lag.start()
        housekeeper = asyncio.get_running_loop().create_task(keep_house(manager, pool), name="keep-house")
        try:
            return await run_uvicorn(settings, app, manager, engine, listener, announce, failed)
        finally:
            housekeeper.cancel()
            await asyncio.wait({housekeeper})
            lag.close()
            await app.aclose()
    finally:
        await engine.aclose()
        pool.close()
