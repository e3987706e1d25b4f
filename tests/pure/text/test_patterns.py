"""Patterns of texts and of JSON: what their regular expression admits, and that their GBNF admits the same."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.llguidance import LlguidanceBackend
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.grammar.json_patterns import json_rules
from stenograph.text.grammar.patterns import (
    ROOT,
    Chars,
    Literal,
    Pattern,
    Repeated,
    RuleName,
    Unwritable,
    as_gbnf,
    as_regex,
    seq,
    text_without,
)

WORDS = [["</parameter>", "</function>"], ["</think>"], ["]<]minimax[>["], ["</"], ["[/THINK]"]]
END, VOCAB = 2, 320
TOKENIZER = Tokenizer(tiny_tokenizer_json())


def rules_of(schema: object) -> dict[str, Pattern]:
    rules: dict[str, Pattern] = {}
    json_rules(schema, ROOT, rules)
    return rules


def admits(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(TOKENIZER, vocab_size=VOCAB, eos_ids=(END,))


def gbnf_admits(backend: LlguidanceBackend, gbnf: str, text: str) -> bool:
    state = backend.compile(Grammar(kind=GrammarKind.EBNF, source=gbnf)).start()
    for id_ in TOKENIZER.encode_plain(text):
        if not state.allowed()[id_]:
            return False
        state.accept(id_)
    return bool(state.allowed()[END])


# -- text


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
@given(data=st.data())
def test_a_text_without_words_has_none_of_them_up_to_its_end(words: list[str], data: st.DataObject) -> None:
    pieces = [word[:cut] for word in words for cut in range(1, len(word) + 1)]
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=2)), max_size=6)))
    pattern = as_regex({ROOT: text_without(words)})
    barred = words if words != WORDS[2] else ["]<"]  # its first character comes again in it
    assert admits(pattern, text) == (not any(word in text for word in barred))
    filled = as_regex({ROOT: text_without(words, is_empty_too=False)})
    assert admits(filled, text) == (admits(pattern, text) and text != "")
    begun = as_regex({ROOT: text_without(words, not_first="{[")})
    assert admits(begun, text) == (admits(pattern, text) and not text.startswith(("{", "[")))


@settings(max_examples=30)
@given(
    text=st.text(
        alphabet=st.characters(exclude_categories=["Cc", "Cs"], include_characters="\n\r\t"), min_size=1, max_size=8
    )
)
def test_a_text_is_admitted_as_it_is_in_both_notations(backend: LlguidanceBackend, text: str) -> None:
    rules: dict[str, Pattern] = {ROOT: Literal(text)}
    assert admits(as_regex(rules), text)
    assert gbnf_admits(backend, as_gbnf(rules), text)


@pytest.mark.parametrize("char", "\0\x1f\x7f")
def test_gbnf_has_no_text_with_a_control_character(char: str) -> None:
    with pytest.raises(Unwritable, match="control character"):
        as_gbnf({ROOT: Literal(f"a{char}")})


@given(chars=st.sets(st.sampled_from('-<][\\"\n\x00 ｜a'), min_size=1), others=st.booleans(), char=st.characters())
def test_a_class_holds_its_characters_and_no_others(chars: set[str], others: bool, char: str) -> None:
    pattern = as_regex({ROOT: Chars([(one, one) for one in sorted(chars)], others=others)})
    for one in {*chars, char}:
        assert admits(pattern, one) == ((one in chars) != others), pattern


def test_a_rule_within_itself_ends_in_a_regular_expression() -> None:
    nested = {ROOT: seq(Literal("("), Repeated(RuleName(ROOT), 0, 1), Literal(")"))}
    assert [admits(as_regex(nested), "(" * n + ")" * n) for n in range(5)] == [False, True, True, True, False]
    with pytest.raises(Unwritable, match="contains itself"):
        as_regex({ROOT: seq(Literal("("), RuleName(ROOT))})


def test_a_regular_expression_has_a_longest_length() -> None:
    with pytest.raises(Unwritable, match="65536 characters"):
        as_regex({ROOT: Literal("a" * 70_000)})


# -- JSON

TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["name"],
        }
    },
}
SHAPES: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}},
    {"type": "object", "additionalProperties": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 12}},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "required": ["x"], "additionalProperties": {"type": "integer"}},
    {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "maxItems": 2, "minItems": 1},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 0},
    {"enum": ["a", 1, None, {"x": [True]}, 'é"\n']},
    {"type": "string", "enum": ["a", 1]},
    {"anyOf": [{"type": "integer", "minimum": 7}, {"type": "null"}], "description": "n", "default": None},
    {"type": ["string", "null"], "maxLength": 2},
    {"allOf": [{"$ref": "#/$defs/x"}], "description": "d", "$defs": {"x": {"type": "boolean"}}},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            {"type": "object", "properties": {"kind": {"const": "b"}, "n": {"type": "integer"}}, "required": ["kind"]},
        ],
        "discriminator": {"propertyName": "kind"},
    },
    {"type": "string", "format": "date-time"},
    TREE,
]


@pytest.mark.parametrize("schema", SHAPES, ids=lambda schema: json.dumps(schema)[:60])
@settings(max_examples=25)
@given(data=st.data())
def test_json_that_a_pattern_admits_is_valid_and_its_gbnf_admits_it(
    schema: dict[str, Any], backend: LlguidanceBackend, data: st.DataObject
) -> None:
    rules = rules_of(schema)
    text = data.draw(st.from_regex(as_regex(rules), fullmatch=True))
    jsonschema.validate(json.loads(text), schema)
    assert gbnf_admits(backend, as_gbnf(rules), text), text


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (SHAPES[0], {"a": '</tool_call>\n"é', "b": -3, "c": {"x": [1, 2.5e-3, None]}}),
        (SHAPES[0], {"b": 0}),
        (SHAPES[1], {}),
        (SHAPES[1], {"b": None}),
        (SHAPES[2], {"x": -0.25, "y": 11.5, "z": 0}),
        (SHAPES[4], {"x": 5}),
        (SHAPES[5], ["abc", "\n"]),
        (SHAPES[8], {"x": [True]}),
        (SHAPES[10], 123456),
        (SHAPES[13], {"kind": "b", "n": 1}),
        (TREE, {"name": "a", "below": [{"name": "b", "below": []}, {"name": "c"}]}),
        (True, [{"deep": 1}]),
    ],
)
def test_json_in_the_order_of_its_schema_is_admitted(schema: Any, value: Any, backend: LlguidanceBackend) -> None:
    rules, text = rules_of(schema), json.dumps(value, ensure_ascii=False)
    assert admits(as_regex(rules), text)
    assert gbnf_admits(backend, as_gbnf(rules), text)


def test_gbnf_admits_json_of_any_depth(backend: LlguidanceBackend) -> None:
    rules, text = rules_of({}), "[" * 9 + "]" * 9
    assert gbnf_admits(backend, as_gbnf(rules), text)
    assert not admits(as_regex(rules), text)


@given(bounds=st.lists(st.integers(-1200, 1200), min_size=2, max_size=2), value=st.integers(-1300, 1300))
def test_an_integer_is_admitted_exactly_within_its_bounds(bounds: list[int], value: int) -> None:
    low, high = sorted(bounds)
    pattern = as_regex(rules_of({"type": "integer", "minimum": low, "maximum": high}))
    for one in (value, low, high, low - 1, high + 1):
        assert admits(pattern, str(one)) == (low <= one <= high)


@given(low=st.floats(-50, 50), high=st.floats(-50, 50), data=st.data())
def test_a_number_is_within_its_bounds(low: float, high: float, data: st.DataObject) -> None:
    schema = {"type": "number", "exclusiveMinimum": low, "maximum": high}
    try:
        pattern = as_regex(rules_of(schema))
    except Unwritable:
        assert high - low < 2
        return
    assert low < float(data.draw(st.from_regex(pattern, fullmatch=True))) <= high


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "string", "pattern": "a"}, "'pattern' at '/'"),
        (
            {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 2}}},
            "'multipleOf' at '/properties/a'",
        ),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "object", "minProperties": 1}, "'minProperties'"),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, "'propertyNames'"),
        ({"not": {}}, "the type null"),
        ({"type": "text"}, 'the type "text"'),
        ({"allOf": [{}, {}]}, "'allOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may fit two"),
        ({"anyOf": [{"minimum": 1}], "minimum": 2}, "'minimum' beside and within 'anyOf'"),
        ({"$ref": "#/$defs/x"}, "leads nowhere"),
        ({"$ref": "other.json"}, "leads out"),
        ({"$ref": "#", "type": "object"}, "'type' beside a $ref"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "leads back to itself"),
        ({"enum": []}, "nothing is valid"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "nothing is valid at '/properties/a'"),
        ({"type": "string", "maxLength": 1001}, "maxLength 1001"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minLength above maxLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number is within"),
        ({"type": "integer", "minimum": "3"}, 'minimum "3"'),
        ({"type": "object", "properties": 3}, "3 in an object's place"),
        ({"type": "object", "required": "a"}, '"a" in a list\'s place'),
        ({"type": "array", "prefixItems": [{}], "minItems": 2}, "1 prefixItems"),
        (3, "3 in an object's place"),
    ],
)
def test_what_a_pattern_cannot_hold_is_refused_by_name(schema: Any, why: str) -> None:
    with pytest.raises(Unwritable, match=re.escape(why)):
        rules_of(schema)
