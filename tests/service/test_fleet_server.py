"""The whole server before several stand-ins of SGLang: engines that die, come back, and are told to stop."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.faults import Fault
from standins.planned_server import ReplyScript as Reply
from standins.scripted_engine import Script, ScriptedEngine
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder
from stenograph.core.clock import SystemClock
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.base import EngineState
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.settings import EngineKind
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.http.engines import make_engine
from stenograph.http.settings import Settings
from stenograph.model.files import load_model_files
from stenograph.offload.body_slots import BodySlots
from stenograph.text.renderer import Renderer

from .conftest import END, Live, assistant, running, user

PROBE_S = 0.02
ENGINE_LOG = HttpEngine.__module__


class Changes(logging.Handler):
    """Wakes who waits for the state of an engine, whose every change is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig(Live):
    """A server before a fleet, and the stand-ins behind it. The `engine` of it is not used."""

    servers: list[SGLangServer]
    fleet: Fleet
    changes: Changes

    @property
    def num_asked(self) -> list[int]:
        return [len(server.requests) for server in self.servers]

    def reply(self, text: str, **options: Any) -> Reply:
        ids = (*self.renderer.tokenizer.encode(text), END)
        return Reply(**{"ids": ids, "text": text, "matched": END, **options})

    def plan(self, *replies: Reply) -> None:
        """Plan the same for every engine."""
        for server in self.servers:
            server.plan(*replies)

    async def nodes(self, session: str) -> int:
        return len((await self.call("GET", f"/sessions/{session}")).json()["records"])

    async def states(self) -> tuple[int, list[str]]:
        """The status of `/ready`, and the state of each engine."""
        answer = await self.call("GET", "/ready")
        return answer.status, [engine["state"] for engine in answer.json()["engines"]]

    async def metric(self, at: int, name: str, **labels: str) -> float:
        """A metric of the engine number `at`."""
        named = "".join(f',{label}="{value}"' for label, value in labels.items())
        line = f'stenograph_engine_{name}{{engine="{self.servers[at].url}"{named}}} '
        page = (await self.call("GET", "/metrics")).body.decode()
        return next(float(row.removeprefix(line)) for row in page.splitlines() if row.startswith(line))

    async def until(self, at: int, state: EngineState) -> None:
        """Wait until a probe has found out."""
        while self.fleet.statuses()[at].health.state is not state:
            self.changes.seen.clear()
            await self.changes.seen.wait()


Connect = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def changes(caplog: pytest.LogCaptureFixture) -> Iterator[Changes]:
    """What is told of the states of engines."""
    caplog.set_level(logging.INFO, logger=ENGINE_LOG)
    handler = Changes()
    logging.getLogger(ENGINE_LOG).addHandler(handler)
    yield handler
    logging.getLogger(ENGINE_LOG).removeHandler(handler)


@pytest.fixture
def connect(renderer: Renderer, changes: Changes) -> Connect:
    """Servers before so many stand-ins, of which the first `num_down` are not there yet."""

    @asynccontextmanager
    async def connected(num_engines: int = 2, *, num_down: int = 0, **settings: Any) -> AsyncIterator[Rig]:
        encode = renderer.tokenizer.encode
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(SGLangServer(encode=lambda text: list(encode(text)), stop_id=END))
                for _ in range(num_engines)
            ]
            for server in servers[:num_down]:
                await server.aclose()
            members = [
                FleetMember(
                    name=server.url,
                    engine=HttpEngine(
                        HttpEngineOptions(url=server.url, probe_pause_s=PROBE_S),
                        SGLangChat(AdapterOptions(model="tiny", vocab_size=renderer.tokenizer.vocab_size)),
                    ),
                )
                for server in servers
            ]
            fleet = Fleet(members, clock=SystemClock())
            await fleet.start()
            stack.push_async_callback(fleet.aclose)
            url, manager = await stack.enter_async_context(running(fleet, renderer, **settings))
            client = await stack.enter_async_context(aiohttp.ClientSession())
            unused = ScriptedEngine(vocab_size=1)
            yield Rig(
                url=url,
                engine=unused,
                renderer=renderer,
                manager=manager,
                client=client,
                servers=servers,
                fleet=fleet,
                changes=changes,
            )

    return connected


async def test_sixty_four_sessions_spread_evenly_and_each_stays(connect: Connect) -> None:
    async with connect(4) as rig:
        sessions = [await rig.open() for _ in range(64)]
        first = await asyncio.gather(*(rig.chat(session, user("one")) for session in sessions))
        assert {answer.status for answer in first} == {200}
        assert rig.num_asked == [16, 16, 16, 16]
        said = first[0].json()["choices"][0]["message"]["content"]
        again = [user("one"), assistant(said), user("two")]
        assert {(await rig.chat(session, *again)).status for session in sessions} == {200}
        assert rig.num_asked == [32, 32, 32, 32]
        for server in rig.servers:
            keys = Counter(asked.header("x-smg-routing-key") for asked in server.requests)
            assert set(keys.values()) == {2}


