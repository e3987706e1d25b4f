"""A tenant at 100 × its share takes nobody else's, and quotas hold: in virtual time, with what a server has."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from standins.virtual_time import VirtualLoop
from stenograph.core.clock import Timer
from stenograph.core.errors import Draining, LimitExceeded
from stenograph.core.stated_options import tag_of
from stenograph.http.wire import ClientGone, delivery_of
from stenograph.session.admission import Capacity, Limits
from stenograph.tenants.counts import TenantCounts
from stenograph.tenants.lanes import HeldPlace, Lanes
from stenograph.tenants.tenant import Tenant

LINK = delivery_of({"type": "http"})
HASH = ["0" * 64]


class LoopClock:
    """The clock of a virtual loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    wall = monotonic

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, call)


async def _nothing(tag: str) -> tuple[int, int]:
    return 0, 0


@dataclass
class Server:
    """The places of one process, and what its turns took."""

    num_places: int
    folder: Path | None = None
    number: int = 0
    stored: Callable[[str], Awaitable[tuple[int, int]]] = _nothing
    timeout_s: float = 600.0
    took: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    num_refused: int = 0

    def __post_init__(self) -> None:
        self.capacity = Capacity(Limits(max_sessions=1, max_in_flight=self.num_places))
        self.lanes = Lanes(
            self.capacity,
            TenantCounts(self.folder, self.number),
            LoopClock(),
            timeout_s=self.timeout_s,
            stored=self.stored,
            is_shared=False,
            has_others=self.folder is not None,
        )

    def add(self, name: str, **options: object) -> None:
        self.lanes.change(name, Tenant(key_sha256=HASH, **options))  # type: ignore[arg-type]

    async def begun(self, name: str) -> HeldPlace:
        place = await self.lanes.place(name, LINK)
        self.capacity.num_in_flight += 1
        place.counted()
        return place

    def ended(self, place: HeldPlace, num_tokens: int = 0) -> None:
        self.capacity.num_in_flight -= 1
        place.end()
        place.sampled(num_tokens)

    async def turn(self, name: str, num_tokens: int) -> None:
        """A turn whose every token takes a second."""
        loop = asyncio.get_running_loop()
        came = loop.time()
        try:
            place = await self.begun(name)
        except LimitExceeded:
            self.num_refused += 1
            return
        await asyncio.sleep(num_tokens)
        self.ended(place, num_tokens)
        if came > 1000:  # the first ones fill an empty server
            self.took.setdefault(name, []).append(loop.time() - came)

    async def load(self, name: str, every_s: float, lengths: Callable[[], int], until_s: float) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as turns:
            while loop.time() < until_s:
                turns.create_task(self.turn(name, lengths()))
                await asyncio.sleep(every_s)

    def p99(self, name: str) -> float:
        times = sorted(self.took[name])
        return times[math.ceil(0.99 * len(times)) - 1]


