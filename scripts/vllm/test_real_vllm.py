"""A real vLLM keeps the laws of engines, and agents' sessions through it are exact. Run by scripts/test-vllm."""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import numpy as np
import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

from scripts.agent_session import FACT, TOOLS, PlayedTurn, play, played
from scripts.engine_table import measured, serving
from scripts.real_engine import ask
from scripts.real_forks import check_forks
from stenograph.conformance.check import check_engine
from stenograph.conformance.lab import EngineUnderTest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.vllm.adapter import VLLM
from stenograph.engine.vllm.request import VLLMRoute
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

from .conftest import MAX_MODEL_LEN, RealVLLM

TOLERANCE_NATS = 2e-3
"""Of float32 on a CPU, where the same tokens are computed in batches of other shapes."""
say = sys.stdout.write
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def teacher_forced(server: RealVLLM, ids: Sequence[int], num_prompt: int) -> list[float]:
    """ln p of `ids[num_prompt:]`, each after all before it, by vLLM itself."""
    own = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    if server.scale_out:
        rows = ask(server.url, VLLMRoute.GENERATE.value, {"token_ids": list(ids), "sampling_params": own})[
            "prompt_logprobs"
        ]
    else:
        reply = ask(server.url, VLLMRoute.COMPLETIONS.value, {"model": "smollm2", "prompt": list(ids), **own})
        rows = reply["choices"][0]["prompt_logprobs"]
    return [row[str(id_)]["logprob"] for id_, row in zip(ids[num_prompt:], rows[num_prompt:], strict=True)]


async def test_vllm_says_how_full_it_is(vllm: RealVLLM) -> None:
    files = load_model_files(vllm.model)
    adapter = VLLM(AdapterOptions(model="smollm2", vocab_size=files.vocab_size))
    engine = HttpEngine(HttpEngineOptions(url=vllm.url), adapter)
    await engine.start()
    try:
        load = await engine.find_load()
    finally:
        await engine.aclose()
    assert load is not None
    assert (load.kv_usage, load.num_running, load.num_waiting) == (0.0, 0, 0)
    assert load.kv_tokens is not None
    assert load.kv_tokens > MAX_MODEL_LEN
    assert load.num_preemptions == 0


async def test_vllm_keeps_the_laws_of_engines(vllm: RealVLLM) -> None:
    files = load_model_files(vllm.model)
    tokenizer = Tokenizer(files.tokenizer_json)

    async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
        return await asyncio.to_thread(teacher_forced, vllm, ids, num_prompt)

    is_paused = False

    async def num_running() -> int:
        if is_paused:  # its figures stand still with it: what was sent to it, it will run
            return engine.num_running
        metrics = await asyncio.to_thread(ask, vllm.url, "/metrics")
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)", metrics, re.MULTILINE)
        return int(sum(map(float, found)))

    async def pause() -> None:
        nonlocal is_paused
        is_paused = True
        await asyncio.to_thread(ask, vllm.url, "/pause?mode=keep", {})

    async def resume() -> None:
        nonlocal is_paused
        await asyncio.to_thread(ask, vllm.url, "/resume", {})
        is_paused = False

    async def set_weight_version(version: str) -> None:
        await asyncio.to_thread(ask, vllm.url, "/update_weight_version", {"new_version": version})

    def new_engine() -> HttpEngine:
        dialect = VLLM(
            AdapterOptions(
                model="smollm2",
                vocab_size=files.vocab_size,
                max_context_tokens=files.max_context_tokens,
                eos_token_ids=files.eos_token_ids,
            )
        )
        return HttpEngine(HttpEngineOptions(url=vllm.url, probe_pause_s=0.2), dialect)

    engine = new_engine()

    @asynccontextmanager
    async def make() -> AsyncGenerator[EngineUnderTest]:
        nonlocal engine
        engine = new_engine()
        await engine.start()
        assert engine.capabilities.max_context_tokens == MAX_MODEL_LEN
        try:
            yield EngineUnderTest(
                engine=engine,
                prompt=tokenizer.encode(PROMPT).tolist(),
                decode=lambda ids: tokenizer.decode(ids, skip_special=True),
                eos_ids=files.eos_token_ids,
                num_tokens=10,
                num_long_tokens=60,
                tolerance_nats=TOLERANCE_NATS,
                score=score,
                num_running=num_running,
                pause=pause,
                resume=resume,
                set_weight_version=set_weight_version if vllm.scale_out else None,
                kill=lambda: asyncio.to_thread(vllm.kill),
                revive=lambda: asyncio.to_thread(vllm.start),
                max_sequence_tokens=MAX_MODEL_LEN,
                not_offered=NOT_KEPT,
            )
        finally:
            await engine.aclose()

    report = await check_engine(make, deadline_s=300.0)
    say(f"\n{vllm.model.name}, scale_out={vllm.scale_out}\n{report}\n")
    assert set(report.not_offered) <= {
        *NOT_KEPT,
        "grammar_json_object" if vllm.scale_out else "two_weight_versions",
    }


