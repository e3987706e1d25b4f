"""A grammar of Qwen's XML calls, in llguidance's Lark: each argument in the order in which the tool's schema names it.

Owns how a schema becomes bare text: a string is free text, anything else JSON that the schema describes. Every text
that the grammar admits is read as those arguments (`qwen_xml`): so free text has no closing marker of this syntax, and
of a string's constraints a length and a choice of values are held, a `format` is not, and any other is refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from stenograph.core.errors import InvalidRequest
from stenograph.render.parsers.call_syntax import ForcedTool, quoted
from stenograph.render.parsers.typed_arguments import ParameterSchemas, takes_text

_VALUE_END = "\n</parameter>\n"
_MARKERS = ("</parameter>", "</function>")
_NO_MARKER = r"~/(?s:.*)<\/(parameter|function)>(?s:.*)/"
_MAX_NAME_CHARS = 256
_NOT_FORCED = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas"}
)
"""What says of a whole object what a list of parameters cannot."""
_NOT_HELD = frozenset({"pattern", "allOf", "not", "if"})
"""What free text is not held to."""
_LENGTHS = frozenset({"minLength", "maxLength"})
_ALL_VALUES: Mapping[object, Sequence[object]] = {"boolean": (True, False), "null": (None,)}
_SHARED = ("$defs", "definitions", "x-guidance")
"""What a parameter's schema needs of the whole one."""


def qwen_xml_grammar(tools: Sequence[ForcedTool], parallel: bool, *, opening: str, closing: str) -> str:
    """One call, or with `parallel` one or more; `opening` and `closing` are the block's markers, as a grammar has them.

    Raises InvalidRequest: a schema, or a name, that calls in this syntax cannot be held to.
    """
    names = " | ".join(f"call_{tool.number}" for tool in tools)
    lines = ["start: one_call" + (' ("\\n" one_call)*' if parallel else ""), f"one_call: {names}"]
    for tool in tools:
        parameters = _Parameters(tool)
        head, tail = quoted(f"\n<function={_plain(tool.name)}>\n"), quoted("</function>\n")
        lines.append(f"call_{tool.number}: {opening} {head} {' '.join(parameters.items())} {tail} {closing}")
        lines += parameters.rules
    lines.append(f"FREE_TEXT: /(?s:.*)/ & {_NO_MARKER}")
    lines.append(f"free_text[lazy]: FREE_TEXT {quoted(_VALUE_END)}")
    return "\n".join(lines) + "\n"


