"""The CPU of a chat of scenario B with one worker, with two on connections that reach the owner, and passed on; and of
a small GET at its owner and passed on.

    python -m benchmarks.workers [ROUNDS]

The ways are measured in turn, in one run: of a shared machine only their differences say something. CPU is that of the
workers alone; chats/s have the load and the engine's stand-in on the same cores.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from stenograph.bench.kit.processes import Children, cpu_s_of
from stenograph.bench.kit.reply_shape import ReplyShape, reply_content
from stenograph.bench.kit.servers import start_serve, start_standin
from stenograph.testing.tiny.llama import write_tiny_folder

NUM_SESSIONS, NUM_TURNS, NUM_GETS = 32, 15, 1500
SHAPE = ReplyShape(vocab_size=250)
WAYS = ((1, 0.0), (2, 0.0), (2, 0.5), (2, 1.0))
"""Numbers of workers, and the share of sessions whose requests are passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server, and the processes that serve."""

    url: str
    pids: Sequence[int]

    def cpu_s(self) -> float:
        return sum(map(cpu_s_of, self.pids))


def started(children: Children, model: Path, engine: str, num_workers: int) -> Served:
    flags = ["--model", str(model), "--family", "smollm2", "--engine", "sglang", "--engine-url", engine]
    before = children_of(os.getpid())
    _, url = start_serve(children, [*flags, "--log-level", "warning", "--workers", str(num_workers)])
    (pid,) = children_of(os.getpid()) - before
    return Served(url=url, pids=[pid] if num_workers == 1 else sorted(children_of(pid)))


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


async def connected(url: str, worker: int | None) -> tuple[aiohttp.ClientSession, str]:
    """A client with one connection, which that worker has taken, and a session of its own."""
    while True:
        client = aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1))
        async with client.post("/sessions", json={}) as answer:
            session: str = (await answer.json())["session_id"]
        if worker is None or int(session[:2], 16) == worker:
            return client, session
        await client.close()


async def measured(served: Served, num_workers: int, passed_on: float) -> tuple[float, float]:
    """Milliseconds of CPU a chat, and chats a second."""
    ready = asyncio.Barrier(NUM_SESSIONS + 1)

    async def work(number: int) -> None:
        owner = number % 2 if num_workers > 1 else None
        client, session = await connected(served.url, owner)
        if owner is not None and number < passed_on * NUM_SESSIONS:
            await client.close()
            client, _ = await connected(served.url, 1 - owner)
        messages: list[Mapping[str, str]] = []
        await ready.wait()
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"question {turn} " + "x" * 200})
            path = f"/sessions/{session}/v1/chat/completions"
            async with client.post(path, json={"messages": messages}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            messages.append({"role": "assistant", "content": reply_content(SHAPE)})
        await client.close()

    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(work(number)) for number in range(NUM_SESSIONS)]
        await ready.wait()
        began, cpu_s = time.monotonic(), served.cpu_s()
        await asyncio.wait(clients)
        num = NUM_SESSIONS * NUM_TURNS
        return (served.cpu_s() - cpu_s) * 1e3 / num, num / (time.monotonic() - began)


async def measured_get(served: Served, *, is_passed_on: bool) -> float:
    """Milliseconds of CPU of a small GET, one after the other on a connection to each of two workers."""
    ends = [await connected(served.url, worker) for worker in (0, 1)]
    clients, sessions = [client for client, _ in ends], [session for _, session in ends]
    if is_passed_on:
        sessions.reverse()

    async def work(client: aiohttp.ClientSession, session: str, num: int) -> None:
        for _ in range(num):
            async with client.get(f"/sessions/{session}/outcome") as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    async def all_work(num: int) -> None:
        await asyncio.gather(*(work(*one, num) for one in zip(clients, sessions, strict=True)))

    await all_work(20)
    cpu_s = served.cpu_s()
    await all_work(NUM_GETS)
    cpu_s = served.cpu_s() - cpu_s
    for client in clients:
        await client.close()
    return cpu_s * 1e3 / (2 * NUM_GETS)


def main(num_rounds: int) -> None:
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([f"{root}/src", *filter(None, [os.environ.get("PYTHONPATH")])])
    with TemporaryDirectory() as folder, Children() as children:
        model = write_tiny_folder(Path(folder) / "tiny")
        _, engine = start_standin(children, SHAPE)
        servers = {num: started(children, model, engine, num) for num in (1, 2)}
        rounds = [
            [asyncio.run(measured(servers[num], num, passed_on)) for num, passed_on in WAYS]
            for _ in range(num_rounds + 1)
        ][1:]
        gets = [
            [asyncio.run(measured_get(servers[2], is_passed_on=passed_on)) for passed_on in (False, True)]
            for _ in range(num_rounds + 1)
        ][1:]
    own_ms, other_ms = (statistics.median(column) for column in zip(*gets, strict=True))
    sys.stdout.write(f"a small GET: {own_ms:.3f} ms CPU at its owner, {other_ms:.3f} passed on\n")
    for (num, passed_on), figures in zip(WAYS, zip(*rounds, strict=True), strict=True):
        cpu_ms, per_s = (statistics.median(column) for column in zip(*figures, strict=True))
        line = f"{num} workers, {passed_on:4.0%} passed on: {cpu_ms:.3f} ms CPU a chat, {per_s:5.0f} chats/s"
        sys.stdout.write(line + chr(10))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
