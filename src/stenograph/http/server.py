"""Runs a server on a socket until a signal: its store, its model, its engine and application, and uvicorn with our own
connections and signal handling."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import math
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

import uvicorn

from stenograph.core.clock import Clock, SystemClock
from stenograph.core.errors import StorageLost
from stenograph.core.settings import Switch
from stenograph.engine.base import Engine
from stenograph.http.app import make_app
from stenograph.http.connection import connections_of
from stenograph.http.engines import make_engine
from stenograph.http.lifecycle import keep_house, start_engine, tell_of_lost_sessions, tell_of_readiness, tell_of_signal
from stenograph.http.listen import url_of
from stenograph.http.loaded_model import LoadedModel, load_model, model_mark
from stenograph.http.mounts import App, WebGuard
from stenograph.http.part import Part
from stenograph.http.processes import Processes
from stenograph.http.rule_files import check_files
from stenograph.http.settings import Settings
from stenograph.model.progress import Progress
from stenograph.offload.body_slots import BodySlots
from stenograph.offload.loop_lag import LoopLag
from stenograph.offload.pool import CpuPool
from stenograph.session.manager import SessionManager
from stenograph.store.base import SessionStore
from stenograph.store.folder import DataFolder

YOUNG_OBJECTS = 5_000
"""Allocations between two runs of the garbage collector over its youngest objects. With Python's 700 it took 7 % of a
small chat's CPU; a run takes hardly longer, because most of what was allocated has gone by then (docs/LOG.md)."""

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn, with our signals, which drain, and a word when it listens.

    `ended_by` is the first signal, None before one.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        manager: SessionManager,
        on_ready: Callable[[], None],
        drain_timeout_s: float,
        processes: Processes,
    ) -> None:
        super().__init__(config)
        self._processes = processes
        self._manager = manager
        self._on_ready = on_ready
        self._drain_timeout_s = drain_timeout_s
        self.ended_by: signal.Signals | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Drain on SIGTERM and SIGINT; a second one ends the drain. uvicorn would raise the signal again at the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.servers += await self._processes.listen(self.config, self.server_state)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().shutdown(sockets=sockets))
            tasks.create_task(self._manager.drain(timeout_s=self._drain_timeout_s))
        tell_of_lost_sessions(self._manager)

    async def end_after(self, failed: asyncio.Event) -> None:
        """End the server once the store has failed for good: no turn can be acknowledged any more."""
        await failed.wait()
        log.error("the store has failed: the server ends once its answers have gone out")
        self._manager.refuse_new()
        self._manager.abandon_all()
        self.should_exit = True

    def _on_signal(self, number: signal.Signals) -> None:
        if self.ended_by is None:
            self.ended_by = number
            tell_of_signal(number, self._manager, drain_timeout_s=self._drain_timeout_s)
        if self.should_exit:
            self.force_exit = True
            self._manager.abandon_all()
        self.should_exit = True
        self._manager.refuse_new()


def uvicorn_config(app: App, settings: Settings, processes: Processes) -> uvicorn.Config:
    """The configuration of uvicorn."""
    return uvicorn.Config(
        processes.serving(WebGuard(app, settings, app.metrics, app.refuse), app),
        http=connections_of(settings, app.metrics, app.refuse),
        ws="none",
        access_log=False,
        log_config=None,
        lifespan="off",
        interface="asgi3",
        server_header=False,
        proxy_headers=False,  # of use to few routes, which read them themselves
        headers=[("server", "stenograph")],
        # The drain ends every turn by its own deadline; this one is for a client that does not take its reply.
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + settings.abort_grace_s) + 5,
    )


async def run_uvicorn(
    settings: Settings,
    app: App,
    manager: SessionManager,
    engine: Engine,
    listener: socket.socket,
    announce: Callable[[str], None],
    failed: asyncio.Event,
    *,
    processes: Processes,
) -> signal.Signals | None:
    """Serve on `listener` until a signal, and return it, or until `failed` is set. `announce` gets a line once the
    engine is ready."""
    config = uvicorn_config(app, settings, processes)
    url = url_of(listener)

    def ready() -> None:
        announce(f"stenograph ready at {url} (model {settings.model}, engine {settings.engine})")

    async def listening() -> None:
        await listens.wait()
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        await tell_of_readiness(engine, url=url, ready=ready)

    listens = asyncio.Event()
    server = Server(
        config, manager=manager, on_ready=listens.set, drain_timeout_s=settings.drain_timeout_s, processes=processes
    )
    loop = asyncio.get_running_loop()
    tasks = {
        loop.create_task(listening(), name="tell-of-readiness"),
        loop.create_task(server.end_after(failed), name="end-after-failure"),
    }
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return server.ended_by


@contextlib.asynccontextmanager
async def held_folder(settings: Settings, *, address: str) -> AsyncGenerator[DataFolder | None]:
    """The folder of `--data-dir`, None without one. Raises StartupError. `address` is where the server listens."""
    folder = None if settings.data_dir is None else DataFolder(settings.data_dir, address=address)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


async def serve(
    listener: socket.socket,
    settings: Settings,
    *,
    announce: Callable[[str], None],
    progress: Progress,
    parts: tuple[Part, ...],
    processes: Processes | None = None,
) -> signal.Signals | None:
    """Run the server until SIGTERM or SIGINT, and return the signal; raises StorageLost if its store has failed.

    `announce` gets one line when it is ready, `progress` long work before. `parts` stand beside the core. `processes`
    None: the server has one. Raises StartupError if it does not start.
    """
    clock = SystemClock()
    check_files(settings)
    async with held_folder(settings, address=url_of(listener)) as folder:

        async def loaded() -> LoadedModel:
            return await asyncio.to_thread(load_model, settings, clock, progress, weights=settings.loads_weights)

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
        parts=parts,
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
