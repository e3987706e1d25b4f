"""The only place that wires things together: settings in, a running server out."""

import asyncio
import contextlib
import errno
import gc
import itertools
import logging
import math
import re
import signal
import socket
import uuid
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from stenograph import __version__
from stenograph.core.clock import Clock, SystemClock
from stenograph.core.errors import InvalidRequest, MethodNotAllowed, StartupError
from stenograph.core.settings import EngineKind, Settings, Switch
from stenograph.embedded.fetch import resolve_model
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.progress import Progress
from stenograph.engine.base import Engine, EngineState, Forwards, statuses_of
from stenograph.engine.fleet import FleetMember, fleet_of
from stenograph.engine.http_engine import Dialect, HttpEngine, HttpEngineOptions
from stenograph.engine.llamacpp import LlamaCpp
from stenograph.engine.llamacpp_text import pieces_of
from stenograph.engine.lmdeploy import LMDeploy
from stenograph.engine.local import EmbeddedEngine
from stenograph.engine.sglang import SGLangChat
from stenograph.engine.sglang_generate import SGLangGenerate
from stenograph.engine.vllm import VLLM
from stenograph.export.replay import ReplayShape
from stenograph.http.auth import Doorman
from stenograph.http.chat_route import ChatDialect
from stenograph.http.completions_route import CompletionDialect
from stenograph.http.connection import ClientConnection
from stenograph.http.control_routes import ControlRoutes
from stenograph.http.metrics import Metrics
from stenograph.http.openapi import openapi_document
from stenograph.http.openapi_routes import Described
from stenograph.http.session_routes import SessionDefaults, SessionRoutes
from stenograph.http.turn_route import TurnRoute, WireDialect
from stenograph.http.wire import count_error, send_error
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.loop_lag import LoopLag
from stenograph.offload.loop_share import LoopShare
from stenograph.offload.memory import trim_memory
from stenograph.offload.pool import INLINE_BELOW_BYTES, CpuPool
from stenograph.protocol.template_kwargs import check_template_kwargs
from stenograph.render.day import Day
from stenograph.render.load import check_renderer, load_renderer
from stenograph.render.model_files import ModelFiles, load_model_files
from stenograph.render.renderer import Renderer
from stenograph.session.manager import Limits, SessionManager
from stenograph.session.matching import MATCHERS, load_matcher
from stenograph.session.turn import TurnServices

log = logging.getLogger(__name__)

HOUSEKEEPING_PERIOD_S = 0.5
EXPIRE_TICKS = 20
TRIM_TICKS = 10

_TURN_PATH = re.compile(r"(?:/sessions/(?P<id>[^/]+))?/v1/(?P<route>chat/completions|completions)/?")


