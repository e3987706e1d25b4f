"""How much code one request goes through: lines of the functions and of the files that it enters, changes of file.

What a reader has to open is what the figures bound: the number of functions and calls was met by making fewer and
longer ones, and is no bar; lines of files alone are met by tearing files in two. Counted is the fourth turn of a
session, whose requests are alike, on every thread, in frames of the product; the stand-in of SGLang is left out.
"""

import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from benchmarks.house.watched import RequestWay, Tracer
from standins.sglang_server import SGLangServer
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.text.renderer import Renderer

from .conftest import END, assistant, running, user
from .test_sglang_chat import Rig

# Lines of the functions, lines of their files, changes of file. Goal: 8,000 lines of files and 110 changes for a chat.
CHAT = (2_930, 13_400, 184)
STREAMED_CHAT = (3_180, 13_820, 227)
SAMPLES = (1_265, 8_400, 184)


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    tracer = Tracer()
    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(tracer)
    threading.setprofile(tracer)
    yield tracer
    sys.setprofile(before[0])
    threading.setprofile(before[1])  # type: ignore[arg-type]


async def fourth_turn(rig: Rig, tracer: Tracer, *, stream: bool) -> tuple[RequestWay, RequestWay]:
    """The ways of a session's fourth turn, and of its samples."""
    session = await rig.open()
    messages: list[dict[str, Any]] = []
    for number in range(4):
        text = f"the answer {number}"
        rig.sglang.plan(rig.script(text))
        messages.append(user(f"question {number}"))
        if number == 3:
            with tracer.counting() as chat:
                answer = await rig.chat(session, *messages, stream=stream)
        else:
            answer = await rig.chat(session, *messages, stream=stream)
        assert answer.status == 200, answer.body
        messages.append(assistant(text))
    await rig.call("GET", f"/sessions/{session}")  # the first request to a late route loads their code
    with tracer.counting() as samples:
        answer = await rig.call("POST", f"/sessions/{session}/samples")
    assert answer.status == 200
    return chat, samples


@asynccontextmanager
async def rig_of(renderer: Renderer) -> AsyncIterator[Rig]:
    encode = renderer.tokenizer.encode
    async with SGLangServer(encode=lambda text: list(encode(text)), stop_id=END) as sglang:
        adapter = SGLangChat(AdapterOptions(model="tiny", vocab_size=renderer.tokenizer.vocab_size))
        engine = HttpEngine(HttpEngineOptions(url=sglang.url), adapter)
        await engine.start()
        try:
            async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
                yield Rig(url=url, manager=manager, sglang=sglang, engine=engine, renderer=renderer, client=client)
        finally:
            await engine.aclose()


def check(way: RequestWay, limit: tuple[int, int, int]) -> None:
    assert all(figure <= most for figure, most in zip(way.figures, limit, strict=True)), f"{way.figures}, not {limit}"


@pytest.mark.parametrize(("stream", "limit"), [(False, CHAT), (True, STREAMED_CHAT)], ids=["whole", "streamed"])
async def test_a_chat_goes_no_longer_way_than_it_may(
    tracer: Tracer, renderer: Renderer, stream: bool, limit: tuple[int, int, int]
) -> None:
    async with rig_of(renderer) as rig:
        chat, _ = await fourth_turn(rig, tracer, stream=stream)
    check(chat, limit)


async def test_samples_go_no_longer_way_than_they_may(tracer: Tracer, renderer: Renderer) -> None:
    async with rig_of(renderer) as rig:
        _, samples = await fourth_turn(rig, tracer, stream=False)
    check(samples, SAMPLES)
