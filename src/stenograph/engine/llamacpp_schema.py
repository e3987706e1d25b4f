"""Which JSON Schemas llama.cpp holds to, and how a choice is written in its GBNF. Pure.

llama.cpp turns `json_schema` into a grammar itself, with one of two converters, as it was built: its own, which skips
keywords that it does not know, or llguidance, which on an error generates without any grammar, and says so in the log
alone. A client cannot tell which one it talks to. So only what both hold to is let through; the rest is refused here,
by name. Source: llama.cpp's `common/json-schema-to-grammar.cpp` and `common/llguidance.cpp`.
"""

import json
from collections.abc import Mapping
from typing import cast

import msgspec

from stenograph.core.errors import InvalidRequest

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_ANYWHERE = _ANNOTATIONS | {"$schema", "$id", "$comment", "$defs", "definitions"}
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_ALONE = ("$ref", "anyOf")
"""Keywords beside which llama.cpp's own converter looks at nothing else."""
_FORMATS = frozenset({"date", "time", "date-time", "uuid"})


def check_schema(source: str) -> None:
    """Raise InvalidRequest, naming the keyword, unless llama.cpp holds to all that the schema says."""
    try:
        schema = msgspec.json.decode(source)
        _check(schema, "")
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"The JSON Schema is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("The JSON Schema is nested too deeply.") from error


def choice_grammar(source: str) -> str:
    """The strings of a JSON list as a GBNF grammar: one of them, and then the end. Raises InvalidRequest."""
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"The choices are not a JSON list of strings: {error}") from error
    if not choices or not all(choices):
        raise InvalidRequest("There must be a choice, and none may be empty.")
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices)


def _escaped(char: str) -> str:
    """A character within a GBNF literal; what is not plain goes by its code point."""
    if " " <= char <= "~" and char not in '"\\':
        return char
    return f"\\U{ord(char):08X}"


def _check(schema: object, where: str) -> None:
    if not isinstance(schema, dict):
        raise _refused(where, "a schema that is no object")
    members = cast("dict[str, object]", schema)
    for name in ("$defs", "definitions"):
        _check_each(members.get(name, {}), f"{where}/{name}")
    named = set(members) - _ANYWHERE
    for name in _ALONE:
        if name in named and len(named) > 1:
            raise _refused(where, f"{name} beside {sorted(named - {name})[0]}")
    if "$ref" in named:
        _check_reference(members["$ref"], where)
    elif "anyOf" in named:
        _check_list(members["anyOf"], f"{where}/anyOf")
    elif "enum" in named or "const" in named:
        if others := named - {"enum", "const", "type"}:
            raise _refused(where, f"{sorted(others)[0]} beside enum or const")
    else:
        _check_typed(members, named, where)


def _check_typed(members: dict[str, object], named: set[str], where: str) -> None:
    kind = members.get("type")
    if isinstance(kind, list) and named == {"type"} and all(one in _OF_TYPE for one in cast("list[object]", kind)):
        return
    if kind is None and not named:
        return
    if not isinstance(kind, str) or kind not in _OF_TYPE:
        raise _refused(where, f"the type {json.dumps(kind)[:80]}")
    if others := named - {"type"} - _OF_TYPE[kind]:
        raise _refused(where, f"{sorted(others)[0]} of {kind}")
    if members.get("format", "date") not in _FORMATS:
        raise _refused(where, f"the format {json.dumps(members['format'])[:80]}")
    _check_each(members.get("properties", {}), f"{where}/properties")
    if not isinstance(members.get("additionalProperties", True), bool):
        _check(members["additionalProperties"], f"{where}/additionalProperties")
    if "items" in members:
        _check(members["items"], f"{where}/items")
    if "prefixItems" in members:
        _check_list(members["prefixItems"], f"{where}/prefixItems")


def _check_each(schemas: object, where: str) -> None:
    if not isinstance(schemas, dict):
        raise _refused(where, "what is no object")
    for name, schema in cast("dict[str, object]", schemas).items():
        _check(schema, f"{where}/{name}")


def _check_list(schemas: object, where: str) -> None:
    if not isinstance(schemas, list) or not schemas:
        raise _refused(where, "what is no list of schemas")
    for index, schema in enumerate(cast("list[object]", schemas)):
        _check(schema, f"{where}/{index}")


def _check_reference(target: object, where: str) -> None:
    if not isinstance(target, str) or not target.startswith("#"):
        raise _refused(where, "a $ref that is not within the schema")


def _refused(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"llama.cpp does not hold to {what}, which the JSON Schema has at {(where or '/')[:200]!r}.")
