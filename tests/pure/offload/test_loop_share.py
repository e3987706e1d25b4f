"""Pieces of work on a loop: one in a pass, whoever has some, and the loop's other work goes on between them."""

import asyncio
from collections.abc import Iterator

import pytest

from stenograph.offload.pool import LoopShare


class Passes:
    """Counts the passes of the loop that it runs on."""

    def __init__(self) -> None:
        self.num = 0
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def _count(self) -> None:
        self.num += 1
        self._handle = asyncio.get_running_loop().call_soon(self._count)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize("num_workers", [1, 2, 7])
async def test_one_piece_is_done_in_a_pass_however_many_have_some(num_workers: int) -> None:
    share, passes = LoopShare(), Passes()
    done_in: list[int] = []

    def work() -> Iterator[int]:
        for index in range(10):
            done_in.append(passes.num)
            yield index

    async def run() -> list[int]:
        return [piece async for piece in share.pieces(work())]

    async with asyncio.TaskGroup() as tasks:
        all_of_them = [tasks.create_task(run()) for _ in range(num_workers)]
    passes.stop()
    assert [task.result() for task in all_of_them] == [list(range(10))] * num_workers
    assert len(done_in) == len(set(done_in)) == 10 * num_workers


async def test_whoever_has_pieces_takes_turns() -> None:
    share, order = LoopShare(), list[str]()

    async def run(name: str) -> None:
        async for _ in share.pieces(iter(range(5))):
            order.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run("a"))
        tasks.create_task(run("b"))
    assert order == ["a", "b"] * 5


async def test_one_that_is_left_or_fails_lets_the_others_go_on() -> None:
    share = LoopShare()

    def breaks() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    left = share.pieces(iter(range(5)))
    assert await anext(left) == 0
    with pytest.raises(ValueError, match="broken"):
        [piece async for piece in share.pieces(breaks())]
    waiting = asyncio.ensure_future(anext(share.pieces(iter(range(5)))))
    await asyncio.sleep(0)
    waiting.cancel()
    assert [piece async for piece in share.pieces(iter(range(3)))] == [0, 1, 2]
    assert await anext(left) == 1
    await left.aclose()
