"""Qwen2.5 and Qwen3, held to their own files and to what transformers makes of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParseProblem
from stenograph.core.errors import StartupError, UnrenderableMessage
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families import family_for
from stenograph.families.load import check_renderer, load_renderer
from stenograph.text.append_proof import Law
from stenograph.text.conversations import WEATHER, appended, call, exchanges, said, user
from stenograph.text.reading import PartKind, ReplyPart
from stenograph.text.renderer import Renderer
from stenograph.verify.verify import verify

LoadReal = Callable[..., Any]
LATER = [pytest.param(name, marks=pytest.mark.families) for name in ("qwen3-later", "qwen3-235b")]
QWEN2_5 = pytest.param("qwen2.5", marks=pytest.mark.families)
QWQ = pytest.param("qwq", marks=pytest.mark.families)
STOP = Finish(reason=FinishReason.STOP)
NOT_THINKING = {"enable_thinking": False}
IS_LATE = "loop.index0 > ns.last_query_index"


@pytest.mark.parametrize("name", ["qwen3", *LATER, QWEN2_5, QWQ])
def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(real: LoadReal, name: str) -> None:
    found = verify(real(name).renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > 200


@pytest.mark.parametrize("name", ["qwen3", *LATER, QWEN2_5, QWQ])
def test_the_family_is_recognized_from_its_files(real: LoadReal, name: str) -> None:
    assert real(name).renderer.family.name == name.partition("-")[0]


@pytest.mark.parametrize("name", ["qwen3", *LATER, QWEN2_5, QWQ])
@pytest.mark.parametrize("kwargs", [{}, NOT_THINKING], ids=["default", "not_thinking"])
def test_every_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, name: str, kwargs: dict[str, object]
) -> None:
    model = real(name)
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            expected = model.oracle(messages, exchange.tools, **kwargs)
            ids = model.renderer.render(messages, exchange.tools, kwargs)
            assert ids == model.renderer.tokenizer.encode(expected)


@pytest.mark.parametrize("name", ["qwen3", *LATER])
def test_without_reasoning_in_it_a_conversation_is_written_as_by_the_stock_template(real: LoadReal, name: str) -> None:
    model = real(name)
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            if new and not any(message.reasoning for message in messages):
                stock = model.oracle(messages, exchange.tools, stock=True)
                assert model.renderer.render(messages, exchange.tools, {}) == model.renderer.tokenizer.encode(stock)
                num_compared += 1
    assert num_compared > 50


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\n\n", " zq\n", "<b>", "é𝄞"])
REASONING = st.none() | TEXT.filter(bool)
REPLIES = st.builds(said, TEXT, reasoning=REASONING) | st.builds(said, TEXT, st.just(call(1)), reasoning=REASONING)
OTHERS = st.builds(Message, role=st.sampled_from([Role.USER, Role.SYSTEM, Role.TOOL]), content=TEXT)


@given(messages=st.lists(REPLIES | OTHERS, min_size=1, max_size=5), has_tools=st.booleans(), thinks=st.booleans())
def test_any_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, messages: list[Message], has_tools: bool, thinks: bool
) -> None:
    model = real("qwen3")
    tools, kwargs = [WEATHER] if has_tools else [], {} if thinks else NOT_THINKING
    expected = model.oracle(messages, tools, **kwargs)
    assert model.renderer.render(messages, tools, kwargs) == model.renderer.tokenizer.encode(expected)


@pytest.mark.parametrize("name", ["qwen3", *LATER])
@pytest.mark.parametrize("family", ["template", "chatml"])
def test_the_stock_template_is_refused_because_it_drops_reasoning(real: LoadReal, name: str, family: str) -> None:
    stock = real(name, family)
    first = stock.renderer.prove().rewrites[0]
    assert (first.law, first.why) == (Law.HISTORY, "it drops the reasoning of an earlier reply")
    assert "<think>\nThought" in first.expected
    assert "<think>" not in first.actual
    with pytest.raises(StartupError, match="drops the reasoning of an earlier reply") as caught:
        check_renderer(stock.files, stock.renderer)
    assert "--family qwen3 is made for it" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_argument_with_which_the_template_rewrites_is_refused(real: LoadReal) -> None:
    files, tokenizer = real("qwen3").files, real("qwen3").renderer.tokenizer
    forgets = template_of(real("qwen3")).replace(IS_LATE, f"not forgets or {IS_LATE}")
    forgets = forgets.replace("loop.last or (not loop.last and reasoning_content)", "reasoning_content")
    renderer = load_renderer(replace(files, chat_template=forgets), "template", tokenizer=tokenizer).renderer
    assert renderer.prove().holds
    assert renderer.render([user("a")], [], {"forgets": 0}) == renderer.render([user("a")], [], {})
    with pytest.raises(UnrenderableMessage, match="drops the reasoning") as caught:
        renderer.render([user("a")], [], {"forgets": True})
    assert caught.value.blame == Blame(RequestPart.TEMPLATE_KWARGS)


def template_of(model: Any) -> str:
    template = model.files.chat_template
    assert template is not None
    return template


@pytest.fixture(scope="module")
def thinking(real: LoadReal) -> Renderer:
    """Qwen3's template with the prompt of its Thinking variants, whose own files no package has."""
    source = template_of(real("qwen3"))
    prompt = source.index("    {{- '<|im_start|>assistant\\n' }}")
    files = replace(
        real("qwen3").files,
        chat_template=source[:prompt] + "    {{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}",
    )
    assert family_for(files).name == "qwen3-thinking"
    return load_renderer(files, tokenizer=real("qwen3").renderer.tokenizer).renderer


