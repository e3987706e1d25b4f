"""No grammar ends the process, holds a thread for ever or fills the memory: it compiles, or is refused in one line."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.base import BadGrammar
from stenograph.embedded.grammar.cache import MAX_OVERDUE, CompilerBusy, GrammarCompiler
from stenograph.embedded.grammar.llguidance_limits import MAX_INTERSECTED, MAX_PATTERN_PROPERTIES, MAX_SOURCE_CHARS

from .grammar_walks import LIKE_SCHEMAS, start, steps, tokenizer

SOURCES = st.one_of(
    st.text(max_size=60),
    st.text('root ::= "ab" | start: /[](){}*+?,&~%.<>\\\n0123A', max_size=60),
    st.text('{}[]":,0123456789.-e\\ntruefalse', max_size=60),
    LIKE_SCHEMAS.map(json.dumps),
)


def nested(begin: str, inner: str, end: str, depth: int) -> str:
    return begin * depth + inner + end * depth


def refuses(kind: GrammarKind, source: str) -> str:
    """The message; a refusal may come with the first tokens, which are computed within llguidance's limits."""
    with pytest.raises(BadGrammar) as raised:
        list(steps(start(kind, source), random.Random(0), 20))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) <= 500
    return str(raised.value)


@given(kind=st.sampled_from(GrammarKind), source=SOURCES)
def test_any_text_is_a_grammar_or_is_refused_in_one_line(kind: GrammarKind, source: str) -> None:
    try:
        for _ in steps(start(kind, source), random.Random(0), 10):
            pass
    except BadGrammar as error:
        message = str(error)
    else:
        message = "none"
    assert message
    assert "\n" not in message
    assert "<backtrace>" not in message


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.REGEX, "(a{1000}){1000}"),
        (GrammarKind.REGEX, "a{4000000000}"),
        (GrammarKind.REGEX, nested("(", "a", ")", 10_000)),
        (GrammarKind.REGEX, nested("(", "a", ")*", 500)),
        (GrammarKind.REGEX, "(?!a)b"),
        (GrammarKind.REGEX, r"(a)\1"),
        (GrammarKind.REGEX, r"[^\s\S]"),
        (GrammarKind.JSON_SCHEMA, ""),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, "3"),
        (GrammarKind.JSON_SCHEMA, "false"),
        (GrammarKind.JSON_SCHEMA, nested('{"type": "array", "items": ', "true", "}", 5_000)),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/none"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "http://localhost:1/x.json"}'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "file:///etc/hostname"}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
        (GrammarKind.JSON_SCHEMA, '{"not": {}, "x-guidance": {"lenient": true}}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 3, "maximum": 2}'),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 1000000007}'),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": "^(a{1000}){1000}$"})),
        (GrammarKind.LARK, ""),
        (GrammarKind.LARK, "start: start"),
        (GrammarKind.LARK, "start: @other"),
        (GrammarKind.LARK, "start: a{1000}\na: b{1000}\nb: c{1000}\nc: /x/"),
        (GrammarKind.LARK, "start: " + nested("(", "/a/", ")", 100_000)),
        (GrammarKind.EBNF, 'root ::= ((("x"{1000}){1000}){1000}){1000}'),
        (GrammarKind.EBNF, "root ::= " + nested("(", '"a"', ")", 20_000)),
        (GrammarKind.CHOICE, '{"a": 1}'),
        (GrammarKind.CHOICE, '["a", ""]'),
        (GrammarKind.CHOICE, '["\\ud800"]'),
        (GrammarKind.JSON_OBJECT, "anything"),
    ],
)
def test_an_impossible_grammar_is_refused(kind: GrammarKind, source: str) -> None:
    refuses(kind, source)


def ref_chain(num: int) -> str:
    named = {str(i): json.loads(nested('{"items": ', f'{{"$ref": "#/$defs/{i + 1}"}}', "}", 60)) for i in range(num)}
    return json.dumps({"$ref": "#/$defs/0", "$defs": {**named, str(num): {"type": "integer"}}})


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.JSON_SCHEMA, ref_chain(120)),
        (GrammarKind.LARK, "start: r0\n" + "".join(f'r{i}: r{i + 1} "a"\n' for i in range(8000)) + 'r8000: "x"'),
        (GrammarKind.LARK, "start: T0\n" + "".join(f"T{i}: ~T{i + 1}\n" for i in range(9000)) + 'T9000: "x"'),
        (GrammarKind.LARK, "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(9000)) + 'T9000: "x"'),
    ],
    ids=["references", "rules", "negations", "terminals"],
)
def test_a_long_chain_of_names_does_not_overflow_a_stack(kind: GrammarKind, source: str) -> None:
    """With the usual stack of 8 MiB each of these ended the process."""
    try:
        ids = list(steps(start(kind, source), random.Random(0), 5))
    except BadGrammar as error:
        ids = [len(str(error))]
    assert ids


