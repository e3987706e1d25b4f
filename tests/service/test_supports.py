"""The whole server: samples and records say which ids could be sampled, as engines report it; a lie is refused."""

import io
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pyarrow.ipc
import pytest
from safetensors.numpy import load

from standins.planned_server import PlannedServer, ReplyScript
from standins.sglang_server import SGLangServer
from standins.vllm_server import VLLMServer
from stenograph.client.samples import decoded
from stenograph.core.settings import Switch
from stenograph.core.support import supports
from stenograph.core.types import LogprobsKind
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.text.renderer import Renderer
from stenograph.trainers.rows import support_rows

from .conftest import END, Answer, Live, running, user

VOCAB = 320
MANY = tuple(range(100, 200))


def vllm(**options: Any) -> tuple[PlannedServer, EngineAdapter]:
    adapter = VLLM(
        AdapterOptions(
            model="tiny",
            vocab_size=VOCAB,
            max_context_tokens=4096,
            eos_token_ids=(END,),
            logprobs=LogprobsKind.SAMPLING,
        )
    )
    return VLLMServer(**{"tells_supports": True, **options}), adapter


def sglang(**options: Any) -> tuple[PlannedServer, EngineAdapter]:
    return SGLangServer(stop_id=END, **options), SGLangChat(AdapterOptions(model="tiny", vocab_size=VOCAB))


def sglang_generate(**options: Any) -> tuple[PlannedServer, EngineAdapter]:
    return SGLangServer(stop_id=END, **options), SGLangGenerate(AdapterOptions(model="tiny", vocab_size=VOCAB))


class Rig:
    """A server before a stand-in that has been planned one reply."""

    def __init__(self, url: str, client: aiohttp.ClientSession, standin: PlannedServer) -> None:
        self._url = url
        self._client = client
        self.standin = standin

    async def call(self, method: str, path: str, body: Any = None) -> Answer:
        async with self._client.request(method, self._url + path, json=body) as response:
            return Answer(status=response.status, headers=response.headers, body=await response.read())

    async def open(self, **options: Any) -> str:
        return f"/sessions/{(await self.call('POST', '/sessions', options)).json()['session_id']}"

    async def chat(self, session: str, **asked: Any) -> Answer:
        return await self.call("POST", f"{session}/v1/chat/completions", {"messages": [user("a")], **asked})


@asynccontextmanager
async def rig_of(
    made: tuple[PlannedServer, EngineAdapter], renderer: Renderer, script: ReplyScript, **settings: Any
) -> AsyncIterator[Rig]:
    server, adapter = made
    server.plan(script)
    async with server:
        engine = HttpEngine(HttpEngineOptions(url=server.url), adapter)
        await engine.start()
        try:
            async with running(engine, renderer, **settings) as (url, _), aiohttp.ClientSession() as client:
                yield Rig(url, client, server)
        finally:
            await engine.aclose()


def scripted(renderer: Renderer, **planned: Any) -> ReplyScript:
    """A reply of several tokens, each of which others could have been in the place of."""
    ids = (*renderer.tokenizer.encode("hi you"), END)
    rows = [tuple({id_, 7, 300}) for id_ in ids]
    rows[0] = tuple({*MANY, ids[0]})
    return ReplyScript(**{"ids": ids, "text": "hi you", "matched": END, "supports": tuple(rows), **planned})


TOLD = pytest.mark.parametrize("make", [sglang, sglang_generate, vllm])


@TOLD
async def test_samples_and_records_have_the_ids_that_the_engine_could_sample(renderer: Renderer, make: Any) -> None:
    script = scripted(renderer)
    wanted = [sorted(row) for row in script.supports]
    async with rig_of(make(), renderer, script) as rig:
        session = await rig.open(support=True)
        assert (await rig.chat(session, top_p=0.9, top_k=100)).status == 200
        (record,) = (await rig.call("GET", session)).json()["records"]
        asked = {"format": "json", "sampling_mask": True}
        answer = await rig.call("POST", f"{session}/samples", asked)
        cut = await rig.call(
            "POST", f"{session}/samples", {**asked, "max_seq_len": len(answer.json()["samples"][0]["tokens"]) - 1}
        )
        arrow = await rig.call("POST", f"{session}/samples", {"format": "arrow"})
        tensors = await rig.call("POST", f"{session}/samples")
    (sample,) = answer.json()["samples"]
    (row,) = sample["turns"]
    support = b64decode(row["support"])
    assert [kept.tolist() for kept in supports(support, script.ids) if kept is not None] == wanted
    assert sample["sampling_mask"][-len(wanted) :] == wanted
    assert len(sample["sampling_mask"]) == sample["response_length"]
    assert b64decode(record["response"]["choices"][0]["meta_info"]["support"]) == support
    (shorter,) = cut.json()["samples"]
    assert shorter["sampling_mask"][-len(wanted) + 1 :] == wanted[:-1]
    (column,) = pyarrow.ipc.open_stream(io.BytesIO(arrow.body)).read_all()["supports"].to_pylist()
    assert column == [support]
    meta = json.loads(load(tensors.body)["_samples_meta"].tobytes())
    assert meta["samples"][0]["turns"][0]["support"] == row["support"]
    assert sample["sampling_log_probs"] is not None
    (decoded_sample,) = decoded(tensors.body)
    found = decoded_sample.support()
    assert found is not None
    assert [kept if kept is None else kept.tolist() for kept in map(found.__getitem__, range(len(found)))] == (
        sample["sampling_mask"]
    )
    spans = support_rows(decoded_sample)
    assert spans.ids.tolist() == [id_ for row in wanted for id_ in row]
    assert spans.log_probs.tolist() == sample["sampling_log_probs"]


