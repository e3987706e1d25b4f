"""Qwen's XML calls: read whole and in pieces, whatever is in an argument, and told with their ids where malformed."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ParseProblem, ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Tool
from stenograph.core.types import Finish, FinishReason
from stenograph.embedded.grammar.llguidance import LlguidanceBackend
from stenograph.families.qwen.qwen3_5 import QWEN3_5
from stenograph.families.qwen.xml_calls import CLOSE, QWEN_XML_CALLS
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.grammar.held import forced_calls
from stenograph.text.reading import Reading
from stenograph.text.reply import ReplyParser

END_ID = 2
STOP = Finish(reason=FinishReason.STOP)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "any": {}},
}
TOOL = Tool(name="f", json="{}", parameters_json=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer(reference: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(reference.to_str())


def written(name: str, /, **arguments: object) -> str:
    """A call as the templates of these families write it."""
    spelled = {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
        for key, value in arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in spelled.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def read(tokenizer: Tokenizer, text: str, *, by_id: bool = False) -> ReplyParser:
    parser = ReplyParser(
        tokenizer, QWEN3_5.syntax, Reading(tools=(TOOL,), prompt_end=QWEN3_5.syntax.prompt_end("<think>\n"))
    )
    ids = tokenizer.encode(text)
    for piece in [[token_id] for token_id in ids] if by_id else [ids]:
        parser.feed(piece)
    return parser


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (written("f", a="Zürich", n=3, b=True), '{"a": "Zürich", "n": 3, "b": true}'),
        (written("f", a="3", any="3"), '{"a": "3", "any": 3}'),
        (written("f", any=None, b=False), '{"any": null, "b": false}'),
        (written("f", any={"x": [1, {"y": "z"}]}), '{"any": {"x": [1, {"y": "z"}]}}'),
        (written("f", a=" two\n\nlines \n"), '{"a": " two\\n\\nlines \\n"}'),
        (written("f", a=""), '{"a": ""}'),
        (written("f"), "{}"),
        (written("unknown", x="y"), '{"x": "y"}'),
        (written("f", a=f"see {CLOSE}\n</function> <parameter=n>\n"), None),
        (written("f", a="<tool_call>\n<function=g>\n</tool_call> </parameter>\nand"), None),
        (written("f", any={"x": "</parameter> </function> </tool_call>"}), None),
        (
            "<tool_call><function=f><parameter=a>x</parameter><parameter=n>3</parameter></function></tool_call>",
            '{"a": "x", "n": 3}',
        ),
        ("<tool_call>\n<function=f>\n<parameter=a>\nx</parameter>\n</function>\n</tool_call>", '{"a": "x"}'),
        (written("f", a="x").replace("</function>\n", "<parameter=a>\ny\n</parameter>\n</function>\n"), '{"a": "y"}'),
    ],
)
def test_a_call_is_read_with_its_arguments_typed(
    tokenizer: Tokenizer, call: str, arguments: str | None, by_id: bool
) -> None:
    parser = read(tokenizer, f"hm\n</think>\n\nSo:\n\n{call}\n{written('f', n=1)}\n", by_id=by_id)
    parsed = parser.finish(STOP)[1]
    assert not parsed.faults
    assert (parsed.message.reasoning, parsed.message.content) == ("hm", "So:")
    first, second = parsed.message.tool_calls
    assert second.arguments == '{"n": 1}'
    if arguments is not None:
        assert first.arguments == arguments
    else:
        (value,) = json.loads(first.arguments).values()
        assert call == written("f", **{"any" if isinstance(value, dict) else "a": value})


MALFORMED = [
    ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>", ParseProblem.TOOL_CALL_WRONG_SHAPE),
    ("<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</tool_call>", ParseProblem.TOOL_CALL_WRONG_SHAPE),
    ("<tool_call>\n<function=>\n</function>\n</tool_call>", ParseProblem.TOOL_CALL_WRONG_SHAPE),
    ('<tool_call>\n{"name": "f"}\n</tool_call>', ParseProblem.TOOL_CALL_WRONG_SHAPE),
    ("<tool_call></tool_call>", ParseProblem.TOOL_CALL_WRONG_SHAPE),
    (written("f", a="x").replace("</function>\n", "</function>\nmore"), ParseProblem.TOOL_CALL_WRONG_SHAPE),
]
UNCLOSED = ["<tool_call>", "<tool_call>\n<function=f>\n<parameter=a>\nx", written("f", a="x")[: -len(CLOSE)]]


@pytest.mark.parametrize(("bad", "problem"), MALFORMED)
def test_a_malformed_call_is_text_and_spoils_no_other(tokenizer: Tokenizer, bad: str, problem: ParseProblem) -> None:
    ids = [tokenizer.encode(text) for text in ("</think>\n\n", bad, "\n" + written("f", n=1))]
    parser = ReplyParser(
        tokenizer, QWEN3_5.syntax, Reading(tools=(TOOL,), prompt_end=QWEN3_5.syntax.prompt_end("<think>\n"))
    )
    for piece in ids:
        parser.feed(piece)
    parsed = parser.finish(STOP)[1]
    (fault,) = parsed.faults
    assert (fault.problem, fault.seen) == (problem, bad)
    assert (fault.start, fault.end) == (len(ids[0]), len(ids[0]) + len(ids[1]))
    assert [call.arguments for call in parsed.message.tool_calls] == ['{"n": 1}']
    assert parsed.message.content == f"{bad}\n"


@pytest.mark.parametrize("bad", UNCLOSED)
def test_a_call_that_is_not_closed_is_text(tokenizer: Tokenizer, bad: str) -> None:
    parsed = read(tokenizer, f"</think>\n\n{written('f', n=1)}\n{bad}").finish(STOP)[1]
    assert [fault.problem for fault in parsed.faults] == [ParseProblem.TOOL_CALL_UNCLOSED]
    assert [call.arguments for call in parsed.message.tool_calls] == ['{"n": 1}']


PIECES = st.sampled_from(
    ["<parameter=", "a>", "\n", "</parameter>", "<function=f>", "</function>", CLOSE, " ", "<", "x", "é", "\x1c"]
)


@given(text=st.lists(PIECES | st.text(max_size=3), max_size=24).map("".join), data=st.data())
def test_where_a_block_ends_does_not_depend_on_the_pieces_that_it_comes_in(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    scanner = QWEN_XML_CALLS.scanner("<tool_call>")
    found = next((end for cut in (*cuts, len(text)) if (end := scanner.find(text[:cut])) is not None), None)
    assert found == QWEN_XML_CALLS.scanner("<tool_call>").find(text)
    if found is not None:
        assert text[slice(*found)] == CLOSE


@given(
    values=st.dictionaries(
        st.sampled_from(["a", "n", "any", "é x"]),
        st.lists(PIECES | st.text(max_size=4), max_size=8).map("".join),
        min_size=1,
    )
)
def test_arguments_are_read_as_they_were_written_unless_they_end_a_value(values: dict[str, str]) -> None:
    tool = Tool(name="f", json="{}", parameters_json='{"additionalProperties": {"type": "string"}}')
    call = written("f", **values)
    body = call.removeprefix("<tool_call>").removesuffix(CLOSE)
    ends = ("</parameter>", "</function>")
    if any(end in value for value in values.values() for end in ends):
        return
    scanned = QWEN_XML_CALLS.scanner("<tool_call>").find(call.removeprefix("<tool_call>"))
    assert scanned == (len(body), len(body) + len(CLOSE))
    found = QWEN_XML_CALLS.read("<tool_call>", body, {"f": tool})
    assert isinstance(found, tuple)
    assert [json.loads(one.arguments) for one in found] == [values]


def test_no_value_ends_at_a_marker_that_nothing_follows() -> None:
    text = "\n<function=f>\n<parameter=a>\n" + "</parameter> </function> <" * 3000
    scanner = QWEN_XML_CALLS.scanner("<tool_call>")
    assert all(scanner.find(text[:end]) is None for end in range(0, len(text), 2))
    ended = text + "\n</parameter>\n</function>\n"
    assert scanner.find(ended + CLOSE) == (len(ended), len(ended) + len(CLOSE))


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "^x"}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}}},
        {"properties": {"a>b": {"type": "string"}}},
        {"properties": {"a": {"enum": ["x", "a</parameter>b"]}}},
        {"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}},
        {"properties": {"a": {"$ref": "https://example.org/a"}}},
        {"properties": [], "required": ["a"]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]},
    ],
)
def test_a_schema_that_bare_text_cannot_be_held_to_is_refused(parameters: dict[str, object]) -> None:
    tool = Tool(name="f", json="{}", parameters_json=json.dumps(parameters))
    with pytest.raises(InvalidRequest, match="cannot be forced") as caught:
        forced_calls([tool], ToolChoice(mode=ToolMode.REQUIRED), True, QWEN3_5.syntax, {})
    assert caught.value.blame == Blame(RequestPart.TOOL_CHOICE)


KEYWORDS = [
    "type",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "minLength",
    "maxLength",
    "pattern",
    "properties",
    "required",
    "$ref",
]
TYPES = st.sampled_from(["string", "integer", "object", "null", "boolean"])
SCHEMAS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 3)
    | TYPES
    | st.sampled_from(["#", "#/properties/a", "\n</parameter>\n", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=4),
    max_leaves=12,
)


@given(
    parameters=st.dictionaries(st.sampled_from(["properties", "required", "additionalProperties", "$defs"]), SCHEMAS)
)
def test_any_schema_makes_a_grammar_or_is_refused(parameters: dict[str, object]) -> None:
    tool = Tool(name="f", json="{}", parameters_json=json.dumps(parameters))
    try:
        grammar = forced_calls([tool], ToolChoice(mode=ToolMode.REQUIRED), True, QWEN3_5.syntax, {})
    except InvalidRequest:
        return
    assert grammar is not None
    assert grammar.source.startswith("start: one_call")


HELD = {
    "type": "object",
    "properties": {
        "short": {"type": "string", "minLength": 2, "maxLength": 3},
        "pick": {"enum": ["x y", 3, None]},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "deep": {"type": "object", "properties": {"n": {"type": "number"}}, "additionalProperties": False},
        "free": {"type": ["string", "null"]},
    },
    "required": [],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "is_admitted"),
    [
        ({}, True),
        ({"short": "ab"}, True),
        ({"short": "éé𝄞"}, True),
        ({"short": "a"}, False),
        ({"short": "abcd"}, False),
        ({"pick": "x y"}, True),
        ({"pick": "3"}, True),
        ({"pick": "null"}, True),
        ({"pick": "y"}, False),
        ({"flag": "true"}, True),
        ({"flag": "True"}, False),
        ({"maybe": "17"}, True),
        ({"maybe": "x"}, False),
        ({"deep": {"n": 1.5}}, True),
        ({"deep": {"m": 1.5}}, False),
        ({"free": "two\nlines </tool_call> <parameter=a>"}, True),
        ({"free": "x</parameter>"}, False),
        ({"free": "x", "short": "ab"}, False),
        ({"short": "ab", "free": ""}, True),
        ({"other": "x"}, False),
    ],
)
def test_a_forced_value_is_held_to_its_schema(
    tokenizer: Tokenizer, arguments: dict[str, object], is_admitted: bool
) -> None:
    tool = Tool(name="f", json="{}", parameters_json=json.dumps(HELD))
    grammar = forced_calls([tool], ToolChoice(mode=ToolMode.REQUIRED), False, QWEN3_5.syntax, tokenizer.added_tokens)
    assert grammar is not None
    backend = LlguidanceBackend(tokenizer, vocab_size=tokenizer.vocab_size, eos_ids=(END_ID,))
    state = backend.compile(grammar).start()
    for token_id in tokenizer.encode(written("f", **arguments)):
        if not state.allowed()[token_id]:
            assert not is_admitted
            return
        state.accept(token_id)
    assert is_admitted
    assert state.allowed()[END_ID]
