"""`stenograph serve` as a process before an engine that comes late, and how it ends by each signal."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.sglang_server import SGLangServer

END = 2

pytestmark = pytest.mark.timeout(600)


@dataclass(slots=True)
class Served:
    """A server's process, and what it has said so far."""

    process: asyncio.subprocess.Process
    out: list[str] = field(default_factory=list[str])
    log: list[str] = field(default_factory=list[str])

    async def says(self, pattern: str) -> str:
        """Wait for a line on stdout."""
        return await _line(self.process.stdout, self.out, pattern)

    async def logs(self, pattern: str) -> str:
        """Wait for a line on stderr."""
        return await _line(self.process.stderr, self.log, pattern)

    async def end(self, *signals: signal.Signals) -> int:
        """Send these, and wait for the exit code."""
        for number in signals:
            self.process.send_signal(number)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # Side by side: it may not end before somebody reads what it has to say.
        rest = await asyncio.gather(self.process.stdout.read(), self.process.stderr.read(), self.process.wait())
        self.out += rest[0].decode().splitlines()
        self.log += rest[1].decode().splitlines()
        return rest[2]


async def _line(source: asyncio.StreamReader | None, seen: list[str], pattern: str) -> str:
    assert source is not None
    while line := (await source.readline()).decode():
        seen.append(line.rstrip("\n"))
        if re.search(pattern, line):
            return seen[-1]
    pytest.fail(f"no line {pattern!r} in {seen}")


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[Served]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stenograph.cli.main", "serve", "--port", "0", "--family", "smollm2", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Served(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def address(line: str) -> str:
    """Where the server says that it is."""
    found = re.search(r"(http://127\.0\.0\.1:\d+)(/health| \(model)", line)
    assert found is not None, line
    return found[1]


