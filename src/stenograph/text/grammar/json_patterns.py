"""JSON that a schema describes, as a pattern in the one style of our grammars (`lark.JSON_STYLE`).

All JSON admitted by the pattern is valid by the schema; some valid JSON may be left out: members come in the schema's
order, and where properties are named no others come; numbers have at most 15 digits before the point. A keyword that it
cannot hold is refused by name, but for `format`: this says nothing here. Pure.
"""

import json
import math
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import cast

from stenograph.core.json_types import KINDS_OF
from stenograph.text.grammar.lark import STYLE_KEYWORD
from stenograph.text.grammar.patterns import (
    Chars,
    Either,
    Literal,
    Pattern,
    Repeated,
    RuleName,
    Unwritable,
    either,
    optional,
    seq,
)

MAX_REPEATS = 1000
"""Most characters or items in a schema's bounds."""
MAX_CHOICES = 100
"""Most members where all are optional, and most options of a `oneOf`: work and text grow by the square."""
MAX_SCHEMA_CHARS = 256 * 1024
MAX_DIGITS = 15
"""Digits of an integer kept by every reader of JSON."""
_LARGEST = 10**MAX_DIGITS - 1

_SAYINGS = frozenset(
    {"title", "description", "default", "examples", "format", "deprecated", "readOnly", "writeOnly", "strict"}
    | {"$comment", "$schema", "$id", "$defs", "definitions", "discriminator", STYLE_KEYWORD}
)
"""Keywords without a constraint."""
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties", "propertyNames"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": frozenset(),
    "null": frozenset(),
}
_CHOICES = ("anyOf", "oneOf", "allOf")

_DIGIT = Chars([("0", "9")])
_HEX = Chars([("0", "9"), ("a", "f"), ("A", "F")])
_FRACTION = seq(Literal("."), Repeated(_DIGIT, 1, MAX_DIGITS))
_INNER_FRACTION = seq(Literal("."), Repeated(_DIGIT, 0, MAX_DIGITS - 1), Chars([("1", "9")]))
_EXPONENT = seq(
    Chars([("e", "e"), ("E", "E")]), optional(either(Literal("+"), Literal("-"))), Repeated(_DIGIT, 1, 2)
)  # 1e999 is no number to JSON's readers
_NATURAL = either(Literal("0"), seq(Chars([("1", "9")]), Repeated(_DIGIT, 0, MAX_DIGITS - 1)))
_INTEGER = seq(optional(Literal("-")), _NATURAL)
_NUMBER = seq(_INTEGER, optional(_FRACTION), optional(_EXPONENT))
_CODE = either(
    seq(Chars([("0", "9"), ("a", "c"), ("e", "f"), ("A", "C"), ("E", "F")]), Repeated(_HEX, 3, 3)),
    seq(Chars([("d", "d"), ("D", "D")]), Chars([("0", "7")]), Repeated(_HEX, 2, 2)),
)  # half a pair is no character
_ESCAPED = Chars([(char, char) for char in '"\\/bfnrt'])
_CHAR = either(
    Chars([('"', '"'), ("\\", "\\"), ("\x00", "\x1f")], others=True),
    seq(Literal("\\"), either(_ESCAPED, seq(Literal("u"), _CODE))),
)
_COMMA, _COLON = Literal(", "), Literal(": ")
_ANY, _STRING = RuleName("json-value"), RuleName("json-string")


def json_rules(schema: object, name: str, rules: dict[str, Pattern]) -> None:
    """Add to `rules` the rule `name`, the JSON of `schema`, and those below it. Raises Unwritable."""
    rules["json-char"] = _CHAR
    rules[_STRING.name] = _quoted(Repeated(RuleName("json-char"), 0, None))
    rules["json-object"] = _braced(_list_of(seq(_STRING, _COLON, _ANY), 0, None))
    rules["json-array"] = _bracketed(_list_of(_ANY, 0, None))
    literals = (Literal("true"), Literal("false"), Literal("null"))
    rules[_ANY.name] = either(_STRING, _NUMBER, *literals, RuleName("json-object"), RuleName("json-array"))
    rules[name] = _SchemaPattern(schema, name, rules).pattern(schema, "")
    try:
        TopologicalSorter({rule: _heads(pattern) for rule, pattern in rules.items()}).prepare()
    except CycleError as error:
        raise Unwritable("a $ref leads back to itself") from error


