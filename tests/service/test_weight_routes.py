"""New weights, by the routes of a trainer: who may, from where, what waits meanwhile, and what a fleet makes of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import AskedRequest, PlannedServer
from standins.planned_server import ReplyScript as Reply
from standins.scripted_engine import ScriptedEngine
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.core.clock import SystemClock
from stenograph.core.weights import PauseMode
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.text.renderer import Renderer
from stenograph.weights.sync import next_version

from .conftest import END, Answer, Live, assistant, running, user

ROUTES = ("update_weights_from_disk", "pause_generation", "continue_generation", "flush_cache", "update_weight_version")
BODIES: dict[str, Any] = {
    "update_weights_from_disk": {"model_path": "step-1"},
    "update_weight_version": {"new_version": "7"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig(Live):
    """A server before stand-ins, and the folder that weights may come from."""

    servers: list[Any]
    weights: Path

    async def post(self, route: str, **body: Any) -> Answer:
        return await self.call("POST", f"/{route}", body or BODIES.get(route, {}))

    async def update(self, version: str, **body: Any) -> tuple[int, dict[str, Any]]:
        answer = await self.post("update_weights_from_disk", model_path="step-1", weight_version=version, **body)
        return answer.status, answer.json()

    async def states(self) -> dict[str, str]:
        engines = (await self.call("GET", "/ready")).json()["engines"]
        return {engine["name"]: engine["state"] for engine in engines}

    async def until(self, at: int, state: str) -> None:
        while (await self.states())[self.servers[at].url] != state:  # noqa: ASYNC110 - a probe finds out
            await asyncio.sleep(0)

    def reply(self, text: str, **more: Any) -> Reply:
        ids = (*self.renderer.tokenizer.encode(text), END)
        return Reply(ids=ids, text=text, matched=END, **more)


@asynccontextmanager
async def rigged(
    renderer: Renderer,
    folder: Path,
    num: int = 1,
    *,
    kind: str = "sglang",
    server_info: dict[str, Any] | None = None,
    routes: Callable[[AskedRequest], Awaitable[Any]] | None = None,
    has_spans: bool = False,
    **settings: Any,
) -> AsyncIterator[Rig]:
    (folder / "step-1").mkdir()

    def server() -> PlannedServer:
        if kind == "vllm":
            return VLLMServer(dev_mode=True)
        encode = renderer.tokenizer.encode
        made = SGLangServer(encode=lambda text: list(encode(text)), stop_id=END, routes=routes, has_spans=has_spans)
        made.server_info = server_info
        return made

    def adapter() -> EngineAdapter:
        vocab = renderer.tokenizer.vocab_size
        if kind == "vllm":
            return VLLM(AdapterOptions(model="stand-in", vocab_size=vocab, max_context_tokens=4096))
        return (SGLangChat if kind == "sglang" else SGLangGenerate)(AdapterOptions(model="stand-in", vocab_size=vocab))

    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(server()) for _ in range(num)]
        members = [
            FleetMember(name=one.url, engine=HttpEngine(HttpEngineOptions(url=one.url, probe_pause_s=0.02), adapter()))
            for one in servers
        ]
        engine = members[0].engine if num == 1 else Fleet(members, clock=SystemClock())
        await engine.start()
        stack.push_async_callback(engine.aclose)
        settings.setdefault("weights_dir", folder)
        url, manager = await stack.enter_async_context(running(engine, renderer, **settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        unused = ScriptedEngine(vocab_size=1, max_context_tokens=1)
        yield Rig(
            url=url,
            engine=unused,
            renderer=renderer,
            manager=manager,
            client=client,
            servers=servers,
            weights=folder,
        )


# -- who may, and from where


@pytest.mark.parametrize(
    ("settings", "key", "status"),
    [
        ({}, "", 200),
        ({"api_key": ("chat",)}, "", 401),
        ({"api_key": ("chat",)}, "chat", 403),
        ({"admin_key": ("admin",)}, "", 401),
        ({"admin_key": ("admin",)}, "chat", 403),
        ({"admin_key": ("admin",)}, "admin", 200),
        ({"api_key": ("chat",), "admin_key": ("admin",)}, "", 401),
        ({"api_key": ("chat",), "admin_key": ("admin",)}, "wrong", 401),
        ({"api_key": ("chat",), "admin_key": ("admin",)}, "chat", 403),
        ({"api_key": ("chat",), "admin_key": ("admin",)}, "admin", 200),
    ],
)
async def test_who_may_chat_may_not_change_the_policy(
    renderer: Renderer, tmp_path: Path, settings: dict[str, Any], key: str, status: int
) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with rigged(renderer, tmp_path, **settings) as rig:
        for route in ROUTES:
            answer = await rig.call("POST", f"/{route}", BODIES.get(route, {}), **headers)
            assert answer.status == status, (route, answer.body)
        assert bool(rig.servers[0].loaded) == (status == 200)
        if key == "admin":  # good for all else, too
            assert (await rig.call("POST", "/sessions", {}, **headers)).status == 200
            assert (await rig.call("GET", "/model_info", **headers)).status == 200


@pytest.mark.parametrize("path", ["..", "../other", "/etc", "step-1/../../other", "link", "loop", "a\0b"])
async def test_weights_come_from_below_the_folder_alone(renderer: Renderer, tmp_path: Path, path: str) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (tmp_path / "other").mkdir()
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "loop").symlink_to(folder / "loop")
    async with rigged(renderer, folder) as rig:
        answer = await rig.post("update_weights_from_disk", model_path=path)
        assert (answer.status, answer.json()["error"]["code"]) == (403, "forbidden")
        assert "--weights-dir" in answer.json()["error"]["message"]
        assert rig.servers[0].loaded == []
        for good in ("step-1", str(folder / "step-1"), "./step-1/"):
            assert (await rig.post("update_weights_from_disk", model_path=good)).status == 200
        assert rig.servers[0].loaded == [str(folder / "step-1")] * 3


async def test_without_a_folder_no_weights_come_from_disk(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, weights_dir=None) as rig:
        answer = await rig.post("update_weights_from_disk", model_path=str(tmp_path / "step-1"))
        assert answer.status == 403
        assert "start it with --weights-dir" in answer.json()["error"]["message"]


async def test_bodies_are_checked(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path) as rig:
        for route, body, pointer in [
            ("update_weights_from_disk", {}, "/model_path"),
            ("update_weights_from_disk", {"model_path": "step-1", "weight_versoin": "1"}, "/weight_versoin"),
            ("update_weights_from_disk", {"model_path": "step-1", "is_async": True}, "/is_async"),
            ("update_weights_from_disk", {"model_path": "step-1", "weight_version": ""}, "/weight_version"),
            ("pause_generation", {"mode": "keep"}, "/mode"),
            ("update_weight_version", {"new_version": 7}, "/new_version"),
        ]:
            answer = await rig.call("POST", f"/{route}", body)
            error = answer.json()["error"]
            assert (answer.status, error["code"]) == (400, "invalid_request")
            assert error["param"] == pointer or pointer in error["message"] or pointer[1:] in error["message"]
        assert rig.servers[0].loaded == []


def test_the_next_name_is_never_the_same() -> None:
    assert [next_version(version) for version in (None, "0", "9", "run", "run+1", "run+9", "+", "1+x")] == [
        "1", "1", "10", "run+1", "run+2", "run+10", "++1", "1+x+1",
    ]  # fmt: skip


# -- what is passed on


async def test_what_an_sglang_is_sent_is_its_own_and_aborts_nothing_by_itself(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        assert (await rig.call("GET", "/model_info")).json() == {
            "model_path": "tiny", "weight_version": "default", "is_generation": True, "paused": False,
        }  # fmt: skip
        status, told = await rig.update("3", load_format="dummy", flush_cache=False, token_step=0)
        assert (status, told["success"], told["num_paused_requests"]) == (200, True, 0)
        asked = next(one for one in server.asked if one.path == "/update_weights_from_disk")
        assert asked.json == {
            "model_path": str(tmp_path / "step-1"), "weight_version": "3", "flush_cache": False,
            "abort_all_requests": False, "load_format": "dummy",
        }  # fmt: skip
        assert (await rig.post("update_weights_from_disk", model_path="step-1")).status == 200  # the next name
        assert server.weight_version == "4"
        assert (await rig.post("update_weight_version", new_version="9")).json()["new_version"] == "9"
        assert server.weight_version == "9"
        assert (await rig.call("GET", "/model_info")).json()["weight_version"] == "9"
        for mode in PauseMode:
            assert (await rig.post("pause_generation", mode=mode)).json()["status"] == "ok"
            assert (await rig.post("continue_generation")).json()["status"] == "ok"
        sent = [one.json for one in server.asked if one.path == "/pause_generation"]
        assert sent == [{"mode": "abort"}, {"mode": "retract"}, {"mode": "in_place"}]
        assert (await rig.post("flush_cache")).json()["success"]


async def test_what_a_vllm_is_sent_is_its_own(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, kind="vllm") as rig:
        (server,) = rig.servers
        begin = len(server.asked)
        status, told = await rig.update("3")
        assert (status, told["success"]) == (200, True)
        for mode in PauseMode:
            assert (await rig.post("pause_generation", mode=mode)).status == 200
            assert (await rig.post("continue_generation")).status == 200
        sent = [(one.path, one.json) for one in server.asked[begin:] if one.method == "POST"]
        loaded = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "step-1")}}
        assert [one for one in sent if "generate" not in one[0] and "abort" not in one[0].partition("?")[0]] == [
            ("/collective_rpc", loaded),
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": "3"}),
            ("/pause?mode=abort", {}), ("/resume", {}),
            ("/pause?mode=keep", {}), ("/resume", {}),
            ("/pause?mode=keep", {}), ("/resume", {}),
        ]  # fmt: skip
        status, told = await rig.update("4", load_format="dummy")
        assert (status, told["success"]) == (400, False)
        assert "vLLM does not know load_format" in told["message"]
        assert (await rig.call("GET", "/model_info")).json()["weight_version"] == "3"


async def test_a_single_engine_that_refuses_goes_on_with_its_old_weights(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        server.refusal = "the shapes differ"
        status, told = await rig.update("3")
        assert (status, told["success"]) == (400, False)
        assert "the shapes differ" in told["message"]
        assert "the weights before go on" in told["message"]
        assert (await rig.call("GET", "/ready")).status == 200
        server.plan(rig.reply("fine"))
        assert (await rig.chat(None, user("hi"))).status == 200
        assert (await rig.call("GET", "/model_info")).json()["weight_version"] == "default"


async def test_an_engine_of_a_fleet_that_refuses_gets_no_turns_until_it_has_the_version(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path, 3) as rig:
        bad = rig.servers[1]
        bad.refusal = "no space left"
        status, told = await rig.update("1")
        assert (status, told["success"]) == (400, False)
        assert bad.url in told["message"]
        assert "no space left" in told["message"]
        assert (await rig.states())[bad.url] == "down"
        assert (await rig.call("GET", "/ready")).status == 200
        sessions = [await rig.open() for _ in range(9)]
        answers = await asyncio.gather(*(rig.chat(session, user("hi")) for session in sessions))
        assert {answer.status for answer in answers} == {200}
        assert bad.requests == []
        assert all(server.requests for server in rig.servers if server is not bad)
        page = (await rig.call("GET", "/metrics")).body.decode()
        assert 'stenograph_weight_updates_total{outcome="partial"} 1.0' in page
        # Somebody gives it the weights: a probe finds that it has the version.
        bad.weight_version = "1"
        await rig.until(1, "ready")
        # It takes the next ones itself.
        bad.refusal = None
        assert (await rig.update("2"))[0] == 200
        assert set((await rig.states()).values()) == {"ready"}


async def test_an_engine_that_comes_back_with_its_old_weights_gets_no_turns(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, 2) as rig:
        server = rig.servers[0]
        assert (await rig.update("1"))[0] == 200
        await server.aclose()
        await rig.until(0, "down")
        server.weight_version = None  # as at its start
        await server.start()
        detail = ""
        while "has not taken" not in detail:
            detail = (await rig.call("GET", "/ready")).json()["engines"][0]["detail"]
        assert "'1'" in detail
        assert "'default'" in detail
        assert (await rig.update("2"))[0] == 200
        await rig.until(0, "ready")


async def test_an_engine_that_was_first_seen_after_an_update_gets_no_turns_with_the_weights_of_its_start(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path) as rig:
        server = rig.servers[0]
        server.weight_version = "5"  # before this server came
        await server.aclose()
        await rig.until(0, "down")
        await server.start()
        await rig.until(0, "ready")
        assert (await rig.update("6"))[0] == 200
        server.weight_version = None  # it has crashed, and has the weights of its start: "default", never seen here
        await server.aclose()
        await rig.until(0, "down")
        await server.start()
        detail = ""
        while "has not taken" not in detail:
            detail = (await rig.call("GET", "/ready")).json()["engines"][0]["detail"]
        assert "'default'" in detail


async def test_an_engine_that_comes_back_with_weights_of_its_trainer_s_gets_turns(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path, has_spans=True) as rig:
        server = rig.servers[0]
        assert (await rig.update("1"))[0] == 200
        server.weight_version = "2"  # nobody told this server
        await server.aclose()
        await rig.until(0, "down")
        await server.start()
        await rig.until(0, "ready")
        assert (await rig.call("GET", "/ready")).status == 200
        session = await rig.open()
        assert (await rig.chat(session, user("one"))).status == 200
        (record,) = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
        assert [span["version"] for span in record["weight_versions"]] == ["2"]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_paused_sglang_is_not_down_and_what_was_held_runs_after_the_pause(
    renderer: Renderer, tmp_path: Path, mode: str
) -> None:
    async with rigged(renderer, tmp_path, 2) as rig:
        assert (await rig.post("pause_generation", mode=mode)).status == 200
        for server in rig.servers:
            async with rig.client.get(f"{server.url}/health") as health:
                assert health.status == 503  # a generation, which waits
        held = asyncio.ensure_future(rig.chat(await rig.open(), user("one")))
        for server in rig.servers:
            num_asked = len(server.asked)
            while len([asked for asked in server.asked[num_asked:] if asked.path == "/model_info"]) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        ready = await rig.call("GET", "/ready")
        assert (ready.status, set((await rig.states()).values())) == (503, {"ready"})
        assert not held.done()
        assert (await rig.post("continue_generation")).status == 200
        assert (await held).status == 200
        assert (await rig.call("GET", "/ready")).status == 200


async def test_one_change_comes_after_the_other_and_new_turns_wait_for_its_end(
    renderer: Renderer, tmp_path: Path
) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(asked: AskedRequest) -> None:
        if asked.path == "/update_weights_from_disk":
            began.set()
            await go_on.wait()

    async with rigged(renderer, tmp_path, routes=slowly) as rig:
        first = asyncio.ensure_future(rig.update("1"))
        await began.wait()
        status, told = await rig.update("2")
        assert (status, told["success"]) == (400, False)
        assert "another change of weights is under way" in told["message"].lower()
        assert (await rig.call("GET", "/ready")).status == 503
        turn = asyncio.ensure_future(rig.chat(None, user("one")))
        while not rig.manager.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert rig.servers[0].requests == []
        go_on.set()
        assert (await first)[0] == 200
        assert (await turn).status == 200
        assert rig.servers[0].weight_version == "1"


# -- what waits


async def test_new_turns_wait_and_go_on_where_they_were(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        session = await rig.open()
        assert (await rig.post("pause_generation")).status == 200
        waiting = [
            asyncio.ensure_future(rig.chat(session, user("one"))),
            asyncio.ensure_future(rig.chat(None, user("x"))),
        ]
        while rig.manager.num_in_flight < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        ready = await rig.call("GET", "/ready")
        assert (ready.status, ready.json()["ready"], ready.json()["paused"]) == (503, False, True)
        assert (await rig.call("GET", "/health")).status == 200
        assert (await rig.call("GET", f"/sessions/{session}")).status == 200
        assert (await rig.update("5"))[0] == 200  # the pause outlasts it
        assert server.requests == []
        assert (await rig.post("continue_generation")).status == 200
        assert [(await one).status for one in waiting] == [200, 200]
        (record,) = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
        assert [span["version"] for span in record["weight_versions"]] == ["5"]
        assert (await rig.call("GET", "/ready")).status == 200


async def test_a_turn_that_waits_until_its_deadline_is_503_paused(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, request_timeout_s=0.05) as rig:
        session = await rig.open()
        assert (await rig.post("pause_generation")).status == 200
        answer = await rig.chat(session, user("one"))
        assert (answer.status, answer.json()["error"]["code"]) == (503, "paused")
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["x-should-retry"] == "true"
        assert rig.servers[0].requests == []
        assert rig.manager.num_in_flight == 0
        assert (await rig.post("continue_generation")).status == 200
        assert (await rig.chat(session, user("one"))).status == 200


async def test_a_waiting_turn_is_aborted_deleted_and_left(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path) as rig:
        first, second = await rig.open(), await rig.open()
        assert (await rig.post("pause_generation")).status == 200
        aborted = asyncio.ensure_future(rig.chat(first, user("one")))
        deleted = asyncio.ensure_future(rig.chat(second, user("one")))
        left = asyncio.ensure_future(rig.chat(None, user("one")))
        while rig.manager.num_in_flight < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await rig.call("POST", f"/sessions/{first}/abort", {})).status == 200
        answer = await aborted
        assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
        assert (await rig.call("DELETE", f"/sessions/{second}")).status == 204
        assert (await deleted).status in (200, 404)
        left.cancel()
        while rig.manager.num_in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert rig.servers[0].requests == []


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_the_deadline_of_a_frozen_turn_stands_still(renderer: Renderer, tmp_path: Path, mode: str) -> None:
    async with rigged(renderer, tmp_path, request_timeout_s=1.5) as rig:
        (server,) = rig.servers
        server.plan(rig.reply("done", paused=True))
        turn = asyncio.ensure_future(rig.chat(await rig.open(), user("one")))
        await server.begun(1)
        assert (await rig.post("pause_generation", mode=mode)).status == 200
        late = await rig.chat(None, user("a turn whose deadline passes meanwhile"))
        assert late.status == 503
        assert not turn.done()
        server.release()
        assert (await rig.post("continue_generation")).status == 200
        assert (await turn).status == 200


async def test_running_turns_end_with_what_they_have_where_a_pause_aborts(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        for command in (lambda: rig.post("pause_generation"), lambda: rig.update("1", abort_all_requests=True)):
            server.plan(rig.reply("a long reply", paused=True, num_drawn=2))
            session = await rig.open()
            turn = asyncio.ensure_future(rig.chat(session, user("one")))
            await server.held(1)
            await command()
            answer = await turn
            assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "abort")
            await rig.post("continue_generation")
            (record,) = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
            assert record["status"] == "aborted"


async def test_a_pause_that_an_engine_refuses_pauses_nothing(live: Live) -> None:
    answer = await live.call("POST", "/pause_generation", {"mode": "in_place"})
    assert (answer.status, answer.json()["status"]) == (400, "error")
    assert "cannot make running generations stand still" in answer.json()["message"]
    assert (await live.call("GET", "/ready")).status == 200
    assert (await live.call("POST", "/pause_generation", {})).status == 200
    assert (await live.call("GET", "/ready")).status == 503
    assert (await live.call("POST", "/continue_generation", {})).status == 200


async def test_an_update_beside_turns_that_stand_in_place_is_taken_and_does_not_ask_for_an_empty_cache(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        server.plan(rig.reply("done", paused=True))
        turn = asyncio.ensure_future(rig.chat(await rig.open(), user("one")))
        await server.begun(1)
        assert (await rig.post("pause_generation", mode="in_place")).status == 200
        status, told = await rig.update("7")
        assert (status, told["success"]) == (200, True)
        assert "its cache still has keys and values of the weights before" in told["message"]
        sent = [(asked.path, asked.json.get("flush_cache")) for asked in server.asked if asked.method == "POST"]
        assert sent[-2:] == [("/update_weights_from_disk", False), ("/flush_cache", None)]
        server.release()
        assert (await rig.post("continue_generation")).status == 200
        assert (await turn).status == 200
        status, told = await rig.update("8")
        assert (status, told["message"]) == (200, f"The weights are those of {tmp_path}/step-1, version '8'.")
        assert [one for one in server.asked if one.path == "/update_weights_from_disk"][-1].json["flush_cache"] is True


async def test_an_update_that_sglang_took_and_called_a_failure_is_taken_and_named(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path, has_spans=True) as rig:
        (server,) = rig.servers
        server.weight_version = "6"
        session = await rig.open()
        server.plan(rig.reply("a reply", paused=True, num_drawn=2))
        turn = asyncio.ensure_future(rig.chat(session, user("one")))
        await server.held(1)
        async with rig.client.post(f"{server.url}/pause_generation", json={"mode": "in_place"}) as paused:
            assert paused.status == 200  # by somebody else, so this server does not know of it
        status, told = await rig.update("7")
        assert (status, told["success"]) == (200, True)
        assert "its cache still has keys and values of the weights before" in told["message"]
        told_of = ("/update_weights_from_disk", "/update_weight_version", "/flush_cache")
        update, version, flush = [one for one in server.asked if one.path in told_of]  # beside them: the probe's
        assert (version.path, version.json["new_version"]) == ("/update_weight_version", "7")
        assert (update.path, flush.path) == ("/update_weights_from_disk", "/flush_cache")
        assert (await rig.call("GET", "/model_info")).json()["weight_version"] == "7"
        async with rig.client.post(f"{server.url}/continue_generation", json={}) as resumed:
            assert resumed.status == 200
        server.release()
        assert (await turn).status == 200
        server.plan(rig.reply("later"))
        assert (await rig.chat(session, user("one"), assistant("a reply"), user("two"))).status == 200
        first, second = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
        assert [span["version"] for span in first["weight_versions"]] == ["6", "7"]
        assert [span["version"] for span in second["weight_versions"]] == ["7"]


async def test_an_update_that_finds_turns_which_have_just_ended_leaves_no_keys_of_old_weights(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        server.num_unflushed = 1
        status, told = await rig.update("7")
        assert (status, told["message"]) == (200, f"The weights are those of {tmp_path}/step-1, version '7'.")
        sent = [asked.path for asked in server.asked if asked.method == "POST"]
        assert sent == ["/update_weights_from_disk", "/update_weight_version", "/flush_cache"]


# -- what a turn over a change is labelled


async def over_a_change(rig: Rig, session: str, change: Any, **fields: Any) -> None:
    """A turn in flight while weights change, that ends after it."""
    (server,) = rig.servers
    server.plan(rig.reply("a reply", paused=True, num_drawn=2))
    turn = asyncio.ensure_future(rig.chat(session, user("one"), **fields))
    await server.held(1)
    assert (await change()).status == 200
    server.release()
    assert (await turn).status == 200


async def test_a_chat_over_a_change_that_a_trainer_made_at_the_engine_has_the_engine_s_spans(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged(renderer, tmp_path, has_spans=True) as rig:
        (server,) = rig.servers
        server.weight_version = "3"
        session = await rig.open()
        server.plan(rig.reply("a reply", paused=True, num_drawn=2))
        turn = asyncio.ensure_future(rig.chat(session, user("one")))
        await server.held(1)
        server.weight_version = "4"  # this server has not heard of it
        server.release()
        assert (await turn).status == 200
        (record,) = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
        num = len(rig.renderer.tokenizer.encode("a reply")) + 1
        assert record["weight_versions"] == [
            {"version": "3", "start": 0, "end": 2},
            {"version": "4", "start": 2, "end": num},
        ]
        assert record["mixed_version"] is False


@pytest.mark.parametrize("by_name", [False, True])
async def test_one_version_for_a_reply_over_a_change_is_none(renderer: Renderer, tmp_path: Path, by_name: bool) -> None:
    async with rigged(renderer, tmp_path) as rig:
        rig.servers[0].weight_version = "3"
        session = await rig.open()

        async def change() -> Answer:
            if by_name:
                return await rig.post("update_weight_version", new_version="4")
            return await rig.post("update_weights_from_disk", model_path="step-1", weight_version="4")

        await over_a_change(rig, session, change)
        rig.servers[0].plan(rig.reply("later"))
        assert (await rig.chat(session, user("one"), assistant("a reply"), user("two"))).status == 200
        first, second = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
        assert (first["mixed_version"], first["weight_versions"]) == (True, None)
        assert second["mixed_version"] is False
        assert [span["version"] for span in second["weight_versions"]] == ["4"]
        asked = {"format": "json"}
        (sample,) = (await rig.call("POST", f"/sessions/{session}/samples", asked)).json()["samples"]
        mixed, later = sample["turns"]
        assert mixed["mixed_version"] is True
        assert "mixed_version" not in later
        assert [(span["start"], span["end"]) for span in sample["weight_spans"]] == [(later["start"], later["end"])]
        assert sample["weight_versions"] == ["3", "4"]  # the oldest that may have sampled
        assert sample["metadata"]["policy"] == "stand-in"
        page = (await rig.call("GET", "/metrics")).body.decode()
        assert "stenograph_mixed_version_turns_total 1.0" in page


async def test_an_update_that_no_engine_took_mixes_nothing(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path) as rig:
        (server,) = rig.servers
        server.weight_version, server.refusal = "3", "no"
        session = await rig.open()
        server.plan(rig.reply("a reply", paused=True, num_drawn=2))
        turn = asyncio.ensure_future(rig.chat(session, user("one")))
        await server.held(1)
        assert (await rig.update("4"))[0] == 400
        server.release()
        assert (await turn).status == 200
        (record,) = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
        assert [span["version"] for span in record["weight_versions"]] == ["3"]


async def test_a_stream_whose_engine_tells_each_version_has_its_spans(renderer: Renderer, tmp_path: Path) -> None:
    async with rigged(renderer, tmp_path, kind="vllm") as rig:
        rig.servers[0].weight_version = "3"
        session = await rig.open()

        async def change() -> Answer:
            return await rig.post("update_weights_from_disk", model_path="step-1", weight_version="4")

        await over_a_change(rig, session, change, stream=True)
        (record,) = (await rig.call("GET", f"/sessions/{session}")).json()["records"]
        assert record["mixed_version"] is False
        assert [(span["version"], span["start"]) for span in record["weight_versions"]] == [("3", 0), ("4", 2)]


# -- where a session's cache is


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_sessions_turns_name_it_and_its_end_is_told_to_who_keeps_something(
    renderer: Renderer, tmp_path: Path, keeps: bool
) -> None:
    async with rigged(renderer, tmp_path, 2, server_info={"enable_session_radix_cache": keeps}) as rig:
        first, other = await rig.open(), await rig.open()
        for session in (first, other, None):
            assert (await rig.chat(session, user("one"))).status == 200
        asked = {one.header("x-session-id"): one for server in rig.servers for one in server.requests}
        assert set(asked) == {first, other, None}
        for session, one in asked.items():
            assert one.header("x-smg-routing-key") == session
            assert one.json.get("session_id") == session
        assert (await rig.call("DELETE", f"/sessions/{first}")).status == 204
        assert (await rig.chat(other, user("one"))).status == 200
        if keeps:
            while not any(server.closed for server in rig.servers):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert [closed for server in rig.servers for closed in server.closed] == ([first] if keeps else [])
