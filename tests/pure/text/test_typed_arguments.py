"""Arguments that come as bare text are read as the tool's schema types them, whatever either of the two holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.messages import Tool
from stenograph.text.typed_arguments import ParameterSchemas, arguments_json, spelled, typed


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        (" true\n", {"type": "string"}, " true\n"),
        ("null", {"type": ["string"]}, "null"),
        ("3", {"type": "integer"}, 3),
        (" 3 ", {"type": "integer"}, 3),
        ("2.0", {"type": "number"}, 2.0),
        ("three", {"type": "integer"}, "three"),
        ("True", {"type": "boolean"}, True),
        ("False", None, False),
        ("None", None, None),
        ("None", {"type": "string"}, "None"),
        ('{"a": [1, "x"]}', {"type": "object"}, {"a": [1, "x"]}),
        ('{"a": [1, "x"]}', {"type": "string"}, '{"a": [1, "x"]}'),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ("[1]", {"type": "array"}, [1]),
        ("1", {}, 1),
        ("one", None, "one"),
        ("", None, ""),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("3", {"type": ["string", "null"]}, "3"),
        ('"3"', {"type": ["string", "null"]}, '"3"'),
        ("3", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, 3),
        ("3.5", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "3.5"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("1", {"const": "1"}, "1"),
        ("[" * 100_000, None, "[" * 100_000),
    ],
)
def test_an_argument_is_of_the_type_that_its_schema_says(
    text: str, schema: dict[str, object] | None, value: object
) -> None:
    found = typed(text, schema)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["2.0", "1e3", "123456789012345678901234567890", '{"a":  1}'])
def test_json_keeps_the_models_spelling(text: str) -> None:
    assert spelled(text, {"type": ["number", "object"]}) == text


SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/text"}, "b": {"$ref": "#/$defs/b"}, "c": {"$ref": "elsewhere"}, "d": True},
    "additionalProperties": {"type": "string"},
    "$defs": {"text": {"type": "string"}, "b": {"$ref": "#/$defs/b"}},
}


def test_a_parameters_schema_is_found_through_references_which_may_lead_nowhere_or_round() -> None:
    schemas = ParameterSchemas(json.dumps(SCHEMA))
    assert schemas.of("a") == {"type": "string"}
    assert [schemas.of(name) for name in "cd"] == [None, None]
    assert typed("x", schemas.of("b")) == "x"
    assert schemas.of("more") == {"type": "string"}
    assert ParameterSchemas("[]").of("a") is None
    assert ParameterSchemas("{").of("a") is None


def test_a_calls_arguments_are_one_object_in_which_a_name_that_comes_twice_counts_last() -> None:
    tool = Tool(name="t", json="{}", parameters_json=json.dumps(SCHEMA))
    pairs = [("a", "1"), ("c", "2.0"), ('q"', "x\ny"), ("a", "2")]
    assert arguments_json(pairs, tool) == '{"a": "2", "c": 2.0, "q\\"": "x\\ny"}'
    assert arguments_json([("a", "1")], None) == '{"a": 1}'
    assert arguments_json([], None) == "{}"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(text=st.text(), schema=st.none() | st.dictionaries(st.sampled_from(["type", "enum", "anyOf", "const"]), JSON))
def test_any_text_under_any_schema_has_a_value(text: str, schema: dict[str, object] | None) -> None:
    typed(text, schema)


@given(value=JSON)
def test_what_a_template_writes_of_a_value_is_read_as_that_value(value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    assert typed(text, {"type": names.get(type(value), "null")}) == value
