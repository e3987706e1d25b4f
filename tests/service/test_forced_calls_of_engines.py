"""A forced call before every kind of engine: it is held to the call, or the client is told which engines can be."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import PlannedServer, ReplyScript
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder
from standins.tiny.tokenizer import tiny_tokenizer_json
from standins.vllm_server import VLLMServer
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.base import Engine
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import pieces_of
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.http.loaded_model import make_renderer
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, running, tiny_files, user
from .test_forced_calls import TEMPLATE
from .test_llamacpp_sessions import LlamaCppStandIn

VOCAB = 320
OPTIONS = AdapterOptions(
    model="tiny", vocab_size=VOCAB, max_context_tokens=4096, eos_token_ids=(END,), tokenizer_json=tiny_tokenizer_json()
)
PLAIN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PATTERN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}}
"""Lark's JSON holds a pattern; neither our GBNF nor our regular expressions do."""
CALLS = {"plain": PLAIN, "pattern": PATTERN}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CAN = ("--engine vllm", "--engine sglang", "--engine embedded")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBehind:
    """A server, the adapter that speaks to it, the calls that it can be held to, and the field that asks for one."""

    name: str
    server: Callable[[], PlannedServer]
    adapter: Callable[[AdapterOptions], EngineAdapter]
    forces: tuple[str, ...] = ()
    field: str = ""


def llamacpp(options: AdapterOptions) -> LlamaCpp:
    return LlamaCpp(options, pieces_of(tiny_tokenizer_json(VOCAB), VOCAB))


ENGINES = {
    "sglang": EngineBehind(
        name="sglang", server=SGLangServer, adapter=SGLangChat, forces=("plain", "pattern"), field="tool_choice"
    ),
    "sglang-generate": EngineBehind(
        name="sglang-generate", server=SGLangServer, adapter=SGLangGenerate, forces=("plain",), field="ebnf"
    ),
    "vllm-generate": EngineBehind(
        name="vllm",
        server=lambda: VLLMServer(scale_out=True),
        adapter=VLLM,
        forces=("plain", "pattern"),
        field="structured_outputs",
    ),
    "vllm-completions": EngineBehind(
        name="vllm",
        server=lambda: VLLMServer(scale_out=False),
        adapter=VLLM,
        forces=("plain", "pattern"),
        field="structured_outputs",
    ),
    "lmdeploy-generate": EngineBehind(name="lmdeploy", server=LMDeployServer, adapter=LMDeploy),
    "lmdeploy-chat-route": EngineBehind(
        name="lmdeploy",
        server=lambda: LMDeployServer(generate_fields=None),
        adapter=LMDeploy,
        forces=("plain",),
        field="regex_schema",
    ),
    "llamacpp": EngineBehind(
        name="llamacpp", server=LlamaCppStandIn, adapter=llamacpp, forces=("plain",), field="grammar"
    ),
}


async def asked(engine: Engine, renderer: Renderer, parameters: dict[str, Any], **fields: Any) -> Answer:
    """The answer to a chat whose only tool is forced."""
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    body = {"messages": [user("hi")], "tools": [tool], "tool_choice": "required", "max_tokens": 60, **fields}
    await engine.start()
    try:
        async with (
            running(engine, renderer) as (url, _),
            aiohttp.ClientSession() as client,
            client.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            return Answer(status=response.status, headers=response.headers, body=await response.read())
    finally:
        await engine.aclose()


def check_refused(answer: Answer, engine: str) -> None:
    """The client is told that this engine cannot, and which can."""
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, "/tool_choice"), error
    assert f"The engine {engine} cannot be made to call a tool" in error["message"]
    assert all(flag in error["message"] for flag in CAN), error["message"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ENGINES)
async def test_an_engine_is_held_to_a_forced_call_or_those_that_can_be_are_named(
    name: str, call: str, renderer: Renderer
) -> None:
    kind = ENGINES[name]
    async with kind.server() as server:
        server.plan(ReplyScript(ids=(*renderer.tokenizer.encode(CALL), END), matched=END))
        engine = HttpEngine(HttpEngineOptions(url=server.url), kind.adapter(OPTIONS))
        answer = await asked(engine, renderer, CALLS[call])
        generations = [one for one in server.requests if "max_" in json.dumps(one.json)]
        if call in kind.forces:
            assert answer.status == 200, answer.body
            (generation,) = generations
            assert f'"{kind.field}": ' in json.dumps(generation.json)
        else:
            check_refused(answer, kind.name)
            assert not generations


@pytest.mark.parametrize("call", CALLS)
async def test_the_embedded_engine_is_held_to_a_forced_call(call: str, tmp_path: Path) -> None:
    engine = EmbeddedEngine(write_tiny_folder(tmp_path / "tiny"), EmbeddedOptions(threads=1, kv_tokens=2048))
    renderer, kwargs = (
        make_renderer(replace(tiny_files(), chat_template=TEMPLATE), "template"),
        {"enable_thinking": False},
    )
    answer = await asked(engine, renderer, CALLS[call], chat_template_kwargs=kwargs)
    assert answer.status == 200, answer.body
    assert b"add" in answer.body, "the tiny model says it because it must"