@pytest.mark.parametrize("fault", [Fault.CLOSED, Fault.RESET])
async def test_an_engine_that_breaks_off_before_its_first_byte_is_nobodys_loss(connect: Connect, fault: Fault) -> None:
    async with connect() as rig:
        session = await rig.open()
        rig.plan(rig.reply("x"))
        assert (await rig.chat(session, user("one"))).status == 200
        home = rig.num_asked.index(1)
        rig.servers[home].plan(rig.reply("lost", fault=fault))
        answer = await rig.chat(session, user("one"), assistant("x"), user("two"))
        assert (answer.status, answer.json()["choices"][0]["message"]["content"]) == (200, "x")
        assert await rig.nodes(session) == 2
        assert sorted(rig.num_asked) == [1, 2]


async def test_when_every_engine_breaks_off_the_turn_fails_after_one_try_at_each(connect: Connect) -> None:
    async with connect(3) as rig:
        session = await rig.open()
        rig.plan(rig.reply("lost", fault=Fault.RESET))
        answer = await rig.chat(session, user("one"))
        assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_unreachable")
        assert rig.num_asked == [1, 1, 1]
        assert await rig.nodes(session) == 0


async def test_an_engine_killed_in_mid_turn_before_the_first_byte_is_replaced(connect: Connect) -> None:
    async with connect() as rig:
        session = await rig.open()
        rig.plan(rig.reply("hi", paused=True))
        chat = asyncio.ensure_future(rig.chat(session, user("one")))
        waits = [asyncio.ensure_future(server.begun(1)) for server in rig.servers]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        first = next(at for at, wait in enumerate(waits) if wait.done())
        await rig.servers[first].aclose()
        await waits[1 - first]
        rig.servers[1 - first].release()
        answer = await chat
        assert answer.status == 200
        assert await rig.nodes(session) == 1
        assert await rig.metric(first, "requests_total", outcome="moved") == 1
        assert await rig.metric(1 - first, "requests_total", outcome="answered") == 1
        assert (await rig.states())[0] == 200
        await rig.until(first, EngineState.DOWN)
        assert await rig.metric(first, "up") == 0
        said = answer.json()["choices"][0]["message"]["content"]
        assert (await rig.chat(session, user("one"), assistant(said), user("two"))).status == 200
        assert await rig.nodes(session) == 2
        samples = await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})
        assert samples.json()["samples"][0]["loss_mask"].count(1) > 2


async def test_a_full_engines_503_is_answered_by_another_and_a_400_is_the_clients(connect: Connect) -> None:
    async with connect(3) as rig:
        for server in rig.servers[:2]:
            server.plan(*[rig.reply("", status=503)] * 2)
        sessions = [await rig.open() for _ in range(6)]
        answers = [await rig.chat(session, user("one")) for session in sessions]
        assert {answer.status for answer in answers} == {200}
        rig.plan(*[rig.reply("", status=400)] * 3)
        before = sum(rig.num_asked)
        refused = await rig.chat(await rig.open(), user("one"))
        assert (refused.status, sum(rig.num_asked)) == (400, before + 1)


async def test_aborts_reach_the_engine_that_runs_the_turn(connect: Connect) -> None:
    async with connect(3) as rig:
        rig.plan(*[rig.reply("a long story", paused=True, num_drawn=3)] * 2)
        sessions = [await rig.open() for _ in range(6)]
        chats = [asyncio.ensure_future(rig.chat(session, user("one"))) for session in sessions]
        await asyncio.gather(*(server.held(2) for server in rig.servers))
        assert [engine["num_running"] for engine in (await rig.call("GET", "/ready")).json()["engines"]] == [2, 2, 2]
        for session, chat in zip(sessions, chats, strict=True):
            assert (await rig.call("POST", f"/sessions/{session}/abort", {})).json() == {"aborted": 1}
            assert (await chat).json()["choices"][0]["finish_reason"] == "abort"
        for server in rig.servers:
            assert set(server.aborts) == {asked.json["rid"] for asked in server.requests}