class _SchemaPattern:
    """One schema on its way."""

    def __init__(self, root: object, name: str, rules: dict[str, Pattern]) -> None:
        self._root = root
        self._name = name
        self._rules = rules
        self._places: dict[str, RuleName] = {}

    def pattern(self, schema: object, where: str) -> Pattern:
        """The JSON of a schema within the root; `where` is its JSON pointer."""
        if schema is False:
            raise Unwritable(f"nothing is valid at {where or '/'!r}")
        members = {
            key: value
            for key, value in _mapping({} if schema is True else schema, where).items()
            if key not in _SAYINGS
        }
        if not members:
            return _ANY
        if "$ref" in members:
            return self._reference(members, where)
        if "const" in members or "enum" in members:
            return either(*(Literal(_spelled(value)) for value in _values(members, where)))
        choice = next((key for key in _CHOICES if key in members), None)
        if choice is not None:
            return either(*(self.pattern(*one) for one in self._choices(members, choice, where)))
        kinds = members.get("type", _kind_of(members))
        if isinstance(kinds, list):
            return either(
                *(
                    self._typed(members, kind, where)
                    for kind in dict.fromkeys(map(str, _array(cast("object", kinds), where)))
                )
            )
        return self._typed(members, kinds, where)

    def _reference(self, members: Mapping[str, object], where: str) -> RuleName:
        if len(members) > 1:
            raise Unwritable(f"there is {min(members.keys() - {'$ref'})!r} beside a $ref at {where or '/'!r}")
        target = members["$ref"]
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            raise Unwritable(f"the $ref at {where!r} leads out of the schema")
        if target not in self._places:
            rule = self._places[target] = RuleName(f"{self._name}-at-{len(self._places)}")
            self._rules[rule.name] = self.pattern(_at(self._root, target), target[1:])
        return self._places[target]

    def _choices(self, members: Mapping[str, object], key: str, where: str) -> list[tuple[object, str]]:
        """Alternative schemas for a value, each with the keywords beside them."""
        options = _array(members[key], where)
        if not options or (key == "allOf" and len(options) > 1) or (key == "oneOf" and len(options) > MAX_CHOICES):
            raise Unwritable(f"there is {key!r} at {where or '/'!r}")
        if key == "oneOf" and not all(
            _are_apart(one, other) for one, other in combinations(map(self._seen, options), 2)
        ):
            raise Unwritable(f"there is 'oneOf' at {where or '/'!r} of which a value may fit two")
        rest = {name: value for name, value in members.items() if name != key}
        found: list[tuple[object, str]] = []
        for number, option in enumerate(options):
            inner = _mapping(option, where) if rest else option
            if isinstance(inner, dict) and (both := rest.keys() & inner.keys()):
                raise Unwritable(f"there is {min(both)!r} beside and within {key!r} at {where or '/'!r}")
            merged: object = {**rest, **inner} if isinstance(inner, dict) and rest else option
            found.append((merged, f"{where}/{key}/{number}"))
        return found

    def _seen(self, schema: object) -> Mapping[str, object]:
        """A schema, or its target if it is a reference."""
        members = cast("dict[str, object]", schema) if isinstance(schema, dict) else {}
        target = members.get("$ref")
        seen = _at(self._root, target) if isinstance(target, str) and target.startswith("#") else members
        return cast("dict[str, object]", seen) if isinstance(seen, dict) else {}

    def _typed(self, members: Mapping[str, object], kind: object, where: str) -> Pattern:
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise Unwritable(f"there is the type {json.dumps(kind)[:80]} at {where or '/'!r}")
        none: frozenset[str] = frozenset()
        known = none.union(*_OF_TYPE.values()) if isinstance(members.get("type"), list) else _OF_TYPE[kind]
        if unknown := members.keys() - known - {"type"}:
            raise Unwritable(f"there is {min(unknown)!r} at {where or '/'!r}")
        match kind:
            case "object":
                return self._object(members, where)
            case "array":
                return self._array(members, where)
            case "string":
                least, most = _counts(members, "minLength", "maxLength", where)
                return _STRING if (least, most) == (0, None) else _quoted(Repeated(RuleName("json-char"), least, most))
            case "integer" | "number":
                return _number(members, is_whole=kind == "integer", where=where)
            case "boolean":
                return either(Literal("true"), Literal("false"))
            case _:
                return Literal("null")

    def _object(self, members: Mapping[str, object], where: str) -> Pattern:
        properties = _mapping(members.get("properties", {}), where)
        others = members.get("additionalProperties", True)
        required = _array(members.get("required", []), where)
        if members.get("propertyNames", {"type": "string"}) != {"type": "string"}:
            raise Unwritable(f"there is 'propertyNames' at {where or '/'!r}")
        unnamed = {name: others for name in required if isinstance(name, str) and name not in properties}
        pairs: list[tuple[Pattern, bool]] = []
        for name, schema in {**properties, **unnamed}.items():
            if schema is False and name not in required:
                continue
            value = self.pattern(schema, f"{where}/properties/{name}")
            rule = RuleName(f"{self._name}-{len(self._rules)}")
            self._rules[rule.name] = seq(Literal(f"{_spelled(name)}: "), value)
            pairs.append((rule, name in required))
        if not pairs and others is not False:
            value = self.pattern(others, f"{where}/additionalProperties")
            return _braced(_list_of(seq(_STRING, _COLON, value), 0, None))
        if len(pairs) > MAX_CHOICES and not any(needed for _, needed in pairs):
            raise Unwritable(f"there are {len(pairs)} properties, of which none is required, at {where or '/'!r}")
        return _braced(_members(pairs)) if pairs else Literal("{}")

    def _array(self, members: Mapping[str, object], where: str) -> Pattern:
        least, most = _counts(members, "minItems", "maxItems", where)
        is_tuple = isinstance(members.get("items"), list)
        first = _array(members["items"] if is_tuple else members.get("prefixItems", []), where)
        if not first and most == 0:
            return Literal("[]")
        if not first:
            return _bracketed(_list_of(self.pattern(members.get("items", True), f"{where}/items"), least, most))
        if not (least <= len(first) and (most is None or most >= len(first))):
            raise Unwritable(f"there are {len(first)} prefixItems, of which not all may come, at {where or '/'!r}")
        parts = [self.pattern(one, f"{where}/prefixItems/{number}") for number, one in enumerate(first)]
        return _bracketed(seq(parts[0], *(part for one in parts[1:] for part in (_COMMA, one))))


