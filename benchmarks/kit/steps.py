"""A measurement's side of the process that makes it: nothing is collected meanwhile, and a child says what it found.

A child says it is ready, then does one step for each line on stdin, and reports it as a line of JSON. The parent's side
is `processes`.
"""

import asyncio
import contextlib
import gc
import sys
from collections.abc import Generator

import msgspec
import uvloop


def say(value: object) -> None:
    """Write a line of JSON to stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def nothing_collected() -> Generator[None]:
    """No garbage collection falls into what is measured inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def new_runner() -> asyncio.Runner:
    """A runner of an event loop of uvloop's, as the server has it."""
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
