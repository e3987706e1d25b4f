"""A grammar of arguments as bare text between tags, in llguidance's Lark: each as the tool's schema has it.

Owns the mapping of a schema to bare text: a string is free text without its closing tag, a value from a list is written
out, and everything else is JSON by its schema. So whatever the grammar admits is read back as those arguments
(`element_calls`, `typed_arguments`). A constraint that bare text cannot keep is refused; of a string's constraints a
length is enforced, and a `format` says nothing. Knows nothing of any family's tags.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from stenograph.core.errors import InvalidRequest
from stenograph.text.call_syntax import PLAIN_NAME, ForcedTool, unforceable
from stenograph.text.grammar.lark import json_value, quoted
from stenograph.text.typed_arguments import SHARED, ParameterSchemas, as_list, as_mapping, typed

_SAYINGS = frozenset({"title", "description", "default", "examples", "format", "deprecated", "$comment", "$schema"})
"""Keywords without a constraint."""
_ROOT_KEYWORDS = _SAYINGS | {"type", "properties", "required", "additionalProperties", "$id", "strict", *SHARED}
_CHOICES = ("anyOf", "oneOf", "allOf")
_LENGTHS: Mapping[str, int | None] = {"minLength": 0, "maxLength": None}
_UNHELD = frozenset({"pattern", "allOf", "anyOf", "oneOf", "not", "if"})
"""Constraints that free text cannot keep."""
_NO_STRINGS = ("object", "array", "number", "boolean", "null")


class ValueFrame(Protocol):
    """Frame around a value, and its meaning for the value."""

    def head(self, name: str) -> str:
        """The grammar's items before the value of the argument of that name."""
        ...

    @property
    def end(self) -> str:
        """The items after a value."""
        ...

    def tail(self, name: str) -> str:
        """The items after the value, if the closing tag has the argument's name; with a space before."""
        ...

    def text_rules(self, rule: str, shortest: int, longest: int | None) -> Sequence[str]:
        """The rules of free text of so many characters, up to its end."""
        ...

    def is_read_back(self, value: str) -> bool:
        """Whether a value ends where its closing tag is."""
        ...


def argument_rules(tool: ForcedTool, frame: ValueFrame) -> tuple[str, Sequence[str]]:
    """The items of a tool's arguments, in its schema's order, optional ones included, and their rules.

    They name the rule `free_text`, text of any length; the caller adds it once. Raises InvalidRequest: a schema, or a
    name, that bare text cannot keep.
    """
    made = _Rules(tool, frame)
    return " ".join(argument_items(tool, made.add)), made.rules


def argument_items(tool: ForcedTool, add: Callable[[str, str], None]) -> Iterator[str]:
    """The rule of each of a tool's arguments, in its schema's order, optional ones with a `?`.

    `add` is called with an argument's name and its rule's. Raises InvalidRequest: a schema with constraints on all
    arguments beyond their own.
    """
    if unknown := tool.schema.keys() - _ROOT_KEYWORDS:
        raise unforceable(f"the parameters of {tool.name!r} have {min(unknown)!r}")
    properties = as_mapping(tool.schema.get("properties"))
    required = as_list(tool.schema.get("required"))
    named = [name for name, schema in properties.items() if schema is not False]
    if absent := [name for name in required if name not in named]:
        raise unforceable(f"{absent[0]!r} of {tool.name!r} is required, but it is not among the properties")
    for number, name in enumerate(named):
        rule = f"argument_{tool.number}_{number}"
        add(name, rule)
        yield rule if name in required else f"{rule}?"


