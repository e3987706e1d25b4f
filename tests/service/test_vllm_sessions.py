"""The whole server before vLLM: a session's turns are the same tokens streamed or not, on both of vLLM's routes."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.vllm_server import COMPLETIONS_PATH, GENERATE_PATH, VLLMServer
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.vllm.adapter import VLLM
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, running, user

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


class Rig:
    """A server, the stand-in behind it, and a plain client with one session."""

    def __init__(self, url: str, vllm: VLLMServer, renderer: Renderer, client: aiohttp.ClientSession) -> None:
        self.url = url
        self.vllm = vllm
        self.renderer = renderer
        self.client = client

    def says(self, *texts: str, **options: Any) -> None:
        """Plan replies of these texts that end with `<|im_end|>`."""
        for text in texts:
            self.vllm.plan(ReplyScript(ids=(*self.renderer.tokenizer.encode(text), END), **options))

    async def call(self, method: str, path: str, body: Any = None) -> Answer:
        async with self.client.request(method, self.url + path, json=body) as response:
            return Answer(status=response.status, headers=response.headers, body=await response.read())

    async def session(self) -> str:
        return str((await self.call("POST", "/sessions", {})).json()["session_id"])

    async def chat(self, session: str, *messages: dict[str, Any], **options: Any) -> Answer:
        return await self.call("POST", f"/sessions/{session}/v1/chat/completions", {"messages": messages, **options})

    async def records(self, session: str) -> list[Any]:
        return list((await self.call("GET", f"/sessions/{session}")).json()["records"])


@pytest.fixture(params=[True, False], ids=["generate", "completions"])
async def rig(request: pytest.FixtureRequest, renderer: Renderer) -> AsyncIterator[Rig]:
    async with VLLMServer(scale_out=request.param, dev_mode=True) as vllm:
        adapter = VLLM(AdapterOptions(model="tiny", vocab_size=320, max_context_tokens=4096, eos_token_ids=(END,)))
        engine = HttpEngine(HttpEngineOptions(url=vllm.url), adapter)
        await engine.start()
        try:
            async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as client:
                yield Rig(url, vllm, renderer, client)
        finally:
            await engine.aclose()


def sampled(record: Any) -> list[Any]:
    return list(record["response"]["choices"][0]["meta_info"]["output_token_logprobs"])


def prompt_of(asked: Any) -> list[int]:
    return list(asked.json.get("token_ids") or asked.json["prompt"])


async def test_a_session_s_turns_are_the_same_streamed_or_not_and_each_goes_on_from_the_ids_before(rig: Rig) -> None:
    lines: list[list[Any]] = []
    for stream in (False, True):
        rig.says("hi", "no", num_cached=3)
        session = await rig.session()
        assert (await rig.chat(session, user("a"), stream=stream)).status == 200
        reply = {"role": "assistant", "content": "hi"}
        answer = await rig.chat(session, user("a"), reply, user("b"), stream=stream)
        assert answer.status == 200, answer.body
        records = await rig.records(session)
        lines.append([(record["request"]["input_ids"], sampled(record)) for record in records])
        first, second = rig.vllm.requests[-2:]
        line = [*prompt_of(first), *(row[1] for row in sampled(records[0]))]
        assert prompt_of(second)[: len(line)] == line
        assert first.path == (GENERATE_PATH if rig.vllm.scale_out else COMPLETIONS_PATH)
        assert first.json.get("stream") is (True if stream else None)
    assert lines[0] == lines[1]


async def test_weights_that_change_within_a_turn_are_in_its_record_and_in_the_sample(rig: Rig) -> None:
    session = await rig.session()
    rig.says("abcd", paused=True, num_drawn=2)
    rig.vllm.weight_version = "1"
    body = {"messages": [user("a")], "stream": True}
    async with rig.client.post(f"{rig.url}/sessions/{session}/v1/chat/completions", json=body) as response:
        seen = b""
        while b'"content":"b"' not in seen:
            seen += await response.content.readany()
        rig.vllm.weight_version = "2"
        rig.vllm.release()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    (record,) = await rig.records(session)
    answer = await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})
    (sample,) = answer.json()["samples"]
    start, end = len(record["request"]["input_ids"]), len(sample["tokens"])
    told = rig.vllm.scale_out
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": end - start}]
    assert record["weight_versions"] == (spans if told else [])
    shifted = [{**span, "start": span["start"] + start, "end": span["end"] + start} for span in spans]
    assert sample["weight_spans"] == (shifted if told else [])


async def test_tool_calls_are_parsed_here_from_the_ids(rig: Rig) -> None:
    rig.says(CALL)
    answer = await rig.chat(await rig.session(), user("a"), tools=TOOLS)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
    assert not [asked for asked in rig.vllm.requests if "tools" in asked.json or "structured_outputs" in asked.json]


async def test_a_forced_call_is_a_grammar_there_and_has_the_model_s_logprobs(rig: Rig) -> None:
    rig.says(CALL)
    session = await rig.session()
    answer = await rig.chat(session, user("a"), tools=TOOLS, tool_choice="required")
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    asked = rig.vllm.requests[-1]
    guided = asked.json.get("sampling_params", asked.json)["structured_outputs"]
    assert list(guided) == ["grammar"]
    assert guided["grammar"].startswith("start: ")
    (record,) = await rig.records(session)
    num_prompt = len(prompt_of(asked))
    assert [row[0] for row in sampled(record)] == [
        -at / 16 for at in range(num_prompt, num_prompt + len(sampled(record)))
    ]


async def test_what_is_too_long_never_reaches_vllm(rig: Rig) -> None:
    answer = await rig.chat(await rig.session(), user("a" * 9000))
    assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not rig.vllm.requests


async def test_what_an_engine_finds_too_long_is_said_of_the_client_s_own_fields(rig: Rig) -> None:
    # One token less than the context has: room for a token, but not for the one that scores a guided turn.
    body = {"prompt": [5] * 4095, "response_format": {"type": "json_object"}}
    answer = await rig.call("POST", f"/sessions/{await rig.session()}/v1/completions", body)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "/prompt")
    assert "length of the prompt" in error["message"]
    assert not rig.vllm.requests


async def test_ready_says_which_route_is_used(rig: Rig) -> None:
    (engine,) = (await rig.call("GET", "/ready")).json()["engines"]
    assert (engine["engine"], engine["state"]) == ("vllm", "ready")
    assert ("--enable-scale-out" in engine["detail"]) != rig.vllm.scale_out


async def test_a_lie_of_vllm_is_502_by_its_law_and_leaves_nothing(rig: Rig) -> None:
    session = await rig.session()
    rig.says("hi", edit=lambda reply: reply["choices"][0].update(token_ids=[1]))
    answer = await rig.chat(session, user("a"))
    assert (answer.status, answer.json()["error"]["code"]) == (502, "upstream_invalid")
    assert answer.json()["error"]["message"].split(":")[0] in ("count_agrees", "ids_agree")
    assert await rig.records(session) == []
    rig.says("hi")
    assert (await rig.chat(session, user("a"))).status == 200
