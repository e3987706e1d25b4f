"""Processes for what a model's words decide: one that computes without end is killed, and stands in nobody's way.

An object lives in each, made there by an entry (`core/loaded`); its methods are called from here. The processes are
forked from one that has imported the entry's module: starting one takes milliseconds, its memory is shared.
"""

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, cast

from stenograph.core.loaded import entry

GRACE_S = 3.0
"""The time in which a process may end its own servers and sandboxes, when it is closed at work."""


class ApartFailed(Exception):
    """A method raised in its process, or the process ended. The message is the cause, in a line."""


class ApartTooLong(ApartFailed):
    """The process computed for longer than it may."""


class Apart:
    """An object in its own process. One call at a time."""

    def __init__(self, made: str, process: BaseProcess, connection: Connection, cpu_s: int | None) -> None:
        self._made, self._process, self._connection, self._cpu_s = made, process, connection, cpu_s
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
            if self._process.exitcode == -signal.SIGXCPU:
                raise ApartTooLong(f"{self._made} computed for more than {self._cpu_s} s") from None
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
def started(made: str, *arguments: object, cpu_s: int | None = None) -> Generator[Apart]:
    """While inside, a process with the object of the entry `made`, called with `arguments`; it may compute for `cpu_s`
    seconds in all. Afterwards it is ended, whatever it does. Blocks, the first time for the import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__, made.partition(":")[0]])
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, made, arguments, cpu_s), daemon=True)
    try:
        process.start()
    finally:
        theirs.close()
    one = Apart(made, process, ours, cpu_s)
    try:
        yield one
    finally:
        one.close()


@asynccontextmanager
async def apart(made: str, *arguments: object, cpu_s: int | None = None) -> AsyncGenerator[Apart]:
    """`started`, while the loop goes on."""
    with contextlib.ExitStack() as stack:
        one = await asyncio.to_thread(stack.enter_context, started(made, *arguments, cpu_s=cpu_s))
        try:
            yield one
        finally:
            await asyncio.to_thread(stack.close)


def _serve(connection: Connection, made: str, arguments: tuple[object, ...], cpu_s: int | None) -> None:
    """Answer calls until the other side is gone."""
    if cpu_s is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    thing: Any = None
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            method, given = cast("tuple[str, tuple[object, ...]]", connection.recv())
            try:
                thing = entry(made)(*arguments) if thing is None else thing
                answer = True, getattr(thing, method)(*given)
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to the caller
                answer = False, f"{type(error).__name__}: {error}"
            connection.send(answer)