@TOLD
async def test_a_session_that_does_not_ask_gets_no_support_and_its_engine_is_not_asked(
    renderer: Renderer, make: Any
) -> None:
    async with rig_of(make(), renderer, scripted(renderer), support=Switch.ON) as rig:
        session = await rig.open(support=False)
        assert (await rig.chat(session, top_p=0.9, top_k=100)).status == 200
        (sample,) = (await rig.call("POST", f"{session}/samples", {"format": "json"})).json()["samples"]
    assert "support" not in sample["turns"][0]
    assert "return_sampling_mask" not in rig.standin.requests[-1].json


@pytest.mark.parametrize(
    ("make", "asked"),
    [(sglang, {}), (sglang, {"temperature": 0, "top_p": 0.9}), (vllm, {}), (vllm, {"temperature": 0, "top_k": 3})],
)
async def test_a_turn_in_which_nothing_is_ruled_out_has_no_support(renderer: Renderer, make: Any, asked: Any) -> None:
    async with rig_of(make(), renderer, scripted(renderer), support=Switch.ON) as rig:
        session = await rig.open()
        assert (await rig.chat(session, **asked)).status == 200
        wanted = {"format": "json", "sampling_mask": True}
        (sample,) = (await rig.call("POST", f"{session}/samples", wanted)).json()["samples"]
    assert "support" not in sample["turns"][0]
    assert sample["sampling_mask"] == [None] * sample["response_length"]
    assert "return_sampling_mask" not in rig.standin.requests[-1].json


@TOLD
async def test_a_stream_has_its_supports_as_well(renderer: Renderer, make: Any) -> None:
    for options in ({}, {"incremental": True}) if make is sglang_generate else ({},):
        script = scripted(renderer, per_event=2)
        async with rig_of(make(**options), renderer, script, support=Switch.ON) as rig:
            session = await rig.open()
            assert (await rig.chat(session, top_p=0.9, top_k=100, stream=True)).status == 200
            (sample,) = (await rig.call("POST", f"{session}/samples", {"format": "json"})).json()["samples"]
        told = supports(b64decode(sample["turns"][0]["support"]), script.ids)
        assert [None if kept is None else kept.tolist() for kept in told] == [sorted(row) for row in script.supports]


def without_masks(reply: dict[str, Any]) -> None:
    choice = reply["choices"][0] if "choices" in reply else reply
    choice.pop("sampling_mask", None)
    choice.get("meta_info", {}).pop("output_token_sampling_mask", None)


@TOLD
@pytest.mark.parametrize(
    ("planned", "law"),
    [
        ({"supports": ((1, 2),) * 9}, "support_of_token"),
        ({"supports": ((VOCAB,),) * 9}, "support_of_token"),
        ({"supports": ((2**40,),) * 9}, "support_of_token"),
        ({"supports": ((),) * 9}, "support_of_token"),
        ({"supports": (("a",),) * 9}, "support_of_token"),
        ({"supports": ((1,),)}, "has_support"),
        ({"edit": without_masks}, "has_support"),
    ],
)
async def test_supports_that_cannot_be_are_refused(renderer: Renderer, make: Any, planned: Any, law: str) -> None:
    script = scripted(renderer)
    planned = {key: value[: len(script.ids)] if key == "supports" else value for key, value in planned.items()}
    async with rig_of(make(), renderer, scripted(renderer, **planned), support=Switch.ON) as rig:
        session = await rig.open()
        answer = await rig.chat(session, top_p=0.9, top_k=100)
        metrics = (await rig.call("GET", "/metrics")).body.decode()
    assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_invalid"), answer.body
    assert f'stenograph_upstream_invalid_total{{law="{law}"}} 1.0' in metrics


