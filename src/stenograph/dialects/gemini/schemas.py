"""Google's schemas as JSON Schema. Pure.

Google spells types in capitals (`OBJECT`), says `nullable`, and writes numbers of 64 bits as texts. Source: the Gemini
API's `Schema`, a subset of OpenAPI 3.0. Clients send such types as `responseJsonSchema` too.
"""

from collections.abc import Mapping
from typing import cast

_TYPES = {name: name.lower() for name in ("STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL")}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OF_SCHEMAS = ("properties", "$defs", "defs", "patternProperties", "definitions")
_ONE_SCHEMA = ("items", "additionalProperties", "not")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
_RENAMED = {"defs": "$defs", "ref": "$ref"}


def json_schema(schema: Mapping[str, object]) -> dict[str, object]:
    """The schema in JSON Schema's words; any that is in them already stays as it is. Its depth has been checked."""
    made: dict[str, object] = {}
    for name, value in schema.items():
        if name == "propertyOrdering" or (name == "type" and value == "TYPE_UNSPECIFIED") or name == "nullable":
            continue
        if name == "example":
            made["examples"] = [value]
            continue
        made[_RENAMED.get(name, name)] = _keyword(name, value)
    if schema.get("nullable") is True:
        _allow_null(made)
    return made


def _keyword(name: str, value: object) -> object:
    if name == "type" and isinstance(value, str):
        return _TYPES.get(value, value)
    if name in _COUNTS and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    if name in _OF_SCHEMAS and isinstance(value, dict):
        named = cast("dict[str, object]", value)
        return {key: _inner(one) for key, one in named.items()}
    if name in _SEVERAL and isinstance(value, list):
        return [_inner(one) for one in cast("list[object]", value)]
    return _inner(value) if name in _ONE_SCHEMA else value


def _inner(value: object) -> object:
    return json_schema(cast("dict[str, object]", value)) if isinstance(value, dict) else value


def _allow_null(made: dict[str, object]) -> None:
    if isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    if isinstance(choices := made.get("enum"), list) and None not in choices:
        made["enum"] = [*cast("list[object]", choices), None]
    if isinstance(choices := made.get("anyOf"), list):
        made["anyOf"] = [*cast("list[object]", choices), {"type": "null"}]
