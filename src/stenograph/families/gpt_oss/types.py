"""JSON Schema as TypeScript, harmony's spelling of a function's parameters.

Owns that spelling, oddities included: a description's later lines stand without `//`, a string as a default is quoted
but not escaped, a schema without a type is `any` even where it lists values. Knows nothing of messages.

Source: the harmony response format as OpenAI publishes it; checked against the output of the package openai-harmony.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import msgspec

_STEP, _VARIANT_STEP = "    ", "   "
_NAMES = {"integer": "number", "number": "number", "boolean": "boolean"}
_MAX_INTEGER, _MIN_INTEGER = 2**64 - 1, -(2**63)


def typescript(schema: object, indent: str = "") -> str:
    """A schema's type. Its inner lines begin with `indent`. Raises RecursionError where it is nested too deep."""
    fields = _mapping(schema)
    if isinstance(fields.get("oneOf"), list):
        return _variants(fields, indent)
    match fields.get("type"):
        case list():
            return " | ".join(_NAMES.get(kind, kind) for kind in _strings(fields["type"])) or "any"
        case "object":
            return _object(fields, indent)
        case "array":
            return f"{typescript(fields['items'], indent)}[]" if "items" in fields else "Array<any>"
        case "string":
            return " | ".join(f'"{value}"' for value in _strings(fields.get("enum"))) or "string"
        case kind:
            return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"


def _object(fields: Mapping[str, object], indent: str) -> str:
    required = _strings(fields.get("required"))
    lines = [*_comment(_text(fields, "description"), indent), "{"]
    for name, schema in _mapping(fields.get("properties")).items():
        optional = "" if name in required else "?"
        lines.extend(_property(f"{name}{optional}", _mapping(schema), indent))
    return "\n".join((*lines, f"{indent}}}"))


def _property(name: str, fields: Mapping[str, object], indent: str) -> Iterator[str]:
    """The lines of one property: its comments, and its type."""
    if (title := _text(fields, "title")) is not None:
        yield from (*_comment(title, indent), f"{indent}//")
    description = _text(fields, "description")
    if isinstance(fields.get("oneOf"), list):
        first = next((_text(_mapping(one), "description") for one in cast("list[object]", fields["oneOf"])), None)
        yield from (*_examples(fields, indent), *_comment(None if description == first else description, indent))
        if "default" in fields:
            yield f"{indent}// default: {_default(fields)}"
        yield f"{indent}{name}:{_variants(fields, indent, above=description, is_property=True)}"
        yield f"{indent},"
        return
    yield from (*_comment(description, indent), *_examples(fields, indent))
    default = f" // default: {_default(fields)}" if "default" in fields else ""
    yield f"{indent}{name}: {_with_null(typescript(fields, indent + _STEP), fields)},{default}"


def _variants(fields: Mapping[str, object], indent: str, *, above: str | None = None, is_property: bool = False) -> str:
    """Several types, each on a line of its own, followed by its comment unless the comment stands `above`.

    Of the first, only its default stands there. A default loses its quotes in a property's own variants alone.
    """
    lines: list[str] = []
    for number, schema in enumerate(cast("list[object]", fields["oneOf"])):
        variant = _mapping(schema)
        description = _text(variant, "description")
        is_above = above is not None and (number == 0 or description == above)
        said = [] if description is None or is_above else [description]
        if "default" in variant:
            said.append(f"default: {_default(variant if is_property else {'default': variant['default']})}")
        comment = f" // {' '.join(said)}" if said else ""
        lines.append(f"\n{indent} | {_with_null(typescript(variant, indent + _VARIANT_STEP), variant)}{comment}")
    return "".join(lines)


def _with_null(text: str, fields: Mapping[str, object]) -> str:
    return f"{text} | null" if fields.get("nullable") is True and "null" not in text else text


def _text(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) else None


def _comment(text: str | None, indent: str) -> tuple[str, ...]:
    return () if text is None else (f"{indent}// {text}",)


def _examples(fields: Mapping[str, object], indent: str) -> tuple[str, ...]:
    if not (isinstance(fields.get("examples"), list) and fields["examples"]):
        return ()
    return f"{indent}// Examples:", *(f'{indent}// - "{one}"' for one in _strings(fields["examples"]))


def _default(fields: Mapping[str, object]) -> str:
    """A default as compact JSON; a string raw, and without quotes where values are listed."""
    value = fields["default"]
    if isinstance(value, str):
        return value if fields.get("enum") else f'"{value}"'
    return msgspec.json.encode(_narrowed(value)).decode()


def _narrowed(value: object) -> object:
    """A JSON value with integers of at most 64 bits; larger ones become floats."""
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        return float(value)
    if isinstance(value, list):
        return [_narrowed(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _narrowed(item) for key, item in cast("dict[str, object]", value).items()}
    return value


def _mapping(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _strings(value: object) -> list[str]:
    """The strings of a list; none if the value is no list."""
    return [one for one in cast("list[object]", value) if isinstance(one, str)] if isinstance(value, list) else []
