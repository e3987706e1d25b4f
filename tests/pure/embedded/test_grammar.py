"""What a grammar admits is in its language, by an independent checker's word; every mask admits a continuation."""

import json
import re

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.base import BadGrammar
from stenograph.embedded.grammar.cache import MAX_CACHED, MAX_CACHED_CHARS, GrammarCompiler

from .grammar_walks import compiler, start, tokenizer, walk

SEEDS = st.integers(0, 2**32)

LITERALS = st.text("ab1 -é☃", min_size=1, max_size=3)
CLASSES = st.sampled_from(["[a-c]", "[0-9x]", "[^a-z\\n]", "[A-Z_]", "[é☃-]"])


def more_regexes(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.builds("(?:{}){}".format, inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{0,2}", "{2,}"]))
    return st.one_of(st.builds("{}{}".format, inner, inner), st.builds("(?:{}|{})".format, inner, inner), repeated)


REGEXES = st.recursive(st.one_of(LITERALS, CLASSES), more_regexes, max_leaves=6)

NAMES = st.sampled_from(["a", "b", "name", "é", 'q"'])
LEAVES = st.one_of(
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"type": "integer"}, {"const": {"x": [1]}}]
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-200, 200),
        st.integers(0, 300),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 4)] * 2
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none()), min_size=1, max_size=4),
    ),
    st.sampled_from([{"type": "string", "pattern": "^[a-c]+[0-9]{2}$"}, {"type": "string", "format": "date"}]),
    st.just({"type": ["integer", "null"]}),
)