class App:
    """The ASGI application: what makes turns goes straight to its route, everything else through Starlette."""

    def __init__(self, *, turns: Mapping[str, TurnRoute], control: ASGIApp, metrics: Metrics) -> None:
        self._turns = turns
        self._control = control
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._control(scope, receive, send)
        match = _TURN_PATH.fullmatch(scope["path"])
        if match is None:
            return await self._control(scope, receive, send)
        if scope["method"] != "POST":
            error = MethodNotAllowed(scope["method"], scope["path"], allowed=("POST",))
            count_error(self.metrics, error)
            return await send_error(send, error)
        return await self._turns[match["route"]].handle(scope, receive, send, session_id=match["id"])


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
    it is, and which of the arguments the template does not look at.
    """
    kwargs = kwargs or {}
    loaded = load_renderer(files, family_name, allows_special=allows_special, strftime_now=today)
    for note in loaded.notes:
        log.warning("%s", note)
    check_renderer(files, loaded.renderer)
    check_renderer(files, loaded.renderer, kwargs)
    for name in sorted(kwargs.keys() - loaded.renderer.writer.read_by_template(kwargs)):
        log.warning("the chat template does not look at %r, which chat_template_kwargs sets", name)
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
        raise StartupError(f"chat_template_kwargs: {error}") from error
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
) -> tuple[App, SessionManager]:
    """The application around an engine, and the manager that has to be drained at its end. Raises StartupError."""
    body_slots = body_slots or BodySlots(settings.body_slots)
    metrics = Metrics(version=__version__)
    share = LoopShare()
    manager = _make_manager(
        settings, engine=engine, renderer=renderer, pool=pool, share=share, clock=clock, metrics=metrics
    )
    doorman = Doorman(api_keys=settings.api_key, manager=manager)

    def route(dialect: WireDialect) -> TurnRoute:
        return TurnRoute(
            dialect=dialect,
            manager=manager,
            doorman=doorman,
            metrics=metrics,
            clock=clock,
            max_body_bytes=settings.max_body_bytes,
            pool=pool,
            share=share,
            body_slots=body_slots,
        )

    dialects = _wire_dialects(settings, renderer, model)
    sessions = _session_routes(
        settings, manager=manager, metrics=metrics, renderer=renderer, pool=pool, share=share, moe_shape=moe_shape
    )
    control = ControlRoutes(
        sessions=sessions,
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
        openapi=openapi_document(_described(settings, engine, renderer)),
    )
    turns = {path: route(dialect) for path, dialect in dialects.items()}
    return App(turns=turns, control=control.app(), metrics=metrics), manager


def _make_manager(
    settings: Settings,
    *,
    engine: Engine,
    renderer: Renderer,
    pool: CpuPool,
    share: LoopShare,
    clock: Clock,
    metrics: Metrics,
) -> SessionManager:
    """The manager, which tells the metrics what happens, and is what they look at."""
    services = TurnServices(
        engine=engine,
        renderer=renderer,
        pool=pool,
        clock=clock,
        timeout_s=settings.request_timeout_s,
        abort_grace_s=settings.abort_grace_s,
        over_budget=settings.over_budget,
        template_kwargs=settings.chat_template_kwargs,
        share=share,
    )
    limits = Limits(
        max_sessions=settings.max_sessions,
        max_in_flight=settings.max_in_flight,
        max_held_tokens=settings.max_held_tokens,
    )
    manager = SessionManager(services=services, limits=limits, telemetry=metrics)
    metrics.bind(
        num_sessions=lambda: manager.num_sessions,
        num_in_flight=lambda: manager.num_in_flight,
        engine_ready=lambda: engine.health().state is EngineState.READY,
        engines=lambda: statuses_of(engine),
    )
    return manager


def _wire_dialects(settings: Settings, renderer: Renderer, model: str) -> dict[str, WireDialect]:
    """What makes turns, by its path."""
    token_text, unknown_fields = renderer.tokenizer.token_text, settings.unknown_fields
    return {
        "chat/completions": ChatDialect(
            token_text=token_text, model=model, unknown_fields=unknown_fields, reply_mode=settings.reply
        ),
        "completions": CompletionDialect(token_text=token_text, model=model, unknown_fields=unknown_fields),
    }


def _session_routes(
    settings: Settings,
    *,
    manager: SessionManager,
    metrics: Metrics,
    renderer: Renderer,
    pool: CpuPool,
    share: LoopShare,
    moe_shape: tuple[int, int] | None,
) -> SessionRoutes:
    """The sessions' own routes. Raises StartupError for a matcher that cannot be loaded."""
    return SessionRoutes(
        manager=manager,
        metrics=metrics,
        renderer=renderer,
        pool=pool,
        share=share,
        defaults=SessionDefaults(
            history=settings.history,
            matcher=load_matcher(settings.matcher),
            matcher_name=settings.matcher,
            ttl_s=settings.session_ttl_s,
            max_nodes=settings.max_nodes,
        ),
        replay_shape=None if moe_shape is None else ReplayShape(layers=moe_shape[0], top_k=moe_shape[1]),
        max_body_bytes=settings.max_body_bytes,
    )


def _described(settings: Settings, engine: Engine, renderer: Renderer) -> Described:
    """What the OpenAPI document says of this server."""
    return Described(
        has_keys=bool(settings.api_key),
        unknown_fields=settings.unknown_fields,
        matchers=tuple(dict.fromkeys([*MATCHERS, settings.matcher])),
        vocab_size=renderer.tokenizer.vocab_size,
        proxy_allow=settings.proxy_allow,
        forwards=isinstance(engine, Forwards),
    )


def make_dialect(settings: Settings, files: ModelFiles) -> Dialect | None:
    """How the engine's server is spoken to; None for the embedded engine, which is none."""
    match settings.engine:
        case EngineKind.EMBEDDED:
            return None
        case EngineKind.SGLANG:
            return SGLangChat(model=files.name, vocab_size=files.vocab_size, replay=settings.replay)
        case EngineKind.SGLANG_GENERATE:
            return SGLangGenerate(model=files.name, vocab_size=files.vocab_size, replay=settings.replay)
        case EngineKind.LMDEPLOY:
            return LMDeploy(
                model=files.name,
                vocab_size=files.vocab_size,
                eos_token_ids=files.eos_token_ids,
                replay=settings.replay,
            )
        case EngineKind.LLAMACPP:
            pieces = pieces_of(files.tokenizer_json, files.vocab_size)
            return LlamaCpp(model=files.name, vocab_size=files.vocab_size, pieces=pieces)
        case EngineKind.VLLM:
            return VLLM(
                model=files.name,
                vocab_size=files.vocab_size,
                max_context_tokens=files.max_context_tokens,
                eos_token_ids=files.eos_token_ids,
                replay=settings.replay,
            )


