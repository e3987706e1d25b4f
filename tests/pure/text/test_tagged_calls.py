"""GLM's and MiniMax's calls as text: read as they were written, whatever the arguments hold and however they come."""

import json
import re
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParseProblem
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Tool
from stenograph.families.glm.family import glm_calls
from stenograph.families.minimax.family import MINIMAX_CALLS as MINIMAX
from stenograph.text.call_syntax import CallSyntax, CallText, ForcedTool
from stenograph.text.element_calls import OPEN_STRING
from stenograph.text.grammar.lark import quoted

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "unit": {"anyOf": [{"enum": ["c", "3"]}, {"type": "null"}]},
        "num": {"type": "number"},
        "flag": {"type": "boolean"},
        "deep": {"$ref": "#/$defs/deep"},
        "either": {"anyOf": [{"$ref": "#/$defs/words"}, {"type": "null"}]},
        "brief": {"type": "string", "minLength": 1, "maxLength": 3},
        "mixed": {"oneOf": [{"const": "all"}, {"type": "integer", "minimum": 1}]},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {
        "deep": {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]},
        "words": {"type": "string", "format": "words"},
    },
}
TOOL = Tool(name="f", json="{}", parameters_json=json.dumps(SCHEMA))
TOOLS = {"f": TOOL}
LINES, DENSE = glm_calls("\n"), glm_calls("")
ALL = pytest.mark.parametrize("syntax", [LINES, DENSE, MINIMAX], ids=["glm-4.5", "glm-4.7", "minimax-m2"])


