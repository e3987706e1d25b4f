"""Kimi K2 Thinking and K2.5, with a template of ours that has the published ones' frames and cuts.

The tokenizer is made for the tests: the models bring none that is read here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.chat import ParseProblem, ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families import family_for
from stenograph.families.kimi.family import KIMI_K2
from stenograph.families.load import load_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.append_proof import Law
from stenograph.text.conversations import WEATHER, call, said, user
from stenograph.text.reading import PartKind
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

STOP = Finish(reason=FinishReason.STOP)
CALLS = KIMI_K2.syntax.calls
OPEN, CALL, ARGUMENTS, CALL_CLOSE, CLOSE = () if CALLS is None else CALLS.markers
CONTROL = (
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    OPEN,
    CALL,
    ARGUMENTS,
    CALL_CLOSE,
    CLOSE,
)
NOT_THINKING = {"thinking": False}

TEMPLATE = """
{%- macro frame(message, reasoning) -%}
    {%- set kind = message.role if message.role in ('user', 'assistant') else 'system' -%}
    {{- '<|im_' ~ kind ~ '|>' ~ (message.get('name') or message.role) ~ '<|im_middle|>' -}}
    {%- if message.role == 'assistant' -%}{{- '<think>' ~ reasoning ~ '</think>' -}}{%- endif -%}
    {%- if message.role == 'tool' -%}{{- '## Return of ' ~ message.tool_call_id ~ '\\n' -}}{%- endif -%}
    {{- message.content or '' -}}
    {%- if message.tool_calls -%}
        {{- '<|tool_calls_section_begin|>' -}}
        {%- for tool_call in message.tool_calls -%}
            {%- set formatted_id = tool_call['id'] -%}
            {{- '<|tool_call_begin|>' ~ formatted_id ~ '<|tool_call_argument_begin|>' -}}
            {{- (tool_call.function.arguments | tojson) ~ '<|tool_call_end|>' -}}
        {%- endfor -%}
        {{- '<|tool_calls_section_end|>' -}}
    {%- endif -%}
    {{- '<|im_end|>' -}}
{%- endmacro -%}
{%- set ns = namespace(last_non_tool_call_assistant_msg=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' and not message.tool_calls -%}
        {%- set ns.last_non_tool_call_assistant_msg = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools -%}
    {{- '<|im_system|>tool_declare<|im_middle|>' ~ (tools | tojson) ~ '<|im_end|>' -}}
{%- endif -%}
{%- for message in messages[:ns.last_non_tool_call_assistant_msg+1] -%}{{- frame(message, '') -}}{%- endfor -%}
{%- for message in messages[ns.last_non_tool_call_assistant_msg+1:] -%}
    {{- frame(message, message.get('reasoning_content', '')) -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|>' -}}PROMPT{%- endif -%}
"""
PROMPTS = {"k2-thinking": "", "k2.5": "{{- '<think></think>' if thinking is false else '<think>' -}}"}


def files_of(name: str) -> ModelFiles:
    reference = Reference.from_str(tiny_tokenizer_json())
    reference.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    reference.add_tokens(["<think>", "</think>"])
    return ModelFiles(
        name=name,
        path=Path(name),
        tokenizer_json=reference.to_str(),
        chat_template=TEMPLATE.replace("PROMPT", PROMPTS[name]),
        bos_token=None,
        eos_token="<|im_end|>",
        eos_token_ids=(2,),
        vocab_size=512,
        max_context_tokens=4096,
        architecture="kimi_k2",
    )


@pytest.fixture(scope="module")
def load() -> Callable[[str], Renderer]:
    renderers = {name: load_renderer(files_of(name)).renderer for name in PROMPTS}
    return lambda name: renderers[name]


@pytest.fixture(scope="module")
def renderer(load: Callable[[str], Renderer]) -> Renderer:
    return load("k2-thinking")


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_every_session_is_bridged_and_parsed(
    load: Callable[[str], Renderer], name: str, kwargs: Mapping[str, object]
) -> None:
    assert family_for(files_of(name)) is KIMI_K2
    found = verify(load(name), kwargs)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.num_refused, found.num_tolerated) == (0, 0)
    assert len(found.findings) > 200


def test_the_stock_template_is_refused_because_it_drops_reasoning() -> None:
    stock = load_renderer(files_of("k2-thinking"), "template").renderer
    assert stock.prove().rewrites[0].law is Law.HISTORY


def written(name: str, arguments: str, number: int = 0) -> str:
    return f"{CALL}functions.{name}:{number}{ARGUMENTS}{arguments}{CALL_CLOSE}"


def test_parallel_calls_keep_their_ids_and_any_marker_in_an_argument(renderer: Renderer) -> None:
    odd = '{"a": "' + f'{CALL_CLOSE}{CLOSE} \\"{CALL}' + '"}'
    text = f"<think>hm</think>So:{OPEN}{written('f', '{}')}{written('g', odd, 1)}{CLOSE}<|im_end|>"
    ids = renderer.tokenizer.encode(text)
    parsed, parts = renderer.parse_tokens(ids, STOP, SamplingParams(), [WEATHER])
    assert not parsed.faults
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", "So:")
    assert [(one.id, one.name, one.arguments) for one in parsed.message.tool_calls] == [
        ("functions.f:0", "f", "{}"),
        ("functions.g:1", "g", odd),
    ]
    assert [part.kind for part in parts] == [
        PartKind.REASONING,
        PartKind.CONTENT,
        PartKind.TOOL_CALL,
        PartKind.END,
    ]


def test_an_id_of_another_form_is_written_with_the_name_before_it(renderer: Renderer) -> None:
    reply = said(None, call(1))
    text = renderer.tokenizer.decode(renderer.render([user("a"), reply], [WEATHER], {}))
    assert f"{CALL}functions.{WEATHER.name}:{reply.tool_calls[0].id}{ARGUMENTS}" in text


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (f"{OPEN}{CLOSE}", ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (f"{OPEN}{written('', '{}')}{CLOSE}", ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (f"{OPEN}{written('f', '{}')}so{CLOSE}", ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (f"{OPEN}{CALL}f{ARGUMENTS}{{}}{CALL_CLOSE}{CLOSE}", ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (f"{OPEN}{written('f', '{')}{CLOSE}", ParseProblem.TOOL_CALL_NOT_JSON),
        (f"{OPEN}{written('f', '3')}{CLOSE}", ParseProblem.TOOL_CALL_NOT_JSON),
        (f"{OPEN}{written('f', '{}')}", ParseProblem.TOOL_CALL_UNCLOSED),
    ],
)
def test_a_malformed_section_is_told_with_its_ids(renderer: Renderer, bad: str, problem: ParseProblem) -> None:
    before, ids = renderer.tokenizer.encode("<think>hm</think>So:"), renderer.tokenizer.encode(bad)
    line = [*before, *ids, renderer.tokenizer.added_tokens["<|im_end|>"]]
    parsed = renderer.parse(line, STOP, SamplingParams(), [WEATHER])
    (fault,) = parsed.faults
    assert (fault.problem, fault.seen) == (problem, bad)
    assert line[fault.start : fault.end] == list(ids)
    assert (parsed.message.content, parsed.message.tool_calls) == (f"So:{bad}", ())


def test_a_name_that_cannot_stand_in_an_id_is_not_forced(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="cannot stand in an id"):
        renderer.tool_grammar([replace(WEATHER, name="a:b")], ToolChoice(mode=ToolMode.REQUIRED), True)


PIECES = st.sampled_from([*KIMI_K2.syntax.markers, "functions.f:0", '{"a": "', '"}', "{}", "\n", "x"])


@given(text=st.lists(PIECES, max_size=14).map("".join), data=st.data(), opened=st.booleans())
def test_any_ids_parse_and_their_parts_are_all_of_them(
    renderer: Renderer, text: str, data: st.DataObject, opened: bool
) -> None:
    ids = list(renderer.tokenizer.encode(text))
    ids += data.draw(st.lists(st.integers(-1, renderer.tokenizer.vocab_size + 9), max_size=6))
    prompt = renderer.tokenizer.encode("<think>") if opened else ()
    parsed, parts = renderer.parse_tokens(
        ids, STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
    )
    parser = renderer.parser(SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt))
    for token_id in ids:
        parser.feed([token_id])
    assert parser.finish(STOP)[1] == parsed
    assert parser.parts() == parts
    ends = [0, *(part.end for part in parts)]
    assert ends[-1] == len(ids)
    assert all(start - 1 <= part.start <= start for start, part in zip(ends, parts, strict=False))
    assert all(0 <= fault.start <= fault.end <= len(ids) for fault in parsed.faults)
