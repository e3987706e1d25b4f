"""DeepSeek V3 and V3.1: calls read whatever they are; the templates held to their own files and to transformers."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families.deepseek.v3 import DEEPSEEK_V3, DEEPSEEK_V3_1
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.call_syntax import CallSyntax, ForcedTool
from stenograph.text.conversations import WEATHER, appended, call, exchanges, result, said, user
from stenograph.text.family import Family
from stenograph.text.grammar.lark import quoted
from stenograph.text.reading import PartKind, Reading
from stenograph.text.reply import ReplyParser
from stenograph.text.template.choice import JinjaTemplate
from stenograph.text.template.input import message_dicts
from stenograph.verify.verify import verify

LoadReal = Callable[..., Any]
STOP = Finish(reason=FinishReason.STOP)
THINKING = {"thinking": True}
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
EOS = "<｜end▁of▁sentence｜>"
LITERAL = f'{{"a": "{CALL_END}{END} \\" {CALL}"}}'
SCHEMA = {
    **json.loads(WEATHER.parameters_json),
    "x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "},
}
FAMILIES = [DEEPSEEK_V3, DEEPSEEK_V3_1]
BY_NAME = [pytest.param(family, id=family.name) for family in FAMILIES]


def one(family: Family, arguments: str, name: str = "w") -> str:
    """A call as the family's template writes it."""
    if family is DEEPSEEK_V3:
        return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{CALL_END}"
    return f"{CALL}{name}{SEP}{arguments}{CALL_END}"


def calls_of(family: Family) -> CallSyntax:
    assert family.syntax.calls is not None
    return family.syntax.calls


def block(family: Family, *calls: str) -> str:
    return BEGIN + ("\n" if family is DEEPSEEK_V3 else "").join(calls) + END


