"""A stream begins within ten seconds and is never silent for more than fifteen. One that is in time is as it was."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from standins.clock import ManualClock
from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.sse import STILL_ALIVE
from stenograph.http.keep_alive import BEGIN_S, SILENCE_S
from stenograph.text.renderer import Renderer

from .conftest import END, Live, running, user
from .test_toy_dialect import ToyDialect


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A server whose time stands still."""

    live: Live
    clock: ManualClock

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.live.client.post(self.live.url + path, json=body)


@pytest.fixture
async def timed(renderer: Renderer) -> AsyncIterator[Timed]:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    clock = ManualClock()
    async with (
        running(engine, renderer, clock=clock, also=(ToyDialect(),)) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        yield Timed(live=live, clock=clock)


CHAT = {"messages": [user("hello")], "stream": True}


async def test_a_silent_chat_begins_with_comments_and_goes_on_as_every_other(timed: Timed) -> None:
    timed.live.says("good day", paused=True)
    asking = asyncio.create_task(anext_answer(timed, "/v1/chat/completions", CHAT))
    await timed.live.engine.begun(1)
    timed.clock.advance(BEGIN_S)
    answer = await asking
    assert await answer.content.readuntil(b"\n\n") == STILL_ALIVE
    timed.clock.advance(SILENCE_S)
    assert await answer.content.readuntil(b"\n\n") == STILL_ALIVE
    timed.live.engine.step(100)
    rest = (await answer.read()).decode()
    assert rest.endswith("data: [DONE]\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in rest.split("\n\n")[:-2]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "good day"
    assert (events[0]["choices"][0]["delta"]["role"], timed.clock.num_timers) == ("assistant", 0)


async def test_nothing_is_added_to_a_stream_whose_events_come_in_time(timed: Timed) -> None:
    script = timed.live.says("good day", paused=True)
    asking = asyncio.create_task(anext_answer(timed, "/v1/chat/completions", CHAT))
    await timed.live.engine.begun(1)
    timed.clock.advance(BEGIN_S - 0.1)
    timed.live.engine.step(1)
    answer = await asking
    first = await answer.content.readuntil(b"\n\n")
    more = await answer.content.readuntil(b"\n\n")
    timed.clock.advance(SILENCE_S - 0.1)
    timed.live.engine.step(len(script.ids))
    assert STILL_ALIVE not in first + more + await answer.read()


async def test_a_dialect_begins_a_silent_stream_in_its_own_way(timed: Timed) -> None:
    timed.live.says("good day", paused=True)
    asking = asyncio.create_task(anext_answer(timed, "/toy/low/say", {"lines": ["hello"], "live": True}))
    await timed.live.engine.begun(1)
    timed.clock.advance(BEGIN_S)
    answer = await asking
    num_ids = len(timed.live.engine.requests[0].prompt.ids)
    assert json.loads(await answer.content.readline()) == {"hm": num_ids}
    timed.live.engine.step(100)
    said = [json.loads(one) for one in (await answer.read()).splitlines()]
    assert (list(said[0]), said[-1]) == (["id"], {"end": "stop"})


async def test_a_stream_whose_tokens_show_nothing_is_kept_alive(timed: Timed) -> None:
    """A call goes out whole: while its arguments are sampled, a client sees nothing of it."""
    text = '<tool_call>\n{"name": "look", "arguments": {"where": "here and there and everywhere"}}\n</tool_call>'
    script = timed.live.says(text, paused=True)
    tool = {"type": "function", "function": {"name": "look"}}
    asking = asyncio.create_task(anext_answer(timed, "/v1/chat/completions", {**CHAT, "tools": [tool]}))
    await timed.live.engine.begun(1)
    timed.live.engine.step(20)
    answer = await asking
    await answer.content.readuntil(b"\n\n")
    timed.clock.advance(SILENCE_S)
    assert await answer.content.readuntil(b"\n\n") == STILL_ALIVE
    timed.live.engine.step(len(script.ids))
    assert b"tool_calls" in await answer.read()


async def test_what_fails_after_the_early_beginning_is_an_event_and_has_its_status_in_the_ledger(timed: Timed) -> None:
    session = await timed.live.open()
    timed.live.engine.plan(Script(ids=(END,), error=UpstreamUnreachable("It broke."), paused=True))
    path = f"/sessions/{session}/v1/chat/completions"
    asking = asyncio.create_task(anext_answer(timed, path, CHAT))
    await timed.live.engine.begun(1)
    timed.clock.advance(BEGIN_S)
    answer = await asking
    timed.live.engine.step(100)
    *_, last = (await answer.read()).decode().rstrip().split("\n\n")
    assert (answer.status, json.loads(last.removeprefix("data: "))["error"]["code"]) == (200, "upstream_unreachable")
    (row,) = (await timed.live.call("GET", f"/sessions/{session}/ledger")).json()["requests"]
    assert (row["status"], row["error"]) == (502, "upstream_unreachable")


async def anext_answer(timed: Timed, path: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
    """The answer as soon as it has begun."""
    answer: aiohttp.ClientResponse = await timed.post(path, body)
    assert answer.status == 200, await answer.read()
    return answer