def bare(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def body_of(syntax: CallSyntax, name: str, arguments: Mapping[str, object]) -> str:
    """A block's body as the family's template writes it."""
    if syntax is MINIMAX:
        items = "".join(f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in arguments.items())
        return f'\n<invoke name="{name}">\n{items}</invoke>\n'
    gap = syntax.lead
    return f"{name}{gap}" + "".join(
        f"<arg_key>{key}</arg_key>{gap}<arg_value>{bare(value)}</arg_value>{gap}" for key, value in arguments.items()
    )


def close_of(syntax: CallSyntax) -> str:
    return "</" + syntax.openers[0][1:]


def read(syntax: CallSyntax, text: str) -> tuple[CallText, ...] | ParseProblem:
    """What is read of a block whose text after the opener this is."""
    found = syntax.scanner(syntax.openers[0]).find(text)
    return syntax.read("", text[: found[0]], TOOLS) if found else syntax.read_cut("", text, TOOLS)


MARKERS = [
    "</tool_call>",
    "<tool_call>",
    "</arg_value>",
    "<arg_value>",
    "<arg_key>",
    "</minimax:tool_call>",
    "</parameter>",
    "</invoke>",
    '<parameter name="a">',
]
TEXTS = st.lists(st.sampled_from([*MARKERS, "\n", " ", "é", '"', "{", "\\"]), max_size=5).map("".join)
VALUES = st.fixed_dictionaries(
    {"text": TEXTS},
    optional={
        "num": st.integers(-9, 9) | st.sampled_from([0.5, 2.0]),
        "flag": st.booleans(),
        "deep": st.dictionaries(st.sampled_from(["a", "b"]), TEXTS | st.none() | st.lists(st.booleans(), max_size=2)),
        "either": TEXTS | st.none(),
    },
)
FORBIDDEN = re.compile(r"</arg_value>\s{0,8}<(arg_key|/tool_call)>|</parameter>\s{0,8}<(parameter name=|/invoke>)")


def is_ambiguous(syntax: CallSyntax, text: str) -> bool:
    """Whether a text says, where it is not escaped, that it ends before its end, or that it goes on after it."""
    return FORBIDDEN.search(text) is not None or (syntax is DENSE and re.fullmatch(OPEN_STRING, text) is not None)


@ALL
@given(arguments=VALUES)
@example(arguments={"text": "", "deep": {"a": ['</arg_value><arg_key>\\"</arg_value></tool_call>']}})
@example(arguments={"text": "", "deep": {"a": ['</parameter></invoke></minimax:tool_call>"']}})
@example(arguments={"text": '{"a": 1, b: "', "num": 1})
def test_a_call_is_read_as_it_was_written_whatever_markers_its_arguments_hold(
    syntax: CallSyntax, arguments: dict[str, object]
) -> None:
    body = body_of(syntax, "f", arguments)
    if any(isinstance(value, str) and is_ambiguous(syntax, value) for value in arguments.values()):
        return
    found = syntax.scanner("").find(text := body + close_of(syntax) + " more " + close_of(syntax))
    assert found == (len(body), len(body) + len(close_of(syntax)))
    calls = read(syntax, text)
    assert not isinstance(calls, ParseProblem)
    ((name, spelled),) = [(call.name, call.arguments) for call in calls]
    assert (name, json.loads(spelled)) == ("f", arguments)


@ALL
@given(pieces=st.lists(st.sampled_from([*MARKERS, *'f\nx{["\\,', '<invoke name="f">', "</arg_key>"]), max_size=14))
@example(pieces=["<arg_value>", "{", '"', "</arg_value>", "</tool_call>", "\n", '"', "</tool_call>"])
@example(pieces=["<arg_value>", "</arg_value>", *"\n" * 9, "<arg_key>", "</tool_call>"])
def test_a_block_closes_at_the_same_place_however_its_text_comes(syntax: CallSyntax, pieces: Sequence[str]) -> None:
    text = "".join(pieces)
    found = syntax.scanner("").find(text)
    scanner = syntax.scanner("")
    ends = (scanner.find(text[:end]) for end in range(len(text) + 1))
    assert next((end for end in ends if end), None) == found
    if found is not None:
        read_back = syntax.read("", text[: found[0]], TOOLS)
        assert isinstance(read_back, tuple | ParseProblem)


@pytest.mark.parametrize(
    "text",
    [
        "</tool_call>",
        "\n</tool_call>",
        '{"name": "f", "arguments": {}}</tool_call>',
        "f g</tool_call>",
        "f<arg_key>a</arg_key></tool_call>",
        "f<arg_key>a</arg_key>x<arg_value>1</arg_value></tool_call>",
        "f<arg_key></arg_key><arg_value>1</arg_value></tool_call>",
        "f<arg_value>1</arg_value></tool_call>",
        "f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</tool_call>",
    ],
)
def test_a_malformed_call_of_glm_is_an_outcome(text: str) -> None:
    assert read(DENSE, text) is ParseProblem.TOOL_CALL_WRONG_SHAPE
    assert read(LINES, text) is ParseProblem.TOOL_CALL_WRONG_SHAPE


@pytest.mark.parametrize(
    "text",
    [
        "</minimax:tool_call>",
        "f</minimax:tool_call>",
        '<invoke name="f"></minimax:tool_call>',
        '<invoke name=""></invoke></minimax:tool_call>',
        '<invoke name="f"></invoke>x</minimax:tool_call>',
        '<invoke name="f"></invoke><invoke name="f"></minimax:tool_call>',
        '<invoke name="f">x</invoke></minimax:tool_call>',
        '{"name": "f", "arguments": {}}</minimax:tool_call>',
    ],
)
def test_a_malformed_block_of_minimax_is_an_outcome(text: str) -> None:
    assert read(MINIMAX, text) is ParseProblem.TOOL_CALL_WRONG_SHAPE


@ALL
@pytest.mark.parametrize("end", ["", ".", "\n"])
def test_a_call_that_is_cut_is_no_call(syntax: CallSyntax, end: str) -> None:
    text = body_of(syntax, "f", {"text": "a"})
    for size in range(len(text)):
        assert read(syntax, text[:size]) is ParseProblem.TOOL_CALL_UNCLOSED
    unclosed = text.replace("</arg_value>", "").replace("</parameter>", "") + close_of(syntax) + end
    assert read(syntax, unclosed) is ParseProblem.TOOL_CALL_UNCLOSED


def test_a_block_of_minimax_has_several_calls_in_their_order() -> None:
    text = "".join(body_of(MINIMAX, name, {"text": name}).removeprefix("\n") for name in ("f", "g", "f"))
    calls = read(MINIMAX, f"\n{text}</minimax:tool_call>")
    assert calls == tuple(CallText(name=name, arguments=f'{{"text": "{name}"}}') for name in ("f", "g", "f"))


@pytest.mark.parametrize(
    ("begin", "inside", "end"),
    [("", "</arg_value> .", ""), ('["', "</arg_value></tool_call>", '"]'), ("[", '"</arg_value></tool_call>",', "1]")],
)
def test_a_long_value_of_closing_tags_that_close_nothing_is_scanned_as_it_grows(
    begin: str, inside: str, end: str
) -> None:
    scanner = DENSE.scanner("")
    text = f"f<arg_key>a</arg_key><arg_value>{begin}{inside * 8_000}{end}</arg_value></tool_call>"
    assert not any(scanner.find(text[:size]) for size in range(0, len(text), 16))
    assert scanner.find(text) == (len(text) - len("</tool_call>"), len(text))


def grammar_of(syntax: CallSyntax, schemas: Sequence[object], *, parallel: bool, tokens: Sequence[str] = ()) -> str:
    """The grammar of calls of tools with these schemas, which are called f."""
    forced = [
        ForcedTool(number=number, name="f", schema=json.loads(json.dumps(schema)))
        for number, schema in enumerate(schemas)
    ]
    return syntax.grammar(forced, parallel, lambda text: text if text in tokens else quoted(text))


def accepts(source: str, text: str) -> bool:
    """Whether the grammar, over bytes, has the text as a whole."""
    matcher = LLMatcher(LLTokenizer("byte"), source)
    ids = list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(ids) and matcher.is_accepting() if len(ids) == matcher.validate_tokens(ids) else False


def block_of(syntax: CallSyntax, *bodies: str) -> str:
    opener, close = syntax.openers[0], close_of(syntax)
    if syntax is MINIMAX:
        return f"{syntax.lead}{opener}\n{''.join(body.removeprefix(chr(10)) for body in bodies)}{close}"
    return syntax.lead.join(f"{opener}{body}{close}" for body in bodies)


@ALL
@pytest.mark.parametrize("parallel", [False, True])
def test_the_grammar_has_what_the_template_writes_and_no_more_calls_than_are_asked_for(
    syntax: CallSyntax, parallel: bool
) -> None:
    source = grammar_of(syntax, [SCHEMA], parallel=parallel)
    bodies = [
        body_of(syntax, "f", arguments)
        for arguments in (
            {"text": "a\nb <c>"},
            {"text": "", "unit": "3", "num": 0.5, "flag": True, "deep": {"a": [1, "x"]}, "either": "y", "mixed": 3},
            {"text": '{"a"', "unit": None, "flag": False, "brief": "é\n.", "mixed": "all"},
        )
    ]
    for body in bodies:
        assert accepts(source, block_of(syntax, body)), body
    assert accepts(source, block_of(syntax, *bodies)) is parallel


@ALL
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num": 1},
        {"text": "a", "unit": "k"},
        {"text": "a", "brief": ""},
        {"text": "a", "brief": "four"},
        {"text": "a", "mixed": 0},
        {"text": "a", "mixed": "none"},
        {"text": "a", "num": "x"},
        {"text": "a", "flag": 1},
        {"text": "a", "deep": {}},
        {"text": "a", "other": "b"},
        {"text": '{"a'},
        {"text": "a</arg_value><arg_key>b</parameter><parameter name="},
    ],
)
def test_the_grammar_has_nothing_that_the_schema_forbids(syntax: CallSyntax, arguments: dict[str, object]) -> None:
    source = grammar_of(syntax, [SCHEMA], parallel=True)
    assert not accepts(source, block_of(syntax, body_of(syntax, "f", arguments)))


