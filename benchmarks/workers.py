"""The CPU of a chat of scenario B with one worker, with two on connections that reach the owner, and passed on; and of
a small GET at its owner and passed on.

    python -m benchmarks.workers [ROUNDS]

The ways are measured in turn, in one run: of a shared machine only their ratios, round by round, say something. CPU is
that of the workers alone; chats/s have the load and the engine's stand-in on the same cores, so that what those need
of a core is said beside them. Two workers that have a core each serve 2 × (one worker's CPU of a chat) / (theirs) times
the chats of one: twice the chats where a chat costs the same.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.kit.client import BUFFER_BYTES, LoadClient, address, open_session, unread
from benchmarks.kit.conversation import Conversation, Messages
from benchmarks.kit.processes import Child, Children, cpu_s_of
from benchmarks.kit.reply_shape import ReplyShape, assistant_fragment
from benchmarks.kit.servers import start_serve, start_standin
from benchmarks.kit.steps import new_runner, nothing_collected
from standins.tiny.llama import write_tiny_folder

NUM_SESSIONS, NUM_TURNS, NUM_GETS = 32, 15, 1500
SHAPE = ReplyShape(vocab_size=250)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLayout:
    """Where the clients are: the number of workers, how many of these have sessions, and the share of the sessions
    whose requests are passed on."""

    says: str
    workers: int = 2
    busy: int = 2
    passed_on: float = 0.0


WAYS = (
    WorkerLayout(says="one worker", workers=1, busy=1),
    WorkerLayout(says="two, all at one", busy=1),
    WorkerLayout(says="two, at the owners"),
    WorkerLayout(says="two, half passed on", passed_on=0.5),
    WorkerLayout(says="two, all passed on", passed_on=1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFigures:
    """Milliseconds of CPU a chat of the workers, of the load and the stand-in; and chats a second."""

    cpu_ms: float
    load_ms: float
    per_s: float


class Served:
    """A server, and the processes that serve."""

    def __init__(self, children: Children, model: Path, engine: str, num_workers: int) -> None:
        flags = ["--model", str(model), "--family", "smollm2", "--engine", "sglang", "--engine-url", engine]
        before = _children_of(os.getpid())
        _, url = start_serve(children, [*flags, "--log-level", "warning", "--workers", str(num_workers)])
        (pid,) = _children_of(os.getpid()) - before
        self._address = address(url)
        self._pids: Sequence[int] = [pid] if num_workers == 1 else sorted(_children_of(pid))
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def __repr__(self) -> str:
        return f"<Served by {len(self._pids)} processes>"

    def cpu_s(self) -> float:
        return sum(map(cpu_s_of, self._pids))

    async def connected(self, worker: int) -> tuple[LoadClient, str]:
        """A client whose connection that worker has taken, and a session of its own."""
        while True:
            client = LoadClient(*self._address, self._buffer)
            session = await open_session(client)
            if len(self._pids) == 1 or int(session[:2], 16) == worker:
                return client, session
            await client.asked("DELETE", f"/sessions/{session}", [])
            client.close()


def _children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


async def measured(served: Served, standin: Child, way: WorkerLayout, messages: Messages) -> WorkerFigures:
    """Chats of all sessions at once, each turn after turn."""
    ready, over = asyncio.Barrier(NUM_SESSIONS + 1), asyncio.Barrier(NUM_SESSIONS + 1)

    async def work(number: int) -> None:
        owner = number % way.busy
        client, session = await served.connected(owner)
        if number < way.passed_on * NUM_SESSIONS:
            client.close()
            client, _ = await served.connected(1 - owner)
        conversation = Conversation()
        await ready.wait()
        for turn in range(NUM_TURNS):
            user = messages.fragment(number * NUM_TURNS + turn)
            parts = conversation.request_parts(user)
            await client.asked("POST", f"/sessions/{session}/v1/chat/completions", parts, unread)
            conversation.add_turn(user, assistant_fragment(SHAPE))
        await over.wait()
        await client.asked("DELETE", f"/sessions/{session}", [])
        client.close()

    def spent() -> tuple[float, float, float]:
        return time.monotonic(), served.cpu_s(), time.process_time() + standin.cpu_s()

    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_SESSIONS):
            tasks.create_task(work(number))
        await ready.wait()
        before = spent()
        await over.wait()
        took_s, cpu_s, load_s = (now - then for now, then in zip(spent(), before, strict=True))
    num = NUM_SESSIONS * NUM_TURNS
    return WorkerFigures(cpu_ms=cpu_s * 1e3 / num, load_ms=load_s * 1e3 / num, per_s=num / took_s)


async def measured_get(served: Served, *, is_passed_on: bool) -> float:
    """Milliseconds of CPU of a small GET, one after the other on a connection to each of two workers."""
    ends = [await served.connected(worker) for worker in (0, 1)]
    clients, sessions = [client for client, _ in ends], [session for _, session in ends]
    if is_passed_on:
        sessions.reverse()

    async def work(client: LoadClient, session: str, num: int) -> None:
        for _ in range(num):
            await client.asked("GET", f"/sessions/{session}/outcome", [])

    async def all_work(num: int) -> None:
        await asyncio.gather(*(work(*one, num) for one in zip(clients, sessions, strict=True)))

    await all_work(20)
    cpu_s = served.cpu_s()
    await all_work(NUM_GETS)
    cpu_s = served.cpu_s() - cpu_s
    for client in clients:
        client.close()
    return cpu_s * 1e3 / (2 * NUM_GETS)


def quartiles(figures: Sequence[float]) -> str:
    """The median, and the middle half."""
    low, middle, high = statistics.quantiles(figures, n=4)
    return f"{middle:.3f} ({low:.3f} … {high:.3f})"


def told(way: WorkerLayout, found: Sequence[WorkerFigures], ones: Sequence[WorkerFigures]) -> str:
    """A way's line: `found` and those of one worker, round by round."""
    cpu, per_s = statistics.median(one.cpu_ms for one in found), statistics.median(one.per_s for one in found)
    load = statistics.median(one.load_ms for one in found)
    line = f"{way.says:20} {cpu:.3f} ms CPU a chat (load {load:.3f}), {per_s:5.0f} chats/s"
    if way.workers == 1:
        return line
    share = quartiles([one.cpu_ms / other.cpu_ms for one, other in zip(found, ones, strict=True)])
    more = quartiles([way.busy * other.cpu_ms / one.cpu_ms for one, other in zip(found, ones, strict=True)])
    wall = quartiles([one.per_s / other.per_s for one, other in zip(found, ones, strict=True)])
    return f"{line}; of one worker's: CPU {share}, chats by CPU {more}, chats/s here {wall}"


