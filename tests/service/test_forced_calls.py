"""A forced call over a real socket: its grammar begins as the prompt that goes to the engine left the reasoning, and is
of a kind that the engine has."""

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import Grammar, GrammarKind
from stenograph.engine.base import Capabilities
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer

from .conftest import END, running, user

TEMPLATE = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n{\"name\": ' ~ (c.function.name | tojson) }}"
    "{{ ', \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def thinking() -> Renderer:
    """Its prompts open the reasoning."""
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(),
        chat_template=TEMPLATE,
        bos_token=None,
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=320,
        max_context_tokens=4096,
        architecture="llama",
    )
    return make_renderer(files, "template")


async def answered(renderer: Renderer, reply: str, **fields: Any) -> tuple[Any, Grammar]:
    """The message that is answered when the engine says `reply`, and the grammar that the engine was given."""
    script = Script(ids=(*renderer.tokenizer.encode(reply), END))
    engine = ScriptedEngine(vocab_size=320, max_context_tokens=4096, model=lambda _: script)
    body = {"messages": [user("hi")], "tools": [TOOL], "tool_choice": "required", **fields}
    async with (
        running(engine, renderer) as (url, _),
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        message = json.loads(await response.read())["choices"][0]["message"]
    (request,) = engine.requests
    assert request.params.grammar is not None
    return message, request.params.grammar


async def test_a_forced_call_comes_after_the_reasoning_that_its_prompt_opened(thinking: Renderer) -> None:
    message, grammar = await answered(thinking, f"hm\n</think>\n\n{CALL}")
    assert grammar.source.startswith("start: reasoning forced_calls\n")
    assert message["reasoning_content"] == "hm"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


async def test_a_forced_call_comes_at_once_where_the_prompt_closed_the_reasoning(thinking: Renderer) -> None:
    message, grammar = await answered(thinking, CALL, chat_template_kwargs={"enable_thinking": False})
    assert grammar.source.startswith("start: one_call")
    assert message.get("reasoning_content") is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


class Lacking(ScriptedEngine):
    """An engine with these kinds of grammars alone."""

    def __init__(self, kinds: Collection[GrammarKind]) -> None:
        super().__init__(vocab_size=320, max_context_tokens=4096)
        self._kinds = frozenset(kinds)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, grammars=self._kinds)


REQUESTS = {
    "/v1/chat/completions": {"model": "m", "messages": [user("hi")], "tools": [TOOL], "tool_choice": "required"},
    "/v1/messages": {
        "model": "m",
        "messages": [user("hi")],
        "max_tokens": 99,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    },
    "/v1/responses": {
        "model": "m",
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
    },
    "/v1beta/models/m:generateContent": {
        "contents": [{"parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
    },
}


@pytest.mark.parametrize("kind", [GrammarKind.EBNF, GrammarKind.REGEX])
@pytest.mark.parametrize("path", REQUESTS)
async def test_every_protocol_forces_calls_of_an_engine_without_lark(
    thinking: Renderer, path: str, kind: GrammarKind
) -> None:
    engine = Lacking({kind, GrammarKind.JSON_SCHEMA})
    engine.plan(Script(ids=(*thinking.tokenizer.encode(f"hm\n</think>\n\n{CALL}"), END)))
    async with (
        running(engine, thinking) as (url, _),
        aiohttp.ClientSession() as client,
        client.post(f"{url}{path}", json=REQUESTS[path]) as response,
    ):
        assert response.status == 200, await response.text()
        assert '"f"' in await response.text()
    (request,) = engine.requests
    assert request.params.grammar is not None
    assert request.params.grammar.kind is kind


async def test_an_engine_without_any_such_grammar_is_named_with_those_that_have_one(thinking: Renderer) -> None:
    engine = Lacking({GrammarKind.JSON_SCHEMA})
    async with (
        running(engine, thinking) as (url, _),
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/chat/completions", json=REQUESTS["/v1/chat/completions"]) as response,
    ):
        error = json.loads(await response.read())["error"]
    assert response.status == 400
    assert error["param"] == "/tool_choice"
    assert "The engine scripted cannot be made to call a tool" in error["message"]
    assert "--engine vllm" in error["message"]
