"""Caches by version: under `follow` no turn reads what other weights computed, `pin` keeps its own, `off` has no salt.

The stand-ins keep a prefix cache that knows which weights computed each position (standins/weight_versions.py).
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import PlannedServer, ReplyScript
from standins.scripted_engine import Script, ScriptedEngine
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder
from standins.vllm_server import VLLMServer
from standins.weight_versions import CachedPrompt, PrefixCache
from stenograph.core.kinds import SaltMode
from stenograph.core.types import Finish, FinishReason, token_ids
from stenograph.core.weights import ControlAnswer, WeightCommand
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.http.lifecycle import start_engine
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Span
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, Live, assistant, running, user

VOCAB = 320
KINDS = ("sglang", "sglang-generate", "vllm", "vllm-completions")
WAYS = ("name_weights", "in_place", "unflushed")
LONG = "a question that is long enough to be cached"


def server_of(kind: str) -> PlannedServer:
    if kind.startswith("vllm"):
        return VLLMServer(dev_mode=True, scale_out=kind == "vllm")
    return SGLangServer(stop_id=END, has_spans=True)


def adapter_of(kind: str) -> EngineAdapter:
    if kind.startswith("vllm"):
        return VLLM(AdapterOptions(model="stand-in", vocab_size=VOCAB, max_context_tokens=4096))
    return (SGLangChat if kind == "sglang" else SGLangGenerate)(AdapterOptions(model="stand-in", vocab_size=VOCAB))


class Rig:
    """A server before a stand-in that keeps a prefix cache."""

    def __init__(self, url: str, renderer: Renderer, client: aiohttp.ClientSession, standin: PlannedServer) -> None:
        self._url = url
        self._renderer = renderer
        self._client = client
        self.standin = standin
        self.cache = standin.cache = standin.cache or PrefixCache()

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self._client.post(self._url + path, json=body or {}) as response:
            answer = Answer(status=response.status, headers=response.headers, body=await response.read())
        assert answer.status == status, answer.body
        return answer.json()

    async def open(self, **options: Any) -> str:
        """A session that keeps every branch."""
        return f"/sessions/{(await self.post('/sessions', {'history': 'tree', **options}))['session_id']}"

    async def records(self, session: str) -> list[Any]:
        async with self._client.get(self._url + session) as response:
            return list((await response.json())["records"])

    def plan(self, text: str = "ok", **options: Any) -> None:
        ids = (*self._renderer.tokenizer.encode(text), END)
        self.standin.plan(ReplyScript(ids=ids, text=text, matched=END, **options))

    async def chat(self, session: str, *messages: dict[str, Any], text: str = "ok") -> CachedPrompt:
        """A turn, and its prompt as the engine's cache found it."""
        self.plan(text)
        await self.post(f"{session}/v1/chat/completions", {"messages": messages})
        return self.cache.prompts[-1]

    async def change(self, way: str, version: str) -> None:
        """Bring other weights and leave what is cached."""
        if way == "name_weights":  # somebody else has sent them
            await self.post("/update_weight_version", {"new_version": version})
            return
        mode = "in_place" if way == "in_place" else "abort"
        await self.post("/pause_generation", {"mode": mode})
        body = {"model_path": "step-1", "weight_version": version, "flush_cache": way == "in_place"}
        await self.post("/update_weights_from_disk", body)
        await self.post("/continue_generation")


@asynccontextmanager
async def before(
    standin: PlannedServer, kind: str, renderer: Renderer, folder: Path, **options: Any
) -> AsyncIterator[Rig]:
    (folder / "step-1").mkdir(exist_ok=True)
    engine = HttpEngine(HttpEngineOptions(url=standin.url, probe_pause_s=0.02), adapter_of(kind))
    async with (
        running(engine, renderer, weights_dir=folder, **options) as (url, manager),
        aiohttp.ClientSession() as client,
    ):
        await start_engine(engine, manager)
        try:
            yield Rig(url, renderer, client, standin)
        finally:
            await engine.aclose()