async def test_all_down_is_503_and_one_that_is_back_is_used(connect: Connect) -> None:
    async with connect(num_down=2) as rig:
        session = await rig.open()
        assert await rig.states() == (503, ["down", "down"])
        refused = await rig.chat(session, user("one"))
        assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in refused.headers
        assert (await rig.call("GET", "/health")).status == 200
        await rig.servers[1].start()
        await rig.until(1, EngineState.READY)
        assert await rig.states() == (200, ["down", "ready"])
        assert (await rig.chat(session, user("one"))).status == 200
        assert rig.num_asked == [0, 1]
        await rig.servers[1].aclose()
        await rig.servers[0].start()
        await rig.until(0, EngineState.READY)
        await rig.until(1, EngineState.DOWN)
        assert (await rig.chat(await rig.open(), user("one"))).status == 200
        assert rig.num_asked == [1, 1]


async def test_raw_requests_go_to_an_engine_that_is_there(connect: Connect) -> None:
    async with connect() as rig:
        assert rig.fleet.forwards
        session = await rig.open()
        assert (await rig.chat(session, user("one"))).status == 200
        home = rig.num_asked.index(1)
        await rig.call("POST", f"/sessions/{session}/tokenize", {"prompt": "x"})
        assert [asked.path for asked in rig.servers[home].asked].count("/tokenize") == 1
        await rig.servers[home].aclose()
        for _ in range(4):
            assert (await rig.call("GET", f"/sessions/{session}/v1/models")).status == 200


async def test_expected_reuse_is_exported_beside_what_was_had(connect: Connect) -> None:
    async with connect() as rig:
        session = await rig.open()
        rig.plan(rig.reply("x"), rig.reply("y", num_cached=7))
        await rig.chat(session, user("one"))
        home = rig.num_asked.index(1)
        assert await rig.metric(home, "expected_cached_tokens_total") == 0
        await rig.chat(session, user("one"), assistant("x"), user("two"))
        view = (await rig.call("GET", f"/sessions/{session}")).json()
        first = view["records"][0]["response"]["choices"][0]["meta_info"]
        left = first["prompt_tokens"] + first["completion_tokens"]
        assert await rig.metric(home, "expected_cached_tokens_total") == left
        assert await rig.metric(home, "cached_tokens_total") == 7


# -- engines that stream


async def test_one_that_dies_after_its_first_token_ends_the_turn_and_nothing_is_kept(renderer: Renderer) -> None:
    ids = tuple(renderer.tokenizer.encode("all of it"))
    dies = Script(ids=ids, error=UpstreamUnreachable("it broke off", reply_began=True))
    says = [dies]
    engines = [
        ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096, model=lambda _: says[0])
        for _ in range(2)
    ]
    members = [FleetMember(name=f"e{at}", engine=engine) for at, engine in enumerate(engines)]
    fleet = Fleet(members, clock=SystemClock())
    await fleet.start()
    async with running(fleet, renderer) as (url, manager), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engines[0], renderer=renderer, manager=manager, client=client)
        session = await live.open()
        failed = await live.chat(session, user("one"))
        assert (failed.status, failed.json()["error"]["code"]) == (502, "upstream_unreachable")
        assert sum(len(engine.requests) for engine in engines) == 1
        assert (await live.call("GET", f"/sessions/{session}")).json()["records"] == []
        says[0] = Script(ids=(*ids, END), finish=Finish(reason=FinishReason.STOP, matched=END))
        assert (await live.chat(session, user("one"))).status == 200
        assert len((await live.call("GET", f"/sessions/{session}")).json()["records"]) == 1
    await fleet.aclose()


# -- how it is wired


@pytest.mark.parametrize("num_urls", [1, 2])
async def test_addresses_make_a_fleet_also_one(tmp_path: Path, num_urls: int) -> None:
    files = load_model_files(write_tiny_folder(tmp_path / "tiny"))
    async with SGLangServer() as first, SGLangServer() as second:
        urls = (first.url, second.url)[:num_urls]
        settings = Settings(engine=EngineKind.SGLANG, engine_url=urls)
        engine = make_engine(settings, files, files.path, BodySlots(2), SystemClock())
        await engine.start()
        assert isinstance(engine, Fleet)
        assert engine.forwards
        assert engine.capabilities.vocab_size == files.vocab_size
        assert [status.name for status in engine.statuses()] == list(urls)
        assert {status.health.state for status in engine.statuses()} == {EngineState.READY}
        await engine.aclose()


@pytest.mark.parametrize("fault", [Fault.RESET_IN_BODY, Fault.CUT_BODY, Fault.CUT_CHUNK, Fault.LONG_LENGTH])
async def test_a_reply_that_had_begun_is_not_asked_for_again(connect: Connect, fault: Fault) -> None:
    async with connect() as rig:
        session = await rig.open()
        rig.plan(rig.reply("lost", fault=fault, released=True))
        answer = await rig.chat(session, user("one"))
        assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_unreachable")
        assert sum(rig.num_asked) == 1
        assert await rig.nodes(session) == 0