async def test_an_engine_that_does_not_report_supports_is_not_asked_for_them(live: Live, renderer: Renderer) -> None:
    answer = await live.call("POST", "/sessions", {"support": True})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/support")
    assert (await live.call("POST", "/sessions", {"support": False})).status == 200
    async with rig_of(vllm(scale_out=False), renderer, scripted(renderer)) as rig:
        refused = await rig.call("POST", "/sessions", {"support": True})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "/support")


async def test_masks_as_lists_are_for_json_alone(live: Live) -> None:
    session = (await live.call("POST", "/sessions", {})).json()["session_id"]
    answer = await live.call("POST", f"/sessions/{session}/samples", {"sampling_mask": True})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "/sampling_mask")


@pytest.mark.parametrize("make", [sglang, sglang_generate])
@pytest.mark.parametrize("asked", [{"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 3}])
async def test_sampling_that_top_p_or_min_p_cuts_off_gets_sglang_s_largest_top_k_and_its_row_says_so(
    renderer: Renderer, make: Any, asked: dict[str, Any]
) -> None:
    script = scripted(renderer)
    async with rig_of(make(), renderer, script) as rig:
        session = await rig.open(support=True)
        assert (await rig.chat(session, temperature=0.7, **asked)).status == 200
        (sample,) = (await rig.call("POST", f"{session}/samples", {"format": "json"})).json()["samples"]
        sent = rig.standin.requests[-1].json
    assert sent["return_sampling_mask"] is True
    assert sent.get("sampling_params", sent)["top_k"] == asked.get("top_k", 4096)
    assert sample["turns"][0]["top_k"] == asked.get("top_k", 4096)
    assert sample["turns"][0]["support"]


@pytest.mark.parametrize("make", [sglang, sglang_generate])
async def test_a_top_k_for_which_sglang_reports_no_support_is_refused_before_it(renderer: Renderer, make: Any) -> None:
    async with rig_of(make(), renderer, scripted(renderer)) as rig:
        session = await rig.open(support=True)
        answer = await rig.chat(session, temperature=0.7, top_k=5000)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "/top_k")
        assert "at most 4096" in answer.json()["error"]["message"]
        assert rig.standin.requests == []
        free = await rig.open(support=False)
        assert (await rig.chat(free, temperature=0.7, top_k=5000)).status == 200


@pytest.mark.parametrize("make", [sglang, sglang_generate])
async def test_stop_tokens_that_sglang_would_not_look_at_are_refused(renderer: Renderer, make: Any) -> None:
    async with rig_of(make(), renderer, scripted(renderer)) as rig:
        answer = await rig.chat(await rig.open(), ignore_eos=True, stop_token_ids=[7])
        assert (answer.status, answer.json()["error"]["param"]) == (400, "/stop_token_ids")
        assert "ignore_eos" in answer.json()["error"]["message"]
        assert rig.standin.requests == []


@pytest.mark.parametrize("make", [sglang, sglang_generate])
async def test_the_stop_token_that_ended_a_reply_is_no_text_in_either_mode(renderer: Renderer, make: Any) -> None:
    """The chat route's text is SGLang's, which leaves it out; the other's is made here."""
    *before, last = renderer.tokenizer.encode("hi you all").tolist()
    text = renderer.tokenizer.decode(before)
    async with rig_of(make(), renderer, ReplyScript(ids=(*before, last), text=text, matched=last)) as rig:
        session = await rig.open(support=False)
        choice = (await rig.chat(session, stop_token_ids=[last])).json()["choices"][0]
        (sample,) = (await rig.call("POST", f"{session}/samples", {"format": "json"})).json()["samples"]
    assert choice["message"]["content"] == text
    assert sample["tokens"][-len(before) - 1 :] == [*before, last]


@pytest.mark.parametrize(("make", "over"), [(sglang, "turn"), (sglang_generate, "turn"), (vllm, "line")])
async def test_a_row_says_what_the_engines_repetition_penalty_counts(renderer: Renderer, make: Any, over: str) -> None:
    async with rig_of(make(), renderer, scripted(renderer)) as rig:
        session = await rig.open(support=False)
        assert (await rig.chat(session, repetition_penalty=1.2)).status == 200
        (sample,) = (await rig.call("POST", f"{session}/samples", {"format": "json"})).json()["samples"]
        rig.standin.plan(scripted(renderer))
        other = await rig.open(support=False)
        assert (await rig.chat(other)).status == 200
        (plain,) = (await rig.call("POST", f"{other}/samples", {"format": "json"})).json()["samples"]
    assert (sample["turns"][0]["repetition_penalty"], sample["turns"][0]["repetition_over"]) == (1.2, over)
    assert "repetition_over" not in plain["turns"][0]
