"""Two real servers on one real PostgreSQL, under load: killed, stopped past their lease, and without their database.

Run by `scripts/test-cluster`, which sets KILLS, STOPS and AWAY_S for the long runs; a few of each without. With WORKERS
each server has so many, and each other kill is of a worker.
"""

import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.postgres_server import PostgresServer, postgres_server, programs
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder
from stenograph.cluster.postgres.connection import connect
from stenograph.cluster.postgres.owner import pause
from stenograph.core.clock import SystemClock

from .chat_load import END, Turn, unique_replies

KILLS = int(os.environ.get("KILLS", "1"))
STOPS = int(os.environ.get("STOPS", "2"))
AWAY_S = float(os.environ.get("AWAY_S", "0.7"))
LEASE_S = float(os.environ.get("LEASE", "0.5"))
WORKERS = int(os.environ.get("WORKERS", "1"))
NUM_SESSIONS = max(8, 4 * WORKERS)
MAX_TURNS = 25
ASK_AGAIN_S = 0.03
PATIENCE_S = min(1.0, LEASE_S + 0.2)
"""Time that a client waits for an answer before it asks another server. A stop costs this, and no more."""

FOUND = programs()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(120 + 20 * KILLS + 10 * STOPS + 2 * AWAY_S),
    pytest.mark.skipif(FOUND is None, reason="no PostgreSQL is installed: scripts/test-cluster installs it"),
    pytest.mark.skipif(
        importlib.util.find_spec("asyncpg") is None, reason="asyncpg is not installed: pip install -e '.[postgres]'"
    ),
]

OWNED = (
    "SELECT s.id FROM stenograph_sessions s JOIN stenograph_ends e ON e.session = s.number"
    " JOIN stenograph_owners o ON o.number = e.owner WHERE o.url = ANY($1) AND o.until > clock_timestamp()"
)


