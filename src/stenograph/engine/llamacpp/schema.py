"""The JSON Schemas enforced by llama.cpp; writes a schema and a choice for it. Pure.

llama.cpp turns `json_schema` into a grammar itself, with one of two converters, as it was built: its own skips unknown
keywords; llguidance, on an error, generates without any grammar, and says so in the log alone. A client cannot tell
which one it talks to. So a schema passes only if both enforce it: its keywords are known to both, side by side only
where both read them together, and our own llguidance compiles it. The rest is refused here, by name. Source:
llama.cpp's `common/json-schema-to-grammar.cpp` and `common/llguidance.cpp`.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import cast

import msgspec
from llguidance import LLMatcher

from stenograph.core.errors import InvalidRequest
from stenograph.core.json_types import KINDS_OF
from stenograph.text.grammar.lark import JSON_STYLE, STYLE_KEYWORD

MAX_SCHEMA_BYTES = 32 * 1024
"""Compiling one takes the loop's time, once: 0.1 to 12 ms for usual ones, at worst (400 dates) 0.2 s."""
MAX_CACHED = 64
"""Number of schemas with a kept verdict, the most recently used."""
STYLE = msgspec.json.encode({STYLE_KEYWORD: JSON_STYLE}).decode().removesuffix("}")
"""The style of JSON, as the beginning of a schema."""
LARGEST_BOUND = 2**53
"""Largest bound of an integer; llguidance reads bounds as float64."""

_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
_AT_ROOT = frozenset({"$schema", "$id"})
_ANYWHERE = _ANNOTATIONS | {"$comment", "$defs", "definitions"}
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
"""Keywords that stop llama.cpp's own converter from looking at any other."""
_APART = (
    ("format", frozenset({"minLength", "maxLength"})),
    ("prefixItems", frozenset({"items"})),
    ("minimum", frozenset({"exclusiveMinimum"})),
    ("maximum", frozenset({"exclusiveMaximum"})),
)
"""Keywords of one type: llama.cpp's own converter reads only the one or the other."""
_COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"))
_FORMATS = frozenset({"date", "time", "date-time", "uuid"})
_DIALECTS = ("draft-07/schema", "draft/2019-09/schema", "draft/2020-12/schema")
_WITH_PREFIX_ITEMS = "draft/2020-12/schema"
"""In the others llguidance does not know `prefixItems`."""


def schema_as_sent(source: str) -> bytes:
    """The schema with fixed white space; llama.cpp's own converter skips the keyword, and allows little.

    Raises InvalidRequest, naming the fault, unless llama.cpp enforces the whole schema.
    """
    if len(source) > MAX_SCHEMA_BYTES or len(source.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"llama.cpp takes a JSON Schema of at most {MAX_SCHEMA_BYTES} bytes; this one is larger.")
    fault = _fault(source)
    if fault is not None:
        raise InvalidRequest(fault)
    return _spelled(source).encode()


def object_as_sent() -> bytes:
    """The schema of any JSON object."""
    return _spelled('{"type":"object"}').encode()


def choice_grammar(source: str) -> str:
    """The strings of a JSON list as a GBNF grammar: one of them, and then the end. Raises InvalidRequest."""
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"The choices are not a JSON list of strings: {error}") from error
    if not choices or not all(choices):
        raise InvalidRequest("There must be at least one choice, and none may be empty.")
    return "root ::= " + " | ".join(f'"{"".join(map(_escaped, choice))}"' for choice in choices)


def _escaped(char: str) -> str:
    """A character within a GBNF literal; any but a plain one goes by its code point."""
    if " " <= char <= "~" and char not in '"\\':
        return char
    return f"\\U{ord(char):08X}"


@lru_cache(maxsize=MAX_CACHED)
def _fault(source: str) -> str | None:
    """The fault of a schema; None if llama.cpp enforces it."""
    try:
        _Walk(msgspec.json.decode(source)).check()
    except InvalidRequest as error:
        return error.message
    except (msgspec.DecodeError, ValueError) as error:
        return f"The JSON Schema is not JSON: {error}"
    except RecursionError:
        return "The JSON Schema is nested too deeply."
    try:
        told = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(_spelled(source)))
    except ValueError as error:
        told = str(error)
    return f"The JSON Schema does not compile: {' '.join(told.split())[:300]}" if told else None


