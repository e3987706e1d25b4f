"""Weights, pauses and engines of a server of several workers: one speaks to the engines, all hold their turns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from msgspec import structs

from standins.planned_server import AskedRequest
from standins.planned_server import ReplyScript as Reply
from standins.scripted_engine import ScriptedEngine
from standins.sglang_server import SGLangServer
from stenograph.cli.settings_table import CommandSettings as Settings
from stenograph.cluster.place import WorkerPlace
from stenograph.cluster.state_file import StateFile
from stenograph.core.clock import SystemClock
from stenograph.core.errors import EngineUnavailable
from stenograph.core.weights import ControlAnswer, WeightCommand
from stenograph.engine.settings import EngineKind
from stenograph.http.engines import make_engine
from stenograph.offload.body_slots import BodySlots
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, tiny_files, user
from .workers_kit import places, serving

pytestmark = pytest.mark.timeout(600)


@dataclass(slots=True, kw_only=True)
class Rig:
    """Two workers around one fleet of stand-ins; each has clients of its own to them."""

    lives: list[Live]
    servers: list[SGLangServer]
    stacks: list[AsyncExitStack]
    places: list[WorkerPlace]
    renderer: Renderer
    client: aiohttp.ClientSession
    settings: dict[str, Any]

    async def post(self, through: int, route: str, **body: Any) -> Answer:
        return await self.lives[through].call("POST", f"/{route}", body)

    async def update(self, through: int, version: str, **more: Any) -> tuple[int, dict[str, Any]]:
        body = {"model_path": "step-1", "weight_version": version, **more}
        answer = await self.post(through, "update_weights_from_disk", **body)
        return answer.status, answer.json()

    async def info(self, through: int) -> dict[str, Any]:
        view: dict[str, Any] = (await self.lives[through].call("GET", "/model_info")).json()
        return view

    async def paused(self) -> list[bool]:
        """Whether turns wait, as every worker says it of all."""
        return [(await live.call("GET", "/ready")).json()["paused"] for live in self.lives]

    async def states(self, through: int) -> dict[str, str]:
        engines = (await self.lives[through].call("GET", "/engines")).json()["engines"]
        return {engine["name"]: engine["state"] for engine in engines}

    async def waiting(self, at: int, num: int = 1) -> None:
        while self.lives[at].manager.num_in_flight < num:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def reply(self, text: str, **more: Any) -> Reply:
        return Reply(ids=(*self.renderer.tokenizer.encode(text), END), text=text, matched=END, **more)

    def asked(self, path: str) -> list[AskedRequest]:
        return [one for server in self.servers for one in server.asked if one.path == path]

    async def start(self, number: int) -> None:
        """Begin a life of a worker, with the engines that the server has by then."""
        place, stack = self.places[number], self.stacks[number]
        place = replace(place, listener=place.listener.dup())  # what outlives a worker is its parent's
        state = StateFile(place.sockets[0].parent).read()
        urls = (self.servers[0].url,) if state is None or not state.addresses else state.addresses
        made = Settings(engine=EngineKind.SGLANG, engine_url=urls, **self.settings)
        engine = make_engine(made, tiny_files(), Path("tiny"), BodySlots(2), SystemClock())
        stack.push_async_callback(engine.aclose)
        url, manager, _ = await stack.enter_async_context(
            serving(place, engine, self.renderer, starts=True, **self.settings)
        )
        unused = ScriptedEngine(vocab_size=1, max_context_tokens=1)
        live = Live(url=url, engine=unused, renderer=self.renderer, manager=manager, client=self.client)
        self.lives[number:] = [live, *self.lives[number + 1 :]]

    async def restart(self, number: int) -> None:
        await self.stacks[number].aclose()
        await self.start(number)


@asynccontextmanager
async def rigged(
    renderer: Renderer, folder: Path, num: int = 1, *, routes: Any = None, **settings: Any
) -> AsyncIterator[Rig]:
    (folder / "step-1").mkdir()
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                SGLangServer(encode=lambda text: list(renderer.tokenizer.encode(text)), stop_id=END, routes=routes)
            )
            for _ in range(num)
        ]
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        rig = Rig(
            lives=[],
            servers=servers,
            stacks=[],
            places=places(folder, 2),
            renderer=renderer,
            client=client,
            settings={"weights_dir": folder, **settings},
        )
        for number, place in enumerate(rig.places):
            stack.callback(place.listener.close)
            rig.stacks.append(await stack.enter_async_context(AsyncExitStack()))
            await rig.start(number)
        yield rig
        await client.close()


async def test_a_pause_holds_the_turns_of_all_workers_through_whichever_it_comes(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path) as rig:
        sessions = [await live.open() for live in rig.lives]
        for through in (0, 1):
            answer = await rig.post(through, "pause_generation")
            assert (answer.status, answer.json()) == (200, {"status": "ok", "message": "Generation is paused."})
            assert await rig.paused() == [True, True]
            assert [(await rig.info(one))["paused"] for one in (0, 1)] == [True, True]
            num_before = len(rig.servers[0].requests)
            turns = [asyncio.ensure_future(rig.lives[0].chat(session, user("hi"))) for session in sessions]
            await rig.waiting(0)
            await rig.waiting(1)
            assert len(rig.servers[0].requests) == num_before
            assert (await rig.post(1 - through, "continue_generation")).status == 200
            assert [(await turn).status for turn in turns] == [200, 200]
            assert await rig.paused() == [False, False]
        assert len(rig.asked("/pause_generation")) == len(rig.asked("/continue_generation")) == 2
        assert (await rig.post(1, "flush_cache")).json()["success"]
        assert len(rig.asked("/flush_cache")) == 1


async def test_an_update_is_one_and_its_name_and_its_turns_over_it_are_those_of_all(
    renderer: Renderer, tmp_path: Path
) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(asked: AskedRequest) -> None:
        if asked.path == "/update_weights_from_disk":
            began.set()
            await go_on.wait()

    async with rigged(renderer, tmp_path, routes=slowly) as rig:
        (server,) = rig.servers
        server.weight_version = "3"
        sessions = [await live.open() for live in rig.lives]
        server.plan(*(rig.reply(f"over {at}", paused=True, num_drawn=2) for at in (0, 1)))
        over = [asyncio.ensure_future(rig.lives[0].chat(session, user("over"))) for session in sessions]
        await server.held(2)
        update = asyncio.ensure_future(rig.update(1, "4"))
        await began.wait()
        late = [await live.open() for live in rig.lives]
        waiting = [asyncio.ensure_future(rig.lives[1].chat(session, user("late"))) for session in late]
        for worker in (0, 1):
            await rig.waiting(worker, 2)
        assert len(server.requests) == 2
        assert await rig.paused() == [True, True]
        assert (await rig.update(0, "5"))[0] == 400  # one after the other
        go_on.set()
        assert (await update)[0] == 200
        server.release()
        assert [(await turn).status for turn in (*over, *waiting)] == [200] * 4
        assert len(rig.asked("/update_weights_from_disk")) == 1
        for through, session in enumerate(sessions):
            (record,) = (await rig.lives[through].call("GET", f"/sessions/{session}")).json()["records"]
            assert (record["mixed_version"], record["weight_versions"]) == (True, None)
            (sample,) = (await rig.post(through, f"sessions/{session}/samples", format="json")).json()["samples"]
            assert sample["weight_versions"] == ["3"]  # the oldest that may have sampled
        for session in late:
            (record,) = (await rig.lives[0].call("GET", f"/sessions/{session}")).json()["records"]
            assert [span["version"] for span in record["weight_versions"]] == ["4"]
        assert [(await rig.info(one))["weight_version"] for one in (0, 1)] == ["4", "4"]
        assert (await rig.post(0, "update_weight_version", new_version="run")).json()["new_version"] == "run"
        assert [(await rig.info(one))["weight_version"] for one in (0, 1)] == ["run", "run"]


@pytest.mark.parametrize("route", ["pause_generation", "update_weights_from_disk"])
async def test_the_turns_of_all_workers_end_where_they_are_to(renderer: Renderer, tmp_path: Path, route: str) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        server.plan(*(rig.reply("a long reply", paused=True, num_drawn=2) for _ in (0, 1)))
        sessions = [await live.open() for live in rig.lives]
        turns = [asyncio.ensure_future(rig.lives[1].chat(session, user("one"))) for session in sessions]
        await server.held(2)
        body = {"model_path": "step-1", "abort_all_requests": True} if route.startswith("update") else {}
        assert (await rig.post(1, route, **body)).status == 200
        for turn in turns:
            assert (await turn).json()["choices"][0]["finish_reason"] == "abort"


async def test_an_engine_that_lacks_the_weights_gets_turns_from_no_worker(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, 2) as rig:
        assert (await rig.post(0, "engines", url=rig.servers[1].url)).status == 200
        bad = rig.servers[1]
        bad.refusal = "no space left"
        status, told = await rig.update(1, "1")
        assert (status, told["success"]) == (400, False)
        assert bad.url in told["message"]
        for life in (1, 2):
            sessions = [await rig.lives[at % 2].open() for at in range(8)]
            answers = [await rig.lives[0].chat(session, user("hi")) for session in sessions]
            assert [answer.status for answer in answers] == [200] * 8
            assert bad.requests == []
            assert (await rig.states(1))[bad.url] == "down"
            if life == 1:
                await rig.restart(1)
        bad.refusal = None
        assert (await rig.update(1, "2"))[0] == 200
        assert set((await rig.states(0)).values()) == {"ready"}
        assert [live.manager.num_in_flight for live in rig.lives] == [0, 0]


async def test_a_worker_that_begins_again_is_as_the_others_are(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, 2) as rig:
        assert (await rig.post(1, "engines", url=rig.servers[1].url)).status == 200
        assert (await rig.update(0, "7"))[0] == 200
        assert (await rig.post(0, "pause_generation")).status == 200
        for number in (1, 0):
            await rig.restart(number)
            assert await rig.paused() == [True, True]
            assert (await rig.info(number))["weight_version"] == "7"
            assert set(await rig.states(number)) == {server.url for server in rig.servers}
            turn = asyncio.ensure_future(rig.lives[number].chat(None, user("hi")))
            await rig.waiting(number)
            turn.cancel()
        assert (await rig.post(1, "continue_generation")).status == 200
        assert await rig.paused() == [False, False]
        for live in rig.lives:
            assert (await live.chat(None, user("hi"))).status == 200
        assert [len(server.loaded) for server in rig.servers] == [1, 1]
        assert (await rig.post(0, "update_weights_from_disk", model_path="step-1")).status == 200
        assert (await rig.info(1))["weight_version"] == "8"


@pytest.mark.parametrize("ending", ["again", "refused, then again", "continue"])
async def test_a_change_that_was_cut_off_holds_all_turns_until_somebody_says_what_becomes_of_it(
    renderer: Renderer, tmp_path: Path, ending: str
) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        server.weight_version = "1"
        assert (await rig.update(0, "1"))[0] == 200
        server.plan(rig.reply("over", paused=True, num_drawn=2))
        session = await rig.lives[1].open()
        over = asyncio.ensure_future(rig.lives[1].chat(session, user("over")))
        await server.held(1)
        file = StateFile(rig.places[0].sockets[0].parent)
        state = file.read()
        assert state is not None
        file.write(structs.replace(state, is_changing=True))  # the last that the first worker said in its life
        await rig.restart(0)
        while await rig.paused() != [True, True]:  # noqa: ASYNC110 - the new life has told the other
            await asyncio.sleep(0)
        server.weight_version = "2"  # the engine has taken it, or had
        if ending == "continue":
            assert (await rig.post(1, "continue_generation")).status == 200
        else:
            if ending != "again":
                server.refusal = "no space left"
                status, told = await rig.update(1, "2")
                assert (status, "an update before was cut off" in told["message"]) == (400, True)
                assert await rig.paused() == [True, True]
                server.refusal = None
            assert (await rig.update(1, "2"))[0] == 200
        assert await rig.paused() == [False, False]
        assert [(await rig.info(one))["weight_version"] for one in (0, 1)] == ["2", "2"]
        server.release()
        assert (await over).status == 200
        (record,) = (await rig.lives[0].call("GET", f"/sessions/{session}")).json()["records"]
        assert (record["mixed_version"], record["weight_versions"]) == (True, None)
        for live in rig.lives:
            assert (await live.chat(None, user("hi"))).status == 200


async def test_engines_join_and_leave_at_all_workers(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, 2) as rig:
        first, second = rig.servers
        first.plan(rig.reply("slow", paused=True))
        slow = asyncio.ensure_future(rig.lives[1].chat(await rig.lives[1].open(), user("one")))
        await first.begun(1)
        rows = (await rig.lives[0].call("GET", "/engines")).json()["engines"]
        assert [(row["name"], row["num_running"]) for row in rows] == [(first.url, 1)]
        answer = await rig.post(1, "engines", url=second.url)
        assert (answer.status, answer.json()["name"], answer.json()["state"]) == (200, second.url, "ready")
        assert (await rig.post(0, "engines", url=second.url)).status == 400
        assert [*await rig.states(0)] == [first.url, second.url]
        leaving = asyncio.ensure_future(rig.lives[0].call("DELETE", f"/engines/{quote(first.url, safe='')}"))
        while (await rig.states(1))[first.url] != "stopped":  # noqa: ASYNC110
            await asyncio.sleep(0)
        for live in rig.lives:
            assert (await live.chat(None, user("meanwhile"))).status == 200
        assert not leaving.done()
        assert len(first.requests) == 1
        first.release()
        assert (await slow).status == 200
        answer = await leaving
        assert (answer.status, answer.json()) == (200, {"name": first.url, "removed": True})
        for live in rig.lives:
            assert (await live.chat(None, user("after"))).status == 200
        assert len(first.requests) == 1
        await rig.restart(1)
        assert set(await rig.states(1)) == {second.url}
        for through in (0, 1):
            gone = await rig.lives[through].call("DELETE", f"/engines/{quote(first.url, safe='')}")
            assert gone.status == 404
            last = await rig.lives[through].call("DELETE", f"/engines/{quote(second.url, safe='')}")
            assert last.status == 409


async def test_weights_are_an_administrators_whichever_worker_is_asked(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, api_key=("chat",), admin_key=("admin",)) as rig:
        session = None
        for through in (0, 1):
            for key, status in (("", 401), ("chat", 403), ("admin", 200)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                if session is not None:  # a request of the server is no session's, whatever it names
                    headers["x_session_id"] = session
                answer = await rig.lives[through].call("POST", "/pause_generation", {}, **headers)
                assert answer.status == status
                answer = await rig.lives[through].call("POST", "/continue_generation", {}, **headers)
                assert answer.status == status
            answer = await rig.lives[1].call("POST", "/sessions", {}, authorization="Bearer chat")
            session = answer.json()["session_id"]


async def test_nothing_changes_while_a_worker_that_is_there_does_not_answer(renderer: Renderer, tmp_path: Path) -> None:
    here, silent = places(tmp_path, 2)  # its socket listens, as it does while a worker hangs
    (tmp_path / "step-1").mkdir()
    engine = Counting(vocab_size=renderer.tokenizer.vocab_size)
    settings = {"weights_dir": tmp_path, "patience_s": 0.05}
    async with serving(here, engine, renderer, **settings) as (url, manager, _), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        for route, body in (
            ("pause_generation", {}),
            ("update_weights_from_disk", {"model_path": "step-1"}),
            ("update_weight_version", {"new_version": "7"}),
        ):
            answer = await live.call("POST", f"/{route}", body)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "worker_unavailable")
            assert not (await live.call("GET", "/model_info")).json()["paused"]
            live.says("fine")
            assert (await live.chat(None, user("hi"))).status == 200
        assert engine.commands == []
        silent.listener.close()  # now nobody is there: its next life begins with what is said meanwhile
        assert (await live.call("POST", "/pause_generation", {})).status == 200
        state = StateFile(here.sockets[0].parent).read()
        assert state is not None
        assert state.is_paused
    here.listener.close()


class Counting(ScriptedEngine):
    """Takes every command; `failure` instead, where it is set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: list[WeightCommand] = []
        self.failure: Exception | None = None

    async def control(self, command: WeightCommand) -> tuple[ControlAnswer, ...]:
        if self.failure is not None:
            raise self.failure
        self.commands.append(command)
        return (ControlAnswer(name=self.name),)


