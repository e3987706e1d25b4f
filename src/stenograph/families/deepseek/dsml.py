"""DSML calls (DeepSeek V3.2 and V4): a block of invocations, each with one element for each argument.

Text stands in an argument as it is, anything else as JSON; an attribute says which. Nothing is escaped. So an argument
ends only where its end is followed by an allowed continuation: the spelling of an end alone is text. Knows nothing of
tokens. Source: the encoders published with the models (encoding_dsv32.py, encoding_dsv4.py).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import (
    NAME,
    CallSpelling,
    CallSyntax,
    CallText,
    ForcedTool,
    Marker,
    NameRule,
    unforceable,
)
from stenograph.text.grammar.argument_grammar import argument_items
from stenograph.text.grammar.lark import json_value, quoted
from stenograph.text.typed_arguments import SHARED, ParameterSchemas, as_list, as_mapping, takes_text

MARK = "｜DSML｜"
_INVOKE_CLOSE = f"</{MARK}invoke>"
_ARGUMENT = f"<{MARK}parameter "
_ARGUMENT_CLOSE = f"</{MARK}parameter>"
_ARGUMENT_ENDS = tuple(f"{_ARGUMENT_CLOSE}\n{following}" for following in (_ARGUMENT, _INVOKE_CLOSE))

_INVOKE_HEAD = re.compile(f'<{MARK}invoke name="([^\n]*?)">\n')
_ARGUMENT_HEAD = re.compile(f'{_ARGUMENT}name="([^\n]*?)" string="(true|false)">')
_ARGUMENT_END = re.compile("|".join(map(re.escape, _ARGUMENT_ENDS)))
_HEAD_END = re.compile('" string="(?:true|false)">|\n')
_MAX_HEAD_END_CHARS = len('" string="false">')
_SPACE = re.compile(r"\s*")
_NAMES = NameRule(like=rf'(?!(?s:.*){MARK})[^"\n]+', where="in a tag")

_SAYINGS = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "$id", "strict"})
"""Keywords without a constraint."""
_CHOICES = ("anyOf", "oneOf")


@dataclass(frozen=True, slots=True, kw_only=True)
class DsmlCalls(CallSyntax):
    """The syntax. All of its tags have one token."""

    close: str

    def scanner(self, opener: str) -> "DsmlScanner":
        """Looks past arguments."""
        del opener
        return DsmlScanner(self.close)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a block, or the problem of the first faulty one: then the block holds none."""
        del opener, tools
        calls: list[CallText] = []
        at = _after_space(body, 0)
        while at < len(body):
            found = _read_call(body, at)
            if isinstance(found, ParseProblem):
                return found
            call, end = found
            calls.append(call)
            at = _after_space(body, end)
        return tuple(calls) or ParseProblem.TOOL_CALL_WRONG_SHAPE

    def arguments(self, tool: ForcedTool, marker: Marker) -> tuple[str, Sequence[str]]:
        """Each argument an element as the tool's schema has it."""
        rules = _ArgumentRules(tool, marker(MARK))
        return " ".join(argument_items(tool, rules.add)) or '"\\n"', rules.rules

    def shared_rules(self, marker: Marker) -> Sequence[str]:
        """The closing tag after its `</`; and free text up to there: in pieces, each up to a `</`."""
        return (
            f'argument_end: {marker(MARK)} "parameter>\\n"',
            "free_text: text_piece+ argument_end",
            "text_piece[lazy]: TEXT_PIECE",
            f"TEXT_PIECE: /(?s:.*)<\\// & ~/{MARK}(?s:.*)/",
        )


def dsml_calls(block: str) -> DsmlCalls:
    """The syntax; `block` is the name of the element around the invocations."""
    opening, closing, lead = f"<{MARK}{block}>", f"</{MARK}{block}>", "\n\n"
    return DsmlCalls(
        openers=(opening,),
        close=closing,
        markers=(MARK,),
        lead=lead,
        spelling=CallSpelling(
            begin=f"{lead}{opening}",
            head=f'<{MARK}invoke name="{NAME}">\n',
            tail=_INVOKE_CLOSE,
            between="\n",
            is_in_lines=True,
            end=closing,
            names=_NAMES,
        ),
    )


class _ElementState(Enum):
    BETWEEN = "between"
    HEAD = "head"
    ARGUMENT = "argument"