def more_schemas(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    properties = st.dictionaries(NAMES, inner, max_size=3)
    objects = st.builds(
        lambda named, required, rest: {
            "type": "object",
            "properties": named,
            "required": [name for name, is_in in zip(named, required, strict=False) if is_in],
            "additionalProperties": rest,
        },
        properties,
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.booleans(),
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return st.one_of(
        objects, arrays, st.builds(lambda either: {"anyOf": either}, st.lists(inner, min_size=1, max_size=3))
    )


REFUSED = "integers above 9007199254740992 are not exact"
"""What may be said of the schemas above."""

SCHEMAS = st.recursive(LEAVES, more_schemas, max_leaves=6)


@given(source=REGEXES, seed=SEEDS)
def test_a_walk_through_a_regex_matches_it(source: str, seed: int) -> None:
    text = walk(start(GrammarKind.REGEX, source), seed)
    assert text is None or re.fullmatch(source, text), f"{text!r} does not match {source!r}"


@given(schema=SCHEMAS, seed=SEEDS)
def test_a_walk_through_a_schema_is_valid(schema: dict[str, object], seed: int) -> None:
    try:
        state = start(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    except BadGrammar as error:
        if not re.search(REFUSED, str(error)):
            raise
        return
    text = walk(state, seed, max_tokens=400)
    if text is not None:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@given(choices=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=6), seed=SEEDS)
def test_a_walk_through_choices_is_one_of_them(choices: list[str], seed: int) -> None:
    text = walk(start(GrammarKind.CHOICE, json.dumps(choices)), seed)
    assert text in choices


@given(seed=SEEDS)
def test_a_walk_through_any_object_is_one(seed: int) -> None:
    text = walk(start(GrammarKind.JSON_OBJECT, ""), seed, max_tokens=400)
    assert text is None or isinstance(json.loads(text), dict)


@given(seed=SEEDS)
def test_a_walk_through_ebnf_is_in_its_language(seed: int) -> None:
    source = 'root ::= item ("," item)* "."\nitem ::= [a-c]{2} | "(" item ")"\n'
    text = walk(start(GrammarKind.EBNF, source), seed)
    assert text is None or re.fullmatch(r"(\(*[a-c]{2}\)*,)*\(*[a-c]{2}\)*\.", text)
    assert text is None or text.count("(") == text.count(")")


def test_each_of_many_choices_can_be_taken() -> None:
    choices = [f"c{number}" for number in range(2500)]
    for last in (0, 1234, 2499):
        state = start(GrammarKind.CHOICE, json.dumps(choices))
        for token_id in tokenizer().encode_plain(choices[last]):
            assert state.allowed()[token_id]
            state.accept(token_id)
        assert state.allowed()[2]


def test_a_finished_grammar_is_not_advanced() -> None:
    state = start(GrammarKind.REGEX, "ab")
    a, b = tokenizer().encode_plain("a")[0], tokenizer().encode_plain("b")[0]
    assert not state.is_finished
    state.accept(a)
    assert not state.is_finished
    state.accept(b)
    for token_id in (a, b, 1):
        assert state.is_finished
        assert state.allowed().nonzero()[0].tolist() == [2]
        state.accept(token_id)


def test_where_no_token_is_the_end_what_is_finished_says_so_and_no_mask_before_it_admits_any_other_token() -> None:
    grammars = endless()
    state = grammars.compile(Grammar(kind=GrammarKind.REGEX, source="ab?"), lambda: None).result().start()
    a, b = tokenizer().encode_plain("a")[0], tokenizer().encode_plain("b")[0]
    for token_id in (a, b):
        assert not state.is_finished
        assert state.allowed().nonzero()[0].tolist() == [token_id]
        state.accept(token_id)
    for token_id in (a, b):
        assert state.is_finished
        assert not state.allowed().any()
        state.accept(token_id)
    grammars.close()


def test_a_token_that_no_mask_admits_fails_its_request_alone() -> None:
    state, other = (start(GrammarKind.REGEX, "ab") for _ in range(2))
    with pytest.raises(BadGrammar) as raised:
        state.accept(tokenizer().encode_plain("b")[0])
    assert "\n" not in str(raised.value)
    other.accept(tokenizer().encode_plain("a")[0])
    assert other.allowed()[tokenizer().encode_plain("b")[0]]


def endless() -> GrammarCompiler:
    """Of a vocabulary in which no token is the end."""
    return GrammarCompiler(tokenizer, vocab_size=tokenizer().vocab_size, eos_ids=())


def small(num_threads: int = 1, **options: float) -> GrammarCompiler:
    return GrammarCompiler(
        tokenizer, vocab_size=tokenizer().vocab_size, eos_ids=(2,), num_threads=num_threads, **options
    )


def test_equal_grammars_are_compiled_once_and_those_least_used_are_forgotten() -> None:
    grammars = small()
    first = grammars.compile(Grammar(kind=GrammarKind.REGEX, source="a"), lambda: None)
    second = grammars.compile(Grammar(kind=GrammarKind.REGEX, source="b"), lambda: None)
    for number in range(MAX_CACHED - 1):
        grammars.compile(Grammar(kind=GrammarKind.REGEX, source=f"x{number}"), lambda: None)
        assert grammars.compile(Grammar(kind=GrammarKind.REGEX, source="a"), lambda: None) is first
    assert grammars.compile(Grammar(kind=GrammarKind.REGEX, source="b"), lambda: None) is not second
    grammars.close()


def test_large_grammars_are_fewer() -> None:
    grammars, num_chars = small(), 200_000
    sources = [json.dumps([f"{number}" + "x" * num_chars]) for number in range(2 * MAX_CACHED_CHARS // num_chars)]
    made = [grammars.compile(Grammar(kind=GrammarKind.CHOICE, source=source), lambda: None) for source in sources]
    for source, future in zip(sources[-10:], made[-10:], strict=True):
        assert grammars.compile(Grammar(kind=GrammarKind.CHOICE, source=source), lambda: None) is future
    assert grammars.compile(Grammar(kind=GrammarKind.CHOICE, source=sources[0]), lambda: None) is not made[0]
    assert len(sources) > MAX_CACHED_CHARS // num_chars
    grammars.close()


def test_the_callback_runs_when_a_grammar_is_compiled_also_for_a_cached_one() -> None:
    told: list[int] = []
    grammar = Grammar(kind=GrammarKind.REGEX, source="told")
    compiler().compile(grammar, lambda: told.append(1)).result()
    compiler().compile(grammar, lambda: told.append(2)).result()
    assert 2 in told
