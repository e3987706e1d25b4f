"""The CPU pool (SPEC 5): bounded, inline for what is small, closed for good; nobody gets a result that he left."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stenograph.offload.pool import INLINE_BELOW_BYTES, LARGE_FROM_BYTES, CpuPool


class Standing:
    """Work that stands in its thread until it is let go; tells how many do at once."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self._changed = threading.Condition()
        self._num = 0
        self.most = 0

    def __call__(self) -> str:
        with self._changed:
            self._num += 1
            self.most = max(self.most, self._num)
            self._changed.notify_all()
        self.let_go.wait()
        with self._changed:
            self._num -= 1
            self._changed.notify_all()
        return threading.current_thread().name

    async def stand(self, num: int) -> None:
        """Wait until so many stand."""

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._num == num)

        await asyncio.to_thread(wait)


@contextmanager
def closing(num_workers: int) -> Iterator[tuple[CpuPool, Standing]]:
    """A pool, and work that is let go at the end, however that comes."""
    pool, work = CpuPool(num_workers), Standing()
    try:
        yield pool, work
    finally:
        work.let_go.set()
        pool.close()


async def test_work_below_the_threshold_runs_on_the_loops_thread_and_other_work_does_not() -> None:
    with closing(2) as (pool, _):
        here = threading.get_ident()
        assert await pool.run(threading.get_ident, num_bytes=INLINE_BELOW_BYTES - 1) == here
        assert await pool.run(threading.get_ident, num_bytes=INLINE_BELOW_BYTES) != here


@pytest.mark.parametrize(
    ("num_workers", "num_bytes", "most"),
    [(1, 10**5, 1), (3, 10**5, 3), (1, 10**6, 1), (2, LARGE_FROM_BYTES, 1), (3, 10**6, 2)],
)
async def test_no_more_than_its_workers_run_at_once_and_the_rest_waits_its_turn(
    num_workers: int, num_bytes: int, most: int
) -> None:
    with closing(num_workers) as (pool, work):
        async with asyncio.TaskGroup() as tasks:
            runs = [tasks.create_task(pool.run(work, num_bytes=num_bytes)) for _ in range(3 * num_workers)]
            await work.stand(most)
            assert not any(run.done() for run in runs)
            work.let_go.set()
    assert work.most == most
    assert len({run.result() for run in runs}) <= num_workers


async def test_smaller_work_has_a_thread_beside_any_amount_of_large_work() -> None:
    with closing(2) as (pool, work):
        large = [asyncio.ensure_future(pool.run(work, num_bytes=10**6)) for _ in range(4)]
        await work.stand(1)
        assert await pool.run(lambda: "small", num_bytes=INLINE_BELOW_BYTES) == "small"
        work.let_go.set()
        await asyncio.gather(*large)
    assert work.most == 1


async def test_large_work_whose_callers_have_left_gives_its_place_back() -> None:
    with closing(2) as (pool, work):
        begun, waiting = [asyncio.ensure_future(pool.run(work, num_bytes=10**6)) for _ in range(2)]
        await work.stand(1)
        for one in (begun, waiting):
            one.cancel()
        await asyncio.gather(begun, waiting, return_exceptions=True)
        last = asyncio.ensure_future(pool.run(lambda: "last", num_bytes=10**6))
        await asyncio.sleep(0)
        assert not last.done(), "the thread of the first works on"
        work.let_go.set()
        assert await last == "last"
        pool.close()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shutdown"):
                await pool.run(lambda: "late", num_bytes=10**6)


async def test_an_exception_of_work_reaches_its_caller_inline_and_from_a_thread() -> None:
    def fails() -> None:
        raise LookupError("broken")

    with closing(1) as (pool, _):
        for num_bytes in (0, 10**6):
            with pytest.raises(LookupError, match="broken"):
                await pool.run(fails, num_bytes=num_bytes)


@pytest.mark.parametrize("num_bytes", [0, 10**6])
async def test_an_iterator_that_has_nothing_more_fails_its_caller_and_keeps_nobody_waiting(num_bytes: int) -> None:
    nothing: Iterator[int] = iter(())
    with closing(1) as (pool, _), pytest.raises(RuntimeError, match="StopIteration"):
        await pool.run(lambda: next(nothing), num_bytes=num_bytes)


@pytest.mark.parametrize("num_bytes", [0, 10**6])
@pytest.mark.parametrize("lazy", [lambda: map(str, [1]), lambda: (x for x in [1]), lambda: asyncio.sleep(0)])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_a_lazy_result_does_not_leave_the_worker(lazy: Callable[[], object], num_bytes: int) -> None:
    with closing(1) as (pool, _):
        with pytest.raises(AssertionError, match="would leave its work to the loop"):
            await pool.run(lazy, num_bytes=num_bytes)
        assert await pool.run(lambda: list(map(str, [1])), num_bytes=num_bytes) == ["1"]


async def test_the_result_of_a_cancelled_call_is_dropped_and_its_worker_works_on() -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with closing(1) as (pool, work):
        run = asyncio.ensure_future(pool.run(work, num_bytes=10**6))
        await work.stand(1)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        waiting = asyncio.ensure_future(pool.run(lambda: "next", num_bytes=10**6))
        work.let_go.set()
        assert await waiting == "next"
    assert complaints == []


async def test_a_closed_pool_drops_what_has_not_begun_and_takes_nothing_more() -> None:
    with closing(1) as (pool, work):
        begun = asyncio.ensure_future(pool.run(work, num_bytes=10**6))
        await work.stand(1)
        dropped = asyncio.ensure_future(pool.run(lambda: "never", num_bytes=10**6))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        with pytest.raises(RuntimeError, match="shutdown"):
            await pool.run(lambda: "late", num_bytes=10**6)
        work.let_go.set()
        (name,) = {await begun}
        worker = next((thread for thread in threading.enumerate() if thread.name == name), None)
        if worker is not None:
            await asyncio.to_thread(worker.join)  # its thread ends
