"""A grammar that a client asks for, over a real socket: where its prompt opens the reasoning, it is of the answer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import GrammarKind
from stenograph.engine.base import Capabilities
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer

from .conftest import END, running, user

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
AS_JSON = {"response_format": {"type": "json_object"}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def thinking() -> Renderer:
    """Its prompts open the reasoning, unless they are asked not to."""
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


class WithoutLark(ScriptedEngine):
    """As most engines are: it takes a JSON Schema, but nothing that could begin with free text."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, grammars=frozenset(GrammarKind) - {GrammarKind.LARK})


async def answered(engine: ScriptedEngine, renderer: Renderer, **body: Any) -> tuple[int, Any]:
    """The status and the body of the answer to a chat, or, with a `prompt`, to a completion."""
    path = "completions" if "prompt" in body else "chat/completions"
    async with (
        running(engine, renderer) as (url, _),
        aiohttp.ClientSession() as client,
        client.post(f"{url}/v1/{path}", json=body) as response,
    ):
        return response.status, json.loads(await response.read())


def says(renderer: Renderer, reply: str) -> ScriptedEngine:
    script = Script(ids=(*renderer.tokenizer.encode(reply), END))
    return ScriptedEngine(vocab_size=320, max_context_tokens=4096, model=lambda _: script)


def asked_of(engine: ScriptedEngine) -> str:
    """The text of the grammar that the engine was given, and its kind before it."""
    (request,) = engine.requests
    assert request.params.grammar is not None
    return f"{request.params.grammar.kind}: {request.params.grammar.source}"


async def test_json_that_is_asked_for_is_the_answer_and_not_the_reasoning(thinking: Renderer) -> None:
    engine = says(thinking, 'hm\n</think>\n\n{"a": 1}')
    status, reply = await answered(engine, thinking, messages=[user("hi")], **AS_JSON)
    assert status == 200, reply
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", '{"a": 1}')
    assert asked_of(engine).startswith("lark: start: reasoning")


async def test_a_prompt_that_closed_the_reasoning_is_answered_by_the_json_at_once(thinking: Renderer) -> None:
    engine = says(thinking, '{"a": 1}')
    status, reply = await answered(engine, thinking, messages=[user("hi")], **AS_JSON, **OFF)
    assert status == 200, reply
    assert reply["choices"][0]["message"]["content"] == '{"a": 1}'
    assert asked_of(engine) == "json_object: "


async def test_a_completion_is_held_from_its_first_token(thinking: Renderer) -> None:
    engine = says(thinking, '{"a": 1}')
    status, reply = await answered(engine, thinking, prompt="<think>\n", **AS_JSON)
    assert status == 200, reply
    assert asked_of(engine) == "json_object: "


async def test_an_engine_that_cannot_wait_for_the_answer_is_not_asked(thinking: Renderer) -> None:
    engine = WithoutLark(vocab_size=320, max_context_tokens=4096)
    status, refused = await answered(engine, thinking, messages=[user("hi")], **AS_JSON)
    assert status == 400
    assert refused["error"]["param"] == "/response_format"
    assert "after its reasoning" in refused["error"]["message"]
    assert not engine.requests
