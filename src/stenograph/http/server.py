"""Runs uvicorn on a socket, with our own connections and signal handling, until shutdown."""

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn

from stenograph.engine.base import Engine
from stenograph.http.lifecycle import tell_of_lost_sessions, tell_of_readiness, tell_of_signal
from stenograph.http.listen import url_of
from stenograph.http.mounts import App, WebGuard
from stenograph.http.processes import Processes
from stenograph.http.settings import Settings
from stenograph.session.manager import SessionManager

YOUNG_OBJECTS = 5_000
"""Allocations between two runs of the garbage collector over its youngest objects. With Python's 700 it took 7 % of a
small chat's CPU; a run takes hardly longer, because most of what was allocated has gone by then (docs/LOG.md)."""

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """uvicorn, with our signals, which drain, and a word when it listens.

    `ended_by` is the first signal that came, None before one.
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
        http=processes.connections(settings, app),
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
