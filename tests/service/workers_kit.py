"""Two workers of one server in one process: each with its manager, its port and its socket, around one engine."""

import asyncio
import importlib.util
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import aiohttp
import pytest
from yarl import URL

from standins.postgres_server import PostgresServer, postgres_server, programs
from standins.scripted_engine import Script, ScriptedEngine
from standins.shared_rows import MemoryRows, SharedTables
from stenograph.cli.parts import PARTS
from stenograph.cli.settings_table import CommandSettings as Settings
from stenograph.cluster.place import WorkerPlace
from stenograph.cluster.postgres.shared_rows import SharedRows
from stenograph.cluster.postgres.store import PostgresStore
from stenograph.cluster.shared_capacity import CapacityPage
from stenograph.cluster.worker import Worker
from stenograph.core.clock import Clock, SystemClock
from stenograph.engine.base import Engine, GenerateRequest
from stenograph.http.app import make_app
from stenograph.http.listen import listen, url_of
from stenograph.http.server import Server, uvicorn_config
from stenograph.offload.pool import CpuPool
from stenograph.session.manager import SessionManager
from stenograph.store.base import SessionStore
from stenograph.store.folder import DataFolder
from stenograph.text.renderer import Renderer

from .conftest import Live


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Workers as clients see them: `lives[k]` asks worker k, whosever the session is."""

    lives: list[Live]
    servers: list[Server]
    engine: ScriptedEngine

    async def open_at(self, worker: int, **options: Any) -> str:
        """A session of that worker's."""
        session = await self.lives[worker].open(**options)
        assert int(session[:2], 16) == worker
        return session

    def cut(self, worker: int) -> None:
        """End every connection that a worker has, as its death does."""
        for connection in list(self.servers[worker].server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def held_back(self, worker: int) -> None:
        """Wait until a connection of that worker waits for whoever reads it."""
        while not any(connection.flow.write_paused for connection in self.servers[worker].server_state.connections):  # type: ignore[union-attr]  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def at_rest(self) -> None:
        """Wait until no worker has a request."""
        while any(server.server_state.tasks for server in self.servers):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A database that servers share: each process has a way to it, and its leases run by a server's clock."""

    rows: Callable[[], SharedRows]
    clock: Clock = field(default_factory=SystemClock)
    lease_s: float = 30.0


@contextmanager
def real_postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL; where there is none the test is skipped."""
    if (found := programs()) is None:
        pytest.skip("no PostgreSQL is installed: scripts/test-cluster installs it")
    if importlib.util.find_spec("asyncpg") is None:
        pytest.skip("asyncpg is not installed: pip install -e '.[postgres]'")
    with postgres_server(found) as server:
        yield server


def places(folder: Path, num: int) -> list[WorkerPlace]:
    """The places of so many workers, whose sockets are in a folder."""
    page, sockets, listeners = CapacityPage(num), [], []
    folder = Path(tempfile.mkdtemp(dir=folder))
    for number in range(num):
        path = folder / f"worker-{number}.sock"
        listener = socket(AF_UNIX)
        listener.bind(str(path))
        listener.listen(128)
        listener.setblocking(False)
        sockets.append(path)
        listeners.append(listener)
    instance_id = uuid.uuid4().hex
    return [
        WorkerPlace(number=number, sockets=tuple(sockets), listener=listener, page=page, instance_id=instance_id)
        for number, listener in enumerate(listeners)
    ]


@asynccontextmanager
async def serving(
    place: WorkerPlace,
    engine: Engine,
    renderer: Renderer,
    *,
    folder: DataFolder | None = None,
    database: Database | None = None,
    server_listener: socket | None = None,
    patience_s: float = 30.0,
    starts: bool = False,
    moe_shape: tuple[int, int] = (2, 2),
    **settings: Any,
) -> AsyncIterator[tuple[str, SessionManager, Server]]:
    """One worker, whose engine has been started, or is started here: its URL, its manager, and its server.

    With a `database` its server shares it, and other servers reach it at `server_listener`, its first worker's.
    """
    made = Settings(drain_timeout_s=10.0, store=None if database is None else "postgresql://of/a/test", **settings)
    worker, pool = Worker(place, made, patience_s=patience_s), CpuPool(2)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(
            listen("127.0.0.1", 0) if place.number or not server_listener else server_listener
        )
        store: SessionStore | None
        if database is None:
            store = await stack.enter_async_context(
                worker.opened_store(made, folder, address="", on_failed=lambda _: None)
            )
        else:
            assert server_listener is not None
            name = f"{url_of(server_listener)}#{place.number}"
            opening = PostgresStore.open(
                database.rows(), database.clock, url=name, lease_s=database.lease_s, memory=place
            )
            store = await stack.enter_async_context(aclosing(await opening))
        app, manager = make_app(
            made,
            engine=engine,
            renderer=renderer,
            pool=pool,
            model="tiny",
            clock=SystemClock(),
            moe_shape=moe_shape,
            store=store,
            processes=worker,
            parts=PARTS,
        )
        if starts:
            await engine.start()
        ready = asyncio.Event()
        config = uvicorn_config(app, made, worker)
        server = Server(config, manager=manager, on_ready=ready.set, drain_timeout_s=10.0, processes=worker)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(sockets=[listener]))
            await ready.wait()
            yield url_of(listener), manager, server
            server.should_exit = True
            await worker.aclose()
        await app.aclose()
    pool.close()


@asynccontextmanager
async def two_workers(
    folder: Path,
    renderer: Renderer,
    *,
    data_dir: Path | None = None,
    tables: SharedTables | None = None,
    database: Database | None = None,
    engine: ScriptedEngine | None = None,
    num: int = 2,
    max_context_tokens: int = 4096,
    model: Callable[[GenerateRequest], Script] | None = None,
    **settings: Any,
) -> AsyncIterator[Workers]:
    """Workers around one scripted engine, where `model` answers what nothing is planned for. `tables` are a `database`
    in memory; an `engine` that is given may be several servers'."""
    vocab_size = renderer.tokenizer.vocab_size
    engine = engine or ScriptedEngine(vocab_size=vocab_size, max_context_tokens=max_context_tokens, model=model)
    database = Database(rows=lambda: MemoryRows(tables)) if tables is not None else database
    data = None if data_dir is None else DataFolder(data_dir, address="here")
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as client:
        if data is not None:
            stack.callback(data.close)
        lives: list[Live] = []
        servers: list[Server] = []
        at = None if database is None else listen("127.0.0.1", 0)
        for place in places(folder, num):
            stack.callback(place.listener.close)
            url, manager, server = await stack.enter_async_context(
                serving(
                    place,
                    engine,
                    renderer,
                    folder=data,
                    data_dir=data_dir,
                    database=database,
                    server_listener=at,
                    **settings,
                )
            )
            lives.append(Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client))
            servers.append(server)
        yield Workers(lives=lives, servers=servers, engine=engine)
        await client.close()
        for server in servers:  # side by side
            server.should_exit = True


HEAD_SIZES = [(100, 0), (101, 0), (0, 65_536), (0, 65_537), (100, 65_536)]
"""The headers and bytes of heads at their limits and beyond them."""


async def check_head_limits(lives: list[Live], session: str, num_headers: int, num_bytes: int) -> None:
    """Send a head of this size to each process: all give one answer, by the limits."""
    head = f"GET /sessions/{session} HTTP/1.1\r\nhost: localhost\r\n".encode()
    num_long = 8 if num_bytes else 0
    head += b"".join(b"x-%d:1\r\n" % number for number in range(num_headers - 2 - num_long))
    head += b"".join(b"y-%d:%b\r\n" % (number, b"a" * 8000) for number in range(num_long))
    head += b"z:" + b"a" * (num_bytes - len(head) - 6) + b"\r\n\r\n"
    firsts: list[bytes] = []
    for live in lives:
        url = URL(live.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head)
        firsts.append(await reader.readline())
        writer.close()
    is_within = num_headers <= 100 and num_bytes <= 65_536
    assert {first.split()[1] for first in firsts} == {b"200" if is_within else b"431"}