def _spelled(schema: str) -> str:
    """A schema, an object, with the style as its first member."""
    members = schema.strip()[1:]
    comma = "" if members.lstrip().startswith("}") else ","
    return f"{STYLE}{comma}{members}"


class _Walk:
    """One schema under way. A schema within it is known by its place, a JSON pointer; the root's is empty.

    `_leads` has for each the places of the schemas in its stead, by `$ref` or `anyOf`, with nothing around them.
    """

    def __init__(self, schema: object) -> None:
        self._schema = schema
        self._has_prefix_items = True
        self._leads: dict[str, list[str]] = {}

    def check(self) -> None:
        """Raise InvalidRequest for the first thing not enforced by llama.cpp."""
        self._check(self._schema, "")
        for where, places in self._leads.items():
            if missing := [place for place in places if place not in self._leads]:
                raise _refused(where, f"a $ref to {('#' + missing[0])[:200]!r}, where there is no schema")
        try:
            TopologicalSorter(self._leads).prepare()
        except CycleError as error:
            cycle: list[str] = error.args[1]
            raise _refused(cycle[0], "a $ref that leads back to itself") from error

    def _check(self, schema: object, where: str) -> None:
        if not isinstance(schema, dict):
            raise _refused(where, "a schema that is no object")
        members = cast("dict[str, object]", schema)
        self._leads[where] = []
        if not where:
            self._check_dialect(members)
        for name in ("$defs", "definitions"):
            self._check_each(members.get(name, {}), f"{where}/{name}")
        named = set(members) - (_ANYWHERE if where else _ANYWHERE | _AT_ROOT)
        for name in _ALONE:
            if name in named and len(named) > 1:
                raise _refused(where, f"{name} beside {sorted(named - {name})[0]}")
        if "$ref" in named:
            self._leads[where] = [_place_of(members["$ref"], where)]
        elif "anyOf" in named:
            self._leads[where] = self._check_list(members["anyOf"], f"{where}/anyOf")
        elif "enum" in named or "const" in named:
            _check_values(members, named, where)
        else:
            self._check_typed(members, named, where)

    def _check_dialect(self, members: dict[str, object]) -> None:
        told = members.get("$schema", _WITH_PREFIX_ITEMS)
        known = [name for name in _DIALECTS if isinstance(told, str) and told.rstrip("#").endswith(name)]
        if not known:
            raise _refused("", f"the $schema {json.dumps(told)[:80]}")
        self._has_prefix_items = known == [_WITH_PREFIX_ITEMS]

    def _check_typed(self, members: dict[str, object], named: set[str], where: str) -> None:
        kind = members.get("type")
        if not named or (named == {"type"} and isinstance(kind, list) and _kinds(cast("object", kind), where)):
            return
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise _refused(where, f"the type {json.dumps(kind)[:80]}")
        if others := named - {"type"} - _OF_TYPE[kind]:
            raise _refused(where, f"{sorted(others)[0]} of {kind}")
        for name, apart in _APART:
            if name in named and named & apart:
                raise _refused(where, f"{name} beside {sorted(named & apart)[0]}")
        _check_counts(members, where)
        match kind:
            case "object":
                self._check_object(members, where)
            case "array":
                self._check_array(members, named, where)
            case "integer":
                _check_bounds(members, where)
            case _:
                told = members.get("format", "date")
                if not isinstance(told, str) or told not in _FORMATS:
                    raise _refused(where, f"the format {json.dumps(told)[:80]}")

    def _check_object(self, members: dict[str, object], where: str) -> None:
        properties = members.get("properties", {})
        self._check_each(properties, f"{where}/properties")
        if not isinstance(members.get("additionalProperties", True), bool):
            self._check(members["additionalProperties"], f"{where}/additionalProperties")
        required = members.get("required", [])
        if not isinstance(required, list):
            raise _refused(where, "required that is no list")
        for name in cast("list[object]", required):
            if not isinstance(name, str) or name not in cast("dict[str, object]", properties):
                raise _refused(where, f"required {json.dumps(name)[:80]}, which is not in properties")

    def _check_array(self, members: dict[str, object], named: set[str], where: str) -> None:
        if "items" in members:
            self._check(members["items"], f"{where}/items")
        elif "prefixItems" in members:
            if not self._has_prefix_items:
                raise _refused(where, "prefixItems under an older $schema")
            num = len(self._check_list(members["prefixItems"], f"{where}/prefixItems"))
            least, most = (members.get(name, num) for name in ("minItems", "maxItems"))
            if not (isinstance(least, int) and isinstance(most, int) and least <= num <= most):
                raise _refused(where, f"minItems or maxItems that are not met by {num} prefixItems")
        elif counts := named & {"minItems", "maxItems"}:
            raise _refused(where, f"{sorted(counts)[0]} without items")

    def _check_each(self, schemas: object, where: str) -> None:
        if not isinstance(schemas, dict):
            raise _refused(where, "what is no object")
        for name, schema in cast("dict[str, object]", schemas).items():
            self._check(schema, f"{where}/{_escaped_name(name)}")

    def _check_list(self, schemas: object, where: str) -> list[str]:
        """The places of the schemas."""
        if not isinstance(schemas, list) or not schemas:
            raise _refused(where, "what is no list of schemas")
        for index, schema in enumerate(cast("list[object]", schemas)):
            self._check(schema, f"{where}/{index}")
        return [f"{where}/{index}" for index in range(len(cast("list[object]", schemas)))]