class _Parameters:
    """A tool's parameters as items of a rule, and the rules that these are made of."""

    def __init__(self, tool: ForcedTool) -> None:
        self._number = tool.number
        self._schema = tool.schema
        self._schemas = ParameterSchemas(json.dumps(tool.schema))
        self.rules: list[str] = []
        if found := _NOT_FORCED & tool.schema.keys():
            raise _refusal(f"the parameters of {tool.name!r} have {min(found)!r}")

    def items(self) -> Iterator[str]:
        """Each parameter, those that are not required with a `?`; any at all, where the schema names none."""
        named = _object(self._schema, "properties")
        required = [str(name) for name in _array(self._schema, "required")]
        for name in dict.fromkeys((*named, *required)):
            if named.get(name) is not False:
                head = quoted(f"<parameter={_plain(name)}>\n")
                yield self._parameter(head, self._value(name)) + ("" if name in required else "?")
        if not named and not required and self._schema.get("additionalProperties") is not False:
            yield self._parameter(r'"<parameter=" /[^<>\n]{1,64}/ ">\n"', self._value("")) + "*"

    def _parameter(self, head: str, value: str) -> str:
        rule = f"parameter_{self._number}_{len(self.rules)}"
        self.rules.append(f"{rule}: {head} {value}")
        return rule

    def _value(self, name: str) -> str:
        """The rule of a value and its end."""
        schema = self._schema_of(name)
        rule = f"value_{self._number}_{len(self.rules)}"
        if (values := _values(schema)) is not None:
            texts = [_written(name, value) for value in values]
            self.rules.append(f"{rule}: {' | '.join(quoted(text + _VALUE_END) for text in texts)}")
            return rule
        if takes_text(schema):
            return self._text(name, schema, rule)
        shared = {key: self._schema[key] for key in _SHARED if key in self._schema}
        self.rules.append(f"{rule}: json_{rule} {quoted(_VALUE_END)}")
        self.rules.append(f"json_{rule}: %json {json.dumps({**schema, **shared}, ensure_ascii=False)}")
        return rule

    def _schema_of(self, name: str) -> Mapping[str, object]:
        schema = self._schemas.of(name)
        if schema is None and isinstance(named := _object(self._schema, "properties").get(name), dict) and named:
            raise _refusal(f"the schema of {name!r} is nowhere")
        return schema or {}

    def _text(self, name: str, schema: Mapping[str, object], rule: str) -> str:
        choices = [one for one in _choices(schema) if takes_text(one)]
        unheld = {key for one in choices for key in one.keys() & (_NOT_HELD | _LENGTHS)} | (_NOT_HELD & schema.keys())
        if unheld:
            raise _refusal(f"the text {name!r} has {min(unheld)!r}")
        if not _LENGTHS & schema.keys():
            return "free_text"
        shortest, longest = _length(schema, "minLength") or 0, _length(schema, "maxLength")
        if longest is not None and shortest > longest:
            raise _refusal(f"no text is long enough for {name!r}")
        chars = f"(?s:.{{{shortest},{'' if longest is None else longest}}})"
        self.rules.append(f"{rule.upper()}: /{chars}/ & {_NO_MARKER}")
        self.rules.append(f"{rule}[lazy]: {rule.upper()} {quoted(_VALUE_END)}")
        return rule


def _values(schema: Mapping[str, object]) -> Sequence[object] | None:
    """All that a schema lets a value be; None where it does not count them."""
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return _array(schema, "enum")
    declared = schema.get("type")
    if isinstance(declared, str) and declared in _ALL_VALUES:
        return _ALL_VALUES[declared]
    choices = [_values(one) for one in _choices(schema)]
    counted = [one for one in choices if one is not None]
    return [value for one in counted for value in one] if choices and len(counted) == len(choices) else None


def _written(name: str, value: object) -> str:
    """A value as bare text, which is read as that value."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if any(marker in text for marker in _MARKERS):
        raise _refusal(f"a value of {name!r} holds a marker")
    return text


def _choices(schema: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    found = _array(schema, "anyOf" if "anyOf" in schema else "oneOf")
    return [cast("Mapping[str, object]", one) for one in found if isinstance(one, dict)]


def _object(schema: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = schema.get(key, {})
    if not isinstance(value, dict):
        raise _refusal(f"{key!r} is not an object")
    return cast("Mapping[str, object]", value)


def _array(schema: Mapping[str, object], key: str) -> Sequence[object]:
    """A list in a schema. One that is there is not empty: it would allow nothing."""
    value = schema.get(key, [])
    if not isinstance(value, list) or (not value and key in schema and key != "required"):
        raise _refusal(f"{key!r} is not a list of what is allowed")
    return cast("Sequence[object]", value)


def _length(schema: Mapping[str, object], key: str) -> int | None:
    value = schema.get(key)
    if value is not None and (not isinstance(value, int) or value < 0):
        raise _refusal(f"{key!r} is not a number of characters")
    return value


def _plain(name: str) -> str:
    """A name that can stand in a marker."""
    if not name or len(name) > _MAX_NAME_CHARS or set("<>\n") & set(name):
        raise _refusal(f"the name {name!r} cannot stand in a marker")
    return name


def _refusal(why: str) -> InvalidRequest:
    reason = f"tool_choice asks for a call that cannot be forced in the syntax of the model's calls: {why}"
    return InvalidRequest(reason, param="/tool_choice")