def _braced(inner: Pattern) -> Pattern:
    return seq(Literal("{"), inner, Literal("}"))


def _bracketed(inner: Pattern) -> Pattern:
    return seq(Literal("["), inner, Literal("]"))


def _quoted(inner: Pattern) -> Pattern:
    return seq(Literal('"'), inner, Literal('"'))


def _list_of(one: Pattern, least: int, most: int | None) -> Pattern:
    """So many of the same, with commas."""
    more = Repeated(seq(_COMMA, one), max(least - 1, 0), None if most is None else most - 1)
    filled = one if most == 1 else seq(one, more)
    return filled if least else optional(filled)


def _members(pairs: Sequence[tuple[Pattern, bool]]) -> Pattern:
    """Members in their order, each with whether it is required."""
    after = [seq(_COMMA, pair) if needed else optional(seq(_COMMA, pair)) for pair, needed in pairs]
    first = next((number for number, (_, needed) in enumerate(pairs) if needed), None)
    if first is not None:
        early = (optional(seq(pair, _COMMA)) for pair, _ in pairs[:first])
        return seq(*early, pairs[first][0], *after[first + 1 :])
    return optional(either(*(seq(pair, *after[number + 1 :]) for number, (pair, _) in enumerate(pairs))))


# -- numbers


def _number(members: Mapping[str, object], *, is_whole: bool, where: str) -> Pattern:
    """A number within its bounds; one with a fraction lies between two integers within them."""
    bounds = {key: members[key] for key in sorted(_BOUNDS & members.keys())}
    if not bounds:
        return _INTEGER if is_whole else _NUMBER
    low, high = -math.inf, math.inf
    for key, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise Unwritable(f"there is {key} {json.dumps(bound)[:80]} at {where or '/'!r}")
        low = max(low, bound) if "inimum" in key else low
        high = min(high, bound) if "aximum" in key else high
    least, most = math.ceil(max(low, -_LARGEST)), math.floor(min(high, _LARGEST))
    options = _between(
        least + (bounds.get("exclusiveMinimum") == least), most - (bounds.get("exclusiveMaximum") == most)
    )
    if not is_whole:
        options += [seq(one, _INNER_FRACTION) for one in _steps(least, most)]
    if not options:
        raise Unwritable(f"no number is within its bounds at {where or '/'!r}")
    return either(*options)


def _between(least: int, most: int) -> list[Pattern]:
    """The integers of a range."""
    below = [seq(Literal("-"), one) for one in _naturals(max(1, -most), -least)]
    return below + _naturals(max(0, least), most)


def _steps(least: int, most: int) -> list[Pattern]:
    """The whole parts of numbers strictly between two integers of a range."""
    below = [seq(Literal("-"), one) for one in _naturals(max(0, -most), -least - 1)]
    return below + _naturals(max(0, least), most - 1)