@pytest.mark.parametrize("kind", [kind for kind in GrammarKind if kind is not GrammarKind.JSON_OBJECT])
def test_a_grammar_that_is_too_long_is_not_even_read(kind: GrammarKind) -> None:
    most = MAX_SOURCE_CHARS[kind]
    assert f"at most {most} are accepted" in refuses(kind, "a" * (most + 1))


def test_patterns_are_intersected_only_a_few_at_a_time() -> None:
    """Thirty of them took all memory there was."""
    patterns = [{"type": "string", "pattern": f".*{number}.*"} for number in range(MAX_INTERSECTED + 1)]
    assert "intersects" in refuses(GrammarKind.JSON_SCHEMA, json.dumps({"allOf": patterns}))
    beside = {"$defs": {"a": {"anyOf": patterns}}, "$ref": "#/$defs/a", "type": "string"}
    assert "intersects" in refuses(GrammarKind.JSON_SCHEMA, json.dumps(beside))
    assert "intersects" in refuses(GrammarKind.LARK, "start: %json " + json.dumps({"allOf": patterns}))
    assert "intersects" in refuses(GrammarKind.LARK, "start: T\nT: " + " & ".join(["/[ab]*/"] * (MAX_INTERSECTED + 2)))


def test_patterns_that_are_not_intersected_may_be_many() -> None:
    properties = {f"p{number}": {"type": "string", "pattern": f"^[a-z]{{1,9}}{number}$"} for number in range(100)}
    schema = json.dumps({"type": "object", "properties": properties, "description": " & ".join("a" * 20)})
    assert list(steps(start(GrammarKind.JSON_SCHEMA, schema), random.Random(0), 5))
    assert list(steps(start(GrammarKind.LARK, f"start: %json {schema}"), random.Random(0), 5))
    assert list(steps(start(GrammarKind.LARK, 'start: "' + "&" * 20 + '"'), random.Random(0), 5))


def test_pattern_properties_are_few() -> None:
    schema = {"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(MAX_PATTERN_PROPERTIES + 1)}}
    assert "patternProperties" in refuses(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def test_an_integer_that_would_be_another_is_refused() -> None:
    refused = refuses(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"const": 9007199254740993}}}')
    assert "9.007199e+15" in refused
    beyond_floats = f'{{"type": "integer", "minimum": {-(10**400)}}}'
    for kind, source in ((GrammarKind.JSON_SCHEMA, beyond_floats), (GrammarKind.LARK, f"start: %json {beyond_floats}")):
        assert "-1.000000e+400" in refuses(kind, source)
    explained = '{"type": "integer", "maximum": 9, "examples": [9007199254740993]}'
    assert list(steps(start(GrammarKind.JSON_SCHEMA, explained), random.Random(0), 5))


SLOW = [json.dumps({"type": "integer", "multipleOf": multiple}) for multiple in (52361, 52363, 52369, 52379, 52387)]


def test_a_grammar_that_takes_too_long_is_refused_and_too_many_of_them_hold_off_others() -> None:
    grammars = GrammarCompiler(tokenizer, vocab_size=tokenizer().vocab_size, eos_ids=(2,), deadline_s=1e-6)
    asked = [Grammar(kind=GrammarKind.JSON_SCHEMA, source=source) for source in SLOW]
    futures = [grammars.compile(grammar, lambda: None) for grammar in asked]
    errors = [future.exception() for future in futures]
    assert all(isinstance(error, BadGrammar) for error in errors)
    busy = [error for error in errors if isinstance(error, CompilerBusy)]
    assert len(busy) <= len(SLOW) - MAX_OVERDUE
    assert all("longer than 1e-06 s" in str(error) for error in errors)
    # A verdict is remembered; that there was none is not.
    for grammar, future, error in zip(asked, futures, errors, strict=True):
        again = grammars.compile(grammar, lambda: None)
        assert (again is future) is not isinstance(error, CompilerBusy)
    grammars.close()
