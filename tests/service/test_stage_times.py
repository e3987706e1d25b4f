"""What a stage of a turn is said to have taken is what it took. Time moves when a test moves it."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import ScriptedEngine
from stenograph.http.turn_route import DECODED_OFF_LOOP_BYTES
from stenograph.offload.pool import CpuPool
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, running, user

T = TypeVar("T")

LARGE = "the user asks " * (DECODED_OFF_LOOP_BYTES // 14 + 1)
"""Decoded on a worker."""


class StandingPool(CpuPool):
    """A real pool before which the first `num` large pieces of work stand until they are let in."""

    def __init__(self, num: int) -> None:
        super().__init__(1)
        self._num_left = num
        self._standing: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def run(self, work: Callable[[], T], *, num_bytes: int) -> T:
        if num_bytes >= DECODED_OFF_LOOP_BYTES and self._num_left:
            self._num_left -= 1
            door = asyncio.Event()
            self._standing.put_nowait(door)
            await door.wait()
        return await super().run(work, num_bytes=num_bytes)

    async def stands(self) -> asyncio.Event:
        """Wait until work stands here that has not been seen; it goes on when the event is set."""
        return await self._standing.get()


@asynccontextmanager
async def timed(renderer: Renderer, clock: ManualClock, pool: CpuPool) -> AsyncGenerator[Live]:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=10**6)
    async with (
        running(engine, renderer, pool=pool, clock=clock) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


def durations_ms(answer: Answer) -> dict[str, float]:
    """What `Server-Timing` says of each stage."""
    parts = (part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
    return {stage: float(ms) for stage, ms in parts}


async def metric(live: Live, name: str) -> str:
    text = (await live.call("GET", "/metrics")).body.decode()
    return next(line.removeprefix(name).strip() for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("stream", [False, True])
async def test_decoding_a_large_body_is_told_apart_from_admitting_it(renderer: Renderer, stream: bool) -> None:
    clock, pool = ManualClock(), StandingPool(2)
    async with timed(renderer, clock, pool) as live:
        session = await live.open()
        live.says("yes")
        began = clock.monotonic()
        chat = asyncio.ensure_future(live.chat(session, user(LARGE), stream=stream))
        for seconds in (60.0, 7.0):  # to decode, to render
            stands = await pool.stands()
            clock.advance(seconds)
            stands.set()
        answer = await chat
        assert answer.status == 200, answer.body
        told = durations_ms(answer)
        assert [told[stage] for stage in ("receive", "admit", "decode", "render")] == [0.0, 0.0, 60_000.0, 7_000.0]
        (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
        ends: dict[str, Any] = record["stages"]
        assert [ends[stage] - began for stage in ("receive", "admit", "decode", "render")] == [0.0, 0.0, 60.0, 67.0]
        assert record["stage_seconds"]["admit"] == 0.0
        assert record["stage_seconds"]["decode"] == 60.0
        assert float(await metric(live, 'stenograph_stage_seconds_sum{stage="admit"}')) == 0.0
        assert float(await metric(live, 'stenograph_stage_seconds_sum{stage="decode"}')) == 60.0
