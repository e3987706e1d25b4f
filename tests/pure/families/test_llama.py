"""Llama 3 to 3.3: bare calls read whatever they are; the templates held to their own files and to transformers."""

import datetime
import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from stenograph.core.chat import ParseProblem, ToolChoice, ToolMode
from stenograph.core.day import STRFTIME_NOW, Day
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.families.llama.calls import LLAMA_CALLS
from stenograph.families.llama.family import LLAMA3_1
from stenograph.families.load import load_renderer
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.call_syntax import ForcedTool
from stenograph.text.conversations import WEATHER, appended, call, exchanges, result, said, user
from stenograph.text.reading import PartKind, Reading
from stenograph.text.renderer import Renderer
from stenograph.text.reply import ReplyParser
from stenograph.verify.verify import verify

LoadReal = Callable[..., Any]
STOP = Finish(reason=FinishReason.STOP)
DAY = "26 Jul 2024"
EOT, TAG = "<|eot_id|>", "<|python_tag|>"
BARE = Tool(name="stop_zq", json='{"type": "function", "function": {"name": "stop_zq"}}')
LITERAL = f'{{"a": "{{\\"name\\": 1}}; {TAG} }} \\\\"}}'
SCHEMA = {
    **json.loads(WEATHER.parameters_json),
    "x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "},
}


def one(arguments: str, name: str = "w") -> str:
    """A call as the template writes it."""
    return f'{{"name": "{name}", "parameters": {arguments}}}'


@pytest.fixture(scope="module")
def marked(reference: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tiny tokenizer with Llama's control tokens."""
    made = tokenizers.Tokenizer.from_str(reference.to_str())
    made.add_special_tokens([EOT, TAG])
    return made


@pytest.fixture(scope="module")
def tiny(marked: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(marked.to_str())


def reader(tokenizer: Tokenizer, ids: Any, *, by_id: bool = False) -> ReplyParser:
    parser = ReplyParser(tokenizer, LLAMA3_1.syntax, Reading(tools=(WEATHER, BARE)))
    for piece in [[token_id] for token_id in ids] if by_id else [ids]:
        parser.feed(piece)
    return parser


def read(tokenizer: Tokenizer, text: str, *, by_id: bool = False) -> Any:
    return reader(tokenizer, tokenizer.encode(text), by_id=by_id).finish(STOP)[1]


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("between", ["; ", ";", "\n", ""])
@pytest.mark.parametrize("before", ["", "\n", TAG, f"So: {TAG}"])
def test_parallel_calls_are_read_whatever_their_arguments_spell(
    tiny: Tokenizer, before: str, between: str, by_id: bool
) -> None:
    text = f"{before}{one(LITERAL)}{between}{one('{}', 'v')}{EOT}"
    parser = reader(tiny, tiny.encode(text), by_id=by_id)
    parsed = parser.finish(STOP)[1]
    assert [(asked.name, asked.arguments) for asked in parsed.message.tool_calls] == [("w", LITERAL), ("v", "{}")]
    assert parsed.message.content == ("So: " if "So" in before else None)
    assert not parsed.faults
    kinds = [part.kind for part in parser.parts()]
    assert PartKind.TOOL_CALL in kinds
    assert kinds[-1] is PartKind.END


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"type": "function", "name": "w", "parameters": {"a": 1}}', ("w", '{"a": 1}')),
        ('{"name": "w", "arguments": {"a": 1}}', ("w", '{"a": 1}')),
        ('{"name": "w", "parameters": "{\\"a\\": 1}"}', ("w", '{"a": 1}')),
        ('{"parameters": { "a":1.0 }, "name": "w"}', ("w", '{ "a":1.0 }')),
        ('{"name": "stop_zq"}', ("stop_zq", "{}")),
        (f'{TAG} {{"name": "w", "parameters": {{}}}}', ("w", "{}")),
    ],
)
def test_a_call_is_read_in_each_spelling_that_these_models_use(
    tiny: Tokenizer, text: str, expected: tuple[str, str]
) -> None:
    parsed = read(tiny, f"{text}{EOT}")
    assert [(asked.name, asked.arguments) for asked in parsed.message.tool_calls] == [expected]
    assert not parsed.faults


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"city": "Zq", "days": {"name": 1, "parameters": {}}}',
        '{"name": "Ada", "age": 3}',
        '{"name": {"first": "Ada"}}',
        '{"name": ["w"], "type": "function"}',
        '{"name": "Ada"',
        '{"type": ',
        "{ curly }",
        "[1, 2]",
        f"So: {one('{}')}",
        f"{TAG}print({{}})",
        f"a; {one('{}')}",
        "{",
        TAG,
    ],
)
def test_what_is_not_meant_as_a_call_is_what_the_model_says(tiny: Tokenizer, text: str, by_id: bool) -> None:
    parsed = read(tiny, f"{text}{EOT}", by_id=by_id)
    assert (parsed.message.content, parsed.message.tool_calls, parsed.faults) == (text, (), ())


