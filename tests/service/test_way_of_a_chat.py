"""How far one request goes through the code: files, functions, Python calls, changes of room.

A 4 KiB chat is paid for in the interpreter, in our own code: so its way is a figure that each change sees. Counted is
the fourth turn of a session, whose requests are alike, on every thread, in frames of the product; the stand-in of
SGLang beside it is left out.
A change that makes a way shorter lowers the limit here; one that makes it longer says why in its commit.
"""

import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp
import pytest

import stenograph
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.render.renderer import Renderer
from stenograph.testing.standins.sglang_server import SGLangServer

from .conftest import END, assistant, running, user
from .test_sglang_chat import Rig

PRODUCT = str(Path(stenograph.__file__).parent) + "/"
TESTING = PRODUCT + "testing/"

# Files, functions, calls, changes of room. Goal: 35 files, 220 functions, 450 calls for a chat.
# The table of sessions is a file of its own, and the manager makes a request's turns itself: as many files as before.
# Strands, their labels and the ledger took 25 calls, and 380 of the samples: their metadata has every strand and turn.
# Admission took a file, and saved eleven calls. The list of messages is decoded in a file that other dialects share.
# The name of a turn's log-probabilities takes two calls.
# Samples say of each turn how it was sampled: 365 for four turns. They are made in a file that `export` shares.
# The session's name in the body of a request to SGLang takes a call.
# The server's own HTTP connection is a file and some 20 calls of the product that were more of uvicorn's before.
CHAT = (50, 220, 284, 98)
# A stream sets the timer that keeps it alive: two files and two functions.
STREAMED_CHAT = (53, 269, 361, 128)
# The digests of its turns: one file, six functions, 35 calls. Mixed versions, differing policies: 24 calls.
# A drift report that is kept for whoever asks next: two files, seven functions and calls. Objects within a row that are
# looked at for their size: two functions, 13 calls.
SAMPLES = (39, 256, 1737, 122)


@dataclass
class Way:
    """What one request entered. A call is each time that a frame of ours is entered, resumed ones included."""

    files: set[str] = field(default_factory=set)
    functions: set[CodeType] = field(default_factory=set)
    num_calls: int = 0
    num_room_changes: int = 0
    rooms: dict[int, str] = field(default_factory=dict)

    def entered(self, frame: FrameType) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(PRODUCT) or file.startswith(TESTING):
            return
        thread = threading.get_ident()
        room = file.removeprefix(PRODUCT).split("/")[0]
        self.num_room_changes += self.rooms.get(thread, room) != room
        self.rooms[thread] = room
        self.files.add(file)
        self.functions.add(frame.f_code)
        self.num_calls += 1

    @property
    def figures(self) -> tuple[int, int, int, int]:
        return len(self.files), len(self.functions), self.num_calls, self.num_room_changes


class Tracer:
    """Sees every frame of every thread that starts after it, and counts while it is asked to."""

    def __init__(self) -> None:
        self.way: Way | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.way is not None:
            self.way.entered(frame)

    @contextmanager
    def counting(self) -> Iterator[Way]:
        self.way = way = Way()
        try:
            yield way
        finally:
            self.way = None


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    tracer = Tracer()
    before = sys.getprofile(), threading.getprofile()
    sys.setprofile(tracer)
    threading.setprofile(tracer)
    yield tracer
    sys.setprofile(before[0])
    threading.setprofile(before[1])  # type: ignore[arg-type]


async def fourth_turn(rig: Rig, tracer: Tracer, *, stream: bool) -> tuple[Way, Way]:
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
    with tracer.counting() as samples:
        answer = await rig.call("POST", f"/sessions/{session}/samples")
    assert answer.status == 200
    return chat, samples


@asynccontextmanager
async def rig_of(renderer: Renderer) -> AsyncIterator[Rig]:
    encode = renderer.tokenizer.encode
    async with SGLangServer(encode=lambda text: list(encode(text)), stop_id=END) as sglang:
        adapter = SGLangChat(model="tiny", vocab_size=renderer.tokenizer.vocab_size)
        engine = HttpEngine(HttpEngineOptions(url=sglang.url), adapter)
        await engine.start()
        try:
            async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
                yield Rig(url=url, manager=manager, sglang=sglang, engine=engine, renderer=renderer, client=client)
        finally:
            await engine.aclose()


def check(way: Way, limit: tuple[int, int, int, int]) -> None:
    assert all(figure <= most for figure, most in zip(way.figures, limit, strict=True)), f"{way.figures}, not {limit}"


@pytest.mark.parametrize(("stream", "limit"), [(False, CHAT), (True, STREAMED_CHAT)], ids=["whole", "streamed"])
async def test_a_chat_goes_no_longer_way_than_it_may(
    tracer: Tracer, renderer: Renderer, stream: bool, limit: tuple[int, int, int, int]
) -> None:
    async with rig_of(renderer) as rig:
        chat, _ = await fourth_turn(rig, tracer, stream=stream)
    check(chat, limit)


async def test_samples_go_no_longer_way_than_they_may(tracer: Tracer, renderer: Renderer) -> None:
    async with rig_of(renderer) as rig:
        _, samples = await fourth_turn(rig, tracer, stream=False)
    check(samples, SAMPLES)