async def test_a_pause_whose_engine_fails_lets_the_turns_of_all_in(renderer: Renderer, tmp_path: Path) -> None:
    engine = Counting(vocab_size=renderer.tokenizer.vocab_size)
    here, other = places(tmp_path, 2)
    async with (
        serving(here, engine, renderer) as (url, manager, _),
        serving(other, engine, renderer) as (other_url, other_manager, _),
        aiohttp.ClientSession() as client,
    ):
        lives = [
            Live(url=one, engine=engine, renderer=renderer, manager=of, client=client)
            for one, of in ((url, manager), (other_url, other_manager))
        ]
        for mode in ("abort", "in_place"):
            engine.failure = EngineUnavailable("The embedded engine is not ready: it is loading.")
            answer = await lives[1].call("POST", "/pause_generation", {"mode": mode})
            assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
            for live in lives:
                assert not (await live.call("GET", "/model_info")).json()["paused"]
                assert (await live.call("GET", "/ready")).status == 200
                live.says("fine")
                assert (await live.chat(None, user("hi"))).status == 200
            engine.failure = None
            assert (await lives[1].call("POST", "/pause_generation", {"mode": mode})).status == 200
            assert (await lives[0].call("GET", "/ready")).json()["paused"]
            assert (await lives[1].call("POST", "/continue_generation", {})).status == 200
        await client.close()
    for place in (here, other):
        place.listener.close()


@pytest.mark.parametrize("through", [0, 1])
async def test_a_lora_is_not_loaded_where_each_worker_has_clients_of_its_own(
    renderer: Renderer, tmp_path: Path, through: int
) -> None:
    async with rigged(renderer, tmp_path) as rig:
        answer = await rig.post(through, "load_lora_adapter", lora_name="a", lora_path="step-1")
        assert answer.status == 400
        assert answer.json()["error_message"] == "With --workers LoRAs are loaded at the engines, not here."
        assert not any(server.loras for server in rig.servers)
        for server in rig.servers:
            server.loras["a"] = "/loras/a"
        for live in rig.lives:
            session = await live.open(policy="a")
            assert (await live.chat(session, user("one"))).status == 200
        assert {asked.json["lora_path"] for server in rig.servers for asked in server.requests} == {"a"}
