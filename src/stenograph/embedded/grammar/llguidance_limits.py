"""Refuses grammars if llguidance would compile them without bound, or not as they are meant. Pure.

Measured with llguidance 1.9: an intersection of 30 patterns, 1.2 KB of schema, took memory at 40 MB a second without an
end; 300 entries of patternProperties are compared pair by pair for 8 s, 1,000 for more than 30 s. Numbers are read as
float64: a schema with the single value 2**53 + 1 admits 2**53 instead.
"""

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import cast

import msgspec

from stenograph.core.types import Grammar, GrammarKind
from stenograph.embedded.grammar.base import BadGrammar, one_line

MAX_SOURCE_CHARS: Mapping[GrammarKind, int] = {
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.JSON_SCHEMA: 256 * 1024,
    GrammarKind.REGEX: 32 * 1024,
    GrammarKind.CHOICE: 256 * 1024,
    GrammarKind.LARK: 256 * 1024,
    GrammarKind.EBNF: 64 * 1024,
}
"""Some grammars take time in the square of their length, and all of them stack in proportion to it."""
MAX_INTERSECTED = 8
"""Patterns and formats of a schema with any intersection, and `&` in a Lark grammar: 16 take 0.1 s at most."""
MAX_PATTERN_PROPERTIES = 64
LARGEST_INTEGER = 2**53

_EXPLAINING = frozenset({"title", "description", "default", "examples", "$comment"})
_BESIDE_REF = _EXPLAINING | {"$ref", "$defs", "definitions"}
_OPAQUE = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/')
"""Literals of a Lark grammar; a `&` in one says nothing."""
_SCHEMA = re.compile(r"%json\s*")
_JSON = json.JSONDecoder()


def check_limits(grammar: Grammar) -> None:
    """Raise BadGrammar for a grammar of unbounded time or memory, or with inexact enforcement."""
    most = MAX_SOURCE_CHARS[grammar.kind]
    if len(grammar.source) > most:
        raise BadGrammar(f"it has {len(grammar.source)} characters; at most {most} are accepted for its kind")
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        _check_schema(_read(grammar.source))
    elif grammar.kind is GrammarKind.LARK:
        _check_lark(grammar.source)


def _read(source: str) -> object:
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise BadGrammar(f"it is not JSON: {one_line(str(error))}") from error


def _check_schema(schema: object) -> None:
    num_patterns, num_pattern_properties, does_intersect = 0, 0, False
    for here in _within(schema):
        if isinstance(here, int) and abs(here) > LARGEST_INTEGER:
            raise BadGrammar(f"it has the integer {Decimal(here):.6e}; integers above {LARGEST_INTEGER} are not exact")
        if not isinstance(here, dict):
            continue
        pattern_properties = here.get("patternProperties")
        if isinstance(pattern_properties, dict):
            num_pattern_properties += len(cast("dict[str, object]", pattern_properties))
        num_patterns += ("pattern" in here) + ("format" in here)
        does_intersect |= "allOf" in here or ("$ref" in here and not here.keys() <= _BESIDE_REF)
    if num_pattern_properties > MAX_PATTERN_PROPERTIES:
        raise BadGrammar(
            f"it has {num_pattern_properties} patternProperties; at most {MAX_PATTERN_PROPERTIES} are accepted"
        )
    _check_intersected(num_patterns + num_pattern_properties if does_intersect else 0)


def _check_lark(source: str) -> None:
    """Its own intersections, and each schema in it. Invalid JSON in it is left to the compiler."""
    own: list[str] = []
    end = 0
    for match in _SCHEMA.finditer(source):
        if match.start() < end:
            continue
        try:
            schema, after = _JSON.raw_decode(source, match.end())
        except (ValueError, RecursionError):
            continue
        _check_schema(schema)
        own.append(source[end : match.start()])
        end = after
    own.append(source[end:])
    _check_intersected(sum(_OPAQUE.sub("", text).count("&") for text in own))


def _check_intersected(num_patterns: int) -> None:
    if num_patterns > MAX_INTERSECTED:
        raise BadGrammar(f"it intersects {num_patterns} patterns; at most {MAX_INTERSECTED} are accepted")


def _within(value: object) -> Iterator[dict[str, object] | int]:
    """All objects and integers within a JSON value, itself included; a schema's mere explanations are left out."""
    rest = [value]
    while rest:
        here = rest.pop()
        if isinstance(here, dict):
            named = cast("dict[str, object]", here)
            yield named
            rest.extend(below for name, below in named.items() if name not in _EXPLAINING)
        elif isinstance(here, list):
            rest.extend(cast("list[object]", here))
        elif isinstance(here, int):
            yield here
