"""A real Ray of two machines, which are both this one, and `stenograph ray`: servers are placed, ended, and stopped.

Run by `scripts/test-cluster`, in an environment that has Ray.
"""

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.postgres_server import postgres_server, programs
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder
from stenograph.cluster.postgres.owner import pause
from stenograph.core.clock import SystemClock

from .chat_load import END, unique_replies

FOUND = programs()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(FOUND is None, reason="no PostgreSQL is installed: scripts/test-cluster installs it"),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: scripts/test-cluster installs it"
    ),
]

HOSTS = ("127.0.0.2", "127.0.0.3")
"""The machines' addresses: for 127.0.0.1 Ray takes the one that others see."""
ASK_AGAIN_S = 0.1
LEASE_S = 1.0


async def ray_process(host: str, *arguments: str) -> asyncio.subprocess.Process:
    """A machine of Ray, until it is ended."""
    code = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
    common = ("--num-cpus", "1", "--object-store-memory", "80000000", "--disable-usage-stats", "--block")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "start", *arguments, "--node-ip-address", host, *common),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Two machines: the cluster's address, and the process of the second."""
    with socket.socket() as free:
        free.bind((HOSTS[0], 0))
        port = free.getsockname()[1]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        head = ("--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", folder)
        first = await ray_process(HOSTS[0], *head)
        stack.push_async_callback(end, first)
        await listening(port)
        second = await ray_process(HOSTS[1], "--address", f"{HOSTS[0]}:{port}")
        stack.push_async_callback(end, second)
        yield f"{HOSTS[0]}:{port}", second


async def listening(port: int) -> None:
    """Wait until somebody listens on a port."""
    while True:
        try:
            _, writer = await asyncio.open_connection(HOSTS[0], port)
        except OSError:
            await pause(SystemClock(), ASK_AGAIN_S)
            continue
        writer.close()
        await writer.wait_closed()
        return


async def command(*arguments: str, **settings: str) -> tuple[int, str, str]:
    """`stenograph ray`: its exit code and what it writes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stenograph.cli.main", "ray", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **settings},
    )
    out, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), said.decode()


def server_at(url: str) -> int | None:
    """The process of the server at an address, by the environment it was started with."""
    advertised = f"STENOGRAPH_ADVERTISE_URL={url}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            runs = b"serve" in (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if runs and advertised in variables:
            return int(folder.name)
    return None


def parent_of(number: int) -> int:
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await pause(SystemClock(), ASK_AGAIN_S)


async def answered(client: aiohttp.ClientSession, url: str, path: str, body: Any, key: str) -> Any:
    """The answer of a server, asked until it has one."""
    while True:
        try:
            async with client.post(url + path, json=body, headers={"idempotency-key": key}) as response:
                answer = await response.read()
                if response.status == 200:
                    return json.loads(answer)
                assert response.status in (409, 503), answer
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            pass
        await pause(SystemClock(), ASK_AGAIN_S)


class Rollout:
    """A session that goes on, whatever server is asked."""

    def __init__(self, client: aiohttp.ClientSession, session: str) -> None:
        self._client = client
        self._session = session
        self._messages: list[dict[str, Any]] = []

    async def turn(self, url: str) -> None:
        number = len(self._messages)
        self._messages.append({"role": "user", "content": f"question {number}"})
        path = f"/sessions/{self._session}/v1/chat/completions"
        reply = await answered(self._client, url, path, {"messages": self._messages}, f"{self._session}-{number}")
        self._messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})

    async def check(self, url: str) -> None:
        """Every turn is there, once."""
        async with self._client.get(f"{url}/sessions/{self._session}") as response:
            view = await response.json()
        assert len(view["records"]) == len(self._messages) // 2
        assert view["metadata"]["discarded"] == {"turns": 0, "sampled_tokens": 0}


async def test_a_server_on_each_machine_is_started_again_and_its_sessions_go_on(tmp_path: Path) -> None:
    assert FOUND is not None
    model = write_tiny_folder(tmp_path / "tiny")
    async with AsyncExitStack() as stack:
        postgres = stack.enter_context(postgres_server(FOUND))
        engine = await stack.enter_async_context(SGLangServer(answers=unique_replies(), stop_id=END, remembers=False))
        address, second = await stack.enter_async_context(cluster())
        flags = (
            *("--ray-address", address, "--model", str(model), "--family", "smollm2", "--engine", "sglang-generate"),
            *("--engine-url", engine.url, "--lease", str(LEASE_S), "--port", "0", "--log-level", "warning"),
        )
        store = {"STENOGRAPH_STORE": postgres.url()}

        async def statuses() -> tuple[int, list[str]]:
            code, out, _ = await command("status", "--ray-address", address)
            return code, [line.split()[2] for line in out.splitlines()[1:]]

        while await statuses() != (1, ["absent", "absent"]):
            await pause(SystemClock(), ASK_AGAIN_S)
        code, out, said = await command("up", *flags, "--model", "/nowhere", **store)
        assert (code, out) == (2, ""), said
        assert re.fullmatch(r"stenograph: on (127\S+, 127\S+): the server did not start, .*/nowhere.*\n", said), said
        assert await statuses() == (1, ["absent", "absent"]), "those that did not start are taken away"

        code, out, said = await command("up", *flags, **store)
        assert code == 0, said
        urls = out.split()
        assert len(set(urls)) == 2
        again = await command("up", *flags, **store)
        assert sorted(again[1].split()) == sorted(urls), "those that run stay as they are"
        assert await statuses() == (0, ["running", "running"])

        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)))
        opened = [(await answered(client, url, "/sessions", {}, f"open {url}"))["session_id"] for url in urls]
        rollouts = [Rollout(client, session) for session in opened]
        for rollout in rollouts:
            for url in urls:
                await rollout.turn(url)

        server = server_at(urls[0])
        assert server is not None
        os.kill(server, signal.SIGKILL)
        await rollouts[0].turn(urls[1])
        await until(lambda: server_at(urls[0]) not in (None, server))
        for rollout in rollouts:
            await rollout.turn(urls[0])

        server = server_at(urls[0])
        assert server is not None
        os.kill(parent_of(server), signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{server}").exists())
        await until(lambda: server_at(urls[0]) not in (None, server))
        for rollout in rollouts:
            await rollout.turn(urls[0])

        lost = await lost_with(second, urls)
        (left,) = set(urls) - {lost}
        for rollout in rollouts:
            await rollout.turn(left)
            await rollout.check(left)
        while await statuses() != (0, ["running"]):
            await pause(SystemClock(), ASK_AGAIN_S)

        code, out, _ = await command("down", "--ray-address", address)
        assert (code, out) == (0, "servers stopped: 1\n")
        assert server_at(left) is None
        assert await statuses() == (1, ["absent"])


async def lost_with(second: asyncio.subprocess.Process, urls: list[str]) -> str:
    """End a machine; the address of its server, which has ended with it."""
    await end(second)
    await until(lambda: any(server_at(url) is None for url in urls))
    return next(url for url in urls if server_at(url) is None)
