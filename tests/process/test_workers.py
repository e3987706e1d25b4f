"""`serve --workers`: a worker that is killed is back soon with all its sessions, and the others notice nothing.

A few kills here; `scripts/test-cluster` sets KILLS and KILL_EVERY_S for the long run.
"""

import asyncio
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder

from .chat_load import END, Load, check, unique_replies

NUM_KILLS = int(os.environ.get("KILLS", "3"))
KILL_EVERY_S = float(os.environ.get("KILL_EVERY_S", "0"))
"""The time from one kill to the next; 0: the next comes once the worker's sessions are back."""
NUM_CLIENTS = 6
"""Clients of the sessions of one worker."""

pytestmark = pytest.mark.timeout(90 + (10 + KILL_EVERY_S) * NUM_KILLS)


@dataclass(slots=True)
class Parent:
    """The parent of a server's workers, and where it listens."""

    process: asyncio.subprocess.Process
    url: str = ""

    @property
    def children(self) -> list[int]:
        """The processes of the workers and of their engine, the oldest first."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        assert self.process.stdout is not None
        await self.process.stdout.read()
        return await self.process.wait()


@asynccontextmanager
async def started(*flags: str, workers: int = 2, said: Any = None) -> AsyncIterator[Parent]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--workers", str(workers)),
        *("--family", "smollm2", "--log-level", "error", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=said,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"(http://127\.0\.0\.1:\d+) \(model .*, 2 workers\)", line)
        yield Parent(process, "" if found is None else found[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # to the end of what it says, which closes its pipes


@asynccontextmanager
async def connected_to(worker: int, url: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client with one connection, which that worker has taken."""
    while True:
        client = aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1))
        async with client:
            async with client.post("/sessions", json={}) as answer:
                session = (await answer.json())["session_id"]
            if int(session[:2], 16) == worker:
                yield client
                return


class AlwaysUp(asyncio.Event):
    """The port is open all the time: whose connection broke asks again at once."""

    async def wait(self) -> Literal[True]:
        return True


@dataclass(slots=True)
class Undisturbed:
    """Clients of one worker's sessions, on its own connections: none of their requests may fail."""

    url: str
    worker: int
    is_over: bool = False
    waits_s: list[float] = field(default_factory=list[float])

    async def work(self) -> None:
        async with connected_to(self.worker, self.url) as client:
            async with client.post("/sessions", json={}) as answer:
                session = (await answer.json())["session_id"]
            messages: list[dict[str, Any]] = []
            while not self.is_over:
                messages = [*messages[-20:], {"role": "user", "content": f"question {len(self.waits_s)}"}]
                began = time.monotonic()
                path = f"/sessions/{session}/v1/chat/completions"
                async with client.post(path, json={"messages": messages[-1:]}) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                self.waits_s.append(time.monotonic() - began)
                if self.waits_s and len(self.waits_s) % 50 == 0:
                    async with client.post("/sessions", json={}) as answer:
                        session = (await answer.json())["session_id"]


async def is_back(client: aiohttp.ClientSession, url: str, session: str) -> float:
    """The time until a session of a worker that was just killed is answered for again."""
    began = time.monotonic()
    while True:
        try:
            async with client.get(f"{url}/sessions/{session}/outcome") as answer:
                if answer.status == 200:
                    return time.monotonic() - began
                assert answer.status == 503, await answer.text()
        except aiohttp.ClientError:
            pass


