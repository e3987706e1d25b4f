"""The child's side of a measurement: it says it is ready, then does one step for each line on stdin.

Every step is reported as a line of JSON. Owns the event loop that it does so on, and that no garbage collection falls
into a measurement. The parent's side is `processes`.
"""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Coroutine

import msgspec
import uvloop


def say(value: object) -> None:
    """Write a line of JSON to stdout."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def be_ready() -> None:
    """From now on nothing is collected; say that measuring may begin."""
    gc.collect()
    gc.disable()
    say({"ready": True})


async def obey(step: Callable[[str], Awaitable[object]]) -> None:
    """Do a step for each line, until an empty one or the end of stdin."""
    loop = asyncio.get_running_loop()
    be_ready()
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        say(await step(line))


def run_child(work: Coroutine[None, None, None]) -> None:
    """Run it to its end on an event loop of uvloop's."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)
