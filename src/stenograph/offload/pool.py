"""The bounded pool of threads for CPU work that releases the GIL, tokenization above all; and the event loop's share
for work that does not.

Owns its threads. Gives no order and no fairness beyond a queue. Only stateless work belongs here; session state
changes on the loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from stenograph.offload.collector_pause import CollectorPause

T = TypeVar("T")

INLINE_BELOW_BYTES = 4096
"""Work on less input than this runs on the loop: it takes half a millisecond, and a hop to a thread and back is not
free either (docs/LOG.md, 2026-11-21)."""

LARGE_FROM_BYTES = 256 * 1024
"""Work on so much input leaves one thread to smaller work, and so a core to the loop: it takes tens of milliseconds."""


class CpuPool:
    """Runs functions on at most `num_workers` threads, large work on one less. Close it with `close`."""

    def __init__(self, num_workers: int) -> None:
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="stenograph-cpu")
        self._large = asyncio.Semaphore(max(1, num_workers - 1))
        self._num_workers = num_workers
        self._pause = CollectorPause()

    def __repr__(self) -> str:
        return f"<CpuPool {self._num_workers} workers>"

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        """Call `work`, inline if its input is small, else on a thread; return its result or raise its error.

        If the caller is cancelled, begun work runs to its end and its result is dropped.
        """
        if num_bytes < INLINE_BELOW_BYTES:
            result = work()  # a coroutine turns StopIteration into RuntimeError by itself
        else:
            work = partial(_without_stop, self._pause.over(work, num_bytes))
            if num_bytes < LARGE_FROM_BYTES or self._num_workers == 1:
                result = await asyncio.get_running_loop().run_in_executor(self._executor, work)
            else:
                result = await self._run_large(work)
        is_lazy = hasattr(result, "__next__") or hasattr(result, "__await__")
        assert not is_lazy, "a lazy result would leave its work to the loop"
        return result

    async def _run_large(self, work: Callable[[], T]) -> T:
        """Call `work` on a thread once large work may begin one more. Its turn is over when the work ends, not when its
        caller is cancelled. Raises RuntimeError if the pool is closed."""
        loop = asyncio.get_running_loop()

        def ended(_: "Future[T]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._large.release)

        await self._large.acquire()
        try:
            future = self._executor.submit(work)
        except RuntimeError:
            self._large.release()
            raise
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drop work not begun and let the threads end."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _without_stop(work: Callable[[], T]) -> T:
    """Call `work`. Raises RuntimeError for StopIteration: no asyncio future accepts it, and its waiter would wait for
    ever."""
    try:
        return work()
    except StopIteration as error:
        raise RuntimeError("work on the pool raised StopIteration") from error


class LoopShare:
    """The share of one loop for GIL-bound work in pieces, with others served in between. First come, first served.

    A thread would not help: the loop would wait for the GIL at each of its own system calls (docs/performance.md). At
    most one piece runs in each event-loop iteration, however many callers have work.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<LoopShare locked={self._turn.locked()}>"

    async def pieces(self, work: Iterator[T]) -> AsyncGenerator[T, None]:
        """Yield the pieces of `work`, each made in an event-loop iteration of its own."""
        while True:
            async with self._turn:  # held over the iteration, so that no other piece runs in it
                await asyncio.sleep(0)
                try:
                    piece = next(work)
                except StopIteration:
                    return
            yield piece
