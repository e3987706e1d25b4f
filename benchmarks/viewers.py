"""`/health` beside chats, with people who look at the console and without: do eight viewers leave its p99 where it was?

    python -m benchmarks.viewers [ROUNDS] [MODEL]

Each round both ways, in an order that alternates, each with a fresh server: 64 sessions at once of 40 turns with 4 KiB
replies, a probe of `/health` every 5 ms, and a session of three messages of 1 MB. A viewer holds a stream of moments,
and asks for a page of that session every 250 ms: its shape, its first turn, and six pages of 8,192 tokens, in turn.
"""

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from benchmarks.kit.client import BUFFER_BYTES, Failures, LoadClient, RequestFailed, address, open_session, unread
from benchmarks.kit.conversation import Conversation, Messages
from benchmarks.kit.processes import Child, Children
from benchmarks.kit.quantiles import summary_ms
from benchmarks.kit.reply_shape import ReplyShape, assistant_fragment
from benchmarks.kit.runner import cached_model
from benchmarks.kit.servers import start_probe, start_serve, start_standin
from benchmarks.kit.steps import new_runner, nothing_collected, say
from benchmarks.responsiveness.load import Load
from benchmarks.responsiveness.scenarios import Scenario
from stenograph.model.files import load_model_files

NUM_VIEWERS, PERIOD_S, PAGE_TOKENS = 8, 0.25, 8192
NUM_MESSAGES, MESSAGE_BYTES = 3, 1_000_000
LOAD = Scenario(name="V", title="4 KiB replies beside viewers", sessions=64, turns=40)


# -- the viewers, a process


@dataclass(slots=True)
class Views:
    """The pages and events that the viewers got."""

    latencies_s: list[float] = field(default_factory=list[float])
    num_events: int = 0
    failures: Failures = field(default_factory=Failures)

    def heard(self, data: bytes, now: float) -> None:
        del now
        self.num_events += data.count(b"event: now")


class Viewers:
    """Viewers of one server, who look from the first line on stdin to the second."""

    def __init__(self, url: str, num: int, shape: ReplyShape) -> None:
        self._url, self._num, self._shape = url, num, shape
        self._views = Views()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    async def run(self) -> None:
        lines = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
        )
        session, num_tokens = await self._long_session()
        say({"ready": True, "num_tokens": num_tokens})
        await lines.readline()
        async with asyncio.TaskGroup() as tasks:
            looking = [
                tasks.create_task(work)
                for number in range(self._num)
                for work in (self._watch(), self._turn_pages(session, num_tokens, number))
            ]
            await lines.readline()
            for task in looking:
                task.cancel()
        pipe.close()
        views = self._views
        say({**summary_ms(views.latencies_s), "num_events": views.num_events, **views.failures.report()})

    def _client(self) -> LoadClient:
        return LoadClient(*address(self._url), self._buffer)

    async def _long_session(self) -> tuple[str, int]:
        client, conversation = self._client(), Conversation()
        messages = Messages(num_bytes=MESSAGE_BYTES, num_messages=NUM_MESSAGES)
        session = await open_session(client)
        for turn in range(NUM_MESSAGES):
            user, path = messages.fragment(turn), f"/sessions/{session}/v1/chat/completions"
            await client.asked("POST", path, conversation.request_parts(user), unread)
            conversation.add_turn(user, assistant_fragment(self._shape))
        answer = await client.asked("GET", f"/console/api/sessions/{session}", [])
        client.close()
        return session, json.loads(answer.body)["turns"]["num_tokens"][-1]

    async def _watch(self) -> None:
        try:
            headers = [("accept", "text/event-stream")]
            await self._client().asked("GET", "/console/api/now", [], self._views.heard, headers)
        except RequestFailed as error:
            self._views.failures.add(error)

    async def _turn_pages(self, session: str, num_tokens: int, number: int) -> None:
        """Ask for page after page, each when it is due and the one before is there."""
        loop, client = asyncio.get_running_loop(), self._client()
        due = loop.time() + PERIOD_S * number / self._num
        try:
            for path in pages_of(session, num_tokens, first=number):
                await asyncio.sleep(due - loop.time())
                due = max(due + PERIOD_S, loop.time())
                begun = time.perf_counter()
                try:
                    await client.asked("GET", path, [], unread)
                except RequestFailed as error:
                    self._views.failures.add(error)
                    continue
                self._views.latencies_s.append(time.perf_counter() - begun)
        finally:
            client.close()


