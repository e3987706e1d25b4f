"""DSML calls: read whatever their arguments spell, and forced as each tool's schema has them."""

import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParseProblem
from stenograph.core.errors import InvalidRequest
from stenograph.core.types import Finish, FinishReason
from stenograph.families.deepseek.dsml import MARK, DsmlScanner, dsml_calls
from stenograph.families.deepseek.dsml_models import DEEPSEEK_V3_2, DEEPSEEK_V4
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.call_syntax import ForcedTool
from stenograph.text.conversations import WEATHER
from stenograph.text.family import Family
from stenograph.text.grammar.lark import quoted
from stenograph.text.reading import PartKind, Reading
from stenograph.text.reply import ReplyParser

STOP = Finish(reason=FinishReason.STOP)
BEGIN, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
OPEN, CLOSE = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>"
SYNTAX = dsml_calls("tool_calls")


def invoked(name: str, *arguments: str) -> str:
    """A call as the format has it."""
    body = "\n".join(arguments)
    return f'<{MARK}invoke name="{name}">\n{body}\n</{MARK}invoke>'


def text_of(name: str, value: str) -> str:
    return f'<{MARK}parameter name="{name}" string="true">{value}</{MARK}parameter>'


def json_of(name: str, value: str) -> str:
    return f'<{MARK}parameter name="{name}" string="false">{value}</{MARK}parameter>'


def block(*calls: str) -> str:
    joined = "\n".join(calls)
    return f"{OPEN}\n{joined}\n{CLOSE}"


@pytest.fixture(scope="module")
def marked(reference: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tiny tokenizer with V3.2's marks, of which those of reasoning are no control tokens."""
    made = tokenizers.Tokenizer.from_str(reference.to_str())
    made.add_special_tokens([MARK, EOS])
    made.add_tokens(["<think>", "</think>"])
    return made


@pytest.fixture(scope="module")
def tiny(marked: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(marked.to_str())


def reader(tokenizer: Tokenizer, ids: Any, *, by_id: bool = False, prompt: str = "") -> ReplyParser:
    parser = ReplyParser(
        tokenizer, DEEPSEEK_V4.syntax, Reading(tools=(WEATHER,), prompt_end=DEEPSEEK_V4.syntax.prompt_end(prompt))
    )
    for piece in [[token_id] for token_id in ids] if by_id else [ids]:
        parser.feed(piece)
    return parser


LITERAL = f"see </{MARK}parameter> and\n{CLOSE}\n</{MARK}invoke>\n{text_of('b', 'x')} or"


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((invoked("w", text_of("a", 'Zürich "zq"')),), [("w", {"a": 'Zürich "zq"'})]),
        ((invoked("w", text_of("a", " two\n\nlines \n")),), [("w", {"a": " two\n\nlines \n"})]),
        ((invoked("w", json_of("n", "3"), json_of("o", '{"x": [1, null, 2.0]}')),), None),
        ((invoked("w"), invoked("v", text_of("a", ""), json_of("t", "true"))), None),
        ((invoked("w", text_of("a", LITERAL), json_of("n", "3")),), [("w", {"a": LITERAL, "n": 3})]),
        ((invoked("w", json_of("o", json.dumps({"x": LITERAL}, ensure_ascii=False))),), [("w", {"o": {"x": LITERAL}})]),
        ((invoked("w", text_of("a", "3")),), [("w", {"a": "3"})]),
    ],
)
def test_parallel_calls_are_read_whatever_their_arguments_spell(
    tiny: Tokenizer, calls: Sequence[str], expected: list[tuple[str, object]] | None, by_id: bool
) -> None:
    ids = tiny.encode(f"hm</think>So:\n\n{block(*calls)}{EOS}")
    parser = reader(tiny, ids, by_id=by_id, prompt="<think>")
    parsed = parser.finish(STOP)[1]
    assert not parsed.faults
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", "So:")
    read = [(asked.name, json.loads(asked.arguments)) for asked in parsed.message.tool_calls]
    assert len(read) == len(calls)
    assert expected is None or read == expected
    assert [part.kind for part in parser.parts()] == [
        PartKind.REASONING,
        PartKind.CONTENT,
        PartKind.TOOL_CALL,
        PartKind.END,
    ]


