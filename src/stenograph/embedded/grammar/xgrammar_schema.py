"""Checks that xgrammar enforces all of a JSON Schema or regular expression. Pure.

xgrammar skips what it does not know: some keywords without a word, others with a line in its log, such as all of an
`allOf`. Where a string has a length, it admits control characters, which are no JSON. A constraint is kept or refused
here, never passed over; so only what tests showed xgrammar 0.2 to enforce is accepted, and the rest is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import cast

import msgspec

from stenograph.core.json_types import KINDS_OF
from stenograph.embedded.grammar.base import BadGrammar, one_line

_ANYWHERE = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"}
    | {"$defs", "definitions"}
)
"""Keywords that constrain nothing."""
_ALONE = ("$ref", "anyOf")
"""Keywords beside which xgrammar looks at nothing else."""
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_FORMATS = frozenset({"date", "time", "date-time", "uuid", "email", "ipv4", "ipv6"})
_NEEDS_ESCAPE = re.compile(r'["\x00-\x1f]|\\(?![dDwWsS.+*?()\[\]{}|^$/-])')
"""In a pattern: what spells a character that JSON escapes, or might."""


def check_schema(source: str) -> None:
    """Raise BadGrammar, naming the keyword and its place, unless xgrammar enforces all of a schema."""
    try:
        schema: object = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise BadGrammar(f"it is not JSON: {one_line(str(error))}") from error
    rest = [("", schema)]
    while rest:
        at, here = rest.pop()
        if isinstance(here, bool):
            continue
        if not isinstance(here, dict):
            raise BadGrammar(f"at {at or '/'}: a schema is an object or a boolean")
        keywords = cast("dict[str, object]", here)
        _check(at, keywords)
        rest.extend(_below(at, keywords))


def check_regex(pattern: str) -> None:
    """Raises BadGrammar for an anchor inside a pattern, which xgrammar skips."""
    is_in_class, is_escaped = False, False
    for at, char in enumerate(pattern):
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif is_in_class:
            is_in_class = char != "]"
        elif char == "[":
            is_in_class = True
        elif (char == "^" and at > 0) or (char == "$" and at < len(pattern) - 1):
            raise BadGrammar(f"xgrammar supports {char!r} only at the {'start' if char == '^' else 'end'} of a pattern")


def _check(at: str, schema: dict[str, object]) -> None:
    constraining = schema.keys() - _ANYWHERE
    types = _types(at, schema)
    for alone in _ALONE:
        if alone in constraining and len(constraining) > 1:
            others = ", ".join(sorted(constraining - {alone}))
            raise BadGrammar(f"at {at or '/'}: xgrammar ignores all keywords beside {alone}: {others}")
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if not isinstance(values, list):
        raise BadGrammar(f"at {at}/enum: an array is expected")
    if types and not all(KINDS_OF[type(value)] & types for value in cast("list[object]", values)):
        raise BadGrammar(f"at {at or '/'}: xgrammar would allow values that are not of the given type")
    known = {"type", *_ALONE, "const", "enum"}
    if values:
        known = {"type", "const"} if "const" in schema else {"type", "enum"}
    else:
        known.update(*(_OF_TYPE[type_] for type_ in types))
    unknown = constraining - known
    if unknown:
        raise BadGrammar(f"at {at or '/'}: xgrammar does not enforce {', '.join(sorted(unknown))} here")
    _check_strings(at, schema)
    _check_objects(at, schema)
    ref = schema.get("$ref", "#")
    if not (isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))):
        raise BadGrammar(f"at {at}/$ref: xgrammar resolves references within the schema only")


def _types(at: str, schema: dict[str, object]) -> frozenset[str]:
    stated = schema.get("type", [])
    types = cast("list[object]", stated) if isinstance(stated, list) else [stated]
    named = frozenset(type_ for type_ in types if isinstance(type_, str))
    if len(named) < len(types) or not named <= _OF_TYPE.keys():
        raise BadGrammar(f"at {at}/type: unknown type")
    return named


def _check_strings(at: str, schema: dict[str, object]) -> None:
    if "pattern" in schema and "format" in schema:
        raise BadGrammar(f"at {at or '/'}: xgrammar enforces either pattern or format, not both")
    if "format" in schema and str(schema["format"]) not in _FORMATS:
        raise BadGrammar(f"at {at}/format: xgrammar does not enforce it; it enforces {', '.join(sorted(_FORMATS))}")
    pattern = schema.get("pattern", "")
    if not isinstance(pattern, str):
        raise BadGrammar(f"at {at}/pattern: a string is expected")
    check_regex(pattern)
    if _NEEDS_ESCAPE.search(pattern):
        raise BadGrammar(f"at {at}/pattern: it matches characters that JSON escapes, and xgrammar does not escape them")


def _check_objects(at: str, schema: dict[str, object]) -> None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise BadGrammar(f"at {at or '/'}: properties are an object, required is an array")
    unnamed = [name for name in cast("list[object]", required) if not (isinstance(name, str) and name in properties)]
    if unnamed:
        raise BadGrammar(
            f"at {at}/required: xgrammar enforces required only for names under properties: {unnamed[0]!r}"
        )


def _below(at: str, schema: dict[str, object]) -> Iterator[tuple[str, object]]:
    """The schemas within a schema, and where they stand."""
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield f"{at}/{name}", schema[name]
    for name in ("prefixItems", "anyOf"):
        listed = schema.get(name, [])
        if not isinstance(listed, list):
            raise BadGrammar(f"at {at}/{name}: an array is expected")
        yield from ((f"{at}/{name}/{i}", below) for i, below in enumerate(cast("list[object]", listed)))
    for name in ("properties", "$defs", "definitions"):
        named = schema.get(name, {})
        if not isinstance(named, dict):
            raise BadGrammar(f"at {at}/{name}: an object is expected")
        yield from ((f"{at}/{name}/{key}", below) for key, below in cast("dict[str, object]", named).items())