class DsmlScanner:
    """Finds the end of a block in a growing text, looking past arguments. Linear in the text."""

    def __init__(self, close: str) -> None:
        self._close = close
        self._close_or_argument = re.compile(f"{re.escape(close)}|{_ARGUMENT}")
        self._at = 0
        self._state = _ElementState.BETWEEN

    def find(self, text: str) -> tuple[int, int] | None:
        """Find the closing tag's span in `text`, the text of the previous `find` and more; None: not there yet."""
        while (found := self._seek(text)) is not None:
            self._at = found.end()
            match self._state:
                case _ElementState.BETWEEN if found.group() == self._close:
                    return found.span()
                case _ElementState.BETWEEN:
                    self._state = _ElementState.HEAD
                case _ElementState.HEAD:
                    self._state = _ElementState.BETWEEN if found.group() == "\n" else _ElementState.ARGUMENT
                case _ElementState.ARGUMENT:
                    self._at = found.start() + len(_ARGUMENT_CLOSE)
                    self._state = _ElementState.BETWEEN
        return None

    def _seek(self, text: str) -> re.Match[str] | None:
        """Find the end of this state; if it is not there yet, the next look begins where it still can be."""
        match self._state:
            case _ElementState.BETWEEN:
                wanted, max_chars = self._close_or_argument, max(len(self._close), len(_ARGUMENT))
            case _ElementState.HEAD:
                wanted, max_chars = _HEAD_END, _MAX_HEAD_END_CHARS
            case _ElementState.ARGUMENT:
                wanted, max_chars = _ARGUMENT_END, max(map(len, _ARGUMENT_ENDS))
        found = wanted.search(text, self._at)
        if found is None:
            self._at = max(self._at, len(text) - max_chars + 1)
        return found


def _read_call(body: str, at: int) -> tuple[CallText, int] | ParseProblem:
    """The invocation at `at`, and where it ends; or its problem."""
    head = _INVOKE_HEAD.match(body, at)
    if head is None or not head[1]:
        return ParseProblem.TOOL_CALL_WRONG_SHAPE
    arguments: dict[str, str] = {}
    at = head.end()
    while found := _ARGUMENT_HEAD.match(body, at):
        end = _ARGUMENT_END.search(body, found.end())
        if end is None or found[1] in arguments:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        value = body[found.end() : end.start()]
        if found[2] == "true":
            value = json.dumps(value, ensure_ascii=False)
        elif not _is_json(value):
            return ParseProblem.TOOL_CALL_NOT_JSON
        arguments[found[1]] = value
        at = end.start() + len(_ARGUMENT_CLOSE) + 1
    if not arguments:
        at = _after_space(body, at)
    if not body.startswith(_INVOKE_CLOSE, at):
        return ParseProblem.TOOL_CALL_WRONG_SHAPE
    pairs = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in arguments.items())
    return CallText(name=head[1], arguments=f"{{{pairs}}}"), at + len(_INVOKE_CLOSE)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
    return True


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "white space may be none"
    return found.end()


class _ArgumentRules:
    """A tool's arguments as rules: free text, and text from a list, as they are; anything else as JSON.

    Text with a pattern or a length is JSON, too. `item` is the mark as the grammar has it.
    """

    def __init__(self, tool: ForcedTool, item: str) -> None:
        self._tool = tool
        self._schemas = ParameterSchemas(json.dumps(tool.schema))
        self._item = item
        self.rules: list[str] = []

    def add(self, name: str, rule: str) -> None:
        """Add the rules of an argument."""
        head = quoted(f'parameter name="{_NAMES.checked(name)}" string="')
        values = " | ".join(self._values(name, rule))
        self.rules.append(f'{rule}: "<" {self._item} {head} ({values})')

    def _values(self, name: str, rule: str) -> Iterator[str]:
        """Texts allowed after the attribute's name: the value's form, the value, and its closing tag."""
        schema = self._schemas.of(name) or {}
        if (listed := _listed(schema)) is not None:
            for is_text in (True, False):
                values = [_spelled(value) for value in listed if isinstance(value, str) is is_text]
                if any(MARK in value for value in values):
                    raise unforceable(f"a value of {name!r} has {MARK!r}")
                if values:
                    items = " | ".join(quoted(f"{value}</") for value in values)
                    yield f"{quoted(_flag(is_text=is_text))} ({items}) argument_end"
            return
        if _is_free_text(schema):
            yield f"{quoted(_flag(is_text=True))} free_text"
            if schema.get("type") == "string":
                return
        shared = {key: self._tool.schema[key] for key in SHARED if key in self._tool.schema}
        self.rules.append(f"{rule}_json: {json_value({**schema, **shared})}")
        yield f'{quoted(_flag(is_text=False))} {rule}_json "</" argument_end'


def _spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _flag(*, is_text: bool) -> str:
    """The rest of the opening tag from the attribute's value on."""
    return 'true">' if is_text else 'false">'


def _listed(schema: Mapping[str, object]) -> Sequence[object] | None:
    """All allowed values; None where the schema does not list them."""
    said, declared = schema.keys() - _SAYINGS - {"type"}, schema.get("type")
    if said not in ({"const"}, {"enum"}) or declared not in (None, "string"):
        return None
    values = [schema["const"]] if "const" in said else as_list(schema["enum"])
    return [value for value in values if declared is None or isinstance(value, str)] or None


def _is_free_text(schema: Mapping[str, object]) -> bool:
    """Whether any text at all is a value."""
    said = schema.keys() - _SAYINGS
    if not said or said == {"type"}:
        return not said or takes_text(schema)
    for key in _CHOICES:
        if said == {key}:
            choices = [as_mapping(one) for one in as_list(schema[key])]
            texts = [one for one in choices if takes_text(one) or "type" not in one]
            return any(map(_is_free_text, texts)) and (key == "anyOf" or len(texts) == 1)
    return False