def virtually(work: Awaitable[None]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


ALIKE = {"alike": lambda mean: lambda: mean, "unlike": lambda mean: partial(random.Random(1).randint, 1, 2 * mean)}


@pytest.mark.parametrize("lengths", ALIKE)
@pytest.mark.parametrize("greedy_tokens", [50, 100])
def test_one_tenant_at_100_times_its_share_keeps_anothers_p99_within_one_and_a_half(
    greedy_tokens: int, lengths: str
) -> None:
    # 32 places of a token a second: a share is 16 of them; the quiet tenant uses 80 % of its own.
    async def served(server: Server, *, is_greedy_there: bool) -> None:
        server.add("quiet")
        server.add("greedy")
        async with asyncio.TaskGroup() as loads:
            loads.create_task(server.load("quiet", 7.8, ALIKE[lengths](100), 3000))
            if is_greedy_there:
                every_s = greedy_tokens / 16 / 100
                loads.create_task(server.load("greedy", every_s, ALIKE[lengths](greedy_tokens), 3000))

    alone, beside = Server(32), Server(32)
    virtually(served(alone, is_greedy_there=False))
    virtually(served(beside, is_greedy_there=True))
    assert beside.num_refused > 5_000, "it asked for far more than there is"
    assert beside.p99("quiet") <= 1.5 * alone.p99("quiet"), (beside.p99("quiet"), alone.p99("quiet"))
    num_served = len(beside.took["greedy"])
    assert num_served * greedy_tokens >= 0.9 * (32 - 12.8) * 2000 * 0.9, "what the other leaves is used"


def test_a_tenant_alone_has_every_place() -> None:
    async def work() -> None:
        server = Server(4)
        server.add("one")
        server.add("absent")
        assert len([await server.begun("one") for _ in range(4)]) == 4

    virtually(work())


def test_turns_beyond_in_flight_wait_and_beyond_waiting_are_refused() -> None:
    async def work() -> None:
        server = Server(8)
        server.add("one", in_flight=1, waiting=1)
        server.add("other")
        first = await server.begun("one")
        waits = asyncio.ensure_future(server.begun("one"))
        await asyncio.sleep(0)
        with pytest.raises(LimitExceeded, match="1 requests of one wait"):
            await server.begun("one")
        await server.begun("other")
        with pytest.raises(LimitExceeded, match="at most 1 turns"):
            first.grow(1)
        assert not waits.done()
        server.ended(first)
        server.ended(await waits)

    virtually(work())


def test_tokens_a_minute_are_refused_with_the_time_until_there_are_some() -> None:
    async def work() -> None:
        server = Server(8)
        server.add("one", tokens_a_minute=60)
        server.ended(await server.begun("one"), 90)
        with pytest.raises(LimitExceeded, match="60 tokens a minute") as refused:
            await server.begun("one")
        assert refused.value.retry_after_s == pytest.approx(30)
        await asyncio.sleep(31)
        server.ended(await server.begun("one"))

    virtually(work())


def test_stored_tokens_are_counted_now_and_then() -> None:
    held = [90, 110, 10]

    async def stored(tag: str) -> tuple[int, int]:
        assert tag == tag_of("one")
        return held.pop(0), 1

    async def work() -> None:
        server = Server(8, stored=stored)
        server.add("one", stored_tokens=100)
        for _ in range(3):
            server.ended(await server.begun("one"))
        await asyncio.sleep(10)
        with pytest.raises(LimitExceeded, match="110 tokens of at most 100"):
            await server.begun("one")
        await asyncio.sleep(1)
        server.ended(await server.begun("one"))
        assert held == []

    virtually(work())


def test_sessions_opened_while_they_are_counted_are_within_the_quota() -> None:
    """Nothing is known before the first count is over; one that is opened during a count may not be in it."""
    counts = asyncio.Queue[asyncio.Future[int]]()

    async def stored(_tag: str) -> tuple[int, int]:
        count: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        counts.put_nowait(count)
        return 0, await count

    async def opened(name: str, num: int, *, counted: int) -> list[str]:
        tasks = [asyncio.create_task(server.lanes.check_opening(name)) for _ in range(num)]
        (await counts.get()).set_result(counted)
        return [type(end).__name__ for end in await asyncio.gather(*tasks, return_exceptions=True)]

    async def work() -> None:
        for name in ("one", "two"):
            server.add(name, sessions=3)
        assert await opened("one", 3, counted=1) == ["NoneType", "NoneType", "LimitExceeded"]
        assert await opened("two", 1, counted=0) == ["NoneType"]
        await asyncio.sleep(10)
        assert await opened("two", 3, counted=1) == ["LimitExceeded", "NoneType", "NoneType"], "the first one counts"

    server = Server(8, stored=stored)
    virtually(work())


def test_who_waits_hears_of_a_stop_of_time_and_of_its_clients_leaving_and_holds_nothing() -> None:
    async def work() -> None:
        server = Server(1, timeout_s=5)
        server.add("one")
        server.add("other")
        held = await server.begun("one")
        with pytest.raises(LimitExceeded, match="no place came free"):
            await server.begun("other")

        class Leaving(type(LINK)):  # type: ignore[misc]
            def when_gone(self, on_gone: Callable[[], object] | None) -> None:
                if on_gone is not None:
                    asyncio.get_running_loop().call_later(1, on_gone)

        with pytest.raises(ClientGone):
            await server.lanes.place("other", Leaving())
        cancelled = asyncio.ensure_future(server.begun("other"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        stopped = asyncio.ensure_future(server.begun("other"))
        await asyncio.sleep(0)
        server.capacity.is_draining = True
        server.ended(held)
        with pytest.raises(Draining):
            await stopped
        server.capacity.is_draining = False
        server.ended(await server.begun("other"))
        assert (server.lanes.num_granted, server.capacity.num_in_flight) == (0, 0)

    virtually(work())


def test_a_place_that_comes_as_its_waiter_is_cancelled_goes_to_the_next() -> None:
    async def work() -> None:
        server = Server(1)
        server.add("one")
        held = await server.begun("one")
        cancelled, next_one = (asyncio.ensure_future(server.begun("one")) for _ in range(2))
        await asyncio.sleep(0)
        server.ended(held)
        cancelled.cancel()
        server.ended(await next_one)
        assert (cancelled.cancelled(), server.lanes.num_granted) == (True, 0)

    virtually(work())


def test_quotas_are_of_all_workers(tmp_path: Path) -> None:
    async def work() -> None:
        servers = [Server(8, folder=tmp_path, number=number) for number in range(2)]
        for server in servers:
            server.add("one", in_flight=2, tokens_a_minute=100)
        first, second = await servers[0].begun("one"), await servers[1].begun("one")
        waits = asyncio.ensure_future(servers[1].begun("one"))
        await asyncio.sleep(1)
        assert not waits.done()
        servers[0].ended(first, 60)  # the other worker hears of it at its next look
        third = await waits
        servers[1].ended(second, 60)
        servers[1].ended(third)
        for server in servers:
            with pytest.raises(LimitExceeded, match="100 tokens a minute"):
                await server.begun("one")

    virtually(work())