def test_an_object_that_begins_otherwise_than_a_call_is_told_as_it_comes(tiny: Tokenizer) -> None:
    parser = reader(tiny, tiny.encode('{"na'))
    assert parser.feed(tiny.encode('ture": ')).content == '{"nature": '


def malformed() -> list[tuple[str, ParseProblem]]:
    return [
        ('{"name": "w", "parameters": {"a": }}', ParseProblem.TOOL_CALL_NOT_JSON),
        ('{"name": "look_up_zq", "a" }', ParseProblem.TOOL_CALL_NOT_JSON),
        ('{"name": "w", "parameters": 3}', ParseProblem.TOOL_CALL_WRONG_SHAPE),
        ('{"name": "", "parameters": {}}', ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (f'{TAG}{{"a": 1}}', ParseProblem.TOOL_CALL_WRONG_SHAPE),
        (f'{TAG}{{"a": }}', ParseProblem.TOOL_CALL_NOT_JSON),
        (f'{TAG}{{"a": ', ParseProblem.TOOL_CALL_UNCLOSED),
        ('{"name": "look_', ParseProblem.TOOL_CALL_UNCLOSED),
        ('{"name": "w", "parameters": {"a": "}', ParseProblem.TOOL_CALL_UNCLOSED),
    ]


@pytest.mark.parametrize(("text", "problem"), malformed())
def test_a_malformed_call_is_told_with_its_ids(tiny: Tokenizer, text: str, problem: ParseProblem) -> None:
    before, bad = tiny.encode(f"{one(LITERAL)}\n"), tiny.encode(text)
    ids = before + bad + tiny.encode(EOT)
    parsed = reader(tiny, ids).finish(STOP)[1]
    (fault,) = parsed.faults
    assert (fault.problem, fault.seen) == (problem, text)
    assert ids[fault.start : fault.end] == bad
    assert [asked.arguments for asked in parsed.message.tool_calls] == [LITERAL]
    assert (parsed.message.content or "").endswith(text)


PIECES = st.sampled_from(
    [
        TAG,
        "{",
        "}",
        '{"name": "',
        "look_up_zq",
        '", "parameters": ',
        "{}",
        '{"a": "',
        '"}',
        "; ",
        ";",
        "\n",
        "x",
        '"',
        "\\",
    ]
)


@given(text=st.lists(PIECES, max_size=14).map("".join), data=st.data())
def test_any_ids_parse_alike_in_any_pieces(tiny: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = [*tiny.encode(text), *data.draw(st.lists(st.integers(-1, tiny.vocab_size + 9), max_size=6))]
    parsers = [reader(tiny, ids, by_id=by_id) for by_id in (False, True)]
    parsed = [parser.finish(STOP)[1] for parser in parsers]
    assert parsed[0] == parsed[1]
    assert parsers[0].parts() == parsers[1].parts()
    at = 0
    for part in parsers[0].parts():
        assert at - 1 <= part.start <= at
        assert part.start < part.end
        at = part.end
    assert at == len(ids)


@pytest.mark.parametrize(("parallel", "num_calls", "accepted"), [(False, 1, True), (False, 2, False), (True, 2, True)])
def test_the_grammar_of_a_forced_call_has_what_the_template_writes(
    marked: tokenizers.Tokenizer, tiny: Tokenizer, parallel: bool, num_calls: int, accepted: bool
) -> None:
    forced = ForcedTool(number=0, name=WEATHER.name, schema=SCHEMA)
    source = LLAMA_CALLS.grammar([forced], parallel, lambda text: text)
    text = "; ".join([one('{"city": "a", "days": 3}', WEATHER.name)] * num_calls)
    ids = list(tiny.encode(f"{text}{EOT}"))
    matcher = LLMatcher(LLTokenizer(marked.to_str(), eos_token=tiny.added_tokens[EOT]), source)
    assert not matcher.get_error()
    assert (matcher.validate_tokens(ids) == len(ids)) is accepted
    assert len(read(tiny, f"{text}{EOT}").message.tool_calls) == num_calls


# -- the models' own files


WITH_TOOLS = ["llama3.1", "llama3.2"]


@pytest.mark.families
@pytest.mark.parametrize(("name", "family"), [("llama3", "llama3"), *((name, "llama3.1") for name in WITH_TOOLS)])
def test_every_session_is_bridged_and_parsed_as_the_real_files_have_it(real: LoadReal, name: str, family: str) -> None:
    renderer = real(name).renderer
    assert renderer.family.name == family
    found = verify(renderer)
    assert found.proof.holds, found.proof.why_not
    assert not found.failures, found.failures[0]
    assert (found.proof.num_refused, found.num_refused, found.num_tolerated) == (0, 0, 0)
    assert len(found.findings) > (150 if name in WITH_TOOLS else 40)


@pytest.mark.families
@pytest.mark.parametrize("name", ["llama3", *WITH_TOOLS])
def test_every_conversation_is_written_as_transformers_writes_it(real: LoadReal, name: str) -> None:
    model = real(name)
    for exchange in exchanges(has_tools=name in WITH_TOOLS):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            expected = model.oracle(messages, exchange.tools, date_string=DAY)
            ids = model.renderer.render(messages, exchange.tools, {})
            assert ids == model.renderer.tokenizer.encode(expected)


def is_as_stock(messages: tuple[Message, ...]) -> bool:
    """Whether the stock template shows all of it: one call a reply, and no text beside it."""
    return all(len(message.tool_calls) == 1 and not message.content for message in messages if message.tool_calls)


@pytest.mark.families
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_with_one_call_a_reply_a_conversation_is_written_as_by_the_stock_template(real: LoadReal, name: str) -> None:
    model = real(name)
    num_compared = 0
    for exchange in exchanges(has_tools=True):
        for new in appended(exchange.reply):
            messages = (*exchange.opening, exchange.reply, *new)
            if is_as_stock(messages):
                stock = model.oracle(messages, exchange.tools, stock=True, date_string=DAY)
                assert model.renderer.render(messages, exchange.tools, {}) == model.renderer.tokenizer.encode(stock)
                num_compared += 1
    assert num_compared > 100


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["{}", "; {", TAG, "\n", " a "])
TURNS = st.one_of(
    TEXT.map(user),
    TEXT.map(said),
    st.builds(Message, role=st.sampled_from([Role.SYSTEM, Role.DEVELOPER]), content=TEXT),
    st.builds(said, TEXT, st.sampled_from([call(1), call(2, "{}")])),
)


@pytest.mark.families
@pytest.mark.parametrize("name", WITH_TOOLS)
@given(
    past=st.lists(TURNS, max_size=4),
    new=st.lists(TURNS, max_size=3),
    reply=st.sampled_from([said("b"), said(None, call(3))]),
)
def test_any_conversation_is_append_only_and_bridged_as_it_is_rendered(
    real: LoadReal, name: str, past: list[Message], new: list[Message], reply: Message
) -> None:
    renderer: Renderer = real(name).renderer
    opening = [user("a"), *past]
    prompt = renderer.render(opening, [WEATHER], {})
    ids = renderer.tokenizer.encode(("b" if reply.content else one(reply.tool_calls[0].arguments, WEATHER.name)) + EOT)
    answers = [result(asked, "r") for asked in reply.tool_calls]
    bridge = renderer.bridge((prompt + ids)[-64:], reply, [*answers, *new], [WEATHER], {})
    assert bridge.num_trimmed == 0
    assert prompt + ids + bridge.ids == renderer.render([*opening, reply, *answers, *new], [WEATHER], {})


@pytest.mark.families
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_reply_that_ends_with_the_message_s_end_goes_on_as_a_turn_s_end(real: LoadReal, name: str) -> None:
    renderer: Renderer = real(name).renderer
    tail = renderer.tokenizer.encode(one("{}", WEATHER.name) + "<|eom_id|>")
    asked = call(1, "{}")
    bridge = renderer.bridge(tail, said(None, asked), [result(asked, "r")], [WEATHER], {})
    assert bridge.num_trimmed == 1
    frame = '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"r"<|eot_id|>'
    assert renderer.tokenizer.decode(bridge.ids) == f"{frame}<|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.families
def test_a_line_keeps_the_day_on_which_it_began(real: LoadReal) -> None:
    days = iter(f"{day:02} Nov 2026" for day in range(1, 29))
    today = [next(days)]
    model = real("llama3.2")
    renderer = load_renderer(model.files, strftime_now=lambda _: today[0], tokenizer=model.renderer.tokenizer).renderer
    prompt = renderer.render([user("a")], [WEATHER], {})
    assert "Today Date: 01 Nov 2026" in renderer.tokenizer.decode(prompt)
    reply = renderer.tokenizer.encode(f"b{EOT}")
    bridges = []
    for _ in range(3):
        bridges.append(renderer.bridge((prompt + reply)[-64:], said("b"), [user("c")], [WEATHER], {}).ids)
        today[0] = next(days)
    assert bridges[0] == bridges[1] == bridges[2]
    assert "Date" not in renderer.tokenizer.decode(bridges[0])
    whole = [user("a"), said("b"), user("c")]
    for kept in ({"date_string": "01 Nov 2026"}, {STRFTIME_NOW: Day(date=datetime.date(2026, 11, 1))}):
        assert prompt + reply + bridges[0] == renderer.render(whole, [WEATHER], kept)


@pytest.mark.families
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_system_messages_before_the_user_keep_their_frames_beside_tools(real: LoadReal, name: str) -> None:
    renderer: Renderer = real(name).renderer
    first, second = (Message(role=Role.SYSTEM, content=text) for text in ("One.", "Two."))
    text = renderer.tokenizer.decode(renderer.render([first, second, user("a")], [WEATHER], {}))
    assert "\n\nOne.<|eot_id|><|start_header_id|>system<|end_header_id|>\n\nTwo.<|eot_id|>" in text
    with pytest.raises(UnrenderableMessage, match="no first user message"):
        renderer.render([said("Hello."), user("a")], [WEATHER], {})


@pytest.mark.families
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_built_in_tools_are_refused(real: LoadReal, name: str) -> None:
    with pytest.raises(UnrenderableMessage, match="builtin_tools is not supported"):
        real(name).renderer.render([user("a")], [], {"builtin_tools": ["brave_search"]})


@pytest.mark.families
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_can_be_forced(real: LoadReal, name: str) -> None:
    model = real(name)
    grammar = model.renderer.tool_grammar([WEATHER], ToolChoice(mode=ToolMode.REQUIRED), True)
    assert grammar is not None
    ids = model.renderer.tokenizer.encode("; ".join([one('{"city": "a"}', WEATHER.name)] * 2) + EOT)
    matcher = LLMatcher(
        LLTokenizer(model.files.tokenizer_json, eos_token=model.renderer.tokenizer.added_tokens[EOT]), grammar.source
    )
    assert matcher.validate_tokens(list(ids)) == len(ids), matcher.get_error()


@pytest.mark.families
def test_llama_3_makes_no_calls(real: LoadReal) -> None:
    renderer: Renderer = real("llama3").renderer
    text = one("{}", WEATHER.name)
    parsed = renderer.parse(renderer.tokenizer.encode(text + EOT), STOP, SamplingParams(), [])
    assert parsed.message == replace(said(text), reasoning=None)
    with pytest.raises(UnrenderableMessage, match="cannot show a tool list"):
        renderer.render([user("a")], [WEATHER], {})