def pages_of(session: str, num_tokens: int, *, first: int) -> Iterator[str]:
    """The questions of a person who opens a session and scrolls through it, again and again."""
    path, num_pages = f"/console/api/sessions/{session}", -(-num_tokens // PAGE_TOKENS)
    for number in itertools.count(first):
        match number % 8:
            case 0:
                yield path
            case 1:
                yield f"{path}/turns?start=0&limit=1"
            case _:
                yield f"{path}/tokens?start={number % num_pages * PAGE_TOKENS}&limit={PAGE_TOKENS}"


# -- the measurement


def measure(load: Scenario, model: str, num_viewers: int) -> dict[str, float]:
    """The figures of one load through a server of its own."""
    with Children() as children:
        _, engine = start_standin(children, load.shape)
        flags = ("--engine", "sglang", "--engine-url", engine, "--model", model, "--log-level", "warning")
        server, url = start_serve(children, flags)
        viewers = start_viewers(children, url, num_viewers, load.shape)
        with Load(replace(load, sessions=8, turns=2), url) as warm:
            for name in ("open", "run", "delete"):
                warm.step(name)
        with Load(load, url) as clients:
            clients.step("open")
            viewers.tell("look")
            probe, begun_s = start_probe(children, url), server.cpu_s()
            run = clients.step("run")
            cpu_s, health = server.cpu_s() - begun_s, probe.step("")
            looked = viewers.step("stop")
            clients.step("delete")
    errors = {**run["errors"], **looked["errors"]}
    if errors or health["num_failures"]:
        sys.exit(f"there were errors: {errors} {run['first_error']} {looked['first_error']}")
    return {
        "health_p50_ms": health["p50_ms"],
        "health_p99_ms": health["p99_ms"],
        "chat_p50_ms": run["latency"]["p50_ms"],
        "cpu_ms_per_chat": 1e3 * cpu_s / run["num_ok"],
        **({f"page_{name}": looked[name] for name in ("p50_ms", "p99_ms")} if "p99_ms" in looked else {}),
    }


def start_viewers(children: Children, url: str, num: int, shape: ReplyShape) -> Child:
    """A process of viewers, which has made its session."""
    child = children.start("the viewers", ["benchmarks.viewers", "look", url, str(num), str(shape.vocab_size)])
    child.event()
    return child


def main() -> None:
    """Print each round, and the ratios of all."""
    if sys.argv[1:2] == ["look"]:
        viewers = Viewers(sys.argv[2], int(sys.argv[3]), ReplyShape(vocab_size=int(sys.argv[4])))
        with new_runner() as runner, nothing_collected():
            runner.run(viewers.run())
        return
    num_rounds, model = int((sys.argv[1:] or ["5"])[0]), cached_model((sys.argv[2:] or ["smollm2-135m"])[0])
    load = replace(LOAD, shape=ReplyShape(vocab_size=load_model_files(model).vocab_size))
    ratios: dict[str, list[float]] = {}
    for number in range(num_rounds):
        ways = (0, NUM_VIEWERS) if number % 2 == 0 else (NUM_VIEWERS, 0)
        figures = {num: measure(load, str(model), num) for num in ways}
        for num in sorted(figures):
            shown = ", ".join(f"{name} {value:.3g}" for name, value in figures[num].items())
            sys.stdout.write(f"{num} viewers: {shown}\n")
        for name, value in figures[0].items():
            ratios.setdefault(name, []).append(figures[NUM_VIEWERS][name] / value)
    for name, found in ratios.items():
        told = f"{statistics.median(found):.3f} ({min(found):.3f} … {max(found):.3f})"
        sys.stdout.write(f"{name}, with {NUM_VIEWERS} viewers / without: {told}\n")
    say({"bench": "viewers", "rounds": num_rounds, "ratios": ratios})


if __name__ == "__main__":
    main()