@dataclass(slots=True)
class Load:
    """Clients that each work on a session, at whichever server answers, and what was acknowledged to them."""

    urls: list[str]
    client: aiohttp.ClientSession
    is_over: bool = False
    sessions: dict[str, list[Turn]] = field(default_factory=dict[str, list[Turn]])
    acknowledged_at: dict[str, float] = field(default_factory=dict[str, float])
    back_at: dict[str, float] = field(default_factory=dict[str, float])
    """When each session had its first turn since this was cleared."""
    num_acknowledged: int = 0
    num_asked_again: int = 0
    num_refused: int = 0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    may_ask: asyncio.Event = field(default_factory=asyncio.Event)
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    async def post(self, path: str, body: Any, **headers: str) -> Any:
        """Ask until there is an answer: the same body, the same key."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        while True:
            await self.may_ask.wait()
            try:
                url = self.chance.choice(self.urls)
                async with self.client.post(url + path, json=body, headers=named) as response:
                    answer = await response.read()
                    if response.status == 200:
                        return json.loads(answer)
                    error = json.loads(answer)["error"]
                    assert response.status in (409, 503), answer
                    if response.status == 503:
                        assert "retry-after" in response.headers, answer
                    self.num_refused += 1
                    self.refusals[error["code"]] = self.refusals.get(error["code"], 0) + 1
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                self.num_asked_again += 1
            await pause(SystemClock(), ASK_AGAIN_S)

    async def work(self, number: int) -> None:
        while not self.is_over:
            opened = await self.post("/sessions", {}, idempotency_key=f"open {number} {len(self.sessions)}")
            session = opened["session_id"]
            turns = self.sessions.setdefault(session, [])
            messages: list[dict[str, Any]] = []
            while len(turns) < MAX_TURNS and not self.is_over:
                messages.append({"role": "user", "content": f"client {number}, question {len(turns)}"})
                body = {"messages": messages, "return_token_ids": True}
                path = f"/sessions/{session}/v1/chat/completions"
                reply = await self.post(path, body, idempotency_key=f"{session}-{len(turns)}")
                choice = reply["choices"][0]
                text = choice["message"]["content"]
                turns.append(Turn(ids=choice["token_ids"], reply_id=reply["id"], text=text))
                messages.append({"role": "assistant", "content": text})
                self.acknowledged_at[session] = time.monotonic()
                self.back_at.setdefault(session, self.acknowledged_at[session])
                async with self.changed:
                    self.num_acknowledged += 1
                    self.changed.notify_all()

    async def more(self, num: int) -> None:
        """Wait for so many more turns."""
        wanted = self.num_acknowledged + num
        async with self.changed:
            await self.changed.wait_for(lambda: self.num_acknowledged >= wanted)

    async def all_after(self, sessions: set[str], moment: float) -> None:
        """Wait until each of these sessions has had a turn after a moment."""
        async with self.changed:
            await self.changed.wait_for(lambda: all(self.acknowledged_at.get(one, 0.0) > moment for one in sessions))

    def working(self) -> set[str]:
        """Sessions that will have turns."""
        return {session for session, turns in self.sessions.items() if 0 < len(turns) < MAX_TURNS - 4}


@dataclass(slots=True)
class Server:
    """A server's process, which can be started again at the same address."""

    port: int
    flags: tuple[str, ...]
    num_workers: int = 1
    process: Any = None
    workers: list[int] = field(default_factory=list[int])
    """The processes of its workers, in order."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def owners(self) -> list[str]:
        """The names of its processes in the database."""
        return [self.url] if self.num_workers == 1 else [f"{self.url}#{number}" for number in range(self.num_workers)]

    @property
    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "stenograph.cli.main", "serve", "--port", str(self.port), *self.flags),
            *("--log-level", "error", "--workers", str(self.num_workers)),
            stdout=asyncio.subprocess.PIPE,
        )
        line = (await self.process.stdout.readline()).decode()
        assert re.search(r"ready at http://127\.0\.0\.1:\d+ ", line), line
        self.workers = self.children if self.num_workers > 1 else []

    async def kill(self) -> None:
        """Kill all of it at once; its workers would drain without their parent."""
        for number in (self.process.pid, *self.workers):
            os.kill(number, signal.SIGKILL)
        await self.process.wait()
        while any(is_running(number) for number in self.workers):
            await pause(SystemClock(), 0.01)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes that serves."""
        for one in self.workers or [self.process.pid]:
            os.kill(one, number)

    def kill_worker(self, number: int) -> None:
        """Kill a worker, which its parent starts again."""
        os.kill(self.workers[number], signal.SIGKILL)

    async def renewed(self, number: int) -> None:
        """Wait until the parent has started a worker again that was killed."""
        others = {worker for at, worker in enumerate(self.workers) if at != number}
        while not (new := set(self.children) - others - {self.workers[number]}):
            await pause(SystemClock(), 0.01)
        (self.workers[number],) = new


def is_running(number: int) -> bool:
    """Whether a process is there; one that nobody has waited for yet is not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@asynccontextmanager
async def cluster(tmp_path: Path, postgres: PostgresServer) -> AsyncIterator[tuple[list[Server], Load]]:
    """Two servers, and clients at work."""
    model = write_tiny_folder(tmp_path / "tiny")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(SGLangServer(answers=unique_replies(), stop_id=END, remembers=False))
        flags = (
            *("--model", str(model), "--family", "smollm2", "--engine", "sglang-generate", "--engine-url", engine.url),
            *("--store", postgres.url(), "--lease", str(LEASE_S)),
        )
        with socket.socket() as one, socket.socket() as other:
            for free in (one, other):
                free.bind(("127.0.0.1", 0))
            ports = [free.getsockname()[1] for free in (one, other)]
        servers = [Server(port, flags, num_workers=WORKERS) for port in ports]
        await asyncio.gather(*(server.start() for server in servers))
        try:
            timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
            async with aiohttp.ClientSession(timeout=timeout) as client, asyncio.TaskGroup() as tasks:
                load = Load([server.url for server in servers], client)
                load.may_ask.set()
                for number in range(NUM_SESSIONS):
                    tasks.create_task(load.work(number))
                await load.more(3 * NUM_SESSIONS)
                yield servers, load
                await load.more(3 * NUM_SESSIONS)
                load.is_over = True
            async with aiohttp.ClientSession() as client:
                for number, (session, turns) in enumerate(load.sessions.items()):
                    await check(client, load.urls[number % 2], session, turns)
        finally:
            for server in servers:
                if server.process.returncode is None:
                    server.process.send_signal(signal.SIGTERM)
            codes = [await server.process.wait() for server in servers]
        assert codes == [0, 0]


async def check(client: aiohttp.ClientSession, url: str, session: str, turns: list[Turn]) -> None:
    """Every acknowledged turn is there once, with its ids, in its order; one more may be on its way to its client."""
    async with client.get(f"{url}/sessions/{session}") as response:
        assert response.status == 200, await response.text()
        view = await response.json()
    ids = [record["response"]["id"] for record in view["records"]]
    kept = [
        [row[1] for row in record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]]
        for record in view["records"]
    ]
    assert kept[: len(turns)] == [turn.ids for turn in turns]
    assert ids[: len(turns)] == [turn.reply_id for turn in turns]
    assert len(kept) <= len(turns) + 1
    assert len(set(ids)) == len(ids)
    assert view["metadata"]["discarded"] == {"turns": 0, "sampled_tokens": 0}
    assert len(view["metadata"]["strands"]) <= 1


async def owned(postgres: PostgresServer, owners: list[str]) -> set[str]:
    """The sessions of these owners' leases."""
    connection = await connect(postgres.url(), name="test", timeout_s=5)
    try:
        return {row[0] for row in await connection.fetch(OWNED, owners)}
    finally:
        connection.terminate()


