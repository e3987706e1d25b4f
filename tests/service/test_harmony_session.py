"""A session of gpt-oss over a real socket: it thinks, calls, and answers, and no id of a turn is written anew."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import Finish, FinishReason
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer

from .conftest import running, user

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
REPLIES = (
    f'{THOUGHT} to=functions.f<|channel|>commentary <|constrain|>json<|message|>{{"a":  1}}<|call|>',
    f"{THOUGHT}<|channel|>final<|message|>It is 1.<|return|>",
    "<|channel|>final<|message|>Yes.<|return|>",
)


@pytest.fixture(scope="module")
def harmony() -> Renderer:
    document = json.loads(tiny_tokenizer_json())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 320 + number, "content": mark, **flags} for number, mark in enumerate(MARKS)]
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=json.dumps({**document, "added_tokens": [*document["added_tokens"], *added]}),
        chat_template=None,
        bos_token=None,
        eos_token="<|return|>",
        eos_token_ids=(326, 325),
        vocab_size=327,
        max_context_tokens=4096,
        architecture="gpt_oss",
    )
    return make_renderer(files, "auto")


async def test_json_that_is_asked_for_is_held_in_the_final_channel_after_free_reasoning(harmony: Renderer) -> None:
    ids = harmony.tokenizer.encode(f'{THOUGHT}<|channel|>final<|message|>{{"a": 1}}<|return|>')
    script = Script(ids=tuple(ids), finish=Finish(reason=FinishReason.STOP, matched=ids[-1]))
    engine = ScriptedEngine(vocab_size=327, max_context_tokens=4096, model=lambda _: script)
    body = {"messages": [user("hi")], "response_format": {"type": "json_object"}}
    async with (
        running(engine, harmony) as (url, _),
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        message = json.loads(await response.read())["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", '{"a": 1}')
    (request,) = engine.requests
    assert request.params.grammar is not None
    assert 'start: (<|channel|> "analysis" <|message|> ' in request.params.grammar.source


async def streamed(response: aiohttp.ClientResponse) -> tuple[str, str, list[str]]:
    """Reasoning, content, and the calls' arguments of an event stream."""
    events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls") or ()]
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return reasoning, "".join(delta.get("content") or "" for delta in deltas), calls


async def test_a_session_thinks_calls_and_answers_and_each_turn_begins_with_the_ids_before(harmony: Renderer) -> None:
    replies = [tuple(harmony.tokenizer.encode(text)) for text in REPLIES]
    engine = ScriptedEngine(vocab_size=327, max_context_tokens=4096)
    for ids in replies:
        engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=ids[-1])))
    messages: list[dict[str, Any]] = [user("What is it?")]
    async with running(engine, harmony) as (url, _), aiohttp.ClientSession() as client:
        async with client.post(f"{url}/sessions", json={}) as response:
            session = f"{url}/sessions/{(await response.json())['session_id']}"

        async def chat(**fields: Any) -> Any:
            body = {"messages": messages, "tools": [TOOL], **fields}
            async with client.post(f"{session}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                return await streamed(response) if fields.get("stream") else await response.json()

        first = (await chat())["choices"][0]
        assert (first["finish_reason"], first["message"]["reasoning_content"]) == ("tool_calls", "hm")
        (call,) = first["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("f", '{"a":  1}')
        messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "<|end|> 1"}]
        assert await chat(stream=True) == ("hm", "It is 1.", [])
        messages += [{"role": "assistant", "content": "It is 1.", "reasoning_content": "hm"}, user("Sure?")]
        assert (await chat())["choices"][0]["message"]["content"] == "Yes."
        async with client.get(f"{session}/drift") as response:
            drift = await response.json()
    prompts = [list(request.prompt.ids) for request in engine.requests]
    added = harmony.tokenizer.added_tokens
    assert prompts[1][: len(prompts[0]) + len(replies[0])] == [*prompts[0], *replies[0]]
    assert prompts[2][: len(prompts[1]) + len(replies[1])] == [*prompts[1], *replies[1][:-1], added["<|end|>"]]
    assert prompts[1].count(added["<|end|>"]) == 5  # system, developer, user, thought, result: none is forged
    (line,) = drift["lines"]
    assert (set(line["counts"].values()), line["unrenderable"]) == ({0}, None)