async def post(client: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with client.post(url, json=body) as response:
        return response.status, await response.json()


async def test_the_ready_line_waits_for_the_engine_and_the_log_says_so_once(tiny: Path) -> None:
    engine = SGLangServer()
    await engine.start()
    await engine.aclose()
    flags = ("--model", str(tiny), "--engine", "sglang", "--engine-url", engine.url)
    async with serving(*flags) as served, aiohttp.ClientSession() as client:
        waits = await served.logs("waiting for the engine")
        assert f"waiting for the engine at {engine.url}: connection refused; " in waits
        async with client.get(f"{address(waits)}/health") as health, client.get(f"{address(waits)}/ready") as ready:
            assert (health.status, ready.status) == (200, 503)
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for _ in range(3):
            assert (await post(client, f"{address(waits)}/v1/chat/completions", chat))[0] == 502
        async with engine:
            line = await served.says("stenograph ready at")
            assert address(line) == address(waits)
            async with client.get(f"{address(line)}/ready") as ready:
                assert ready.status == 200
            assert await served.end(signal.SIGTERM) == 0
    assert len(served.out) == 1
    assert sum("connection refused" in line for line in served.log if " INFO " not in line) == 1, served.log


async def test_an_engine_that_never_comes_leaves_a_server_that_ends_by_a_signal(tiny: Path) -> None:
    flags = ("--model", str(tiny), "--engine", "sglang", "--engine-url", "http://127.0.0.1:1")
    async with serving(*flags) as served:
        await served.logs("waiting for the engine")
        assert await served.end(signal.SIGTERM) == 0
    assert served.out == []


async def test_a_bad_file_of_sampling_stops_the_start_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "sampling.json"
    file.write_text('{"force": {"temperature": -1}}')
    async with serving("--model", str(tmp_path), "--sampling", str(file)) as served:
        assert await served.end() == 2
    assert served.log[-1] == (
        f"stenograph: --sampling: /force/temperature of the file '{file}': temperature must be in [0, 100], got -1.0."
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_ctrl_c_is_exit_code_130_and_sigterm_0(tiny: Path, number: signal.Signals, code: int) -> None:
    async with (
        SGLangServer() as engine,
        serving("--model", str(tiny), "--engine", "sglang", "--engine-url", engine.url) as served,
    ):
        await served.says("stenograph ready at")
        assert await served.end(number) == code
        assert "Traceback" not in "\n".join(served.log)


@pytest.mark.parametrize(
    ("first", "second", "code"), [(signal.SIGTERM, signal.SIGINT, 0), (signal.SIGINT, signal.SIGINT, 130)]
)
async def test_a_second_signal_ends_the_drain_with_the_exit_code_of_the_first(
    tiny: Path, first: signal.Signals, second: signal.Signals, code: int
) -> None:
    async with (
        SGLangServer() as engine,
        serving("--model", str(tiny), "--engine", "sglang", "--engine-url", engine.url) as served,
        aiohttp.ClientSession() as client,
    ):
        engine.plan(ReplyScript(ids=(70, END), matched=END, paused=True))
        url = address(await served.says("stenograph ready at"))
        chat = {"messages": [{"role": "user", "content": "a"}]}
        turn = asyncio.ensure_future(post(client, f"{url}/v1/chat/completions", chat))
        await engine.begun(1)
        served.process.send_signal(first)
        told = await served.logs("shutting down")
        assert f"{first.name}: shutting down, waiting up to 30 s for 1 turn; a second signal ends it at once" in told
        assert await served.end(second) == code
        assert (await turn)[0] == 503


async def test_a_drain_that_takes_too_long_gives_the_partial_reply_and_says_what_is_lost(tiny: Path) -> None:
    flags = ("--model", str(tiny), "--engine", "sglang-generate", "--drain-timeout", "0.2")
    async with (
        SGLangServer() as engine,
        serving(*flags, "--engine-url", engine.url) as served,
        aiohttp.ClientSession() as client,
    ):
        engine.plan(ReplyScript(ids=(70, 71, 72, 73, END), matched=END, paused=True, num_drawn=3))
        url = address(await served.says("stenograph ready at"))
        _, opened = await post(client, f"{url}/sessions", {})
        chat = {"messages": [{"role": "user", "content": "a"}]}
        turn = asyncio.ensure_future(post(client, f"{opened['base_url']}/chat/completions", chat))
        await engine.begun(1)
        ended = asyncio.ensure_future(served.end(signal.SIGTERM))
        status, reply = await turn
        assert (status, reply["choices"][0]["finish_reason"]) == (200, "abort")
        num_tokens = reply["usage"]["total_tokens"]
        assert reply["usage"]["completion_tokens"] == 3
        assert await ended == 0
    assert sum(f"1 session with {num_tokens} tokens ends with this process" in line for line in served.log) == 1


async def test_a_structured_log_is_a_json_object_a_line_from_the_start_to_the_end(tiny: Path) -> None:
    flags = ("--model", str(tiny), "--engine", "sglang-generate", "--log-format", "json")
    async with (
        SGLangServer() as engine,
        serving(*flags, "--engine-url", engine.url) as served,
        aiohttp.ClientSession() as client,
    ):
        engine.plan(ReplyScript(ids=(70, END), matched=END))
        url = address(await served.says("stenograph ready at"))
        _, opened = await post(client, f"{url}/sessions", {})
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert (await post(client, f"{opened['base_url']}/chat/completions", chat))[0] == 200
        async with client.delete(f"{url}/sessions/{opened['session_id']}") as deleted:
            assert deleted.status == 204
        assert await served.end(signal.SIGTERM) == 0
    told = [json.loads(line) for line in served.log]
    assert all(list(line)[:4] == ["time", "level", "logger", "event"] for line in told)
    turns = [line for line in told if line["event"] == "turn_end"]
    (ended,) = [line for line in told if line["event"] == "session_end"]
    assert [(line["session"], line["status"], line["sampled_tokens"]) for line in turns] == [
        (opened["session_id"], "committed", 2)
    ]
    assert (ended["session"], ended["turns"]) == (opened["session_id"], 1)
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", page.split("## Logs")[1], re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {key for line in told for key in line} - documented == set()


async def test_an_error_at_start_is_in_a_structured_log_too() -> None:
    async with serving("--model", "/nowhere", "--log-format", "json") as served:
        assert await served.end() == 2
    assert [json.loads(line)["level"] for line in served.log] == ["error"]