def _naturals(least: int, most: int) -> list[Pattern]:
    """The decimals of the natural numbers of a range."""
    found: list[Pattern] = []
    while least <= most:
        end = min(most, 10 ** len(str(least)) - 1)
        found.append(_digits(str(least), str(end)))
        least = end + 1
    return found


def _digits(low: str, high: str) -> Pattern:
    """The decimals of a range, all of one length."""
    if low == high:
        return Literal(low)
    size = len(low) - 1
    if low[0] == high[0]:
        return seq(Literal(low[0]), _digits(low[1:], high[1:]))
    first, last, options = int(low[0]), int(high[0]), list[Pattern]()
    if low[1:] != "0" * size:
        options.append(seq(Literal(low[0]), _digits(low[1:], "9" * size)))
        first += 1
    above: list[Pattern] = []
    if high[1:] != "9" * size:
        above.append(seq(Literal(high[0]), _digits("0" * size, high[1:])))
        last -= 1
    if first <= last:
        digit = Chars([(str(first), str(last))])
        options.append(seq(digit, Repeated(_DIGIT, size, size)) if size else digit)
    return either(*options, *above)


# -- reading a schema


def _kind_of(members: Mapping[str, object]) -> object:
    """The type implied by a schema's keywords, where it names none."""
    return next((kind for kind in ("object", "array", "string") if members.keys() & _OF_TYPE[kind]), None)


def _values(members: Mapping[str, object], where: str) -> list[object]:
    if unknown := members.keys() - {"const", "enum", "type"}:
        raise Unwritable(f"there is {min(unknown)!r} beside its values at {where or '/'!r}")
    values = [members["const"]] if "const" in members else list(_array(members["enum"], where))
    kinds = _kinds(members)
    if kinds:
        values = [value for value in values if kinds & KINDS_OF[type(value)]]
    if not values:
        raise Unwritable(f"nothing is valid at {where or '/'!r}")
    return values


def _counts(members: Mapping[str, object], low: str, high: str, where: str) -> tuple[int, int | None]:
    least, most = members.get(low, 0), members.get(high)
    for key, count in ((low, least), (high, 0 if most is None else most)):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_REPEATS:
            raise Unwritable(
                f"there is {key} {json.dumps(count)[:80]} at {where or '/'!r}, and {MAX_REPEATS} is the most"
            )
    least, most = cast("int", least), cast("int | None", most)
    if most is not None and most < least:
        raise Unwritable(f"there is {low} above {high} at {where or '/'!r}")
    return least, most


def _are_apart(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether no value fits both schemas, as their types, their values, or those of a member of both show."""
    if _listed(one) and _listed(other):
        return not _listed(one) & _listed(other)
    kinds = [{"number" if kind == "integer" else kind for kind in _kinds(schema)} for schema in (one, other)]
    if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
        return True
    both = [cast("dict[str, dict[str, object]]", schema.get("properties", {})) for schema in (one, other)]
    needed = [set(cast("list[str]", schema.get("required", []))) for schema in (one, other)]
    tags = needed[0] & needed[1] & both[0].keys() & both[1].keys()
    return any(
        _listed(both[0][tag]) and _listed(both[1][tag]) and not _listed(both[0][tag]) & _listed(both[1][tag])
        for tag in tags
    )


def _listed(schema: Mapping[str, object]) -> set[str]:
    """All values listed by a schema, as JSON."""
    values = [schema["const"]] if "const" in schema else cast("list[object]", schema.get("enum", []))
    return {json.dumps(value, sort_keys=True) for value in values}


def _kinds(schema: Mapping[str, object]) -> set[str]:
    kinds = schema.get("type", [])
    return {kinds} if isinstance(kinds, str) else set(cast("list[str]", kinds))


def _at(root: object, target: str) -> object:
    """The target schema of a `$ref`."""
    found = root
    for part in target[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            raise Unwritable(f"the $ref {target[:80]!r} leads nowhere")
        found = cast("dict[str, object]", found)[name]
    return found


def _heads(pattern: Pattern) -> set[str]:
    """Rules able to make up the whole pattern, without any text around them."""
    match pattern:
        case RuleName(name):
            return {name}
        case Either(options):
            return set[str]().union(*map(_heads, options))
        case _:
            return set()


def _spelled(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _mapping(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Unwritable(f"there is {json.dumps(value)[:80]} in an object's place at {where or '/'!r}")
    return cast("dict[str, object]", value)


def _array(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise Unwritable(f"there is {json.dumps(value)[:80]} in a list's place at {where or '/'!r}")
    return cast("list[object]", value)