def say(line: str) -> None:
    """Say how far a long run is."""
    sys.stdout.write(f"\n{line}")
    sys.stdout.flush()


async def killed(servers: list[Server], load: Load, postgres: PostgresServer) -> list[float]:
    """Kill a server, again and again; the times until its sessions had a turn again."""
    times_s: list[float] = []
    for number in range(KILLS):
        victim, worker = servers[number % 2], None if WORKERS == 1 or number % 4 > 1 else number // 4 % WORKERS
        await load.more(3 * NUM_SESSIONS)
        theirs = await owned(postgres, victim.owners if worker is None else [victim.owners[worker]])
        load.back_at.clear()
        if worker is None:
            await victim.kill()
        else:
            victim.kill_worker(worker)
        moment = time.monotonic()
        theirs &= load.working()
        await load.all_after(theirs, moment)
        times_s += [load.back_at[one] - moment for one in theirs]
        say(f"kill {number + 1} of {KILLS}: {len(theirs)} sessions back after {time.monotonic() - moment:.2f} s")
        if worker is not None:
            await victim.renewed(worker)
            continue
        load.may_ask.clear()  # beside clients at full speed a start takes most of the time
        await victim.start()
        load.may_ask.set()
    return times_s


async def stopped(servers: list[Server], load: Load, postgres: PostgresServer) -> tuple[int, int]:
    """Stop a server past its leases, ask it for sessions that another has by then, and wake it, until so many owners
    that had sessions were stopped; how many owners, and how many questions the woken ones got."""
    num_stopped = num_asked = num_rounds = 0
    while num_stopped < STOPS:
        victim, other = servers[num_rounds % 2], servers[1 - num_rounds % 2]
        had_by = [await owned(postgres, [owner]) for owner in victim.owners]
        had_by = [had & load.working() for had in had_by]
        theirs = set[str]().union(*had_by)
        victim.signal_all(signal.SIGSTOP)
        try:
            moment = time.monotonic()
            load.urls = [other.url]
            await load.all_after(theirs, moment)
            had = {one: len(load.sessions[one]) for one in theirs}
            async with aiohttp.ClientSession() as client:
                asked = [asyncio.ensure_future(seen(client, victim.url, *one)) for one in had.items() for _ in range(2)]
                await load.more(1)
                victim.signal_all(signal.SIGCONT)
                await asyncio.gather(*asked)
            num_asked += len(asked)
        finally:
            victim.signal_all(signal.SIGCONT)
            load.urls = [server.url for server in servers]
        num_rounds += 1
        num_stopped += sum(map(bool, had_by))
        if num_rounds % 10 == 0 or num_stopped >= STOPS:
            say(f"{num_stopped} owners stopped in {num_rounds} rounds, the last {time.monotonic() - moment:.2f} s")
        await load.more(NUM_SESSIONS)
    return num_stopped, num_asked


