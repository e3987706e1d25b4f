"""A fleet whose engines say how full they are: where turns go, which wait, and what an engine's silence does."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.errors import EngineUnavailable, UpstreamRefused
from stenograph.core.types import Chunk, FinishReason, Prompt, RequestId, SamplingParams, token_ids
from stenograph.engine.base import EngineLoad, GenerateRequest
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.gate import MemoryGate
from stenograph.engine.fleet.members import RESIDENT_S, FleetMember

SAID = (5, 6, 7)
ROOMY = EngineLoad(kv_usage=0.1, num_running=1, num_waiting=0, kv_tokens=100_000)
FULL = replace(ROOMY, kv_usage=0.95, num_running=9)
NO_ROUTE = UpstreamRefused(status=404, content_type="", headers=(), body=b"", said="Not Found")
WAIT_S = 60.0


class Rig:
    """A started fleet of so many engines that are asked each second, by a clock that stands still."""

    def __init__(self, num_engines: int = 3) -> None:
        self.clock = ManualClock()
        self.says = [Script(ids=SAID)] * num_engines
        self.engines = [
            ScriptedEngine(vocab_size=100, model=lambda _, at=at: self.says[at]) for at in range(num_engines)
        ]
        for engine in self.engines:
            engine.load = ROOMY
        members = [FleetMember(name=f"e{at}", engine=engine) for at, engine in enumerate(self.engines)]
        self.fleet = Fleet(members, clock=self.clock, load_interval_s=1.0, max_wait_s=WAIT_S)
        self._num_requests = 0

    def request(self, key: str | None = None, *, num_prompt: int = 4, num_kept: int = 0) -> GenerateRequest:
        self._num_requests += 1
        return GenerateRequest(
            request_id=RequestId(f"r{self._num_requests}"),
            prompt=Prompt.of(token_ids(0 for _ in range(num_prompt)), num_kept=num_kept),
            params=SamplingParams(),
            affinity_key=key,
        )

    async def draw(self, key: str | None = None, **prompt: int) -> list[Chunk]:
        return [chunk async for chunk in self.fleet.generate(self.request(key, **prompt))]

    async def pass_time(self, seconds: float = 1.0) -> None:
        """Let time pass, half a second at a time, and what it wakes come to rest."""
        for _ in range(round(2 * seconds)):
            await settled()
            self.clock.advance(0.5)
        await settled()

    async def say(self, *loads: EngineLoad | None) -> None:
        """What the engines say from now on; they are asked."""
        for engine, load in zip(self.engines, loads, strict=True):
            engine.load = load
        await self.pass_time()

    def num_asked(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines]

    def homes(self) -> dict[str, int]:
        """The engine of each session's last turn."""
        return {str(one.affinity_key): at for at, engine in enumerate(self.engines) for one in engine.requests}


