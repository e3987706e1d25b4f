"""A grammar of DSML calls, in llguidance's Lark: each argument in the order in which the tool's schema names it.

Owns the mapping of a schema to elements: free text, and text that is one of a few, as it is; anything else as JSON, as
is text with a pattern or a length. All that the grammar admits is read as those arguments (`dsml`): free text has no
closing tag in it. Knows nothing of what comes before the calls.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import InvalidRequest
from stenograph.text.call_syntax import ForcedTool
from stenograph.text.grammar.lark import json_value, quoted
from stenograph.text.typed_arguments import ParameterSchemas, takes_text

_SHARED = ("$defs", "definitions")
"""Members of the whole schema that an argument's schema needs."""
_SAYINGS = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "$id", "strict"})
"""Keywords that allow and forbid nothing."""
_ROOT_KEYWORDS = _SAYINGS | {"type", "properties", "required", "additionalProperties", *_SHARED}
_CHOICES = ("anyOf", "oneOf")


def dsml_grammar(tools: Sequence[ForcedTool], parallel: bool, *, lead: str, block: str, mark: str, item: str) -> str:
    """A block of one call, or with `parallel` of one or more, after `lead`; `item` is the mark as grammars have it.

    Raises InvalidRequest: a schema, or a name, that calls in this syntax cannot keep.
    """
    names = " | ".join(f"call_{tool.number}" for tool in tools)
    more = ' ("\\n" one_call)*' if parallel else ""
    tag = quoted(f"{block}>")
    opening, closing = f'{quoted(f"{lead}<")} {item} {tag} "\\n"', f'"\\n" "</" {item} {tag}'
    lines = [f"start: {opening} one_call{more} {closing}", f"one_call: {names}"]
    for tool in tools:
        arguments = _Arguments(tool, mark=mark, item=item)
        items = " ".join(arguments.items()) or '"\\n"'
        head = quoted(f'invoke name="{_plain(tool.name, mark)}">\n')
        lines.append(f'call_{tool.number}: "<" {item} {head} {items} "</" {item} "invoke>"')
        lines += arguments.rules
    return "\n".join([*lines, *_shared_rules(mark, item)]) + "\n"


def _shared_rules(mark: str, item: str) -> Sequence[str]:
    """The closing tag after its `</`; and free text up to there: in pieces, each up to a `</`."""
    return (
        f'argument_end: {item} "parameter>\\n"',
        "free_text: text_piece+ argument_end",
        "text_piece[lazy]: TEXT_PIECE",
        f"TEXT_PIECE: /(?s:.*)<\\// & ~/{mark}(?s:.*)/",
    )


class _Arguments:
    """A tool's arguments as items of a rule, and the rules that these are made of."""

    def __init__(self, tool: ForcedTool, *, mark: str, item: str) -> None:
        self._tool = tool
        self._schemas = ParameterSchemas(json.dumps(tool.schema))
        self._mark = mark
        self._item = item
        self.rules: list[str] = []

    def items(self) -> Iterator[str]:
        """Each argument, those that are not required with a `?`."""
        if unknown := self._tool.schema.keys() - _ROOT_KEYWORDS:
            raise _refusal(f"the parameters of {self._tool.name!r} have {min(unknown)!r}")
        properties = _mapping(self._tool.schema.get("properties"))
        required = _list(self._tool.schema.get("required"))
        named = [name for name, schema in properties.items() if schema is not False]
        if absent := [name for name in required if name not in named]:
            raise _refusal(f"{absent[0]!r} of {self._tool.name!r} is required, but it is not among the properties")
        for number, name in enumerate(named):
            rule = f"argument_{self._tool.number}_{number}"
            head = quoted(f'parameter name="{_plain(name, self._mark)}" string="')
            values = " | ".join(self._values(name, rule))
            self.rules.append(f'{rule}: "<" {self._item} {head} ({values})')
            yield rule if name in required else f"{rule}?"

    def _values(self, name: str, rule: str) -> Iterator[str]:
        """Texts that may follow the attribute's name: the value's form, the value, and its closing tag."""
        schema = self._schemas.of(name) or {}
        if (listed := _listed(schema)) is not None:
            for is_text in (True, False):
                values = [_spelled(value) for value in listed if isinstance(value, str) is is_text]
                if any(self._mark in value for value in values):
                    raise _refusal(f"a value of {name!r} has {self._mark!r}")
                if values:
                    items = " | ".join(quoted(f"{value}</") for value in values)
                    yield f"{quoted(_flag(is_text=is_text))} ({items}) argument_end"
            return
        if _is_free_text(schema):
            yield f"{quoted(_flag(is_text=True))} free_text"
            if schema.get("type") == "string":
                return
        shared = {key: self._tool.schema[key] for key in _SHARED if key in self._tool.schema}
        self.rules.append(f"{rule}_json: {json_value({**schema, **shared})}")
        yield f'{quoted(_flag(is_text=False))} {rule}_json "</" argument_end'


def _spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flag(*, is_text: bool) -> str:
    """The rest of the opening tag from the attribute's value on."""
    return 'true">' if is_text else 'false">'


def _listed(schema: Mapping[str, object]) -> Sequence[object] | None:
    """All that a value may be; None where the schema does not list it."""
    said, declared = schema.keys() - _SAYINGS - {"type"}, schema.get("type")
    if said not in ({"const"}, {"enum"}) or declared not in (None, "string"):
        return None
    values = [schema["const"]] if "const" in said else _list(schema["enum"])
    return [value for value in values if declared is None or isinstance(value, str)] or None


def _is_free_text(schema: Mapping[str, object]) -> bool:
    """Whether any text at all is a value."""
    said = schema.keys() - _SAYINGS
    if not said or said == {"type"}:
        return not said or takes_text(schema)
    for key in _CHOICES:
        if said == {key}:
            choices = [_mapping(one) for one in _list(schema[key])]
            texts = [one for one in choices if takes_text(one) or "type" not in one]
            return any(map(_is_free_text, texts)) and (key == "anyOf" or len(texts) == 1)
    return False


def _plain(name: str, mark: str) -> str:
    """A name that can stand in an attribute."""
    if not name or set('"\n') & set(name) or mark in name:
        raise _refusal(f"the name {name!r} cannot stand in a tag")
    return name


def _mapping(value: object) -> Mapping[str, object]:
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _list(value: object) -> Sequence[object]:
    return cast("list[object]", value) if isinstance(value, list) else ()


def _refusal(why: str) -> InvalidRequest:
    reason = f"tool_choice asks for a call that cannot be forced in the syntax of the model's calls: {why}"
    return InvalidRequest(reason, blame=Blame(RequestPart.TOOL_CHOICE))