class _Rules:
    """One tool's rules on their way."""

    def __init__(self, tool: ForcedTool, frame: ValueFrame) -> None:
        self._tool = tool
        self._frame = frame
        self._schemas = ParameterSchemas(json.dumps(tool.schema))
        self._shared = {key: tool.schema[key] for key in SHARED if key in tool.schema}
        self.rules: list[str] = []

    def add(self, name: str, rule: str) -> None:
        """Add the rules of an argument."""
        head, tail = self._frame.head(PLAIN_NAME.checked(name)), self._frame.tail(name)
        self.rules.append(f"{rule}: {head} {self._value(name, rule)}{tail}")

    def _value(self, name: str, rule: str) -> str:
        """The items of a value and its end."""
        schema = self._schemas.of(name) or {}
        if not schema and as_mapping(as_mapping(self._tool.schema.get("properties")).get(name)):
            raise self._unheld(name, "a schema that is nowhere")
        choices = list(_choices(schema))
        if any(_is_text(one) for one in choices):
            return self._text(name, choices, rule)
        if not any(_may_be_string(one) for one in choices):
            return f"{self._json(schema, rule)} {self._frame.end}"
        items = [item for number, one in enumerate(choices) for item in self._items(name, one, f"{rule}_{number}")]
        return f"({' | '.join(items)}) {self._frame.end}"

    def _text(self, name: str, choices: Sequence[Mapping[str, object]], rule: str) -> str:
        """Free text; beside it only keywords true of any text of the type."""
        for one in choices:
            values = _values(one) or [None]
            if not (_is_text(one) or one.keys() <= _SAYINGS | {"type"} or all(isinstance(it, str) for it in values)):
                raise self._unheld(name, "text or a value with more constraints than a type")
            if unheld := one.keys() & (_UNHELD if len(choices) == 1 else _UNHELD.union(_LENGTHS)):
                raise self._unheld(name, min(unheld))
        if not choices[0].keys() & _LENGTHS:
            return "free_text"
        shortest, longest = (choices[0].get(key, least) for key, least in _LENGTHS.items())
        if not isinstance(shortest, int) or not (
            longest is None or (isinstance(longest, int) and longest >= max(1, shortest))
        ):
            raise self._unheld(name, "a text of no such length")
        self.rules += self._frame.text_rules(f"{rule}_text", shortest, longest)
        return f"{rule}_text"

    def _items(self, name: str, schema: Mapping[str, object], rule: str) -> Iterator[str]:
        """The forms of a value other than free text."""
        values = _values(schema)
        if values is None:
            if "allOf" in schema and "type" not in schema:
                raise self._unheld(name, "'allOf'")
            yield self._json(schema if "type" in schema else {**schema, "type": _NO_STRINGS}, rule)
            return
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if typed(text, self._schemas.of(name)) != value or not self._frame.is_read_back(text):
                raise self._unheld(name, f"the value {text}")
            yield quoted(text)

    def _json(self, schema: Mapping[str, object], rule: str) -> str:
        self.rules.append(f"{rule}_json: {json_value({**schema, **self._shared})}")
        return f"{rule}_json"

    def _unheld(self, name: str, what: str) -> InvalidRequest:
        return unforceable(f"the argument {name!r} of {self._tool.name!r} has {what}")


def _choices(schema: Mapping[str, object], *, is_nested: bool = False) -> Iterator[Mapping[str, object]]:
    """Alternative schemas for a value, each of one type, or of no named one."""
    if "const" in schema or "enum" in schema:
        yield schema
        return
    key = next((key for key in _CHOICES if as_list(schema.get(key))), None)
    if key is None or is_nested or (key == "allOf" and len(as_list(schema[key])) > 1):
        types = as_list(schema.get("type"))
        yield from ({**schema, "type": one} for one in types) if types else [schema]
        return
    rest = {name: value for name, value in schema.items() if name != key and name not in _SAYINGS}
    for one in map(as_mapping, as_list(schema[key])):
        if both := rest.keys() & one.keys():
            raise unforceable(f"{min(both)!r} stands beside and within {key!r}")
        yield from _choices({**rest, **one}, is_nested=True)


def _values(schema: Mapping[str, object]) -> Sequence[object] | None:
    """All allowed values; None where the schema does not list them."""
    return [schema["const"]] if "const" in schema else as_list(schema["enum"]) if "enum" in schema else None


def _is_text(schema: Mapping[str, object]) -> bool:
    """Whether it is a string, or anything at all."""
    is_open = not schema.keys() - _SAYINGS or schema.get("type") == "string"
    return is_open and _values(schema) is None


def _may_be_string(schema: Mapping[str, object]) -> bool:
    values = _values(schema)
    return "type" not in schema if values is None else any(isinstance(value, str) for value in values)