async def seen(client: aiohttp.ClientSession, url: str, session: str, num_turns: int) -> None:
    """Ask a server that is stopped for a session that has gone on: it says what there is, or that it cannot."""
    async with client.get(f"{url}/sessions/{session}?records=delta") as response:
        answer = await response.json()
        if response.status != 503:
            assert response.status == 200, answer
            assert len(answer["records"]) >= num_turns, "an answer from memory that is not current any more"


async def away(load: Load, postgres: PostgresServer) -> None:
    """Kill the database, and start it again after a while."""
    await asyncio.to_thread(postgres.kill)
    before = load.refusals.get("storage_unavailable", 0)
    await pause(SystemClock(), AWAY_S)
    await asyncio.to_thread(postgres.start)
    moment = time.monotonic()
    await load.all_after(load.working(), moment)
    assert load.refusals.get("storage_unavailable", 0) > before
    sys.stdout.write(f"\ndatabase away {AWAY_S:g} s: all sessions go on {time.monotonic() - moment:.1f} s later\n")


async def asked(url: str, query: str) -> list[Any]:
    connection = await connect(url, name="test", timeout_s=5)
    try:
        return list(await connection.fetch(query))
    finally:
        connection.terminate()


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_server_that_gets_no_more_connections_says_so_and_ends(tmp_path: Path, workers: int) -> None:
    """Its role may have so many connections as it has leases, and those for all else break."""
    assert FOUND is not None
    model = write_tiny_folder(tmp_path / "tiny")
    async with AsyncExitStack() as stack:
        postgres = stack.enter_context(postgres_server(FOUND))
        engine = await stack.enter_async_context(SGLangServer(answers=unique_replies(), stop_id=END, remembers=False))
        await asked(postgres.url(), f"CREATE ROLE few LOGIN CONNECTION LIMIT {5 * workers}")
        await asked(postgres.url(), "ALTER SCHEMA public OWNER TO few")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        store = postgres.url().replace("//stenograph@", "//few@")
        flags = ("--model", str(model), "--family", "smollm2", "--engine", "sglang-generate")
        server = Server(port, (*flags, "--engine-url", engine.url, "--store", store, "--lease", "1"), workers)
        await server.start()
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        try:
            async with client.post(f"{server.url}/sessions") as response:
                session = (await response.json())["session_id"]
            await asked(postgres.url(), f"ALTER ROLE few CONNECTION LIMIT {workers}")
            broken = "FROM pg_stat_activity WHERE usename = 'few' AND application_name <> 'stenograph lease'"
            await asked(postgres.url(), f"SELECT pg_terminate_backend(pid) {broken}")
            body = {"messages": [{"role": "user", "content": "a"}]}
            async with client.post(f"{server.url}/sessions/{session}/v1/chat/completions", json=body) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (503, "storage_unavailable")
            while True:
                async with client.get(f"{server.url}/ready") as response:
                    if response.status == 503:
                        break
        finally:
            server.process.send_signal(signal.SIGTERM)
            code = await server.process.wait()
        assert code == 0


async def test_nodes_killed_stopped_and_without_their_database_lose_no_turn(tmp_path: Path) -> None:
    assert FOUND is not None
    with postgres_server(FOUND) as postgres:
        async with cluster(tmp_path, postgres) as (servers, load):
            took_s = sorted(await killed(servers, load, postgres))
            num_stopped, num_seen = await stopped(servers, load, postgres)
            if AWAY_S:
                await away(load, postgres)
        p99_s = took_s[int(0.99 * len(took_s))] if took_s else 0.0
        assert p99_s <= LEASE_S + 1.5, took_s
        sys.stdout.write(
            f"\n{KILLS} kills: {len(took_s)} sessions taken over, p99 {p99_s:.2f} s after it, lease {LEASE_S:g} s;"
            f" {num_stopped} owners stopped past their leases, {num_seen} questions to the woken;"
            f" {load.num_acknowledged} turns acknowledged in {len(load.sessions)} sessions,"
            f" {load.num_asked_again} asked again, refused"
            f" {load.refusals}; 0 lost, 0 doubled, 0 forks\n"
        )
