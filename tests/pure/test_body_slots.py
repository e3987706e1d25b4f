"""Few bodies flow at a time; one that stalls holds up nobody, and one that ends gives its slot on."""

import asyncio

import pytest

from stenograph.offload import body_slots
from stenograph.offload.body_slots import BodySlots


async def test_no_more_bodies_flow_than_there_are_slots_and_all_get_their_turn() -> None:
    slots, flowing, most = BodySlots(2), 0, 0

    async def read() -> None:
        nonlocal flowing, most
        async with slots.slot():
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
            order.append("stalled")
            await slot.piece(more.wait())
            order.append("flows on")

    async def other() -> None:
        async with slots.slot() as slot:
            await slot.piece(asyncio.sleep(0))
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
            await slot.piece(never.wait())

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
    async with slots.slot():  # it is free
        pass
