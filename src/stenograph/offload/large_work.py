"""Large work on a pool's threads, of which it leaves one to smaller work. Loaded by the first such work.

Owns nothing: the pool owns its threads and the places of large work. Does not know what the work is.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")


async def run(executor: Executor, places: asyncio.Semaphore, work: Callable[[], T]) -> T:
    """Call `work` on a thread of `executor` once one of `places` is free; return its result or raise its error.

    The place is free again when the work ends, not when its caller is cancelled. Raises RuntimeError if the executor is
    closed.
    """
    loop = asyncio.get_running_loop()

    def ended(_: "Future[T]") -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(places.release)

    await places.acquire()
    try:
        future = executor.submit(work)
    except RuntimeError:
        places.release()
        raise
    future.add_done_callback(ended)
    return await asyncio.wrap_future(future)
