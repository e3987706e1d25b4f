"""MiniMax-M3's calls: a block of invocations, with arguments, objects and lists as elements in elements.

Every tag follows the model's own token, never sampled in the text of a value, so a value needs no escape. A leaf is
bare text, typed by the tool's schema; an object has an element for each key, a list one `item` for each entry, and null
is `null`.

Source: the chat template of MiniMax-M3.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import NAME, PLAIN_NAME, CallSpelling, CallSyntax, CallText, ForcedTool, Marker
from stenograph.text.grammar.argument_grammar import argument_rules
from stenograph.text.grammar.lark import quoted
from stenograph.text.typed_arguments import ParameterSchemas, schema_types, spelled

MARK = "]<]minimax[>["
TOOL_CALL, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
OPEN, CLOSE = MARK + TOOL_CALL, MARK + TOOL_CALL_CLOSE
_INVOKE_CLOSE = f"{MARK}</invoke>"
_ITEM = "item"
_MAX_NESTED = 32
_MAX_GAP_CHARS = 8

_HEAD = re.compile(rf'\s*{re.escape(MARK)}<invoke name="([^"<>\n]+)">')
_TAIL = re.compile(rf"{re.escape(_INVOKE_CLOSE)}\s*")
_ELEMENT = re.compile(rf"{re.escape(MARK)}<([^<>/\n][^<>\n]{{0,255}})>")
_END = re.compile(
    rf"(?:{re.escape(_INVOKE_CLOSE)}\s{{0,{_MAX_GAP_CHARS}}}|\A\s{{0,{_MAX_GAP_CHARS}}}){re.escape(CLOSE)}"
)
_MAX_END_CHARS = len(_INVOKE_CLOSE) + _MAX_GAP_CHARS + len(CLOSE)


class _MalformedCall(Exception):
    """A call is not well formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM3Calls(CallSyntax):
    """The syntax. Objects and lists are forced as JSON; it is read too."""

    def scanner(self, opener: str) -> "BlockEnd":
        """Looks for the block's close after an invocation."""
        del opener
        return BlockEnd()

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a block, or none of them, if one is malformed; leaves as the tools' schemas type them."""
        del opener
        calls: list[CallText] = []
        at = 0
        try:
            while head := _HEAD.match(body, at):
                tool = tools.get(head[1])
                schemas = ParameterSchemas("{}" if tool is None else tool.parameters_json)
                elements, at = _elements(body, head.end(), schemas, 0)
                tail = _TAIL.match(body, at)
                if tail is None:
                    return ParseProblem.TOOL_CALL_WRONG_SHAPE
                calls.append(CallText(name=head[1], arguments=_object(elements)))
                at = tail.end()
        except _MalformedCall:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        return tuple(calls) if calls and not body[at:].strip() else ParseProblem.TOOL_CALL_WRONG_SHAPE

    def arguments(self, tool: ForcedTool, marker: Marker) -> tuple[str, Sequence[str]]:
        """Each argument in its element."""
        return argument_rules(tool, _Frame(mark=marker(MARK)))

    def shared_rules(self, marker: Marker) -> Sequence[str]:
        """Free text of any length up to its end."""
        return _Frame(mark=marker(MARK)).text_rules("free_text", 0, None)


M3_CALLS = MiniMaxM3Calls(
    openers=(OPEN,),
    # The token before each tag, and those of the block.
    markers=(MARK, TOOL_CALL, TOOL_CALL_CLOSE),
    spelling=CallSpelling(
        begin=f"{OPEN}\n",
        head=f'{MARK}<invoke name="{NAME}">',
        tail=f"{_INVOKE_CLOSE}\n",
        end=CLOSE,
        names=PLAIN_NAME,
    ),
)


class BlockEnd:
    """Finds a block's closing tag in a growing text: one after an invocation, or after nothing. Linear."""

    def __init__(self) -> None:
        self._at = 0

    def find(self, text: str) -> tuple[int, int] | None:
        """Find its span in `text`, the text of the previous `find` and more; None: not there yet."""
        found = _END.search(text, self._at)
        if found is None:
            self._at = max(0, len(text) - _MAX_END_CHARS)
            return None
        return found.end() - len(CLOSE), found.end()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A value between `<key>` and `</key>`; `mark` is the token before each, as the grammar has it."""

    mark: str

    def head(self, name: str) -> str:
        """The items before a value."""
        return f"{self.mark} {quoted(f'<{name}>')}"

    @property
    def end(self) -> str:
        """The end of a value: no text of it has the token."""
        return self.mark

    def tail(self, name: str) -> str:
        """The items after that."""
        return f" {quoted(f'</{name}>')}"

    def text_rules(self, rule: str, shortest: int, longest: int | None) -> Sequence[str]:
        """The rules of free text of so many characters, up to its end."""
        terminal, most = rule.upper(), "" if longest is None else longest
        spelled_mark = re.escape(MARK).replace("/", r"\/")
        return (
            f"{rule}: {terminal}{'' if shortest else '?'} {self.end}",
            f"{terminal}: /(?s:.{{{max(1, shortest)},{most}}})/ & ~/(?s:.*){spelled_mark}(?s:.*)/",
        )

    def is_read_back(self, value: str) -> bool:
        """Whether a value ends where its closing tag is."""
        return MARK not in value


def _elements(text: str, at: int, schemas: ParameterSchemas, num_nested: int) -> tuple[list[tuple[str, str]], int]:
    """The elements from `at` on, as name and JSON, and where they end. Raises _MalformedCall."""
    if num_nested > _MAX_NESTED:
        raise _MalformedCall
    found: list[tuple[str, str]] = []
    while opened := _ELEMENT.match(text, at):
        value, at = _value(text, opened, schemas, num_nested)
        found.append((opened[1], value))
    return found, at


def _value(text: str, opened: re.Match[str], schemas: ParameterSchemas, num_nested: int) -> tuple[str, int]:
    """An element's value as JSON, and where its closing tag ends. Raises _MalformedCall."""
    close = f"{MARK}</{opened[1]}>"
    schema = schemas.entry() or schemas.of(opened[1])
    types = schema_types(schema or {})
    if types != {"string"} and _ELEMENT.match(text, opened.end()):
        elements, at = _elements(text, opened.end(), schemas.within(schema), num_nested + 1)
        if not text.startswith(close, at):
            raise _MalformedCall
        is_list = {name for name, _ in elements} == {_ITEM} and "object" not in types - {"array"}
        value = f"[{', '.join(value for _, value in elements)}]" if is_list else _object(elements)
        return value, at + len(close)
    end = text.find(close + MARK, opened.end())
    if end < 0:
        raise _MalformedCall
    leaf = text[opened.end() : end]
    empty = "{}" if types == {"object"} else "[]" if types == {"array"} else None
    return empty if empty and not leaf.strip() else spelled(leaf, schema), end + len(close)


def _object(elements: Sequence[tuple[str, str]]) -> str:
    """The JSON object of elements; of a repeated name the last counts."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in dict(elements).items()) + "}"
