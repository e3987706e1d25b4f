"""A JSON Schema goes to llama.cpp only where it holds to all of it; with one that it cannot compile it draws freely."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import InvalidRequest, UpstreamInvalid
from stenograph.core.types import Grammar, GrammarKind, Prompt, RequestId, SamplingParams, token_ids
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.llamacpp.adapter import LlamaCpp, LlamaCppReading
from stenograph.engine.llamacpp.schema import MAX_SCHEMA_BYTES, schema_as_sent
from stenograph.engine.llamacpp.text import Pieces, is_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
KEYWORDS = (
    *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems"),
    *("minLength", "maxLength", "format", "minimum", "exclusiveMaximum", "enum", "const", "anyOf", "$ref", "$defs"),
    *("$schema", "$id", "title"),
)
NEAR_SCHEMAS = st.recursive(
    JSON | st.sampled_from(["object", "array", "string", "integer", "#", "#/$defs/a", "date"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS) | st.just("a"), inner, max_size=4)
    ),
    max_leaves=12,
)
END = 256
PIECES = Pieces([*(bytes([byte]) for byte in range(256)), b""])
"""Of a model whose tokens are bytes, and an end."""


@pytest.mark.parametrize(
    "schema",
    [
        "{}",
        '{"type":"object","properties":{"a":{"type":"integer","minimum":1}},"required":["a"],"title":"T"}',
        '{"type":"object","additionalProperties":{"type":"string","maxLength":3}}',
        '{"type":"array","items":{"$ref":"#/$defs/a"},"$defs":{"a":{"type":"null"}},"minItems":1}',
        '{"anyOf":[{"type":"string","format":"date"},{"const":1},{"enum":["a","b"],"type":"string"}]}',
        '{"type":["string","null"]}',
        '{"type":"array","prefixItems":[{"type":"number"}]}',
        '{"type":"array","prefixItems":[{},{}],"minItems":2,"maxItems":2}',
        '{"type":"object","properties":{"n":{"$ref":"#"},"m":{"$ref":"#/properties/n"}},"required":["n"]}',
        '{"anyOf":[{"type":"array","items":{"$ref":"#"}},{"type":"null"}]}',
        '{"$schema":"http://json-schema.org/draft-07/schema#","$id":"x","type":"integer","minimum":-3,"maximum":0}',
        '{"enum":[1,1.5],"type":"number"}',
        '{"enum":[1,null],"type":["integer","null"]}',
    ],
)
def test_a_schema_that_llama_cpp_holds_to_is_sent(schema: str) -> None:
    schema_as_sent(schema)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ('{"type":"foo"}', "foo"),
        ('{"type":"number","minimum":3}', "minimum"),
        ('{"type":"object","patternProperties":{}}', "patternProperties"),
        ('{"type":"string","pattern":"a"}', "pattern"),
        ('{"type":"string","format":"email"}', "email"),
        ('{"not":{}}', "type"),
        ('{"oneOf":[{}]}', "type"),
        ('{"anyOf":[{}],"type":"string"}', "anyOf beside type"),
        ('{"$ref":"#/a","minimum":1}', "$ref beside minimum"),
        ('{"$ref":"http://example.org/a"}', "$ref"),
        ('{"anyOf":[]}', "list"),
        ('{"enum":[1],"minimum":1}', "minimum"),
        ('{"type":"array","items":true}', "no object"),
        ('{"type":"object","properties":{"a":{"allOf":[{}]}}}', "/properties/a"),
        ('{"type":"object","properties":[]}', "no object"),
        ('{"$defs":{"a":{"type":"object","minProperties":1}}}', "minProperties"),
        ('{"type":"object","x-guidance":{}}', "x-guidance"),
        ("true", "no object"),
        ("{", "not JSON"),
        ("[" * 30_000, "nested"),
        ('{"type":["string","foo"]}', "foo"),
    ],
)
def test_a_schema_that_llama_cpp_would_not_hold_to_is_refused_by_name(schema: str, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        schema_as_sent(schema)
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        # what nothing satisfies, or means nothing
        ('{"$ref":"#/$defs/missing"}', "no schema"),
        ('{"type":"object","properties":{"a":{"$ref":"#foo"}}}', "not within the schema"),
        ('{"type":"integer","minimum":"x"}', "minimum"),
        ('{"type":"array","items":{},"minItems":"2"}', "minItems that is no count"),
        ('{"type":"string","minLength":-1}', "minLength that is no count"),
        ('{"type":"string","minLength":5,"maxLength":2}', "minLength over maxLength"),
        ('{"type":"integer","minimum":5,"maximum":2}', "bounds with no integer"),
        ('{"type":"array","items":{},"minItems":3,"maxItems":1}', "minItems over maxItems"),
        ('{"type":"object","properties":{"a":{"type":[]}},"required":["a"]}', "type"),
        ('{"type":"object","required":"x"}', "required"),
        ('{"type":"object","required":[1]}', "required"),
        ('{"enum":[]}', "enum"),
        ('{"enum":"a"}', "enum"),
        ('{"const":"abc","type":"integer"}', "another type"),
        ('{"type":"integer","exclusiveMinimum":3,"exclusiveMaximum":4}', "bounds with no integer"),
        ('{"type":"object","properties":{"a":{"type":"string","minLength":5,"maxLength":2}}}', "/properties/a"),
        # what it compiles to a grammar of nothing
        ('{"$ref":"#"}', "leads back"),
        ('{"anyOf":[{"$ref":"#"},{"type":"null"}]}', "leads back"),
        ('{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}', "leads back"),
        # where the two converters differ
        ('{"type":"object","required":["b"],"additionalProperties":false}', '"b", which is not in properties'),
        ('{"type":"object","properties":{"a":{}},"required":["b"]}', '"b", which is not in properties'),
        ('{"type":"string","format":"date","minLength":20}', "format beside minLength"),
        ('{"enum":["a",1],"type":"string"}', "another type"),
        ('{"enum":["a"],"const":"a"}', "const beside enum"),
        ('{"type":"integer","minimum":1.5}', "minimum"),
        ('{"type":"integer","minimum":true}', "minimum"),
        ('{"type":"integer","maximum":9007199254740993}', "maximum"),
        ('{"type":"integer","minimum":1,"exclusiveMinimum":3}', "minimum beside exclusiveMinimum"),
        ('{"type":"array","minItems":1}', "minItems without items"),
        ('{"type":"array","prefixItems":[{}],"items":{}}', "prefixItems beside items"),
        ('{"type":"array","prefixItems":[{}],"minItems":2}', "not met by 1 prefixItems"),
        ('{"$schema":"http://json-schema.org/draft-07/schema#","type":"array","prefixItems":[{}]}', "older $schema"),
        ('{"$schema":"http://json-schema.org/draft-04/schema#","type":"null"}', "$schema"),
        ('{"$schema":4}', "$schema"),
        ('{"type":"object","properties":{"a":{"$id":"http://example.org/","type":"null"}}}', "$id"),
        # what nobody has looked into
        ('{"default":{"type":"string","pattern":"a"},"$ref":"#/default"}', "no schema"),
        ('{"$defs":{"a/b":{}},"$ref":"#/$defs/a/b"}', "no schema"),
        ('{"$defs":{"a~b":{}},"$ref":"#/$defs/a~0b"}', "~"),
        ('{"type":[[]]}', "type"),
        ('{"type":"string","format":[]}', "format"),
    ],
)
def test_a_schema_that_does_not_compile_or_not_to_what_it_says_is_refused(schema: str, named: str) -> None:
    for _ in range(2):  # a verdict that is remembered is the same
        with pytest.raises(InvalidRequest) as caught:
            schema_as_sent(schema)
        assert named in caught.value.message


def test_a_schema_may_be_long_but_not_too_long_to_compile_between_other_turns() -> None:
    filler = "a" * (MAX_SCHEMA_BYTES - len('{"title":""}'))
    schema_as_sent(json.dumps({"title": filler}, separators=(",", ":")))
    for text in (filler + "a", filler[:-1] + "é"):
        with pytest.raises(InvalidRequest, match="at most 32768 bytes"):
            schema_as_sent(json.dumps({"title": text}, separators=(",", ":"), ensure_ascii=False))


@given(JSON | NEAR_SCHEMAS | st.dictionaries(st.sampled_from(KEYWORDS), NEAR_SCHEMAS, max_size=4))
def test_any_schema_is_let_through_or_refused(schema: Any) -> None:
    with suppress(InvalidRequest):
        schema_as_sent(json.dumps(schema))


# -- whether it was held to


def end_of(text: bytes, *, kind: GrammarKind, stop_type: str = "eos", stop_token_ids: tuple[int, ...] = ()) -> None:
    """Read a turn whose tokens are these bytes, and an end token."""
    params = SamplingParams(grammar=Grammar(kind=kind, source="{}"), stop=(",",), stop_token_ids=stop_token_ids)
    asked = GenerateRequest(request_id=RequestId("r"), prompt=Prompt(new_ids=token_ids([1])), params=params)
    capabilities = LlamaCpp(AdapterOptions(model="m", vocab_size=END + 1), PIECES).capabilities
    reading = LlamaCppReading(asked, capabilities, PIECES)
    for place, id_ in enumerate((*text, END), start=1):
        row = {"id": id_, "logprob": -0.5, "top_logprobs": []}
        told = {"content": "", "tokens": [id_], "stop": False, "tokens_predicted": place, "tokens_evaluated": 1}
        reading.event(json.dumps({**told, "completion_probabilities": [row]}).encode())
        if reading.has_enough:
            break
    else:
        told = {"tokens": [], "stop": True, "tokens_predicted": len(text) + 1, "tokens_evaluated": 1}
        reading.event(json.dumps({**told, "stop_type": stop_type, "stopping_word": ","}).encode())
    asyncio.run(reading.settle(never_asked))
    reading.end()


async def never_asked(method: str, target: str, body: bytes = b"") -> HttpReply:
    raise AssertionError("there was nothing to ask")


@pytest.mark.parametrize("kind", [GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA])
@pytest.mark.parametrize("stop_token_ids", [(), (END,)])
@pytest.mark.parametrize("text", [b"Sure! {}", b"", b'{"a": ', b"{} {}", b"NaN", b'"\xff"'])
def test_a_reply_under_a_json_grammar_that_ends_and_is_no_json_is_refused(
    text: bytes, stop_token_ids: tuple[int, ...], kind: GrammarKind
) -> None:
    with pytest.raises(UpstreamInvalid) as caught:
        end_of(text, kind=kind, stop_token_ids=stop_token_ids)
    assert caught.value.law == "grammar_held"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (b' {"a": [1, "\xc3\xa9"]}\n', {}),
        (b' {"a": 1}', {"stop_token_ids": (END,)}),
        (b'{"a": 1', {"stop_type": "limit"}),
        (b'{"a": 1', {"stop_type": "word"}),
        (b'{"a": 1', {"stop_token_ids": (ord("1"),)}),
        (b"Sure!", {"kind": GrammarKind.EBNF}),
    ],
)
def test_a_reply_that_is_json_or_that_something_else_ended_is_passed_on(text: bytes, options: dict[str, Any]) -> None:
    end_of(text, **{"kind": GrammarKind.JSON_SCHEMA, **options})


def test_json_has_numbers_of_any_size_and_any_depth() -> None:
    assert is_json(b"1e999")
    assert is_json(b"9" * 5000)
    assert is_json(b"[" * 100_000 + b"]" * 100_000)
    assert is_json(b'"\\ud800"')
