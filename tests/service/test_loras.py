"""A session's LoRA: checked at its opening, sent with each turn, kept in records and samples; lost, it is an error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import PlannedServer, ReplyScript
from standins.scripted_engine import ScriptedEngine
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.client import Client
from stenograph.core.clock import SystemClock
from stenograph.core.errors import EngineUnavailable, InvalidRequest, StartupError
from stenograph.core.weights import LoadLora, UnloadLora
from stenograph.engine.base import EngineState
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.http.adapter import AdapterOptions, Ask, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.http.policy_check import check_policy
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer
from stenograph.weights.sync import WeightSync

from .conftest import END, Live, assistant, running, user
from .test_engines_join_updates import no_turns

VOCAB = 320
KINDS: dict[str, tuple[Callable[[], PlannedServer], type[EngineAdapter]]] = {
    "sglang": (lambda: SGLangServer(stop_id=END), SGLangChat),
    "sglang-generate": (lambda: SGLangServer(stop_id=END), SGLangGenerate),
    "vllm": (lambda: VLLMServer(dev_mode=True), VLLM),
    "vllm-completions": (lambda: VLLMServer(scale_out=False, dev_mode=True), VLLM),
}
WITHOUT = {"lmdeploy": (LMDeployServer, LMDeploy)}
LORAS = {"code": "/loras/code", "prose": "/loras/prose"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRig(Live):
    """A server before stand-ins of one kind of engine."""

    servers: list[PlannedServer]
    fleet: Fleet

    def plan(self, text: str) -> None:
        script = ReplyScript(ids=(*self.renderer.tokenizer.encode(text), END), text=text, matched=END)
        for server in self.servers:
            server.plan(script)

    async def refused(self, path: str, body: Any, status: int) -> dict[str, Any]:
        answer = await self.call("POST", path, body)
        assert answer.status == status, answer.body
        error: dict[str, Any] = answer.json()["error"]
        return error


@asynccontextmanager
async def rigged(kind: str, renderer: Renderer, *loras: dict[str, str], **settings: Any) -> AsyncIterator[LoraRig]:
    """A server before an engine for each of these tables of LoRAs."""
    make, adapter = {**KINDS, **WITHOUT}[kind]
    options = AdapterOptions(model="stand-in", vocab_size=VOCAB, max_context_tokens=4096)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(make()) for _ in loras]
        for server, known in zip(servers, loras, strict=True):
            server.loras.update(known)
        engines = [HttpEngine(HttpEngineOptions(url=one.url), adapter(options)) for one in servers]  # type: ignore[call-arg]
        members = [FleetMember(name=one.name, engine=one, url=one.name) for one in engines]
        fleet = Fleet(members, clock=SystemClock())
        await fleet.start()
        stack.push_async_callback(fleet.aclose)
        url, manager = await stack.enter_async_context(running(fleet, renderer, **settings))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        unused = ScriptedEngine(vocab_size=1)
        yield LoraRig(
            url=url, engine=unused, renderer=renderer, manager=manager, client=client, servers=servers, fleet=fleet
        )


def asked_lora(asked: Any) -> str | None:
    """The LoRA of a generation, by its engine's name for the field."""
    body: dict[str, Any] = asked.json
    return body.get("lora_path") if asked.path in ("/generate", "/v1/chat/completions") else body["model"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_each_turn_is_sampled_by_its_session_s_lora_and_says_so(
    renderer: Renderer, kind: str, stream: bool
) -> None:
    async with rigged(kind, renderer, LORAS) as rig:
        base = None if kind.startswith("sglang") else "stand-in"
        sessions = {name: await rig.open(policy=name, group="g") for name in LORAS}
        plain = await rig.open()
        for name, session in [*sessions.items(), (base, plain)]:
            for turns in ([user("one")], [user("one"), assistant("ok"), user("two")]):
                rig.plan("ok")
                assert (await rig.chat(session, *turns, stream=stream)).status == 200
                assert asked_lora(rig.servers[0].requests[-1]) == name
            records = (await rig.call("GET", f"/sessions/{session}")).json()
            assert {record["policy"] for record in records["records"]} == {name or "stand-in"}
            assert records["metadata"].get("policy") == (None if session is plain else name)
            samples = (await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
            assert [sample["metadata"]["policy"] for sample in samples] == [name or "stand-in"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lora_that_no_engine_has_is_refused_with_the_names_of_those_that_there_are(
    renderer: Renderer, kind: str
) -> None:
    async with rigged(kind, renderer, LORAS) as rig:
        error = await rig.refused("/sessions", {"policy": "poems"}, 400)
        assert error["param"] == "/policy"
        assert error["message"] == "policy: no engine has the LoRA 'poems'; they have 'code', 'prose'."
        rig.servers[0].loras["poems"] = "/loras/poems"  # loaded meanwhile, by another way
        assert await rig.open(policy="poems")
        own = await rig.refused("/sessions", {"policy": "stand-in"}, 400)
        assert own["param"] == "/policy", "the model itself is no LoRA"
        for name in ("", "x" * 513):
            assert (await rig.refused("/sessions", {"policy": name}, 400))["param"] == "/policy"
        for name in ("../code", "a/b", "\n\x00", "x" * 512):
            assert (await rig.refused("/sessions", {"policy": name}, 400))["param"] == "/policy"
        assert set(rig.manager.weights.loras) == {"poems"}, "a refused name leaves nothing"
        chat = {"messages": [user("one")], "lora_path": "code"}
        assert (await rig.refused("/v1/chat/completions", chat, 400))["param"] == "/lora_path"


async def test_an_engine_without_loras_refuses_a_policy(live: Live) -> None:
    answer = await live.call("POST", "/sessions", {"policy": "code"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/policy")
    assert "samples by none" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_lora_lost_between_two_turns_is_an_error_and_nothing_is_recorded(
    renderer: Renderer, kind: str, stream: bool
) -> None:
    async with rigged(kind, renderer, LORAS) as rig:
        session = await rig.open(policy="code")
        rig.plan("ok")
        assert (await rig.chat(session, user("one"))).status == 200
        del rig.servers[0].loras["code"]
        line = [user("one"), assistant("ok"), user("two")]
        body = {"messages": line, "stream": stream}
        error = await rig.refused(f"/sessions/{session}/v1/chat/completions", body, 503)
        assert error["code"] == "engine_unavailable"
        assert "no longer has the LoRA 'code'" in error["message"]
        assert len((await rig.call("GET", f"/sessions/{session}")).json()["records"]) == 1
        assert (await rig.refused("/sessions", {"policy": "code"}, 400))["param"] == "/policy"
        rig.servers[0].loras["code"] = "/loras/code"
        rig.plan("again")
        assert (await rig.chat(session, *line)).status == 200
        assert len((await rig.call("GET", f"/sessions/{session}")).json()["records"]) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fleet_gives_a_session_to_an_engine_that_has_its_lora(renderer: Renderer, kind: str) -> None:
    async with rigged(kind, renderer, {}, LORAS, {}) as rig:
        sessions = [await rig.open(policy="code") for _ in range(6)]
        for session in sessions:
            assert (await rig.chat(session, user("one"))).status == 200
        assert [len(server.requests) for server in rig.servers] == [0, 6, 0]
        plain = [await rig.open() for _ in range(6)]
        await asyncio.gather(*(rig.chat(session, user("one")) for session in plain))
        assert all(server.requests for server in rig.servers), "the others are used for the rest"


async def test_a_session_moves_to_the_engine_that_still_has_its_lora(renderer: Renderer) -> None:
    async with rigged("vllm", renderer, LORAS, LORAS) as rig:
        session = await rig.open(policy="code")
        rig.plan("ok")
        assert (await rig.chat(session, user("one"))).status == 200
        home = [bool(server.requests) for server in rig.servers].index(True)
        del rig.servers[home].loras["code"]
        answer = await rig.chat(session, user("one"), assistant("ok"), user("two"))
        assert answer.status == 200, answer.body
        assert [asked_lora(server.requests[-1]) for server in rig.servers] == ["code", "code"]
        assert {one.health.state for one in rig.fleet.statuses()} == {EngineState.READY}
        assert not any(one.health.detail for one in rig.fleet.statuses()), "the loser is not in doubt"


async def test_an_engine_that_does_not_answer_may_have_the_lora(renderer: Renderer) -> None:
    async with rigged("vllm", renderer, {}, LORAS) as rig:
        await rig.servers[1].aclose()
        await rig.fleet.members[rig.servers[1].url].find_policies()
        assert await rig.open(policy="code"), "it listed it last"
        error = await rig.refused("/sessions", {"policy": "poems"}, 503)
        assert error["code"] == "engine_unavailable"


class ProbedEngine(ScriptedEngine):
    """One whose probes end when they are let to."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB)
        self.probes = asyncio.Queue[asyncio.Future[None]]()

    async def find_policies(self) -> None:
        probe = asyncio.get_running_loop().create_future()
        self.probes.put_nowait(probe)
        await probe


async def test_many_sessions_of_unknown_loras_share_the_next_probe() -> None:
    """One probe at a time: a request is answered by one that began after it came, also where its prober leaves."""
    engine = ProbedEngine()
    first = asyncio.create_task(check_policy(engine, "poems"))
    probe = await engine.probes.get()
    later = [asyncio.create_task(check_policy(engine, f"poems-{number}")) for number in range(30)]
    await asyncio.sleep(0)  # each waits for its turn
    probe.set_result(None)
    with pytest.raises(InvalidRequest):
        await first
    await engine.probes.get()
    assert not any(one.done() for one in later), "the first probe may be older than the LoRA"
    later.pop(0).cancel()  # it has the second one
    (await engine.probes.get()).set_result(None)
    ends = await asyncio.gather(*later, return_exceptions=True)
    assert [type(end) for end in ends] == [InvalidRequest] * 29
    assert engine.probes.empty()


async def test_an_engine_that_fails_the_check_of_its_start_is_503_in_words() -> None:
    """As when another model has come up at its address."""
    is_other = False

    async def check(_adapter: EngineAdapter, _ask: Ask) -> None:
        if is_other:
            raise StartupError("the engine has another model")

    options = AdapterOptions(model="stand-in", vocab_size=VOCAB, max_context_tokens=4096)
    async with KINDS["vllm"][0]() as server:
        engine = HttpEngine(HttpEngineOptions(url=server.url, check=check), KINDS["vllm"][1](options))
        async with aclosing(engine):
            await engine.start()
            is_other = True
            with pytest.raises(EngineUnavailable, match="the engine has another model") as caught:
                await check_policy(engine, "poems")
    assert caught.value.status == 503


async def test_a_session_keeps_its_lora_over_a_restart_and_is_sampled_by_no_engine_without(
    renderer: Renderer, tmp_path: Path
) -> None:
    held, line = DataFolder(tmp_path, address=""), [user("one"), assistant("ok"), user("two")]
    async with aclosing(await SqliteStore.open(held)) as store, rigged("vllm", renderer, LORAS, store=store) as rig:
        session = await rig.open(policy="code")
        rig.plan("ok")
        assert (await rig.chat(session, user("one"))).status == 200
    async with aclosing(await SqliteStore.open(held)) as store, rigged("lmdeploy", renderer, {}, store=store) as rig:
        error = await rig.refused(f"/sessions/{session}/v1/chat/completions", {"messages": line}, 503)
        assert "sampled by the LoRA 'code', and the engine lmdeploy takes none" in error["message"]
        assert not rig.servers[0].requests
    async with aclosing(await SqliteStore.open(held)) as store, rigged("vllm", renderer, LORAS, store=store) as rig:
        assert (await rig.chat(session, *line)).status == 200
        assert asked_lora(rig.servers[0].requests[-1]) == "code"
    held.close()


async def test_the_client_opens_sessions_of_a_lora(renderer: Renderer) -> None:
    async with (
        rigged("vllm", renderer, LORAS) as rig,
        Client(rig.url) as client,
        client.session(policy="prose") as session,
    ):
        rig.plan("ok")
        assert (await rig.chat(session.id, user("one"))).status == 200
        (sample,) = await session.samples()
        assert sample.metadata["policy"] == "prose"


async def by(rig: LoraRig, session: str, *line: dict[str, Any]) -> dict[str, Any]:
    """The record of a turn."""
    rig.plan("ok")
    answer = await rig.chat(session, *line)
    assert answer.status == 200, answer.body
    record: dict[str, Any] = (await rig.call("GET", f"/sessions/{session}")).json()["records"][-1]
    return record


def versions(record: dict[str, Any]) -> list[str]:
    return [span["version"] for span in record["weight_versions"]]


@pytest.mark.parametrize("kind", KINDS)
async def test_each_load_of_a_lora_has_a_version_that_its_turns_have(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
    async with rigged(kind, renderer, {}, {}, weights_dir=tmp_path, weight_version="7") as rig:
        told = (await rig.call("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": "step-1"})).json()
        assert told == {
            "success": True,
            "error_message": None,
            "loaded_adapters": {"a": str(tmp_path / "step-1")},
            "weight_version": "1",
        }
        session, other = await rig.open(policy="a"), await rig.open()
        first = await by(rig, session, user("one"))
        again = await rig.call("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": "step-2"})
        assert (again.status, again.json()["weight_version"]) == (200, "2")
        second = await by(rig, session, user("one"), assistant("ok"), user("two"))
        assert (versions(first), versions(second)) == (["1"], ["2"])
        assert (first["cached_from"], second["cached_from"]) == ("7+1", "7+2"), "nothing cached is shared"
        plain = await by(rig, other, user("one"))
        assert (plain["cached_from"], plain["mixed_version"]) == ("7", False), "a LoRA's load is not the model's"
        rows = (await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
        assert [row["weight_versions"] for row in rows] == [["1", "2"]]
        gone = await rig.call("POST", "/unload_lora_adapter", {"lora_name": "a"})
        assert (gone.status, gone.json()["loaded_adapters"]) == (200, {})
        await rig.refused(f"/sessions/{session}/v1/chat/completions", {"messages": [user("new")]}, 503)
        assert (await rig.call("POST", "/unload_lora_adapter", {"lora_name": "a"})).status == 400


@pytest.mark.parametrize("kind", ["sglang-generate", "vllm"])
async def test_the_versions_of_a_lora_go_on_after_a_restart(renderer: Renderer, tmp_path: Path, kind: str) -> None:
    """Turns of stored sessions have them. An engine with the LoRA in another folder has another one."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    settings: dict[str, Any] = {"weights_dir": tmp_path, "data_dir": tmp_path, "weight_version": "7"}
    first, second = {"lora_name": "a", "lora_path": "one"}, {"lora_name": "a", "lora_path": "two"}
    async with rigged(kind, renderer, {}, **settings) as rig:
        for body in (first, second):
            assert (await rig.call("POST", "/load_lora_adapter", body)).status == 200
    for listed, version, cached in (("two", "2", "7+2"), ("other", "7", "7")):
        async with rigged(kind, renderer, {"a": str(tmp_path / listed)}, **settings) as rig:
            record = await by(rig, await rig.open(policy="a"), user("one"))
            assert (versions(record), record["cached_from"]) == ([version], cached)
    async with rigged(kind, renderer, {}, **settings) as rig:
        told = (await rig.call("POST", "/load_lora_adapter", first)).json()
        assert (told["success"], told["weight_version"]) == (True, "3")
        assert versions(await by(rig, await rig.open(policy="a"), user("one"))) == ["3"]
        (tmp_path / "loras.json").write_text("[]")
        error = await rig.refused("/load_lora_adapter", {**first, "lora_name": "b"}, 500)
        assert "loras.json" in error["message"]


@pytest.mark.parametrize("kind", ["sglang-generate", "vllm"])
async def test_a_lora_has_its_load_s_version_when_engines_list_that_folder_again(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    """The first turn after a restart does not decide for the later ones. A turn that runs meanwhile is mixed."""
    (tmp_path / "one").mkdir()
    settings: dict[str, Any] = {"weights_dir": tmp_path, "data_dir": tmp_path, "weight_version": "7"}
    async with rigged(kind, renderer, {}, **settings) as rig:
        body = {"lora_name": "a", "lora_path": "one"}
        assert (await rig.call("POST", "/load_lora_adapter", body)).status == 200
    async with rigged(kind, renderer, {"a": "/loras/other"}, **settings) as rig:
        member = rig.fleet.members[rig.servers[0].url]
        session, running = await rig.open(policy="a"), await rig.open(policy="a")
        assert versions(await by(rig, session, user("one"))) == ["7"]
        rig.servers[0].plan(
            ReplyScript(ids=(*renderer.tokenizer.encode("ok"), END), text="ok", matched=END, paused=True)
        )
        turn = asyncio.create_task(rig.chat(running, user("one")))
        await rig.servers[0].held(1)
        for folder, version, cached in ((str(tmp_path / "one"), "1", "7+1"), ("/loras/third", "7", "7")):
            rig.servers[0].loras["a"] = folder
            await member.find_policies()
            record = await by(rig, await rig.open(policy="a"), user("one"))
            assert (versions(record), record["cached_from"]) == ([version], cached)
        rig.servers[0].release()
        assert (await turn).status == 200
        record = (await rig.call("GET", f"/sessions/{running}")).json()["records"][0]
        assert (record["mixed_version"], record["weight_versions"]) == (True, None)


@pytest.mark.parametrize("kind", ["sglang-generate", "vllm"])
async def test_a_lora_loaded_by_another_way_after_an_unload_has_the_model_s_version(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    """Also from the same folder, and after a restart. The versions of loads here go on."""
    (tmp_path / "one").mkdir()
    settings: dict[str, Any] = {"weights_dir": tmp_path, "data_dir": tmp_path, "weight_version": "7"}
    body, folder = {"lora_name": "a", "lora_path": "one"}, str(tmp_path / "one")
    async with rigged(kind, renderer, {}, **settings) as rig:
        assert (await rig.call("POST", "/load_lora_adapter", body)).status == 200
        assert versions(await by(rig, await rig.open(policy="a"), user("one"))) == ["1"]
        assert (await rig.call("POST", "/unload_lora_adapter", {"lora_name": "a"})).status == 200
        assert rig.manager.weights.of("a").age_of("1") == 1, "one change, not 7 - 1"
        for listed in (folder, "/loras/other"):
            rig.servers[0].loras["a"] = listed
            await rig.fleet.members[rig.servers[0].url].find_policies()
            record = await by(rig, await rig.open(policy="a"), user("one"))
            assert (versions(record), record["cached_from"]) == (["7"], "7+1-unloaded")
    async with rigged(kind, renderer, {"a": folder}, **settings) as rig:
        assert versions(await by(rig, await rig.open(policy="a"), user("one"))) == ["7"]
        told = (await rig.call("POST", "/load_lora_adapter", body)).json()
        assert (told["success"], told["weight_version"]) == (True, "2")
        assert versions(await by(rig, await rig.open(policy="a"), user("one"))) == ["2"]


@pytest.mark.parametrize("kind", ["sglang-generate", "vllm"])
async def test_a_turn_over_a_load_of_its_lora_has_no_version_and_others_have(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "step").mkdir()
    async with rigged(kind, renderer, LORAS, weights_dir=tmp_path) as rig:
        sessions = [await rig.open(policy=name) for name in LORAS]
        script = ReplyScript(ids=(*renderer.tokenizer.encode("ok"), END), text="ok", matched=END, paused=True)
        rig.servers[0].plan(script, script)
        turns = [asyncio.create_task(rig.chat(session, user("one"))) for session in sessions]
        await rig.servers[0].held(2)
        body = {"lora_name": "code", "lora_path": "step", "weight_version": "new"}
        assert (await rig.call("POST", "/load_lora_adapter", body)).status == 200
        rig.servers[0].release()
        assert [(await turn).status for turn in turns] == [200, 200]
        records = [(await rig.call("GET", f"/sessions/{one}")).json()["records"][0] for one in sessions]
        assert [record["mixed_version"] for record in records] == [True, False]
        assert records[0]["weight_versions"] is None


async def test_an_engine_that_refuses_a_load_samples_nothing_by_the_lora_of_before(
    renderer: Renderer, tmp_path: Path
) -> None:
    (tmp_path / "step").mkdir()
    async with rigged("vllm", renderer, LORAS, LORAS, weights_dir=tmp_path) as rig:
        rig.servers[0].refusal = "no memory"
        answer = await rig.call("POST", "/load_lora_adapter", {"lora_name": "code", "lora_path": "step"})
        assert answer.status == 400
        assert "no memory" in answer.json()["error_message"]
        for _ in range(4):
            record = await by(rig, await rig.open(policy="code"), user("one"))
            assert versions(record) == ["1"]
        assert [len(server.requests) for server in rig.servers] == [0, 4]
        await rig.servers[1].aclose()
        chat = f"/sessions/{await rig.open(policy='code')}/v1/chat/completions"
        await rig.refused(chat, {"messages": [user("a")]}, 502)
        assert not rig.servers[0].requests


async def test_an_engine_without_routes_for_loras_refuses_a_load(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "step").mkdir()
    body = {"lora_name": "code", "lora_path": "step"}
    for kind, words in (("vllm", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"), ("lmdeploy", "takes no LoRAs")):
        async with rigged(kind, renderer, {}, weights_dir=tmp_path) as rig:
            for server in rig.servers:
                server.dev_mode = False  # type: ignore[attr-defined]
            answer = await rig.call("POST", "/load_lora_adapter", body)
            assert answer.status == 400
            assert words in answer.json()["error_message"]
    async with rigged("vllm", renderer, {}) as rig:
        assert (await rig.call("POST", "/load_lora_adapter", body)).status == 403, "there is no --weights-dir"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_lora_with_the_model_s_name_is_not_loaded_and_not_listed(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "step").mkdir()
    async with rigged(kind, renderer, {**LORAS, "stand-in": "/loras/own"}, weights_dir=tmp_path) as rig:
        assert (await rig.refused("/sessions", {"policy": "stand-in"}, 400))["param"] == "/policy"
        answer = await rig.call("POST", "/load_lora_adapter", {"lora_name": "stand-in", "lora_path": "step"})
        assert answer.status == 400
        assert "the model's own name" in answer.json()["error_message"]
        assert rig.servers[0].loras["stand-in"] == "/loras/own", "the engine was asked nothing"
        assert not rig.manager.weights.loras


@pytest.mark.parametrize("path", ["../outside", "/", "link", "link/../../outside", "a\x00b", "step/../.."])
async def test_a_lora_comes_from_the_folder_of_weights_alone(renderer: Renderer, tmp_path: Path, path: str) -> None:
    weights = tmp_path / "weights"
    for folder in (weights / "step", tmp_path / "outside"):
        folder.mkdir(parents=True)
    (weights / "link").symlink_to(tmp_path / "outside")
    async with rigged("vllm", renderer, {}, weights_dir=weights) as rig:
        error = await rig.refused("/load_lora_adapter", {"lora_name": "a", "lora_path": path}, 403)
        assert "is not below --weights-dir" in error["message"]
        assert not rig.servers[0].loras


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_joins_gets_the_loras_that_were_loaded(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    for name in ("code", "poems"):
        (tmp_path / name).mkdir()
    make, adapter = KINDS[kind]
    options = AdapterOptions(model="stand-in", vocab_size=VOCAB, max_context_tokens=4096)
    async with rigged(kind, renderer, LORAS) as rig, make() as late, make() as refusing:
        sync = WeightSync(rig.fleet, rig.manager.weights, no_turns)
        for name, version in (("code", "1"), ("code", "2"), ("poems", "1"), ("prose", "1")):
            command = LoadLora(name=name, path=str(tmp_path / name), version=version)
            assert (await sync.change_lora(command)).success
        assert (await sync.change_lora(UnloadLora(name="prose"))).success
        session = await rig.open(policy="code")
        late.loras.update(LORAS)
        refusing.loras.update(LORAS)
        refusing.refusal = "no memory"
        for server in (late, refusing):
            engine = HttpEngine(HttpEngineOptions(url=server.url), adapter(options))  # type: ignore[call-arg]
            await engine.start()
            member = FleetMember(name=server.url, engine=engine, url=server.url)
            await sync.bring_up(engine, lambda member=member: rig.fleet.join(member))  # type: ignore[misc]
        assert late.loras == {**LORAS, "code": str(tmp_path / "code"), "poems": str(tmp_path / "poems")}
        assert await rig.fleet.leave(rig.servers[0].url)
        assert versions(await by(rig, session, user("one"))) == ["2"]
        assert (bool(late.requests), bool(refusing.requests)) == (True, False), "one has another of that name"