def test_a_prompt_that_opens_the_reasoning_is_continued_by_it(thinking: Renderer) -> None:
    found = verify(thinking)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    prompt = thinking.render([user("a")], [], {})
    ids = thinking.tokenizer.encode("hm\n</think>\n\nhello<|im_end|>")
    parsed, parts = thinking.parse_tokens(ids, STOP, SamplingParams(), [], prompt_end=thinking.prompt_end(prompt))
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", "hello")
    close = ids.index(thinking.tokenizer.added_tokens["</think>"])
    assert parts == (
        ReplyPart(kind=PartKind.REASONING, start=0, end=close + 2),
        ReplyPart(kind=PartKind.CONTENT, start=close + 2, end=len(ids) - 1),
        ReplyPart(kind=PartKind.END, start=len(ids) - 1, end=len(ids)),
    )
    assert parsed.num_reasoning_tokens == close + 1


@pytest.mark.families
def test_the_instruct_variants_are_chatml_by_their_own_template(real: LoadReal) -> None:
    model = real("qwen3-instruct-2507")
    assert model.renderer.family.name == "chatml"
    found = verify(model.renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    for exchange in exchanges(has_tools=True):
        messages = (*exchange.opening, exchange.reply)
        expected = model.oracle(messages, exchange.tools)
        assert model.renderer.render(messages, exchange.tools, {}) == model.renderer.tokenizer.encode(expected)


MALFORMED = [
    ('<tool_call>\n{"name": }\n</tool_call>', ParseProblem.TOOL_CALL_NOT_JSON),
    ('<tool_call>\n{"name": "w", "arguments": 3}\n</tool_call>', ParseProblem.TOOL_CALL_WRONG_SHAPE),
    ('<tool_call>\n{"name": "w", "argu', ParseProblem.TOOL_CALL_UNCLOSED),
]


@pytest.mark.parametrize(("text", "problem"), MALFORMED)
def test_a_malformed_call_is_told_with_its_ids(real: LoadReal, text: str, problem: ParseProblem) -> None:
    renderer: Renderer = real("qwen3").renderer
    good = '<tool_call>\n{"name": "w", "arguments": {"a": "</tool_call>"}}\n</tool_call>'
    before = renderer.tokenizer.encode(f"<think>\nhm\n</think>\n\nSo:\n{good}\n")
    bad = renderer.tokenizer.encode(text)
    ids = before + bad + renderer.tokenizer.encode("<|im_end|>")
    parsed, parts = renderer.parse_tokens(ids, STOP, SamplingParams(), [WEATHER])
    (fault,) = parsed.faults
    assert (fault.problem, parsed.problem, fault.seen) == (problem, problem, text)
    assert ids[fault.start : fault.end] == bad
    assert [one.arguments for one in parsed.message.tool_calls] == ['{"a": "</tool_call>"}']
    assert [part.kind for part in parts] == [
        PartKind.REASONING,
        PartKind.CONTENT,
        PartKind.TOOL_CALL,
        PartKind.CONTENT,
        PartKind.END,
    ]


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "w", ',
        '"arguments": {',
        '"a": "',
        '"}}',
        "\n",
        "x",
    ]
)


