"""xgrammar is told only what it holds to; where it is not installed, the start says how to install it."""

import contextlib
import importlib.util
import json

import pytest
from hypothesis import given

from stenograph.core.errors import StartupError
from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.base import BadGrammar
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.grammar.xgrammar_schema import check_regex, check_schema
from stenograph.embedded.settings import GrammarBackendKind

from .grammar_walks import LIKE_SCHEMAS, compiler, tokenizer

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "number", "multipleOf": 3}, "multipleOf"),
        ({"type": "string", "minLength": 2}, "minLength"),
        ({"type": "string", "pattern": "^a$", "maxLength": 2}, "maxLength"),
        ({"type": "string", "pattern": "^a$", "format": "date"}, "either pattern or format"),
        ({"type": "string", "pattern": '^"$'}, "JSON escapes"),
        ({"type": "string", "pattern": "^\\\\$"}, "JSON escapes"),
        ({"type": "string", "pattern": "a|^b"}, "at the start"),
        ({"type": "string", "format": "iri"}, "/format"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "array", "items": [{}]}, "/items"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "'b'"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a"),
        ({"$defs": {"a": {"if": {}}}}, "/$defs/a"),
        ({"anyOf": [{"oneOf": []}]}, "/anyOf/0"),
        ({"additionalProperties": {"minimum": 1}, "type": "object"}, "/additionalProperties"),
        ({"anyOf": [{}], "type": "integer"}, "beside anyOf: type"),
        ({"$ref": "#/$defs/a", "minimum": 4, "$defs": {"a": {}}}, "beside $ref: minimum"),
        ({"$ref": "http://localhost/x"}, "/$ref"),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf"),
        ({"type": "integer", "enum": [1, "x"]}, "of the given type"),
        ({"type": "integer", "const": True}, "of the given type"),
        ({"const": 1, "enum": [2]}, "enum"),
        ({"minimum": 5}, "minimum"),
        ({"type": "nonsense"}, "unknown type"),
        ({"type": [["string"]]}, "unknown type"),
        ({"properties": {"a": 3}, "type": "object"}, "/properties/a"),
        (3, "object or a boolean"),
    ],
)
def test_a_keyword_that_xgrammar_ignores_is_refused_by_name(schema: object, named: str) -> None:
    with pytest.raises(BadGrammar) as raised:
        check_schema(json.dumps(schema))
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"minimum": {"type": "integer", "minimum": 1}}, "required": ["minimum"]},
        {"type": "string", "pattern": "^[a-z]+\\.[^^$]$", "description": "what allOf is for"},
        {"type": ["integer", "null"], "maximum": 3},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "number", "const": 1},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"const": None}, {"type": "array", "items": True}]}}},
    ],
)
def test_a_schema_that_xgrammar_enforces_is_accepted(schema: object) -> None:
    check_schema(json.dumps(schema))


@given(schema=LIKE_SCHEMAS)
def test_any_json_is_let_through_or_refused(schema: object) -> None:
    with contextlib.suppress(BadGrammar):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize("pattern", ["^a$", "[$^]", "[]a", "\\$\\^", "a\\\\", "^", "$", "", "[^a]", "^\\[$"])
def test_an_anchor_stands_at_an_end_or_for_itself(pattern: str) -> None:
    check_regex(pattern)


@pytest.mark.parametrize("pattern", ["a^", "$a", "(^a)", "a$|b", "\\\\^a", "[a]^", "^^"])
def test_an_anchor_within_a_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(BadGrammar, match="xgrammar supports"):
        check_regex(pattern)


def test_a_schema_that_is_no_json_is_refused_in_one_line() -> None:
    for source in ("", "{", "[" * 100_000, '{"a": NaN}', '"\\ud800"'):
        with pytest.raises(BadGrammar) as raised:
            check_schema(source)
        assert "\n" not in str(raised.value)


@pytest.mark.skipif(HAS_XGRAMMAR, reason="xgrammar is installed")
def test_where_xgrammar_is_not_installed_the_start_says_how_to_install_it() -> None:
    with pytest.raises(StartupError, match=r"pip install xgrammar"):
        GrammarCompiler(tokenizer, vocab_size=300, eos_ids=(2,), backend=GrammarBackendKind.XGRAMMAR)


def test_with_xgrammar_there_are_all_grammars_but_lark() -> None:
    grammars = compiler(GrammarBackendKind.XGRAMMAR)
    assert grammars.kinds == frozenset(GrammarKind) - {GrammarKind.LARK}
    lark = grammars.compile(Grammar(kind=GrammarKind.LARK, source="start: /a/"), lambda: None)
    assert isinstance(lark.exception(), BadGrammar)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "("),
        (GrammarKind.REGEX, "(?=a)b"),
        (GrammarKind.REGEX, "[^\\s\\S]"),
        (GrammarKind.EBNF, 'root ::= "a'),
        (GrammarKind.EBNF, 'other ::= "a"'),
        (GrammarKind.EBNF, "root ::= " + "(" * 20_000),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/none"}'),
        (GrammarKind.CHOICE, "[]"),
        (GrammarKind.CHOICE, json.dumps(["x" * 40_000])),
    ],
)
def test_a_grammar_that_xgrammar_does_not_compile_is_refused_in_one_line(kind: GrammarKind, source: str) -> None:
    future = compiler(GrammarBackendKind.XGRAMMAR).compile(Grammar(kind=kind, source=source), lambda: None)
    with pytest.raises(BadGrammar) as raised:
        future.result()
    assert "\n" not in str(raised.value)