@pytest.fixture(scope="module")
def marked(reference: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tiny tokenizer with DeepSeek's marks as control tokens."""
    made = tokenizers.Tokenizer.from_str(reference.to_str())
    made.add_special_tokens([BEGIN, END, CALL, CALL_END, SEP, EOS])
    return made


@pytest.fixture(scope="module")
def tiny(marked: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(marked.to_str())


def reader(tokenizer: Tokenizer, family: Family, ids: Any, *, by_id: bool = False, prompt: str = "") -> ReplyParser:
    parser = ReplyParser(
        tokenizer, family.syntax, Reading(tools=(WEATHER,), prompt_end=family.syntax.prompt_end(prompt))
    )
    for piece in [[token_id] for token_id in ids] if by_id else [ids]:
        parser.feed(piece)
    return parser


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("family", BY_NAME)
def test_parallel_calls_are_read_whatever_their_arguments_spell(tiny: Tokenizer, family: Family, by_id: bool) -> None:
    text = f"So: {block(family, one(family, LITERAL), one(family, '{}', 'v'))}{EOS}"
    parser = reader(tiny, family, tiny.encode(text), by_id=by_id)
    parsed = parser.finish(STOP)[1]
    assert [(asked.name, asked.arguments) for asked in parsed.message.tool_calls] == [("w", LITERAL), ("v", "{}")]
    assert parsed.message.content == "So: "
    assert not parsed.faults
    assert [part.kind for part in parser.parts()] == [PartKind.CONTENT, PartKind.TOOL_CALL, PartKind.END]


def malformed(family: Family) -> list[tuple[str, ParseProblem]]:
    whole = one(family, "{}")
    return [
        (block(family, one(family, '{"a": }')), ParseProblem.TOOL_CALL_NOT_JSON),
        (block(family, whole, one(family, "3")), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (block(family, one(family, "{}", "")), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (block(family, f"{CALL}w{CALL_END}"), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (block(family, whole, "and"), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (block(family, f"{CALL}w"), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (block(family), ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (f"{BEGIN}{whole}", ParseProblem.TOOL_CALL_UNCLOSED),
    ]


@pytest.mark.parametrize(
    ("family", "text", "problem"),
    [
        *((family, text, problem) for family in FAMILIES for text, problem in malformed(family)),
        (DEEPSEEK_V3, block(DEEPSEEK_V3, f"{CALL}function{SEP}w\n{{}}{CALL_END}"), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    ],
)
def test_a_malformed_block_is_told_with_its_ids(
    tiny: Tokenizer, family: Family, text: str, problem: ParseProblem
) -> None:
    before = tiny.encode(f"So:{block(family, one(family, LITERAL))}\n")
    bad = tiny.encode(text)
    ids = before + bad + tiny.encode(EOS)
    parser = reader(tiny, family, ids)
    parsed = parser.finish(STOP)[1]
    (fault,) = parsed.faults
    assert (fault.problem, fault.seen) == (problem, text[:160])
    assert ids[fault.start : fault.end] == bad
    assert [asked.arguments for asked in parsed.message.tool_calls] == [LITERAL]
    assert (parsed.message.content or "").endswith(text)


PIECES = st.sampled_from(
    [BEGIN, END, CALL, CALL_END, SEP, "function", "\n```json\n", "\n```", '{"a": "', '"}', "w", "\n"]
)


@pytest.mark.parametrize("family", BY_NAME)
@given(text=st.lists(PIECES, max_size=14).map("".join), data=st.data(), opened=st.booleans())
def test_any_ids_parse_alike_in_any_pieces(
    tiny: Tokenizer, family: Family, text: str, data: st.DataObject, opened: bool
) -> None:
    ids = [*tiny.encode(text), *data.draw(st.lists(st.integers(-1, tiny.vocab_size + 9), max_size=6))]
    parsers = [reader(tiny, family, ids, by_id=by_id, prompt="<think>" * opened) for by_id in (False, True)]
    parsed = [parser.finish(STOP)[1] for parser in parsers]
    assert parsed[0] == parsed[1]
    assert parsers[0].parts() == parsers[1].parts()
    at = 0
    for part in parsers[0].parts():
        assert at - 1 <= part.start <= at
        assert part.start < part.end
        at = part.end
    assert at == len(ids)


@pytest.mark.parametrize("family", BY_NAME)
def test_a_long_reply_parses_alike_at_once_and_id_by_id(tiny: Tokenizer, family: Family) -> None:
    """Wherever in its pieces a marker stands."""
    calls = f"{block(family, one(family, LITERAL))} {BEGIN}{END}"
    for num_before in range(4000, 4100, 23):
        ids = tiny.encode(f"{'x' * num_before}{calls}{'y' * 4200}{calls}")
        parsers = [reader(tiny, family, ids, by_id=by_id) for by_id in (False, True)]
        parsed = [parser.finish(STOP)[1] for parser in parsers]
        assert parsed[0] == parsed[1]
        assert parsers[0].parts() == parsers[1].parts()
        assert (len(parsed[0].message.tool_calls), len(parsed[0].faults)) == (2, 2)


@pytest.mark.parametrize(("parallel", "num_calls", "accepted"), [(False, 1, True), (False, 2, False), (True, 2, True)])
@pytest.mark.parametrize("family", BY_NAME)
def test_the_grammar_of_a_forced_call_has_what_the_template_writes(
    marked: tokenizers.Tokenizer, tiny: Tokenizer, family: Family, parallel: bool, num_calls: int, accepted: bool
) -> None:
    forced = ForcedTool(number=0, name=WEATHER.name, schema=SCHEMA)
    source = calls_of(family).grammar(
        [forced], parallel, lambda text: text if text in tiny.added_tokens else quoted(text)
    )
    calls = [one(family, '{"city": "a", "days": 3}', WEATHER.name)] * num_calls
    ids = list(tiny.encode(f"{block(family, *calls)}{EOS}"))
    matcher = LLMatcher(LLTokenizer(marked.to_str(), eos_token=tiny.added_tokens[EOS]), source)
    assert not matcher.get_error()
    assert (matcher.validate_tokens(ids) == len(ids)) is accepted


NAMES = ["deepseek-v3", "deepseek-v3.1"]


@pytest.mark.families
@pytest.mark.parametrize("name", NAMES)
def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(real: LoadReal, name: str) -> None:
    renderer = real(name).renderer
    assert renderer.family.name == name
    found = verify(renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > 150


@pytest.mark.families
@pytest.mark.parametrize(("name", "kwargs"), [("deepseek-v3", {}), ("deepseek-v3.1", {}), ("deepseek-v3.1", THINKING)])
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


@pytest.mark.families
@pytest.mark.parametrize("name", NAMES)
def test_without_tools_a_conversation_is_written_as_by_the_stock_template(real: LoadReal, name: str) -> None:
    model = real(name)
    writes_calls = name == "deepseek-v3.1"
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            if exchange.tools and not writes_calls:
                continue
            stock = model.oracle(messages, (), stock=True)
            assert model.renderer.render(messages, (), {}) == model.renderer.tokenizer.encode(stock)
            num_compared += 1
    assert num_compared > (100 if writes_calls else 50)


@pytest.mark.families
def test_where_v3s_stock_template_places_its_marks_well_calls_are_written_as_it_writes_them(real: LoadReal) -> None:
    """With two calls and no content, once in a conversation."""
    model = real("deepseek-v3")
    first, second = call(1), call(2)
    messages = [user("a"), said(None, first, second), result(first, "b"), result(second, "c"), said("d"), user("e")]
    form = replace(model.renderer.family.form, empty_content=None)
    dicts = message_dicts(messages, model.renderer.writer.sealer(), form)
    files = model.files
    stock = JinjaTemplate(files.chat_template, files.bos_token, files.eos_token).render(dicts, None, True, {})
    assert model.renderer.render(messages, (), {}) == model.renderer.tokenizer.encode(stock)


TEXT = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["\n\n", " zq\n", "<b>", "é𝄞"])
).filter(lambda text: "｜" not in text and "think>" not in text)
"""Without what is a control token: that is text in a client's message, and to transformers a control token."""
REASONING = st.none() | TEXT.filter(bool)
REPLIES = st.builds(said, TEXT, reasoning=REASONING) | st.builds(said, TEXT, st.just(call(1)), reasoning=REASONING)
OTHERS = st.builds(Message, role=st.sampled_from([Role.USER, Role.SYSTEM, Role.TOOL]), content=TEXT)


@pytest.mark.families
@pytest.mark.parametrize(("name", "kwargs"), [("deepseek-v3", {}), ("deepseek-v3.1", {}), ("deepseek-v3.1", THINKING)])
@given(messages=st.lists(REPLIES | OTHERS, min_size=1, max_size=5), has_tools=st.booleans())
def test_any_conversation_is_written_as_transformers_writes_it(
    real: LoadReal, name: str, kwargs: dict[str, object], messages: list[Message], has_tools: bool
) -> None:
    model = real(name)
    tools = [WEATHER] if has_tools else []
    expected = model.oracle(messages, tools, **kwargs)
    assert model.renderer.render(messages, tools, kwargs) == model.renderer.tokenizer.encode(expected)


@pytest.mark.families
@pytest.mark.parametrize("name", NAMES)
def test_the_stock_template_shows_no_tools(real: LoadReal, name: str) -> None:
    assert real(name, "template").renderer.family.shows_tools is False
    assert real(name).renderer.family.shows_tools is True


@pytest.mark.families
def test_with_thinking_what_is_sampled_is_what_is_later_written(real: LoadReal) -> None:
    renderer = real("deepseek-v3.1").renderer
    asked = call(1)
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        opening, tools = exchange.opening, exchange.tools
        prompt = renderer.render(opening, tools, THINKING)
        opened = opening[-1].role is Role.USER
        text = f"{'' if opened else '<think>'}hm</think>So"
        for reply, calls in ((said("So", reasoning="hm"), ""), (said("So", asked, reasoning="hm"), "w")):
            spelled = block(DEEPSEEK_V3_1, one(DEEPSEEK_V3_1, asked.arguments, asked.name)) if calls else ""
            if spelled and not tools:
                continue
            sampled = renderer.tokenizer.encode(f"{text}{spelled}{EOS}")
            parsed, _ = renderer.parse_tokens(
                sampled, STOP, SamplingParams(), tools, prompt_end=renderer.prompt_end(prompt)
            )
            assert (parsed.message.reasoning, parsed.message.content, parsed.faults) == ("hm", "So", ())
            assert [json.loads(one_.arguments) for one_ in parsed.message.tool_calls] == [
                json.loads(one_.arguments) for one_ in reply.tool_calls
            ]
            for new in appended(reply):
                if any(message.role in (Role.SYSTEM, Role.DEVELOPER) for message in new):
                    continue
                bridge = renderer.bridge(sampled[-8:], reply, new, tools, THINKING)
                whole = renderer.render((*opening, reply, *new), tools, THINKING)
                assert prompt + sampled + bridge.ids == whole
                num_compared += 1
    assert num_compared > 50
