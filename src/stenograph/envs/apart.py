"""Processes for what a model's words decide: one that takes more than its bounds is killed, and stands in nobody's way.

An object lives in each, made there by an entry (`core/loaded`); its methods are called from here. The processes are
forked from one that has imported the entry's module: starting one takes milliseconds, its memory is shared. The kernel
holds the bounds.
"""

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from stenograph.core.loaded import entry

GRACE_S = 3.0
"""The time in which a process may end its own servers and sandboxes, when it is closed at work."""


OUT_OF_MEMORY = 77
"""The exit code of a process without memory for a call."""


class ApartFailed(Exception):
    """A method raised in its process, or the process ended. The message is the cause, in a line."""


class ApartTooMuch(ApartFailed):
    """The process took more than its bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a process: seconds of computing in all, seconds of a call however they are spent, bytes of memory of
    its own beyond those it starts with. A child of it has the same of computing and memory for itself, none of a
    call."""

    cpu_s: int
    call_s: float
    memory_bytes: int

    def hold(self) -> None:
        """Bind this process to those of computing and memory."""
        memory = _data_bytes() + self.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (self.cpu_s, self.cpu_s + 1))

    def broken(self, exitcode: int | None) -> str | None:
        """The bound that ended a process with this code, None if it was none."""
        words = {
            -signal.SIGXCPU: f"computed for more than {self.cpu_s} s",
            -signal.SIGALRM: f"did not answer a call in {self.call_s:g} s",
            OUT_OF_MEMORY: f"wanted more than {self.memory_bytes >> 20} MiB of memory",
        }
        return None if exitcode is None else words.get(exitcode)


def _data_bytes() -> int:
    """The bytes that RLIMIT_DATA counts of this process."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


class Apart:
    """An object in its own process. One call at a time."""

    def __init__(self, made: str, process: BaseProcess, connection: Connection, bounds: Bounds | None) -> None:
        self._made, self._process, self._connection, self._bounds = made, process, connection, bounds
        self._is_asked = False

    def __repr__(self) -> str:
        return f"<Apart {self._made}, process {self._process.pid}>"

    async def call(self, method: str, *arguments: object) -> Any:
        """The result of a method. Raises ApartFailed; cancelled, it leaves the process as it is: close it."""
        answered, loop = asyncio.Event(), asyncio.get_running_loop()
        self._ask(method, arguments)
        loop.add_reader(self._connection.fileno(), answered.set)
        try:
            await answered.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        return self._answer()

    def call_now(self, method: str, *arguments: object) -> Any:
        """The same, blocking."""
        self._ask(method, arguments)
        return self._answer()

    def _ask(self, method: str, arguments: tuple[object, ...]) -> None:
        self._is_asked = True
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says so
            self._connection.send((method, arguments))

    def _answer(self) -> Any:
        try:
            is_result, found = cast("tuple[bool, Any]", self._connection.recv())
        except (EOFError, ConnectionResetError):
            self._process.join()
            broken = None if self._bounds is None else self._bounds.broken(self._process.exitcode)
            if broken is not None:
                raise ApartTooMuch(f"{self._made} {broken}") from None
            raise ApartFailed(f"the process of {self._made} ended with {self._process.exitcode}") from None
        self._is_asked = False
        if not is_result:
            raise ApartFailed(found)
        return found

    def close(self) -> None:
        """End the process, at once unless it is at work: then it is interrupted first, as by Ctrl-C. Blocks."""
        self._connection.close()
        if self._is_asked and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)
            self._process.join(GRACE_S)
        self._process.kill()
        self._process.join()


@contextmanager
def started(made: str, *arguments: object, bounds: Bounds | None = None) -> Generator[Apart]:
    """While inside, a process with the object of the entry `made`, called with `arguments`. Afterwards it is ended,
    whatever it does. Blocks, the first time for the import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, made.partition(":")[0]])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, made, arguments, bounds), daemon=True)
    try:
        process.start()
    finally:
        theirs.close()
    one = Apart(made, process, ours, bounds)
    try:
        yield one
    finally:
        one.close()


@asynccontextmanager
async def apart(made: str, *arguments: object, bounds: Bounds | None = None) -> AsyncGenerator[Apart]:
    """`started`, while the loop goes on."""
    with contextlib.ExitStack() as stack:
        one = await asyncio.to_thread(stack.enter_context, started(made, *arguments, bounds=bounds))
        try:
            yield one
        finally:
            await asyncio.to_thread(stack.close)


def _serve(connection: Connection, made: str, arguments: tuple[object, ...], bounds: Bounds | None) -> None:
    """Answer calls until the other side is gone."""
    call_s = 0.0
    if bounds is not None:
        bounds.hold()
        call_s = bounds.call_s
    thing = Lazy(made, arguments)
    try:
        with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
            while True:
                method, given = cast("tuple[str, tuple[object, ...]]", connection.recv())
                signal.setitimer(signal.ITIMER_REAL, call_s)
                answer = thing.answer(method, given)
                signal.setitimer(signal.ITIMER_REAL, 0)
                connection.send(answer)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)


class Lazy:
    """An object that its first call makes."""

    def __init__(self, made: str, arguments: tuple[object, ...]) -> None:
        self._made, self._arguments = made, arguments
        self._thing: Any = None

    def answer(self, method: str, given: tuple[object, ...]) -> tuple[bool, Any]:
        """Whether the method has a result, and it, else why not in a line. Raises MemoryError."""
        try:
            if self._thing is None:
                self._thing = entry(self._made)(*self._arguments)
            return True, getattr(self._thing, method)(*given)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller
            return False, f"{type(error).__name__}: {error}"