NOT_KEPT = {
    "supports_of_tokens": "--return-sampling-mask needs kernels that run on no CPU",
    "grammar_of_a_forced_call": "where its xgrammar reads the Lark, white space in the arguments is free",
}
"""Laws that vLLM 0.32 breaks, and how."""


def test_a_forced_call_is_of_a_tool_and_valid(vllm: RealVLLM) -> None:
    properties = {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}}
    parameters = {"type": "object", "properties": properties, "required": ["ok", "size"], "additionalProperties": False}
    tools: list[Any] = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    messages: list[Any] = [{"role": "user", "content": "Look."}]
    with serving(vllm.model, "--engine", "vllm", "--engine-url", vllm.url) as url:
        client = openai.OpenAI(base_url=ask(url, "/sessions", {})["base_url"], api_key="none")
        for seed in range(4):
            reply = client.chat.completions.create(
                model="m", messages=messages, tools=tools, tool_choice="required", seed=seed, parallel_tool_calls=False
            )
            (call,) = calls_of(reply)
            assert call.function.name == "look"
            jsonschema.validate(json.loads(call.function.arguments), parameters)
            say(f"\nforced: {call.function.arguments!r}\n")
        client.close()


def told(name: str, vllm: RealVLLM, turns: Sequence[PlayedTurn], began: float) -> None:
    """Hold a session's turns to vLLM's own teacher-forced pass, and print how far they are apart."""
    found = measured(name, turns, lambda ids, num_prompt: teacher_forced(vllm, ids, num_prompt))
    apart, num_drawn = found.apart_nats, len(found.apart_nats)
    say(
        f"\n{name}, scale_out={vllm.scale_out}: {len(turns)} turns, {num_drawn} tokens drawn in"
        f" {time.monotonic() - began:.1f} s, cached {[turn.num_cached for turn in turns]}, teacher-forced apart: max"
        f" {apart.max():.1e}, mean {apart.mean():.1e} nats\n"
    )
    assert apart.max() < TOLERANCE_NATS
    assert np.isfinite(apart).all()


def test_a_scripted_agent_s_session_is_exact(vllm: RealVLLM) -> None:
    began = time.monotonic()
    with serving(vllm.model, "--engine", "vllm", "--engine-url", vllm.url) as url:
        ready = ask(url, "/ready")
        say(f"\n{ready}\n")
        assert ready["ready"]
        assert ("/v1/completions" in ready["engines"][0]["detail"]) != vllm.scale_out
        turns = play(url)
    assert len(turns) >= 4
    told("scripted agent", vllm, turns, began)


def test_a_tool_session_with_the_openai_sdk_is_exact_streamed_or_not(vllm: RealVLLM) -> None:
    began = time.monotonic()
    with serving(vllm.model, "--engine", "vllm", "--engine-url", vllm.url) as url:
        session = ask(url, "/sessions", {})
        with openai.OpenAI(base_url=session["base_url"], api_key="none") as client:
            use_tools(client)
        records = ask(url, f"/sessions/{session['session_id']}")["records"]
        samples = ask(url, f"/sessions/{session['session_id']}/samples", {"format": "json"})
    assert len(samples["samples"]) == 1
    told("OpenAI SDK, tools", vllm, [played(record) for record in records], began)
    versions = [[span["version"] for span in record["weight_versions"]] for record in records]
    assert all(len(one) == vllm.scale_out for one in versions)


def calls_of(reply: ChatCompletion) -> list[ChatCompletionMessageFunctionToolCall]:
    """The calls of a reply, each of a function."""
    calls = reply.choices[0].message.tool_calls or []
    return [call for call in calls if call.type == "function"]


def use_tools(client: openai.OpenAI) -> None:
    """A call that is forced, a streamed answer to its result, an answer in JSON, and a call of a named tool."""
    create: Any = client.chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "What is 12 times 7?"}]
    asked: dict[str, Any] = {"model": "m", "tools": TOOLS, "temperature": 0, "max_tokens": 96}
    asked["parallel_tool_calls"] = False
    first: ChatCompletion = create(messages=messages, tool_choice="required", **asked)
    (call,) = calls_of(first)
    assert call.function.name == "multiply"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    messages += [first.choices[0].message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "84"}]
    streamed = create(messages=messages, stream=True, stop=["."], **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Where is Paris?"}]
    form = {"type": "json_schema", "json_schema": {"name": "fact", "schema": FACT}}
    third: ChatCompletion = create(messages=messages, response_format=form, **asked)
    content = third.choices[0].message.content or ""
    assert set(json.loads(content)) == {"city", "is_capital"}
    messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Multiply 3 and 4."}]
    named = {"type": "function", "function": {"name": "multiply"}}
    last: ChatCompletion = create(messages=messages, tool_choice=named, **asked)
    assert last.choices[0].finish_reason == "tool_calls"


def test_forks_continue_behind_their_exact_ids(vllm: RealVLLM) -> None:
    with serving(vllm.model, "--engine", "vllm", "--engine-url", vllm.url) as url:
        check_forks(url, vllm.model)
