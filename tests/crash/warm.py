"""A process that has imported everything and forks servers, so that a start costs a third of a second.

As a program it reads a line of JSON for each server, `{"flags": [...], "log": path}`, forks, and writes `forked PID`;
the server's own ready line comes on the same pipe. `{"reap": pid}` is answered with `ended PID STATUS`.
"""

import asyncio
import gc
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

READY = re.compile(r"^stenograph ready at (http://127\.0\.0\.1:\d+) ")


class WarmServer:
    """One forked server. `url` is where it listens, once `ready` has been waited for; `log` is its log's file."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.is_ready = asyncio.Event()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.url = ""

    def __repr__(self) -> str:
        return f"<WarmServer {self.pid} at {self.url or 'no address yet'}>"

    async def ready(self) -> None:
        """Wait for its ready line. Raises RuntimeError, with the end of its log, if it ends before."""
        loop, process = asyncio.get_running_loop(), os.pidfd_open(self.pid)
        is_gone = asyncio.Event()
        loop.add_reader(process, is_gone.set)
        waits = [asyncio.create_task(event.wait()) for event in (self.is_ready, is_gone)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(process)
            os.close(process)
            for wait in waits:
                wait.cancel()
        if not self.is_ready.is_set():
            raise RuntimeError(f"the server ended before it was ready: {self.log.read_text()[-2000:]}")


class WarmParent:
    """The parent of servers. One at a time has no ready line yet."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._forked: asyncio.Future[WarmServer] | None = None
        self._log = Path(os.devnull)
        self._servers: dict[int, WarmServer] = {}
        self._newest: WarmServer | None = None

    @classmethod
    @asynccontextmanager
    async def started(cls) -> AsyncIterator[Self]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        parent = cls(process)
        reading = asyncio.create_task(parent._read())
        try:
            yield parent
        finally:
            for pid, server in parent._servers.items():
                if not server.ended.done():
                    os.kill(pid, signal.SIGKILL)
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
            await reading

    async def fork(self, flags: Sequence[str], log: Path) -> WarmServer:
        """Fork a server; it is not ready yet."""
        self._forked, self._log = asyncio.get_running_loop().create_future(), log
        self._order({"flags": list(flags), "log": str(log)})
        return await self._forked

    async def kill(self, server: WarmServer, number: int = signal.SIGKILL) -> int:
        """Send a signal, and wait for the end: the status of waitpid(2)."""
        os.kill(server.pid, number)
        return await self.end_of(server)

    async def end_of(self, server: WarmServer) -> int:
        """Wait until a server has ended by itself: the status of waitpid(2)."""
        self._order({"reap": server.pid})
        return await server.ended

    def _order(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            text = line.decode()
            if (ready := READY.match(text)) and self._newest is not None:
                self._newest.url = ready[1]
                self._newest.is_ready.set()
                continue
            what, pid, *status = text.split()
            if what == "forked" and self._forked is not None:
                self._newest = self._servers[int(pid)] = WarmServer(int(pid), self._log)
                self._forked.set_result(self._newest)
            elif what == "ended":
                self._servers.pop(int(pid)).ended.set_result(int(status[0]))


def _serve_orders() -> None:
    """Fork a server for each order, until standard input ends."""
    from stenograph.cli import parts, serve_command  # noqa: F401, PLC0415
    from stenograph.cli.main import main  # noqa: PLC0415  -- only this program is a server

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            _say(f"ended {order['reap']} {status}")
            continue
        if pid := os.fork():
            _say(f"forked {pid}")
            continue
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(log, 2)
        os.dup2(nothing, 0)
        code = 1
        try:
            code = main(["serve", *order["flags"]])
        finally:
            sys.stdout.flush()
            os._exit(code)


def _say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    _serve_orders()
