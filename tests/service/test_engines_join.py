"""Engines that join a fleet and leave it while turns run."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from standins.planned_server import AskedRequest
from standins.planned_server import ReplyScript as Reply
from standins.scripted_engine import ScriptedEngine
from standins.sglang_server import SGLangServer
from stenograph.cli.settings_table import CommandSettings as Settings
from stenograph.core.clock import SystemClock
from stenograph.engine.settings import EngineKind
from stenograph.http.engines import make_engine
from stenograph.offload.body_slots import BodySlots
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, assistant, running, tiny_files, user

Routes = Callable[[AskedRequest], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig(Live):
    """A server that was started with the first of these stand-ins."""

    servers: list[SGLangServer]

    async def add(self, at: int) -> Answer:
        return await self.call("POST", "/engines", {"url": self.servers[at].url})

    async def remove(self, at: int) -> Answer:
        return await self.call("DELETE", f"/engines/{quote(self.servers[at].url, safe='')}")

    async def states(self) -> list[tuple[str, str]]:
        engines = (await self.call("GET", "/engines")).json()["engines"]
        return [(engine["name"], engine["state"]) for engine in engines]

    def reply(self, text: str, **more: Any) -> Reply:
        return Reply(ids=(*self.renderer.tokenizer.encode(text), END), text=text, matched=END, **more)

    async def turn(self, session: str, *messages: dict[str, Any]) -> None:
        assert (await self.chat(session, *messages)).status == 200


@asynccontextmanager
async def rigged(
    renderer: Renderer, num: int = 3, *, routes: Sequence[Routes | None] = (), **settings: Any
) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        encode = renderer.tokenizer.encode
        servers = [
            await stack.enter_async_context(
                SGLangServer(encode=lambda text: list(encode(text)), stop_id=END, routes=each)
            )
            for each, _ in itertools.zip_longest(routes, range(num))
        ]
        made = Settings(engine=EngineKind.SGLANG, engine_url=(servers[0].url,), **settings)
        engine = make_engine(made, tiny_files(), Path("tiny"), BodySlots(2), SystemClock())
        await engine.start()
        stack.push_async_callback(engine.aclose)
        url, manager = await stack.enter_async_context(running(engine, renderer, **settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        unused = ScriptedEngine(vocab_size=1, max_context_tokens=1)
        yield Rig(url=url, engine=unused, renderer=renderer, manager=manager, client=client, servers=servers)


async def test_an_engine_that_joins_gets_turns(renderer: Renderer) -> None:
    async with rigged(renderer) as rig:
        assert await rig.states() == [(rig.servers[0].url, "ready")]
        sessions = [await rig.open() for _ in range(8)]
        await asyncio.gather(*(rig.turn(session, user("hi")) for session in sessions))
        answer = await rig.add(1)
        assert (answer.status, answer.json()["name"], answer.json()["state"]) == (200, rig.servers[1].url, "ready")
        others = [await rig.open() for _ in range(8)]
        await asyncio.gather(*(rig.turn(session, user("hi")) for session in others))
        assert rig.servers[1].requests
        again = await rig.add(1)
        assert (again.status, again.json()["error"]["param"]) == (400, "/url")
        assert "already" in again.json()["error"]["message"]
        assert len(await rig.states()) == 2


async def test_an_engine_that_leaves_drains_and_its_sessions_move(renderer: Renderer) -> None:
    async with rigged(renderer) as rig:
        session = await rig.open()
        rig.servers[0].plan(rig.reply("slow", paused=True))
        slow = asyncio.ensure_future(rig.chat(session, user("one")))
        await rig.servers[0].begun(1)
        assert (await rig.add(1)).status == 200
        leaving = asyncio.ensure_future(rig.remove(0))
        while (rig.servers[0].url, "stopped") not in await rig.states():  # noqa: ASYNC110
            await asyncio.sleep(0)
        other = await rig.open()
        await rig.turn(other, user("meanwhile"))
        assert not leaving.done()
        assert len(rig.servers[0].requests) == 1
        rig.servers[0].release()
        assert (await slow).status == 200
        answer = await leaving
        assert (answer.status, answer.json()) == (200, {"name": rig.servers[0].url, "removed": True})
        assert await rig.states() == [(rig.servers[1].url, "ready")]
        await rig.turn(session, user("one"), assistant("slow"), user("two"))
        assert len(rig.servers[0].requests) == 1
        assert len((await rig.call("GET", f"/sessions/{session}")).json()["records"]) == 2


async def test_a_turn_that_began_before_another_engine_came_is_aborted_at_its_own(renderer: Renderer) -> None:
    async with rigged(renderer) as rig:
        session = await rig.open()
        rig.servers[0].plan(rig.reply("slow", paused=True, num_drawn=2))
        slow = asyncio.ensure_future(rig.chat(session, user("one")))
        await rig.servers[0].held(1)
        assert (await rig.add(1)).status == 200
        assert (await rig.call("POST", f"/sessions/{session}/abort", {})).json() == {"aborted": 1}
        assert (await slow).json()["choices"][0]["finish_reason"] == "abort"


async def test_an_engine_that_joins_late_gets_the_weights_first(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    async with rigged(renderer, weights_dir=tmp_path) as rig:
        update = {"model_path": "step-1", "weight_version": "1"}
        assert (await rig.call("POST", "/update_weights_from_disk", update)).status == 200
        assert (await rig.add(1)).json()["state"] == "ready"
        assert rig.servers[1].loaded == [str(tmp_path / "step-1")]
        assert rig.servers[1].weight_version == "1"
        rig.servers[2].refusal = "no"
        row = (await rig.add(2)).json()
        assert row["state"] == "down"
        assert "has not taken the weights '1'" in row["detail"]
        assert (await rig.call("POST", "/update_weight_version", {"new_version": "2"})).status == 200
        assert {state for _, state in await rig.states()} == {"ready"}


NO_ADDRESSES = [
    *("", "nonsense", "ftp://x", "http://a,http://b", "http://h/?q=1", "http://a:99999", "http://a:0", "http://a:x"),
    *("http://:80", "http://[::1", "http://[x]", "http://a:-1/", "http://a\0b"),
]


@pytest.mark.parametrize("url", NO_ADDRESSES)
async def test_what_is_no_address_is_refused(renderer: Renderer, url: str) -> None:
    async with rigged(renderer, 1) as rig:
        answer = await rig.call("POST", "/engines", {"url": url})
        assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert len(await rig.states()) == 1


async def test_the_last_engine_and_an_unknown_one_cannot_leave(renderer: Renderer) -> None:
    async with rigged(renderer) as rig:
        answer = await rig.remove(0)
        assert (answer.status, answer.json()["error"]["code"]) == (409, "last_engine")
        assert "add another one first" in answer.json()["error"]["message"]
        assert (await rig.call("DELETE", f"/engines/{rig.servers[0].url}?force=true")).status == 409
        assert (await rig.remove(1)).status == 404


async def test_the_last_usable_engine_leaves_only_if_it_is_forced(renderer: Renderer, unused_tcp_port: int) -> None:
    async with rigged(renderer, 2) as rig:
        away, here = f"http://127.0.0.1:{unused_tcp_port}", f"/engines/{rig.servers[0].url}"
        assert (await rig.call("POST", "/engines", {"url": away})).status == 200
        assert dict(await rig.states())[rig.servers[0].url] == "ready" != dict(await rig.states())[away]
        for query in ("", "?force=false"):
            answer = await rig.call("DELETE", here + query)
            assert (answer.status, answer.json()["error"]["code"]) == (409, "last_engine")
            assert "?force=true" in answer.json()["error"]["message"]
        for query in ("?force=yes", "?forced=true"):
            assert (await rig.call("DELETE", here + query)).status == 400
        assert (await rig.call("DELETE", f"/engines/{away}")).status == 200, "one that is not usable leaves"
        assert (await rig.call("POST", "/engines", {"url": away})).status == 200
        assert (await rig.add(1)).status == 200
        assert (await rig.remove(1)).status == 200, "another one is usable"
        assert (await rig.call("DELETE", f"{here}?force=true")).status == 200
        assert [name for name, _ in await rig.states()] == [away]


async def test_engines_are_an_administrators(renderer: Renderer) -> None:
    async with rigged(renderer, 2, api_key=("chat",), admin_key=("admin",)) as rig:
        for key, status in (("chat", 403), ("admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await rig.call("GET", "/engines", **headers)).status == status
            assert (await rig.call("POST", "/engines", {"url": rig.servers[1].url}, **headers)).status == status
            named = quote(rig.servers[1].url, safe="")
            assert (await rig.call("DELETE", f"/engines/{named}", **headers)).status == status


async def test_the_one_engine_of_a_server_without_addresses_stays_alone(live: Live) -> None:
    answer = await live.call("POST", "/engines", {"url": "http://127.0.0.1:1"})
    assert (answer.status, answer.json()["error"]["code"]) == (404, "route_not_found")
    assert len((await live.call("GET", "/engines")).json()["engines"]) == 1