@given(text=st.lists(PIECES, max_size=12).map("".join), data=st.data(), opened=st.booleans())
def test_any_ids_parse_and_their_parts_are_all_of_them(
    real: LoadReal, text: str, data: st.DataObject, opened: bool
) -> None:
    renderer: Renderer = real("qwen3").renderer
    ids = list(renderer.tokenizer.encode(text))
    ids += data.draw(st.lists(st.integers(-1, renderer.tokenizer.vocab_size + 9), max_size=6))
    prompt = renderer.tokenizer.encode("<think>\n") if opened else ()
    parsed, parts = renderer.parse_tokens(
        ids, STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
    )
    parser = renderer.parser(SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt))
    for token_id in ids:
        parser.feed([token_id])
    assert parser.finish(STOP)[1] == parsed
    assert parser.parts() == parts
    at = 0
    for part in parts:
        assert at - 1 <= part.start <= at
        assert part.start < part.end
        at = part.end
    assert at == len(ids)
    assert all(0 <= fault.start <= fault.end <= len(ids) for fault in parsed.faults)


@pytest.mark.families
def test_of_qwq_the_stock_template_is_refused_and_a_first_prompt_is_written_as_by_it(real: LoadReal) -> None:
    with pytest.raises(StartupError, match="--family qwq is made for it"):
        check_renderer(real("qwq", "template").files, real("qwq", "template").renderer)
    model = real("qwq")
    for exchange in exchanges(has_tools=True):
        if not any(message.role is Role.ASSISTANT for message in exchange.opening):
            stock = model.oracle(exchange.opening, exchange.tools, stock=True)
            ids = model.renderer.render(exchange.opening, exchange.tools, {})
            assert ids == model.renderer.tokenizer.encode(stock)


@pytest.mark.families
def test_what_qwq_samples_after_its_opened_reasoning_is_written_so_later(real: LoadReal) -> None:
    renderer = real("qwq").renderer
    for text in ("hm\n</think>\n\nhello", "</think>\n\nhello", "hm\n</think>\n\n<tool_call>"):
        sampled_text = text
        if text.endswith("<tool_call>"):
            sampled_text += '\n{"name": "look_up_zq", "arguments": {"city": "a"}}\n</tool_call>'
        prompt = renderer.render([user("a")], [WEATHER], {})
        assert renderer.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n<think>\n")
        sampled = renderer.tokenizer.encode(f"{sampled_text}<|im_end|>")
        parsed, _ = renderer.parse_tokens(
            sampled, STOP, SamplingParams(), [WEATHER], prompt_end=renderer.prompt_end(prompt)
        )
        assert parsed.faults == ()
        assert len(parsed.message.tool_calls) == text.endswith("<tool_call>")
        line = prompt + sampled + renderer.bridge(sampled, parsed.message, [user("c")], [WEATHER], {}).ids
        whole = renderer.render([user("a"), parsed.message, user("c")], [WEATHER], {})
        written, kept = renderer.tokenizer.decode(whole), renderer.tokenizer.decode(line)
        assert kept == (
            written if parsed.message.reasoning else written.replace("<think>\n\n</think>", "<think>\n</think>")
        )
