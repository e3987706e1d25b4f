"""Few bodies flow at a time; one that stalls holds up nobody, and one that ends gives its slot on."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from stenograph.offload import body_slots
from stenograph.offload.body_slots import SERVED_IN_A_PASS, BodySlots


async def test_no_more_bodies_flow_than_there_are_slots_and_all_get_their_turn() -> None:
    slots, flowing, most = BodySlots(2), 0, 0

    async def read() -> None:
        nonlocal flowing, most
        async with slots.slot() as slot:
            await slot.take()
            flowing += 1
            most = max(most, flowing)
            for _ in range(3):
                await asyncio.sleep(0)
            flowing -= 1

    await asyncio.gather(*(read() for _ in range(10)))
    assert (most, flowing) == (2, 0)


async def test_a_body_that_stalls_lets_another_flow_and_flows_on_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_slots, "STALL_S", 0.0)
    slots, more, order = BodySlots(1), asyncio.Event(), list[str]()

    async def stalled() -> None:
        async with slots.slot() as slot:
            await slot.take()
            order.append("stalled")
            await slot.piece(more.wait(), int)
            await slot.take()
            order.append("flows on")

    async def other() -> None:
        async with slots.slot() as slot:
            await slot.take()
            await slot.piece(asyncio.sleep(0, 1), int)
            order.append("other")
        more.set()

    await asyncio.gather(stalled(), other())
    assert order == ["stalled", "other", "flows on"]


@pytest.mark.parametrize("where", ["waiting", "reading", "stalled"])
async def test_a_cancelled_body_gives_its_slot_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_slots, "STALL_S", 0.0 if where == "stalled" else 60.0)
    slots, never = BodySlots(1), asyncio.Event()

    async def read() -> None:
        async with slots.slot() as slot:
            await slot.take()
            await slot.piece(never.wait(), int)

    first = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    second = asyncio.ensure_future(read())
    for _ in range(5):
        await asyncio.sleep(0)
    (second if where == "waiting" else first).cancel()
    await asyncio.wait({second if where == "waiting" else first})
    if where == "waiting":
        first.cancel()
    else:
        second.cancel()
    await asyncio.wait({first, second})
    assert slots.num_held == 0


async def test_a_body_that_drips_needs_no_slot_and_one_that_turns_to_dripping_gives_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, loop = BodySlots(1), asyncio.get_running_loop()
    began_s, waited_s = loop.time(), 0.0
    monkeypatch.setattr(loop, "time", lambda: began_s + waited_s)

    async def bring(num_bytes: int) -> int:
        return num_bytes

    async def drip() -> int:
        nonlocal waited_s
        waited_s += body_slots.STALL_S / 10
        return 1

    async with slots.slot() as slot:
        for _ in range(1000):
            await slot.piece(bring(1), int)
        assert slots.num_held == 0
        await slot.piece(bring(100_000), int)
        assert slots.num_held == 1
        for _ in range(8):
            await slot.piece(drip(), int)
        assert slots.num_held == 1
        for _ in range(3):
            await slot.piece(drip(), int)
        assert slots.num_held == 0


class Gathering:
    """A body of which so many bytes come until the slot is looked at again; nobody takes them before it is whole."""

    def __init__(self, *num_bytes: int) -> None:
        self._coming = list(num_bytes)
        self._brought = 0
        self.was_handed_over = asyncio.Event()

    @property
    def num_pending(self) -> int:
        self._brought += self._coming.pop(0) if self._coming else 0
        return self._brought

    def hand_over(self) -> None:
        self.was_handed_over.set()

    async def taken(self) -> int:
        await self.was_handed_over.wait()
        return self._brought


async def test_a_body_that_is_gathered_keeps_its_slot_while_it_comes_and_is_handed_over_once_it_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_slots, "STALL_S", 0.001)
    slots, body = BodySlots(1), Gathering(200, 1, 100_000)
    async with slots.slot() as slot:
        await slot.take()
        assert await slot.piece(body.taken(), int, body) == 100_201
        assert slots.num_held == 0
        await slot.piece(asyncio.sleep(0, 100_000), int)
        assert slots.num_held == 1


async def test_slots_of_another_kind_wait_for_none_of_these() -> None:
    slots = BodySlots(1)
    async with slots.slot() as ours, slots.apart().slot() as theirs:
        await ours.take()
        await theirs.take()


async def passes_of(enter: Callable[[], Awaitable[None]], num: int) -> list[list[int]]:
    """Which of `num` bodies that `enter` are served in each pass of the loop."""
    passes: list[list[int]] = []

    async def serve(index: int) -> None:
        await enter()
        passes[-1].append(index)

    def next_pass() -> None:
        passes.append([])
        if len(passes) < num + 5:
            asyncio.get_running_loop().call_soon(next_pass)

    next_pass()
    await asyncio.gather(*(serve(index) for index in range(num)))
    return [served for served in passes if served]


async def test_a_few_small_bodies_are_served_in_each_event_loop_iteration_in_order() -> None:
    served = await passes_of(BodySlots(1).small, 5 * SERVED_IN_A_PASS)
    assert [index for one in served for index in one] == list(range(5 * SERVED_IN_A_PASS))
    assert max(map(len, served)) <= SERVED_IN_A_PASS
    assert len(served) <= 6


async def test_one_large_body_is_decoded_in_an_event_loop_iteration_in_order() -> None:
    served = await passes_of(BodySlots(4).large, 5)
    assert served == [[index] for index in range(5)]


async def test_small_bodies_that_go_on_coming_are_served_in_their_order_and_no_more_of_them_in_a_pass() -> None:
    slots, num_passes, came, served = BodySlots(1), 0, list[int](), list[tuple[int, int]]()
    loop = asyncio.get_running_loop()

    def count() -> None:
        nonlocal num_passes
        num_passes += 1
        counting[0] = loop.call_soon(count)

    async def serve(index: int) -> None:
        came.append(index)
        await slots.small()
        served.append((index, num_passes))

    counting = [loop.call_soon(count)]
    async with asyncio.TaskGroup() as tasks:
        for index in range(12 * SERVED_IN_A_PASS):
            tasks.create_task(serve(index))
            if index > 2 * SERVED_IN_A_PASS and index % 5 == 0:  # first a crowd, then a few in each pass
                await asyncio.sleep(0)
    counting[0].cancel()
    assert [index for index, _ in served] == came
    assert max(Counter(in_pass for _, in_pass in served).values()) <= SERVED_IN_A_PASS


async def test_when_none_came_for_a_while_the_next_are_served_at_once() -> None:
    slots = BodySlots(1)
    await passes_of(slots.small, 2 * SERVED_IN_A_PASS + 1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(await passes_of(slots.small, SERVED_IN_A_PASS)) == 1


async def test_abandoned_small_bodies_delay_no_other() -> None:
    slots = BodySlots(1)
    waiting = [asyncio.ensure_future(slots.small()) for _ in range(4 * SERVED_IN_A_PASS)]
    await asyncio.sleep(0)
    for one in waiting[: 3 * SERVED_IN_A_PASS]:
        one.cancel()
    await asyncio.gather(*waiting[3 * SERVED_IN_A_PASS :])