@ALL
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"minProperties": 1}, "minProperties"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"required": ["a"]}, "among the properties"),
        ({"properties": {"a": {"type": "string", "pattern": "^a$"}}}, "pattern"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}}, "maxLength"),
        ({"properties": {"a<": {"type": "string"}}}, "between tags"),
        ({"properties": {"a": {"enum": ["3", 3]}}}, "the value 3"),
        ({"properties": {"a": {"const": "</arg_value><arg_key></parameter><parameter name="}}}, "the value <"),
        ({"properties": {"a": {"allOf": [{"minLength": 1}, {"maxLength": 3}]}}}, "allOf"),
        ({"properties": {"a": {"type": "string", "maxLength": 0}}}, "no such length"),
        ({"properties": {"a": {"type": "string", "anyOf": [{"type": "string"}]}}}, "beside and within 'anyOf'"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"const": 3}]}}}, "more constraints than a type"),
    ],
)
def test_what_bare_text_cannot_be_held_to_is_refused(syntax: CallSyntax, schema: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        grammar_of(syntax, [schema], parallel=False)
    assert caught.value.blame == Blame(RequestPart.TOOL_CHOICE)


@ALL
def test_the_grammar_names_markers_that_are_tokens(syntax: CallSyntax) -> None:
    source = grammar_of(syntax, [SCHEMA, SCHEMA], parallel=True, tokens=syntax.markers)
    assert LLMatcher.validate_grammar(source, None) == ""
    assert f'"{syntax.openers[0]}"' not in source
