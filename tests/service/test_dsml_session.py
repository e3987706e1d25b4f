"""A session of DeepSeek V3.2 or V4 over a real socket: it thinks, calls twice, and answers; no id is written anew."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import Finish, FinishReason
from stenograph.families.deepseek.dsml import MARK
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer

from .conftest import running, user

EOS = "<｜end▁of▁sentence｜>"
MARKS = (EOS, "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", MARK, "<think>", "</think>")
LATEST = "<｜latest_reminder｜>"
BLOCKS = {"deepseek-v3.2": "function_calls", "deepseek-v4": "tool_calls"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
LITERAL = f"</{MARK}parameter> {EOS}"


@pytest.fixture(params=BLOCKS)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    marks = MARKS if request.param == "deepseek-v3.2" else (*MARKS, LATEST)
    document = json.loads(tiny_tokenizer_json())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": 320 + number, "content": mark, "special": "think" not in mark, **flags}
        for number, mark in enumerate(marks)
    ]
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=json.dumps({**document, "added_tokens": [*document["added_tokens"], *added]}),
        chat_template=None,
        bos_token=None,
        eos_token=EOS,
        eos_token_ids=(320,),
        vocab_size=320 + len(marks),
        max_context_tokens=4096,
        architecture="deepseek",
    )
    made = make_renderer(files, "auto")
    assert made.family.name == request.param
    return made


def block(name: str, *values: str) -> str:
    """Calls of `f`, one for each value."""
    called = "\n".join(
        f'<{MARK}invoke name="f">\n<{MARK}parameter name="a" string="true">{value}</{MARK}parameter>\n</{MARK}invoke>'
        for value in values
    )
    return f"<{MARK}{BLOCKS[name]}>\n{called}\n</{MARK}{BLOCKS[name]}>"


async def test_a_session_thinks_calls_and_answers_and_each_turn_begins_with_the_ids_before(renderer: Renderer) -> None:
    tokenizer, name = renderer.tokenizer, renderer.family.name
    texts = (f"hm</think>So:\n\n{block(name, 'x', 'y')}{EOS}", f"ah</think>It is 1.{EOS}", f"</think>Yes.{EOS}")
    engine = ScriptedEngine(vocab_size=tokenizer.vocab_size, max_context_tokens=4096)
    replies = [tuple(tokenizer.encode(text)) for text in texts]
    for ids in replies:
        engine.plan(Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=ids[-1])))
    messages: list[dict[str, Any]] = [user(f"What is it? {EOS}")]
    async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as client:
        async with client.post(f"{url}/sessions", json={}) as response:
            session = f"{url}/sessions/{(await response.json())['session_id']}"

        async def chat(**fields: Any) -> dict[str, Any]:
            body = {"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"thinking": True}, **fields}
            async with client.post(f"{session}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                choice: dict[str, Any] = (await response.json())["choices"][0]
                return choice["message"]

        first = await chat(tool_choice="required")
        assert (first["reasoning_content"], first["content"]) == ("hm", "So:")
        calls = first["tool_calls"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": "x"}, {"a": "y"}]
        messages += [
            first,
            *({"role": "tool", "tool_call_id": call["id"], "content": f"{LITERAL}{i}"} for i, call in enumerate(calls)),
        ]
        second = await chat()
        assert (second["reasoning_content"], second["content"]) == ("ah", "It is 1.")
        messages += [second, user("Sure?")]
        assert (await chat())["content"] == "Yes."
        async with client.get(f"{session}/drift") as response:
            drift = await response.json()
    requests = list(engine.requests)
    prompts = [list(request.prompt.ids) for request in requests]
    for number in (0, 1):
        before = [*prompts[number], *replies[number]]
        assert prompts[number + 1][: len(before)] == before
    assert prompts[2].count(320) == 2  # the two replies': none is forged
    assert all(prompt[-1] == tokenizer.added_tokens["<think>"] for prompt in prompts)
    (line,) = drift["lines"]
    assert (set(line["counts"].values()), line["unrenderable"]) == ({0}, None)
    grammar = requests[0].params.grammar
    assert grammar is not None
    assert f"<[{tokenizer.added_tokens[MARK]}]>" in grammar.source