async def settled() -> None:
    """Let every task that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.fleet.start()
    await settled()
    yield made
    await made.fleet.aclose()


async def test_a_new_session_goes_where_memory_is_and_stays_there(rig: Rig) -> None:
    await rig.say(replace(ROOMY, kv_usage=0.4), replace(ROOMY, kv_usage=0.2), replace(ROOMY, kv_usage=0.3))
    await rig.draw("s")
    assert rig.num_asked() == [0, 1, 0]
    await rig.say(ROOMY, replace(ROOMY, kv_usage=0.8), ROOMY)
    await rig.draw("s", num_kept=4)
    assert rig.num_asked() == [0, 2, 0]


async def test_tokens_that_idle_sessions_left_count_as_held(rig: Rig) -> None:
    for number in range(3):
        await rig.draw(f"s{number}", num_prompt=10_000 * (number + 1))
    assert sorted(rig.homes().values()) == [0, 1, 2]
    await rig.draw("t")
    assert rig.homes()["t"] == rig.homes()["s0"]


async def test_turns_wait_here_while_no_engine_has_memory_and_go_in_their_order(rig: Rig) -> None:
    await rig.say(FULL, FULL, FULL)
    drawing = [asyncio.ensure_future(rig.draw(f"s{number}", num_prompt=30_000)) for number in range(4)]
    await rig.pass_time()
    assert (rig.num_asked(), rig.fleet.num_waiting) == ([0, 0, 0], 4)
    rig.says = [Script(ids=SAID, paused=True)] * 3
    await rig.say(FULL, ROOMY, FULL)
    assert (rig.num_asked(), rig.fleet.num_waiting) == ([0, 1, 0], 3)
    await rig.say(ROOMY, replace(ROOMY, kv_usage=0.4), ROOMY)
    assert [[one.affinity_key for one in engine.requests] for engine in rig.engines] == [["s1"], ["s0"], ["s2"]]
    await rig.say(FULL, replace(ROOMY, kv_usage=0.4), FULL)
    rig.engines[1].load = replace(ROOMY, kv_tokens=200_000)
    rig.engines[1].step(len(SAID) + 1)
    await rig.pass_time()
    assert rig.engines[1].requests[-1].affinity_key == "s3"
    rig.says = [Script(ids=SAID)] * 3
    for engine in rig.engines:
        engine.step(8)
    assert all(chunks[-1].finish is not None for chunks in await asyncio.gather(*drawing))
    assert rig.fleet.num_waiting == 0


async def test_a_wait_has_an_end_and_the_turn_goes_where_it_would_have_gone(rig: Rig) -> None:
    await rig.draw("s")
    home = rig.homes()["s"]
    await rig.say(FULL, FULL, FULL)
    drawing = asyncio.ensure_future(rig.draw("s", num_kept=4))
    await rig.pass_time(WAIT_S - 1)
    assert not drawing.done()
    await rig.pass_time(1.0)
    await drawing
    assert rig.num_asked()[home] == 2


async def test_a_session_waits_for_a_full_home_as_long_as_its_prefix_is_worth_and_then_leaves(rig: Rig) -> None:
    large = replace(ROOMY, kv_tokens=1_000_000)
    await rig.say(large, large, large)
    await rig.draw("s", num_prompt=72_000)  # three seconds of prefill
    home = rig.homes()["s"]
    await rig.say(*[replace(large, kv_usage=0.95) if at == home else large for at in range(3)])
    drawing = asyncio.ensure_future(rig.draw("s", num_prompt=80_000, num_kept=72_000))
    await rig.pass_time(2.5)
    assert not drawing.done()
    await rig.pass_time(0.5)
    await drawing
    assert (rig.num_asked()[home], sum(rig.num_asked())) == (1, 2)


async def test_an_engine_with_a_queue_or_a_full_batch_gets_nothing(rig: Rig) -> None:
    await rig.say(replace(ROOMY, num_waiting=1), replace(ROOMY, num_running=16, max_running=16), ROOMY)
    for number in range(6):
        await rig.draw(f"s{number}")
    assert rig.num_asked() == [0, 0, 6]


async def test_an_idle_engine_takes_a_turn_larger_than_what_it_may_hold(rig: Rig) -> None:
    await rig.say(*[replace(ROOMY, kv_usage=0.0, num_running=0)] * 3)
    await rig.draw("s", num_prompt=99_000)
    assert sum(rig.num_asked()) == 1


@pytest.mark.parametrize("how", ["abort", "cancel", "close"])
async def test_a_waiting_turn_ends_as_it_is_told_and_leaves_nothing(rig: Rig, how: str) -> None:
    await rig.say(FULL, FULL, FULL)
    request = rig.request("s")

    async def draw() -> list[Chunk]:
        return [chunk async for chunk in rig.fleet.generate(request)]

    drawing = asyncio.ensure_future(draw())
    await settled()
    assert rig.fleet.num_waiting == 1
    if how == "abort":
        assert await rig.fleet.abort(request.request_id)
        (chunk,) = await drawing
        assert chunk.finish is not None
        assert chunk.finish.reason is FinishReason.ABORT
    elif how == "cancel":
        drawing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drawing
    else:
        await rig.fleet.aclose()
        with pytest.raises(EngineUnavailable):
            await drawing
    assert (rig.fleet.num_waiting, rig.fleet.num_running, rig.num_asked()) == (0, 0, [0, 0, 0])
    assert [post.load_tokens for post in rig.fleet._posts] == [0, 0, 0]


async def test_a_turn_that_is_let_in_as_its_waiter_leaves_holds_nothing(rig: Rig) -> None:
    await rig.say(FULL, FULL, FULL)
    drawing = asyncio.ensure_future(rig.draw("s"))
    await settled()
    gate = rig.fleet._gate
    assert isinstance(gate, MemoryGate)
    post = rig.fleet._posts[0]
    gate._queue.report(post, ROOMY, rig.clock.monotonic())
    gate.freed(post)
    assert post.num_running == 1
    drawing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drawing
    assert (post.num_running, post.load_tokens, rig.fleet.num_waiting) == (0, 0, 0)


async def test_engines_that_say_nothing_stop_no_turn_and_it_is_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await rig.say(FULL, FULL, FULL)
    for engine in rig.engines:
        engine.load = NO_ROUTE
    drawing = asyncio.ensure_future(rig.draw("s"))
    await rig.pass_time(25)
    await drawing
    assert [status.load for status in rig.fleet.statuses()] == [None, None, None]
    for number in range(6):
        await rig.draw(f"t{number}")
    assert sorted(rig.num_asked()) == [2, 2, 3]
    assert len([one for one in caplog.records if "does not say how full it is" in one.message]) == 3
    for engine in rig.engines:
        engine.load = ROOMY
    await rig.pass_time(30.0)
    assert [status.load for status in rig.fleet.statuses()] == [ROOMY] * 3


async def test_a_silent_engine_gets_no_more_than_its_share(rig: Rig) -> None:
    rig.says = [Script(ids=SAID, paused=True)] * 3
    rig.engines[0].load = None
    await rig.pass_time(15.0)
    rig.engines[0].load = None
    await rig.say(None, FULL, FULL)
    drawing = [asyncio.ensure_future(rig.draw(f"s{number}", num_prompt=1000)) for number in range(30)]
    await settled()
    assert 0 < rig.num_asked()[0] < 30
    for one in drawing:
        one.cancel()
    await asyncio.wait(drawing)
    assert rig.fleet.num_running == 0


async def test_one_engine_is_asked_nothing_and_two_are() -> None:
    rig = Rig(1)
    await rig.fleet.start()
    assert rig.fleet._gate is None
    other = ScriptedEngine(vocab_size=100)
    other.load = FULL
    rig.fleet.join(FleetMember(name="other", engine=other))
    await settled()
    assert [status.load for status in rig.fleet.statuses()] == [ROOMY, FULL]
    assert await rig.fleet.leave("other")
    await rig.draw("s")
    await rig.fleet.aclose()


async def test_sessions_that_had_no_turn_for_long_keep_no_new_one_out(rig: Rig) -> None:
    for number in range(3):
        await rig.draw(f"s{number}", num_prompt=30_000)
    await rig.pass_time(RESIDENT_S / 2)
    drawing = asyncio.ensure_future(rig.draw("t", num_prompt=30_000))
    await rig.pass_time(RESIDENT_S / 2 - 1)
    assert not drawing.done(), "their next turns would lose their prefix"
    await rig.pass_time(1.5)
    await drawing
