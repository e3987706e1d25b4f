"""Nemotron 3, held to the models' own templates and to what transformers makes of them, with Qwen3's tokenizer.

By default, a template of ours with the same frames.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families.load import load_renderer
from stenograph.text.append_proof import Law
from stenograph.text.conversations import WEATHER, appended, call, exchanges, said, user
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

NAMES = ["nemotron-3-nano", "nemotron-3-super", "nemotron-3-ultra", "nemotron-3.5-lightning"]
LoadReal = Callable[..., Any]
STOP = Finish(reason=FinishReason.STOP)
NOT_THINKING = {"enable_thinking": False}

TEMPLATE = """
{%- set enable_thinking = enable_thinking is not defined or enable_thinking %}
{%- set forgets = truncate_history_thinking is not defined or truncate_history_thinking %}
{%- set seen = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set seen.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{{- '<|im_start|>system\\n' ~ (messages[0].content if messages[0].role == 'system' else '') }}
{%- for tool in tools or [] %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- if message.reasoning_content %}
            {%- set content = '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n' ~ content %}
            {%- if forgets and loop.index0 < seen.last_user %}
                {%- set content = '<think></think>' ~ content.split('</think>')[-1] %}
            {%- endif %}
        {%- else %}
            {%- set content = "<think></think>" ~ content %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' ~ (content | trim) }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if loop.first else '' }}
            {{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {%- set is_json = value is mapping or (value is sequence and value is not string) %}
                {%- set text = value | tojson if is_json else value | string %}
                {{- '<parameter=' ~ name ~ '>\\n' ~ text ~ '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n' if loop.previtem.role != 'tool' else '' }}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>\\n' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' ~ ('<think>\\n' if enable_thinking else '<think></think>') }}
{%- endif %}
"""


@pytest.fixture(scope="module")
def load(real: LoadReal) -> Callable[[str], Renderer]:
    files = replace(real("qwen3").files, chat_template=TEMPLATE)
    return lambda family: load_renderer(files, family, tokenizer=real("qwen3").renderer.tokenizer).renderer


@pytest.fixture(scope="module")
def renderer(load: Callable[[str], Renderer]) -> Renderer:
    return load("auto")


@pytest.mark.families
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_the_models_own_templates_are_of_the_family_and_written_as_transformers_writes_them(
    real: LoadReal, name: str, kwargs: Mapping[str, object]
) -> None:
    model = real(name)
    renderer: Renderer = model.renderer
    assert renderer.family.name == "nemotron3"
    found = verify(renderer, kwargs)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert found.num_tolerated == 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            expected = model.oracle(messages, exchange.tools, **kwargs)
            assert renderer.render(messages, exchange.tools, kwargs) == renderer.tokenizer.encode(expected)


@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_every_session_is_bridged_and_parsed(renderer: Renderer, kwargs: Mapping[str, object]) -> None:
    assert renderer.family.name == "nemotron3"
    found = verify(renderer, kwargs)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert len(found.findings) > 100


@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_a_reply_has_the_block_that_its_prompt_began(renderer: Renderer, kwargs: Mapping[str, object]) -> None:
    prompt = renderer.tokenizer.decode(renderer.render([user("a")], [], kwargs))
    line = renderer.tokenizer.decode(renderer.render([user("a"), said("b"), user("c")], [], kwargs))
    assert line.startswith(prompt)
    assert line.removeprefix(prompt).startswith("b<|im_end|>" if kwargs else "\n</think>\nb<|im_end|>")


def test_the_stock_template_is_refused_because_it_drops_reasoning(load: Callable[[str], Renderer]) -> None:
    laws = {found.law for found in load("chatml").prove().rewrites}
    assert {Law.HISTORY, Law.PROMPT} & laws


def test_history_cannot_be_truncated_by_a_request(renderer: Renderer) -> None:
    with pytest.raises(UnrenderableMessage, match="truncate_history_thinking"):
        renderer.render([user("a")], [], {"truncate_history_thinking": True})


@pytest.mark.families
def test_an_effort_that_rewrites_the_last_user_s_message_is_refused(real: LoadReal) -> None:
    renderer: Renderer = real("nemotron-3-super").renderer
    with pytest.raises(UnrenderableMessage) as caught:
        renderer.render([user("a")], [], {"low_effort": True})
    assert caught.value.blame == Blame(RequestPart.TEMPLATE_KWARGS)


def test_a_forced_call_comes_after_the_reasoning(renderer: Renderer) -> None:
    prompt = renderer.render([user("a")], [WEATHER], {})
    grammar = renderer.tool_grammar(
        [WEATHER], ToolChoice(mode=ToolMode.REQUIRED), True, prompt_end=renderer.prompt_end(prompt)
    )
    assert grammar is not None
    assert grammar.source.startswith('start: reasoning forced_calls\nreasoning: reasoning_text "\\n"\n')
    reply = said(None, call(1), call(2), reasoning="hm")
    line = renderer.render([user("a"), reply], [WEATHER], {})
    sampled = line[len(prompt) : line.index(renderer.tokenizer.added_tokens["<|im_end|>"], len(prompt)) + 1]
    parsed = renderer.parse(sampled, STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt))
    assert (parsed.faults, parsed.message.content, parsed.message.reasoning) == ((), None, "hm")
    assert [one.name for one in parsed.message.tool_calls] == [one.name for one in reply.tool_calls]
