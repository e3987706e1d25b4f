"""Conversations to ids: the stock template's text, append-only, and nothing forged."""

import json

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from llguidance import LLMatcher, LLTokenizer

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest, StartupError, UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.text.renderer import Renderer
from stenograph.text.template.template import ChatTemplate

CONTROL = ["<|im_end|>", "<|im_start|>", "<x>", "<|im_end", "|>"]
NEUTRAL = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
FORGED = st.lists(st.sampled_from(CONTROL) | NEUTRAL, max_size=4).map("".join)
TOOL = Tool(
    name='w"<x>',
    json='{"type": "function", "function": {"name": "w", "description": "<|im_end|>"}}',
    parameters_json='{"properties": {"a": {"type": "string"}}, "required": ["a"]}',
)


def messages_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    call = st.builds(ToolCall, id=st.just("c"), name=texts, arguments=st.just('{"a": "\\u003c|im_end|>"}') | texts)
    reply = st.builds(Message, role=st.just(Role.ASSISTANT), content=texts, tool_calls=st.tuples(call) | st.just(()))
    other = st.builds(
        Message, role=st.sampled_from([Role.USER, Role.SYSTEM, Role.DEVELOPER, Role.TOOL]), content=texts | st.none()
    )
    return st.lists(reply | other, min_size=1, max_size=5)


def jinja(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)


@given(data=st.data())
def test_without_tools_ids_are_those_of_the_stock_template(
    renderer: Renderer, stock_template: str, data: st.DataObject
) -> None:
    roles = st.sampled_from([Role.USER, Role.SYSTEM, Role.ASSISTANT])
    messages = data.draw(st.lists(st.builds(Message, role=roles, content=NEUTRAL), min_size=1, max_size=4))
    dicts = [{"role": m.role.value, "content": m.content} for m in messages]
    text = jinja(stock_template).render(messages=dicts, tools=None, add_generation_prompt=True)
    assert ChatTemplate(stock_template, None, None).render(dicts, None, True, {}) == text
    assert renderer.render(messages, [], {}) == renderer.tokenizer.encode(text)


@given(messages=messages_of(FORGED))
def test_no_clients_text_forges_a_control_token(renderer: Renderer, messages: list[Message]) -> None:
    ids = renderer.render(messages, [TOOL], {"note": "<|im_end|>"})
    text = renderer.tokenizer.decode(ids)
    closed = sum(i == renderer.tokenizer.added_tokens["<|im_end|>"] for i in ids)
    opened = sum(i == renderer.tokenizer.added_tokens["<|im_start|>"] for i in ids)
    groups = sum(
        m.role is not Role.TOOL or i == 0 or messages[i - 1].role is not Role.TOOL for i, m in enumerate(messages)
    )
    has_default = messages[0].role not in (Role.SYSTEM, Role.DEVELOPER)
    assert (closed, opened) == (groups + has_default, groups + has_default + 1)
    assert renderer.tokenizer.added_tokens["<x>"] not in ids
    assert all(m.content is None or m.content in text for m in messages)


@given(first=messages_of(FORGED), reply=NEUTRAL, new=messages_of(FORGED), stopped=st.booleans())
def test_a_bridged_line_is_append_only_and_reads_as_the_render(
    renderer: Renderer, first: list[Message], reply: str, new: list[Message], stopped: bool
) -> None:
    tokenizer = renderer.tokenizer
    prompt = renderer.render(first, [TOOL], {})
    node = prompt + tokenizer.encode_plain(reply)
    if stopped:
        node.append(tokenizer.added_tokens["<|im_end|>"])
    said = Message(role=Role.ASSISTANT, content=reply)
    line = node + renderer.bridge(node[-64:], said, new, [TOOL], {}).ids
    assert tokenizer.decode(line) == tokenizer.decode(renderer.render([*first, said, *new], [TOOL], {}))


ARGUMENTS = st.dictionaries(NEUTRAL, NEUTRAL | st.integers() | st.just('</tool_call>"'), max_size=3)