def make_engine(settings: Settings, files: ModelFiles, path: Path, body_slots: BodySlots, clock: Clock) -> Engine:
    """The engine that the settings name, or a fleet of several; not yet started."""
    members: list[FleetMember] = []
    for url in settings.engine_url:
        dialect = make_dialect(settings, files)  # each learns of its own server
        if dialect is not None:
            server = HttpEngineOptions(url=url, connect_timeout_s=settings.connect_timeout_s)
            members.append(FleetMember(name=url, engine=HttpEngine(server, dialect, body_slots)))
    if len(members) > 1:
        return fleet_of(members, clock=clock, trial_s=2 * settings.connect_timeout_s)
    if members:
        return members[0].engine
    options = EmbeddedOptions(
        threads=settings.engine_threads,
        max_batch=settings.max_batch,
        kv_tokens=settings.kv_tokens,
        step_tokens=settings.step_tokens,
        reuses_prefixes=settings.prefix_reuse is Switch.ON,
        forward=settings.forward,
        torch_device=settings.torch_device,
        torch_dtype=settings.torch_dtype,
        grammar_backend=settings.grammar_backend,
    )
    return EmbeddedEngine(path, options)


class Server(uvicorn.Server):
    """uvicorn, with our signals (drain, then exit 0) and our ready line."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        manager: SessionManager,
        on_ready: Callable[[], None],
        drain_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._manager = manager
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Drain on SIGTERM and SIGINT; a second one ends the drain. uvicorn would raise the signal again at the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().shutdown(sockets=sockets))
            tasks.create_task(self._manager.drain(timeout_s=self._drain_timeout_s))

    def _on_signal(self) -> None:
        if self.should_exit:
            self.force_exit = True
            self._manager.abandon_all()
        self.should_exit = True
        self._manager.refuse_new()


async def serve(settings: Settings, *, announce: Callable[[str], None], progress: Progress) -> None:
    """Run the server until SIGTERM or SIGINT. `announce` gets one line when it is ready, `progress` long work before.

    Raises StartupError for whatever stops the start: the port first, so that it is known before anything is loaded.
    """
    clock = SystemClock()
    with listen(settings.host, settings.port) as listener:
        path = await asyncio.to_thread(resolve_model, settings.model, cache_dir=settings.cache_dir, progress=progress)
        files = await asyncio.to_thread(load_model_files, path)
        renderer = await asyncio.to_thread(renderer_of, settings, files, clock)
        body_slots = BodySlots(settings.body_slots)
        engine = make_engine(settings, files, path, body_slots, clock)
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
            )
            await engine.start()
            lag = LoopLag(app.metrics.loop_lagged, name_culprits=settings.loop_watchdog is Switch.ON)
            lag.start()
            housekeeper = asyncio.get_running_loop().create_task(keep_house(manager, pool), name="keep-house")
            try:
                await _run_uvicorn(settings, app, manager, listener, announce)
            finally:
                housekeeper.cancel()
                await asyncio.wait({housekeeper})
                lag.close()
        finally:
            await engine.aclose()
            pool.close()


def uvicorn_config(app: App, *, drain_timeout_s: float) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=ClientConnection,
        access_log=False,
        log_config=None,
        lifespan="off",
        server_header=False,
        headers=[("server", "stenograph")],
        # The drain ends every turn by its own deadline; this one is for a client that does not take its reply.
        timeout_graceful_shutdown=math.ceil(drain_timeout_s) + 5,
    )


async def keep_house(manager: SessionManager, pool: CpuPool) -> None:
    """Drop expired sessions and give memory back, for ever.

    A request for an expired session finds it gone without this. Memory is given back soon after sessions were dropped
    or the last turn ended, and now and then while turns are made: what is between them is in pieces that malloc would
    keep.
    """
    num_forgotten = num_held = 0
    for tick in itertools.count(1):
        await asyncio.sleep(HOUSEKEEPING_PERIOD_S)
        if tick % EXPIRE_TICKS == 0 and (num := manager.expire()):
            log.info("dropped %d sessions that were idle for longer than their ttl_s", num)
        came_to_rest = not manager.num_in_flight and manager.num_held_tokens != num_held
        if came_to_rest or manager.num_forgotten != num_forgotten or tick % TRIM_TICKS == 0:
            num_forgotten, num_held = manager.num_forgotten, manager.num_held_tokens
            await pool.run(trim_memory, num_bytes=INLINE_BELOW_BYTES)


async def _run_uvicorn(
    settings: Settings, app: App, manager: SessionManager, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    config = uvicorn_config(app, drain_timeout_s=settings.drain_timeout_s)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host

    def ready() -> None:
        gc.collect()
        gc.freeze()
        announce(f"stenograph ready at http://{shown}:{port} (model {settings.model}, engine {settings.engine})")

    server = Server(config, manager=manager, on_ready=ready, drain_timeout_s=settings.drain_timeout_s)
    await server.serve(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything else. Raises StartupError, in a line, if that cannot be done."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it. asyncio would not set it on them, and an answer's body would wait 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use; choose another with --port") from error
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