@asynccontextmanager
async def rigged(kind: str, renderer: Renderer, folder: Path, **options: Any) -> AsyncIterator[Rig]:
    async with server_of(kind) as standin:
        standin.weight_version = "v1"
        async with before(standin, kind, renderer, folder, **options) as rig:
            yield rig


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_no_turn_reads_what_other_weights_computed(
    renderer: Renderer, tmp_path: Path, kind: str, way: str
) -> None:
    async with rigged(kind, renderer, tmp_path, weight_version="v1") as rig:
        one, other = await rig.open(), await rig.open(cache_salt="follow")
        first = await rig.chat(one, user(LONG))
        assert not first.found
        again = await rig.chat(other, user(LONG))
        assert again.found == {"v1"}, "the stand-in finds what is cached"
        rig.plan("over the change", paused=True, num_drawn=2)
        crossing = asyncio.create_task(rig.post(f"{other}/v1/chat/completions", {"messages": [user("another")]}))
        await rig.standin.held(1)
        await rig.change(way, "v2")
        rig.standin.release()
        await crossing
        line = (user(LONG), assistant("ok"), user("and now?"))
        after = [await rig.chat(one, *line), await rig.chat(other, user("another")), await rig.chat(one, user(LONG))]
        assert all(prompt.found <= {"v2"} for prompt in after), [prompt.found for prompt in after]
        again = await rig.chat(one, user(LONG), text="a reply of the new weights")
        assert again.found == {"v2"}, "the new weights have a cache of their own"
        last = (await rig.records(one))[-1]
        assert (last["cached_from"], [span["version"] for span in last["weight_versions"]]) == ("v2", ["v2"])
        rows = (await rig.post(f"{one}/samples", {"format": "json", "include_side": True}))["samples"]
        assert {row["cached_from"] for sample in rows for row in sample["turns"]} <= {"v1", "v2"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_pinned_session_and_its_forks_keep_the_cache_of_the_version_they_began_with(
    renderer: Renderer, tmp_path: Path, kind: str, way: str
) -> None:
    async with rigged(kind, renderer, tmp_path, weight_version="v1") as rig:
        pinned = await rig.open(cache_salt="pin")
        await rig.chat(pinned, user(LONG))
        await rig.change(way, "v2")
        flushes = way == "in_place"
        line = (user(LONG), assistant("ok"), user("and now?"))
        goes_on = await rig.chat(pinned, *line)
        assert goes_on.found == (set() if flushes else {"v1"})
        fork = await rig.chat(pinned, user(LONG), text="a fork")
        assert fork.found == ({"v2"} if flushes else {"v1"})
        younger = await rig.open(cache_salt="pin")
        assert (await rig.chat(younger, user(LONG))).found <= {"v2"}
        assert [record["cached_from"] for record in await rig.records(pinned)][-1] == "v1"
        assert [record["cached_from"] for record in await rig.records(younger)] == ["v2"]


@pytest.mark.parametrize("kind", KINDS)
async def test_without_a_salt_a_turn_may_read_what_other_weights_computed(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    async with rigged(kind, renderer, tmp_path, weight_version="v1") as rig:
        unsalted = await rig.open(cache_salt="off")
        await rig.chat(unsalted, user(LONG))
        await rig.change("name_weights", "v2")
        assert (await rig.chat(unsalted, user(LONG), text="again")).found == {"v1"}
        assert not {"extra_key", "cache_salt"} & rig.standin.requests[-1].json.keys()
        assert [record["cached_from"] for record in await rig.records(unsalted)] == [None]
        assert (await rig.chat(await rig.open(), user(LONG))).found == set(), "others do not read it"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_weights_without_a_name_have_no_salt(renderer: Renderer, tmp_path: Path, kind: str) -> None:
    async with server_of(kind) as standin, before(standin, kind, renderer, tmp_path) as rig:
        following, pinned = await rig.open(), await rig.open(cache_salt="pin")
        await rig.chat(following, user(LONG))
        await rig.change("name_weights", "v1")
        assert not (await rig.chat(following, user(LONG), text="again")).found
        await rig.chat(pinned, user(LONG))
        assert [record["cached_from"] for record in await rig.records(following)] == ["v1"]
        assert [record["cached_from"] for record in await rig.records(pinned)] == [None]


async def test_turns_without_a_session_are_under_the_policy_of_the_settings(renderer: Renderer, tmp_path: Path) -> None:
    salts = {SaltMode.FOLLOW: "v1", SaltMode.PIN: "v1", SaltMode.OFF: None}
    for policy, salt in salts.items():
        async with rigged("sglang", renderer, tmp_path, weight_version="v1", cache_salt=policy) as rig:
            await rig.chat("", user(LONG))
            assert rig.standin.requests[-1].json.get("extra_key") == salt
            session = await rig.open()
            await rig.chat(session, user(LONG))
            await rig.change("name_weights", "v2")
            await rig.chat(session, user(LONG), text="again")
            expected = {SaltMode.FOLLOW: "v2", SaltMode.PIN: "v1", SaltMode.OFF: None}[policy]
            assert rig.standin.requests[-1].json.get("extra_key") == expected


async def test_after_a_restart_a_session_has_its_policy_and_the_engine_names_the_weights(
    renderer: Renderer, tmp_path: Path
) -> None:
    folder = DataFolder(tmp_path / "data", address="")

    @asynccontextmanager
    async def begun(standin: PlannedServer) -> AsyncIterator[Rig]:
        store = await SqliteStore.open(folder)
        try:
            async with before(standin, "sglang", renderer, tmp_path, store=store, weight_version="v0") as rig:
                yield rig
        finally:
            await store.aclose()

    async with server_of("sglang") as standin:
        standin.weight_version = "v1"
        async with begun(standin) as rig:
            sessions = {policy: await rig.open(cache_salt=policy) for policy in SaltMode}
            for session in sessions.values():
                await rig.chat(session, user(LONG))
            await rig.change("name_weights", "v2")
        async with begun(standin) as rig:
            line, told = (user(LONG), assistant("ok"), user("and now?")), dict[str, str | None]()
            for policy, session in sessions.items():
                await rig.chat(session, *line)
                told[policy] = (await rig.records(session))[-1]["cached_from"]
                assert rig.standin.requests[-1].json.get("extra_key") == told[policy]
    folder.close()
    assert told == {"pin": "v1", "follow": "v2", "off": None}


class SlowEngine(ScriptedEngine):
    """Makes ids of text, and takes the name of its weights, when it is let."""

    tokenizes = True

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
        self._tokenizer = renderer.tokenizer
        self.is_asked, self.may_tokenize, self.may_change = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def tokenize(self, spans: Sequence[Span]) -> "array[int]":
        self.is_asked.set()
        await self.may_tokenize.wait()
        return token_ids(self._tokenizer.encode("".join(span.text for span in spans)))

    async def control(self, command: WeightCommand) -> Sequence[ControlAnswer]:
        self.is_asked.set()
        await self.may_change.wait()
        return await super().control(command)


async def test_a_turn_that_a_change_finds_before_the_engine_waits_and_is_of_the_new_weights(renderer: Renderer) -> None:
    engine = SlowEngine(renderer)
    engine.plan(Script(ids=(65, END), finish=Finish(reason=FinishReason.STOP, matched=END)))
    async with running(engine, renderer, weight_version="v1") as (url, _), aiohttp.ClientSession(url) as http:
        turn = asyncio.create_task(http.post("/v1/chat/completions", json={"messages": [user("a")]}))
        await engine.is_asked.wait()
        engine.is_asked.clear()
        change = asyncio.create_task(http.post("/update_weight_version", json={"new_version": "v2"}))
        await engine.is_asked.wait()
        engine.may_tokenize.set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not engine.requests, "it is not sent while the weights change"
        engine.may_change.set()
        assert (await change).status == (await turn).status == 200
        assert len(engine.requests) == 1
        page = await (await http.get("/metrics")).text()
        assert "stenograph_mixed_version_turns_total 0.0" in page


async def test_scores_of_guided_tokens_are_cached_under_the_salt_of_their_turn(
    renderer: Renderer, tmp_path: Path
) -> None:
    async with rigged("vllm", renderer, tmp_path, weight_version="v1") as rig:
        rig.plan("1")
        body = {"messages": [user(LONG)], "guided_regex": "1"}
        await rig.post("/v1/chat/completions", body)
        asked = [one.json for one in rig.standin.asked if one.json.get("token_ids")]
        assert [one["cache_salt"] for one in asked] == ["v1", "v1"]


@pytest.mark.parametrize("cache_salt", ["pin", "unsalted"])
async def test_a_policy_that_the_engine_cannot_keep_is_refused(live: Live, cache_salt: str) -> None:
    answer = await live.call("POST", "/sessions", {"cache_salt": cache_salt})
    assert answer.status == 400
    error = answer.json()["error"]
    assert error["param"] == "/cache_salt"
    why = "cannot keep a cache of the weights" if cache_salt == "pin" else "'pin', 'follow' or 'off'"
    assert why in error["message"]
    assert (await live.call("POST", "/sessions", {"cache_salt": "follow"})).status == 200


async def test_the_embedded_engine_keeps_its_own_cache_apart(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    engine = EmbeddedEngine(folder, EmbeddedOptions(max_batch=4, kv_tokens=2048))
    renderer = make_renderer(load_model_files(folder), "auto")
    async with running(engine, renderer, weights_dir=tmp_path) as (url, manager), aiohttp.ClientSession(url) as http:
        await start_engine(engine, manager)
        try:
            async with http.post("/sessions", json={"cache_salt": "follow"}) as response:
                session = f"/sessions/{(await response.json())['session_id']}"
            body = {"prompt": list(range(40, 80)), "max_tokens": 2, "ignore_eos": True}
            for version in (None, None, "v2", None):
                if version is not None:
                    update = {"model_path": str(folder), "weight_version": version}
                    async with http.post("/update_weights_from_disk", json=update) as response:
                        assert response.status == 200
                async with http.post(f"{session}/v1/completions", json=body) as response:
                    assert response.status == 200
            async with http.post(f"{session}/samples", json={"format": "json", "include_side": True}) as response:
                samples = (await response.json())["samples"]
        finally:
            await engine.aclose()
    cached = [sample["prefix_cache_info"]["cached_tokens"] for sample in samples]
    assert [row["cached_from"] for sample in samples for row in sample["turns"]] == ["0", "0", "v2", "v2"]
    assert cached == [0, 39, 0, 39]