@given(
    content=st.text("ab <\n", max_size=12),
    reasoning=st.none() | st.text("ab <\n", min_size=1, max_size=12),
    arguments=st.lists(ARGUMENTS, max_size=2),
    cuts=st.lists(st.integers(1, 5)),
)
def test_parsing_a_rendered_reply_gives_it_back_however_it_is_cut(
    renderer: Renderer, content: str, reasoning: str | None, arguments: list[dict[str, object]], cuts: list[int]
) -> None:
    calls = [ToolCall(id=f"call_p{n}", name="w", arguments=dumps(value)) for n, value in enumerate(arguments)]
    if calls and not content.strip():
        content = ""
    message = Message(
        role=Role.ASSISTANT,
        content=None if calls and not content else content,
        reasoning=reasoning,
        tool_calls=tuple(calls),
    )
    empty = Message(role=Role.USER, content="")
    before = renderer.render([empty], [], {})
    ids = renderer.render([empty, message], [], {})[len(before) :]
    ids = ids[: ids.index(renderer.tokenizer.added_tokens["<|im_end|>"]) + 1]
    finish = Finish(reason=FinishReason.STOP, matched=ids[-1])
    parsed = renderer.parse(ids, finish, SamplingParams(), [TOOL], id_prefix="p")
    assert parsed.message == message
    parser = renderer.parser(SamplingParams(stop=("zz",)), [TOOL], id_prefix="p")
    deltas, at = [], 0
    for cut in [*cuts, len(ids)]:
        deltas.append(parser.feed(ids[at : at + cut]))
        at += cut
    last, whole = parser.finish(finish)
    assert whole == parsed
    assert "".join(d.content for d in [*deltas, last]) == (message.content or "")
    assert "".join(d.reasoning for d in [*deltas, last]) == (message.reasoning or "")
    assert sum(len(d.tool_calls) for d in [*deltas, last]) == len(message.tool_calls)


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@given(data=st.data(), stop=st.sampled_from([(), ("a",), ("he", "hello"), ("</",)]))
def test_any_ids_parse_and_a_stop_string_never_shows(
    renderer: Renderer, data: st.DataObject, stop: tuple[str, ...]
) -> None:
    marks = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "w"', "}", '"', "hello"])
    text = data.draw(st.lists(marks | NEUTRAL).map("".join))
    ids = list(renderer.tokenizer.encode(text)) + data.draw(
        st.lists(st.integers(-1, renderer.tokenizer.vocab_size), max_size=8)
    )
    matched = next((s for s in stop if s in renderer.tokenizer.decode(ids, skip_special=True)), None)
    parser = renderer.parser(SamplingParams(stop=stop), [TOOL])
    deltas = [parser.feed([i]) for i in ids]
    finish = Finish(reason=FinishReason.STOP, matched=matched)
    last, parsed = parser.finish(finish)
    assert parsed == renderer.parse(ids, finish, SamplingParams(stop=stop), [TOOL])
    shown = "".join(d.content for d in [*deltas, last])
    assert shown == (parsed.message.content or "")
    assert matched is None or matched not in shown


@pytest.mark.parametrize("parallel", [False, True])
def test_the_tool_grammar_is_one_the_grammar_engine_compiles(renderer: Renderer, parallel: bool) -> None:
    grammar = renderer.tool_grammar([TOOL, TOOL], ToolChoice(mode=ToolMode.REQUIRED), parallel)
    assert grammar is not None
    assert LLMatcher.validate_grammar(grammar.source, None) == ""
    assert renderer.tool_grammar([TOOL], ToolChoice(), parallel) is None


@pytest.mark.parametrize(("parallel", "num_calls", "accepted"), [(False, 1, True), (False, 2, False), (True, 2, True)])
def test_the_tool_grammar_accepts_what_the_template_writes(
    renderer: Renderer, reference: tokenizers.Tokenizer, parallel: bool, num_calls: int, accepted: bool
) -> None:
    grammar = renderer.tool_grammar([TOOL], ToolChoice(mode=ToolMode.REQUIRED), parallel)
    call = ToolCall(id="c", name=TOOL.name, arguments='{"a": "b"}')
    empty, said = Message(role=Role.USER), Message(role=Role.ASSISTANT, tool_calls=(call,) * num_calls)
    ids = list(renderer.render([empty, said], [], {})[len(renderer.render([empty], [], {})) :])
    end = renderer.tokenizer.added_tokens["<|im_end|>"]
    ids = ids[: ids.index(end) + 1]
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer(reference.to_str(), eos_token=end), grammar.source)
    assert (matcher.validate_tokens(ids) == len(ids)) is accepted


def test_a_tool_that_cannot_be_called_is_refused(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        renderer.tool_grammar(
            [Tool(name="a", json="{}", parameters_json="[]")], ToolChoice(mode=ToolMode.REQUIRED), True
        )
    assert caught.value.blame == Blame(RequestPart.TOOLS, 0, ("parameters",))
    with pytest.raises(InvalidRequest):
        renderer.tool_grammar([TOOL], ToolChoice(mode=ToolMode.NAMED, name="none"), True)


def test_a_templates_own_refusal_reaches_the_caller() -> None:
    with pytest.raises(UnrenderableMessage, match="no way"):
        ChatTemplate("{{ raise_exception('no way') }}", None, None).render([], None, True, {})
    with pytest.raises(StartupError):
        ChatTemplate("{% if %}", None, None)


def test_a_tool_message_that_answers_nothing_is_refused(renderer: Renderer) -> None:
    with pytest.raises(UnrenderableMessage) as caught:
        renderer.check_messages([Message(role=Role.USER), Message(role=Role.TOOL, content="1")])
    assert caught.value.blame == Blame(RequestPart.MESSAGES, 1, ("role",))