WHOLE = invoked("w", text_of("a", LITERAL))
MALFORMED = [
    (block(invoked("w", json_of("n", "{"))), ParseProblem.TOOL_CALL_NOT_JSON),
    (block(invoked("w", text_of("a", "1"), text_of("a", "2"))), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (block("and"), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (block(invoked("", text_of("a", "1"))), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (block(invoked("w", "and")), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (block(f'<{MARK}invoke name="w">\n'), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (block(), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (block(invoked("w", f'<{MARK}parameter name="a">\n')), ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (f"{OPEN}\n{invoked('w')}", ParseProblem.TOOL_CALL_UNCLOSED),
    (
        f'{OPEN}\n<{MARK}invoke name="w">\n<{MARK}parameter name="a" string="true">{CLOSE}',
        ParseProblem.TOOL_CALL_UNCLOSED,
    ),
]


@pytest.mark.parametrize(("text", "problem"), MALFORMED)
def test_a_malformed_block_is_told_with_its_ids(tiny: Tokenizer, text: str, problem: ParseProblem) -> None:
    before = tiny.encode(f"<think>hm</think>So:\n\n{block(WHOLE)}\n\n")
    bad = tiny.encode(text)
    ids = before + bad + tiny.encode(EOS)
    parser = reader(tiny, ids)
    parsed = parser.finish(STOP)[1]
    (fault,) = parsed.faults
    assert (fault.problem, fault.seen) == (problem, text[:160])
    assert ids[fault.start : fault.end] == bad
    assert [json.loads(asked.arguments) for asked in parsed.message.tool_calls] == [{"a": LITERAL}]
    assert [part.kind for part in parser.parts()] == [
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
        OPEN,
        CLOSE,
        f'<{MARK}invoke name="w">\n',
        f"\n</{MARK}invoke>",
        f'<{MARK}parameter name="a" string="true">',
        '" string="false">',
        f"</{MARK}parameter>\n",
        f"<{MARK}",
        "\n",
        "x",
    ]
)


@given(text=st.lists(PIECES, max_size=14).map("".join), data=st.data(), opened=st.booleans())
def test_any_ids_parse_alike_in_any_pieces(tiny: Tokenizer, text: str, data: st.DataObject, opened: bool) -> None:
    ids = [*tiny.encode(text), *data.draw(st.lists(st.integers(-1, tiny.vocab_size + 9), max_size=6))]
    parsers = [reader(tiny, ids, by_id=by_id, prompt="<think>" * opened) for by_id in (False, True)]
    parsed = [parser.finish(STOP)[1] for parser in parsers]
    assert parsed[0] == parsed[1]
    assert parsers[0].parts() == parsers[1].parts()
    at = 0
    for part in parsers[0].parts():
        assert at - 1 <= part.start <= at
        assert part.start < part.end
        at = part.end
    assert at == len(ids)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.lists(PIECES, max_size=4).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PIECES, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("family", [DEEPSEEK_V3_2, DEEPSEEK_V4], ids=lambda family: family.name)
@given(calls=st.lists(st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3), min_size=1, max_size=3))
def test_calls_with_any_arguments_are_read_as_they_were_made(
    tiny: Tokenizer, family: Family, calls: list[dict[str, object]]
) -> None:
    ends = [f"</{MARK}parameter>\n{following}" for following in (f"<{MARK}parameter ", f"</{MARK}invoke>")]
    assume(not any(end in str(value) for one in calls for value in one.values() for end in ends))
    asked = [{"id": "1", "function": {"name": "w", "arguments": one}} for one in calls]
    assert family.encoder is not None
    message = {"role": "assistant", "content": "So", "tool_calls": asked}
    ids = tiny.encode(family.encoder.render([message], None, False, {}).removeprefix(BEGIN))
    parser = ReplyParser(tiny, family.syntax, Reading(tools=(WEATHER,)))
    parser.feed(ids)
    parsed = parser.finish(STOP)[1]
    assert not parsed.faults
    assert parsed.message.content == "So"
    assert [json.loads(one.arguments) for one in parsed.message.tool_calls] == calls


@given(text=st.lists(PIECES, max_size=14).map("".join))
def test_a_block_ends_at_the_same_place_however_its_text_grows(text: str) -> None:
    growing = DsmlScanner(CLOSE)
    found = [growing.find(text[:end]) for end in range(len(text) + 1)]
    assert next((span for span in found if span is not None), None) == DsmlScanner(CLOSE).find(text)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"type": "string", "enum": ["C", "°F\n<b>"]},
        "level": {"enum": ["low", 3, None]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "never": False,
    },
    "required": ["city"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 99}},
}


def grammar_of(schema: object, *, parallel: bool = True, name: str = "w", marker: Callable[[str], str] = quoted) -> str:
    """Of one tool and one that has no parameters."""
    shown = [ForcedTool(number=0, name=name, schema=cast("Any", schema)), ForcedTool(number=1, name="v", schema={})]
    return SYNTAX.grammar(shown, parallel, marker)


def accepts(source: str, text: str) -> bool:
    """Whether the grammar, over bytes, has the text as a whole."""
    matcher = LLMatcher(LLTokenizer("byte"), source)
    ids = list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


CITY = text_of("city", "Zürich </b> <｜ </p")


@pytest.mark.parametrize(
    ("arguments", "is_admitted"),
    [
        ((CITY,), True),
        ((text_of("city", ""),), True),
        ((json_of("city", '"a"'),), False),
        ((), False),
        ((text_of("city", f"a</{MARK}parameter>\n</{MARK}invoke>"),), False),
        ((CITY, json_of("days", "99")), True),
        ((CITY, json_of("days", "100")), False),
        ((CITY, text_of("days", "99")), False),
        ((CITY, text_of("unit", "°F\n<b>"), text_of("level", "low")), True),
        ((CITY, json_of("level", "3")), True),
        ((CITY, json_of("level", "null"), text_of("note", "null")), True),
        ((CITY, text_of("unit", "K")), False),
        ((CITY, text_of("level", "3")), False),
        ((CITY, json_of("note", "null"), text_of("any", "x")), True),
        ((CITY, json_of("any", '{"x": [1, "y"]}')), True),
        ((CITY, json_of("code", '"ABC"')), True),
        ((CITY, json_of("code", '"ABCD"')), False),
        ((CITY, text_of("code", "ABC")), False),
        ((CITY, json_of("never", "null")), False),
        ((CITY, text_of("other", "x")), False),
        ((json_of("days", "9"), CITY), False),
    ],
)
def test_a_forced_call_has_the_arguments_that_the_schema_allows(arguments: tuple[str, ...], is_admitted: bool) -> None:
    assert accepts(grammar_of(SCHEMA), f"\n\n{block(invoked('w', *arguments))}") is is_admitted


@pytest.mark.parametrize(("parallel", "num_calls", "accepted"), [(False, 1, True), (False, 2, False), (True, 2, True)])
def test_the_grammar_of_a_forced_call_has_what_the_encoder_writes(
    tiny: Tokenizer, marked: tokenizers.Tokenizer, parallel: bool, num_calls: int, accepted: bool
) -> None:
    source = grammar_of(SCHEMA, parallel=parallel, marker=lambda text: f"<[{tiny.added_tokens[text]}]>")
    calls = [invoked("w", CITY, json_of("days", "3")), invoked("v")][:num_calls]
    ids = list(tiny.encode(f"\n\n{block(*calls)}{EOS}"))
    matcher = LLMatcher(LLTokenizer(marked.to_str(), eos_token=tiny.added_tokens[EOS]), source)
    assert not matcher.get_error()
    assert (matcher.validate_tokens(ids) == len(ids)) is accepted


@pytest.mark.parametrize(
    ("schema", "name", "why"),
    [
        ({"minProperties": 1}, "w", "minProperties"),
        ({"required": ["a"]}, "w", "among the properties"),
        ({"properties": {"a": False}, "required": ["a"]}, "w", "among the properties"),
        ({"required": [[]]}, "w", "among the properties"),
        ({"properties": {'a"': {}}}, "w", "in a tag"),
        ({"properties": {"a": {"enum": [f"</{MARK}parameter>"]}}}, "w", "a value of"),
        ({}, "w\n", "in a tag"),
        ({}, f"<{MARK}", "in a tag"),
    ],
)
def test_what_a_call_cannot_be_held_to_is_refused(schema: object, name: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        grammar_of(schema, name=name)
    assert caught.value.blame == Blame(RequestPart.TOOL_CHOICE)
