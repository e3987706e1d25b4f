"""An object in its own process: it answers, its faults are lines, and one that computes without end is killed."""

import asyncio
import os
from dataclasses import replace
from decimal import Decimal

import pytest

from stenograph.envs.apart import ApartFailed, ApartTooMuch, Bounds, apart, started

pytestmark = pytest.mark.timeout(600)

BOUNDS = Bounds(cpu_s=1, call_s=30, memory_bytes=64 << 20)


async def test_an_object_answers_call_after_call_and_a_fault_is_a_line() -> None:
    async with apart("collections:Counter", "aab") as counter:
        assert await counter.call("most_common") == [("a", 2), ("b", 1)]
        assert await counter.call("update", "bb") is None
        with pytest.raises(ApartFailed, match="AttributeError: 'Counter' object has no attribute 'least_common'"):
            await counter.call("least_common")
        assert await counter.call("most_common") == [("b", 3), ("a", 2)]


def test_an_object_that_cannot_be_made_says_why() -> None:
    with started("decimal:Decimal", "x") as none, pytest.raises(ApartFailed, match="InvalidOperation"):
        none.call_now("sqrt")
    with started("no.such:Thing") as none, pytest.raises(ApartFailed, match="No module named 'no'"):
        none.call_now("run")
    with started("decimal:Decimal", "4") as four:
        assert four.call_now("sqrt") == Decimal(2)


async def test_computing_without_end_is_killed_while_others_answer() -> None:
    async with apart("builtins:int", 10, bounds=BOUNDS) as ten, apart("builtins:int", 7, bounds=BOUNDS) as seven:
        endless = asyncio.create_task(ten.call("__pow__", 10**10))
        assert await seven.call("__add__", 1) == 8
        with pytest.raises(ApartTooMuch, match="builtins:int computed for more than 1 s"):
            await endless
        assert await seven.call("__add__", 2) == 9


async def test_a_call_that_waits_without_end_is_killed_and_waiting_between_calls_costs_nothing() -> None:
    bounds = replace(BOUNDS, call_s=0.2)
    async with (
        apart("threading:Barrier", 2, bounds=bounds) as barrier,
        apart("builtins:int", 7, bounds=bounds) as seven,
    ):
        assert await seven.call("__add__", 1) == 8
        with pytest.raises(ApartTooMuch, match=r"threading:Barrier did not answer a call in 0\.2 s"):
            await barrier.call("wait")
        assert await seven.call("__add__", 2) == 9


async def test_memory_beyond_the_bound_ends_the_process_and_its_own_is_not_counted() -> None:
    async with apart("builtins:bytes", b"x", bounds=BOUNDS) as one:
        assert len(await one.call("__mul__", 24 << 20)) == 24 << 20
        with pytest.raises(ApartTooMuch, match="builtins:bytes wanted more than 64 MiB of memory"):
            await one.call("__mul__", 100 << 20)
    async with apart("builtins:bytes", b"x", bounds=BOUNDS) as one:
        with pytest.raises(ApartTooMuch, match="builtins:bytes wanted more than 64 MiB of memory"):
            await one.call("__mul__", 48 << 20)  # there is room for it, and none to send it
    async with apart("builtins:bytes", b"x") as free:
        assert len(await free.call("__mul__", 100 << 20)) == 100 << 20


async def test_a_cancelled_call_ends_its_process() -> None:
    async def endless(pid: "asyncio.Future[int]") -> None:
        async with apart("os:getpid") as none, apart("builtins:int", 10) as ten:
            with pytest.raises(ApartFailed):
                await none.call("bit")
            pid.set_result(int(repr(ten).rpartition(" ")[2][:-1]))
            await ten.call("__pow__", 10**10)

    pid = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(endless(pid))
    found = await pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(found, 0)