def main(num_rounds: int) -> None:
    messages = Messages(num_bytes=SHAPE.content_bytes, num_messages=NUM_SESSIONS * NUM_TURNS)
    with TemporaryDirectory() as folder, Children() as children, new_runner() as runner:
        model = write_tiny_folder(Path(folder) / "tiny")
        standin, engine = start_standin(children, SHAPE)
        servers = {num: Served(children, model, engine, num) for num in (1, 2)}
        rounds: list[list[WorkerFigures]] = []
        with nothing_collected():
            for at in range(num_rounds + 1):
                found = {
                    way: runner.run(measured(servers[way.workers], standin, way, messages))
                    for way in (WAYS if at % 2 else reversed(WAYS))  # whoever comes first has no advantage
                }
                rounds.append([found[way] for way in WAYS])
            gets = [
                [runner.run(measured_get(servers[2], is_passed_on=passed_on)) for passed_on in (False, True)]
                for _ in range(num_rounds + 1)
            ]
    own, other = zip(*gets[1:], strict=True)
    more = quartiles([passed_on - at_owner for at_owner, passed_on in gets[1:]])
    own_ms, other_ms = statistics.median(own), statistics.median(other)
    sys.stdout.write(f"a small GET: {own_ms:.3f} ms CPU at its owner, {other_ms:.3f} passed on; more: {more}\n")
    ways = list(zip(*rounds[1:], strict=True))
    for way, all_found in zip(WAYS, ways, strict=True):
        sys.stdout.write(told(way, all_found, ways[0]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
