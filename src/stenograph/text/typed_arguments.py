"""Arguments written by a model as bare text between markers, to values as typed by the tool's JSON Schema.

Owns the reading of one such text, and of a whole call's as a JSON object. Templates of these families write a string as
it is and everything else as JSON, or, for true, false and null, as Python spells them. So only the schema can tell a
string `3` from a number. Knows nothing of markers. Nothing here raises, whatever a model or a client wrote.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec

from stenograph.core.messages import Tool

_PYTHON = {"True": "true", "False": "false", "None": "null"}
_JSON_SPACE = " \t\r\n"
_MAX_NESTED = 16
SHARED = ("$defs", "definitions")
"""Members of a whole schema needed by the schema of a parameter."""
_REF, _CHOICES = "$ref", ("anyOf", "oneOf", "allOf")
_TYPES: Mapping[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    list: {"array"},
    dict: {"object"},
}


def typed(text: str, schema: Mapping[str, object] | None) -> object:
    """The value of one argument: of a string the text, else the value of the JSON or of Python's word; else the text.

    Where the schema allows strings beside other types, the text is of another type only if it is JSON of such a type.
    """
    return msgspec.json.decode(spelled(text, schema))


def spelled(text: str, schema: Mapping[str, object] | None) -> str:
    """The same value as JSON, in the model's own spelling where this is JSON: 2.0 stays 2.0."""
    types = schema_types(schema or {})
    if types == {"string"}:
        return _quoted(text)
    bare = text.strip(_JSON_SPACE)
    bare = _PYTHON.get(bare, bare)
    try:
        value: object = msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return _quoted(text)
    return _quoted(text) if "string" in types and not types & _types_of(value) else bare


def takes_text(schema: Mapping[str, object]) -> bool:
    """Whether a bare text may be a string by this schema: it names strings, alone or beside other types."""
    return "string" in schema_types(schema)


def arguments_json(arguments: Iterable[tuple[str, str]], tool: Tool | None) -> str:
    """The JSON object of a call's arguments, given as name and text. Of a repeated name the last counts.

    `tool` is None where no tool has the call's name.
    """
    schemas = ParameterSchemas("{}" if tool is None else tool.parameters_json)
    values = {name: spelled(text, schemas.of(name)) for name, text in arguments}
    return "{" + ", ".join(f"{_quoted(name)}: {value}" for name, value in values.items()) + "}"


class ParameterSchemas:
    """The schemas of a tool's parameters, by name. `parameters_json` is whatever a client sent."""

    def __init__(self, parameters_json: str) -> None:
        self._root: Mapping[str, object] = {}
        try:
            self._root = msgspec.json.decode(parameters_json, type=dict[str, object])
        except (msgspec.DecodeError, RecursionError, ValueError):
            return

    def within(self, schema: Mapping[str, object] | None) -> "ParameterSchemas":
        """The schemas within an object or a list; `schema` is from `of` or `entry`."""
        made = ParameterSchemas("{}")
        shared = {key: self._root[key] for key in SHARED if key in self._root}
        made._root = {**shared, **(schema or {})}
        return made

    def entry(self) -> Mapping[str, object] | None:
        """The schema of a list's entries; None where nothing says it, or this is no list."""
        return self._followed(self._root.get("items")) or None

    def of(self, name: str) -> Mapping[str, object] | None:
        """The schema of a parameter, found through references, as are its choices; None where the tool says nothing."""
        properties = as_mapping(self._root.get("properties"))
        schema = self._followed(properties.get(name, self._root.get("additionalProperties")))
        choices = {key: [self._followed(one) for one in as_list(schema[key])] for key in _CHOICES if key in schema}
        return {**schema, **choices} or None

    def _followed(self, schema: object) -> Mapping[str, object]:
        for _ in range(_MAX_NESTED):
            reference = as_mapping(schema).get(_REF)
            if not isinstance(reference, str):
                break
            schema = self._pointed_at(reference)
        return as_mapping(schema)

    def _pointed_at(self, reference: str) -> object:
        found: object = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = as_mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
        return found


def schema_types(schema: Mapping[str, object], num_nested: int = 0) -> set[str]:
    """The JSON types named by a schema; none where it leaves them open."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if names := as_list(declared):
        return {name for name in names if isinstance(name, str)}
    values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    if values:
        return set[str]().union(*({"string"} if isinstance(value, str) else _types_of(value) for value in values))
    choices = [one for key in _CHOICES for one in as_list(schema.get(key))] if num_nested < _MAX_NESTED else []
    return set[str]().union(*(schema_types(as_mapping(one), num_nested + 1) for one in choices))


def _types_of(value: object) -> set[str]:
    """JSON Schema's types of a decoded value other than a string; none for a string, since it comes unquoted."""
    if isinstance(value, float):
        return {"integer", "number"} if value.is_integer() else {"number"}
    return _TYPES.get(type(value), set())


def as_mapping(value: object) -> Mapping[str, object]:
    """The value if it is an object, else an empty one."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> Sequence[object]:
    """The value if it is a list, else an empty one."""
    return cast("list[object]", value) if isinstance(value, list) else ()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