async def test_a_worker_that_is_killed_loses_nothing_is_back_soon_and_disturbs_no_other(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    load, back_s, restarts = Load(up=AlwaysUp()), [], 0
    async with SGLangServer(answers=unique_replies(), stop_id=END, remembers=False) as engine:
        flags = ("--model", str(model), "--engine", "sglang-generate", "--engine-url", engine.url)
        async with started(*flags, "--data-dir", str(tmp_path / "data")) as parent:
            load.url = parent.url
            undisturbed = Undisturbed(parent.url, worker=1)
            workers = parent.children
            fresh = aiohttp.TCPConnector(force_close=True)
            async with (
                aiohttp.ClientSession() as client,
                aiohttp.ClientSession(connector=fresh) as looker,
                connected_to(0, parent.url) as near,
            ):
                async with asyncio.TaskGroup() as tasks:
                    for number in range(NUM_CLIENTS):
                        tasks.create_task(load.work(client if number else near, number))
                    for _ in range(NUM_CLIENTS):
                        tasks.create_task(undisturbed.work())
                    await load.acknowledged(2 * NUM_CLIENTS)
                    while (session := next((one for one in load.sessions if one.startswith("00")), None)) is None:
                        await load.acknowledged(load.num_acknowledged + 1)
                    for _ in range(NUM_KILLS):
                        began, before = time.monotonic(), load.num_acknowledged
                        await load.acknowledged(before + random.Random(before).randrange(1, 40))
                        (killed,) = set(parent.children) - {workers[1]}
                        os.kill(killed, signal.SIGKILL)
                        back_s.append(await is_back(looker, parent.url, session))
                        restarts += 1
                        await asyncio.sleep(max(0.0, KILL_EVERY_S - (time.monotonic() - began)))
                    await load.acknowledged(load.num_acknowledged + 2 * NUM_CLIENTS)
                    load.is_over = undisturbed.is_over = True
                for one, turns in load.sessions.items():
                    await check(client, load, one, turns)
                async with client.get(f"{parent.url}/metrics") as answer:
                    text = await answer.text()
                assert f'stenograph_worker_restarts_total{{worker="0"}} {restarts}.0' in text
                assert 'stenograph_worker_restarts_total{worker="1"} 0.0' in text
            assert workers[1] in parent.children
            assert await parent.end(signal.SIGTERM) == 0
    back_s.sort()
    waits_s = sorted(undisturbed.waits_s)
    sys.stdout.write(
        f"\n{NUM_KILLS} kills of a worker: {load.num_acknowledged} turns acknowledged, {load.num_asked_again} requests"
        f" asked again, 0 lost, 0 doubled; its sessions back after {back_s[len(back_s) // 2]:.2f} s (median),"
        f" {back_s[max(0, -(-len(back_s) * 99 // 100) - 1)]:.2f} s (p99); {len(waits_s)} turns of the other worker,"
        f" 0 failed, the longest {waits_s[-1]:.2f} s\n"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_to_the_parent_ends_all(number: signal.Signals, code: int, tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    async with started("--model", str(model)) as parent:  # with an engine of its own, which ends too
        children = parent.children
        assert len(children) == 3
        async with aiohttp.ClientSession(parent.url, connector=aiohttp.TCPConnector(force_close=True)) as client:
            sessions: set[str] = set()
            while {session[:2] for session in sessions} != {"00", "01"}:
                async with client.post("/sessions", json={}) as answer:
                    sessions.add((await answer.json())["session_id"])
            for session in sessions:  # each through whichever worker comes
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
                async with client.post(f"/sessions/{session}/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
            async with client.get("/sessions") as answer:
                assert {one["session_id"] for one in (await answer.json())["sessions"]} == sessions
        assert await parent.end(number) == code
        assert not any(is_there(pid) for pid in children)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_the_workers_end_with_their_parent(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    async with started("--model", str(model), said=asyncio.subprocess.PIPE) as parent:
        assert parent.process.stderr is not None
        parent.process.kill()
        said = await parent.process.stderr.read()  # which ends with the last process that has it
        assert b"the parent process has ended" in said


async def test_a_worker_whose_store_is_lost_ends_the_server_with_74(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    async with SGLangServer(answers=lambda _: ReplyScript(ids=(5, END), matched=END), stop_id=END) as engine:
        flags = ("--model", str(model), "--engine", "sglang-generate", "--engine-url", engine.url)
        said = asyncio.subprocess.PIPE
        async with started(*flags, "--data-dir", str(tmp_path / "data"), said=said) as parent:
            async with aiohttp.ClientSession(parent.url) as client:
                async with client.post("/sessions", json={}) as answer:
                    session = (await answer.json())["session_id"]
                most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                worker = parent.children[int(session[:2], 16)]
                resource.prlimit(worker, resource.RLIMIT_FSIZE, (1024, most))
                body = {"messages": [{"role": "user", "content": "hi"}]}
                async with client.post(f"/sessions/{session}/v1/chat/completions", json=body) as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "storage_unavailable")
            assert parent.process.stderr is not None
            lines = (await parent.process.stderr.read()).decode().splitlines()
            assert await parent.process.wait() == 74
            assert lines[-1].startswith("stenograph: the store of --data-dir has failed:"), lines


async def test_what_stops_the_start_of_a_worker_stops_the_server(tmp_path: Path) -> None:
    model = write_tiny_folder(tmp_path / "tiny")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "01.sqlite3").write_bytes(b"no database" * 1000)
    said = asyncio.subprocess.PIPE
    async with started("--model", str(model), "--data-dir", str(folder), said=said) as parent:
        assert parent.url == ""
        assert parent.process.stderr is not None
        lines = (await parent.process.stderr.read()).decode().splitlines()
        assert await parent.process.wait() == 2
        assert lines[-1].startswith("stenograph: "), lines
        assert "01.sqlite3" in lines[-1]