def _check_values(members: dict[str, object], named: set[str], where: str) -> None:
    """`enum` or `const`: llama.cpp's own converter reads no type beside them, so they must agree with it."""
    if others := named - {"enum" if "enum" in named else "const", "type"}:
        raise _refused(where, f"{sorted(others)[0]} beside {'enum' if 'enum' in named else 'const'}")
    values = members["enum"] if "enum" in named else [members["const"]]
    if not isinstance(values, list) or not values:
        raise _refused(where, "an enum that is no list of values")
    if "type" not in named:
        return
    kinds = _kinds(members["type"], where)
    for value in cast("list[object]", values):
        if not KINDS_OF[type(value)] & kinds:
            raise _refused(where, f"the value {json.dumps(value)[:80]} beside another type")


def _check_counts(members: dict[str, object], where: str) -> None:
    """llguidance leaves out an unsatisfiable optional part, llama.cpp's own converter writes it down."""
    for names in _COUNTS:
        counts = [members[name] for name in names if name in members]
        for name, count in zip((name for name in names if name in members), counts, strict=True):
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise _refused(where, f"{name} that is no count")
        if counts != sorted(cast("list[int]", counts)):
            raise _refused(where, f"{names[0]} over {names[1]}")


def _check_bounds(members: dict[str, object], where: str) -> None:
    for name in sorted(members.keys() & _OF_TYPE["integer"]):
        bound = members[name]
        if not isinstance(bound, int) or isinstance(bound, bool) or abs(bound) > LARGEST_BOUND:
            raise _refused(where, f"{name} that is no integer within 2^53")
    bounds = cast("dict[str, int]", members)
    least = max(bounds.get("minimum", -LARGEST_BOUND), bounds.get("exclusiveMinimum", -LARGEST_BOUND - 1) + 1)
    most = min(bounds.get("maximum", LARGEST_BOUND), bounds.get("exclusiveMaximum", LARGEST_BOUND + 1) - 1)
    if least > most:
        raise _refused(where, "bounds with no integer between them")


def _kinds(told: object, where: str) -> set[str]:
    """The types named by a schema, one at least."""
    kinds: list[object] = cast("list[object]", told) if isinstance(told, list) else [told]
    for kind in kinds or [told]:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise _refused(where, f"the type {json.dumps(told)[:80]}")
    return {kind for kind in kinds if isinstance(kind, str)}


def _place_of(target: object, where: str) -> str:
    """The target of a `$ref`."""
    if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
        raise _refused(where, "a $ref that is not within the schema")
    if "~" in target or "%" in target:
        raise _refused(where, "a $ref with ~ or %")
    return target[1:]


def _escaped_name(name: str) -> str:
    """A name within a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _refused(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"llama.cpp does not enforce {what}, which the JSON Schema has at {(where or '/')[:200]!r}.")
