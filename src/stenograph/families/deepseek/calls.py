"""DeepSeek's calls up to V3.1: in one block of control tokens, each with a name and the JSON of its arguments.

V3 and R1 write `function`, then the name on a line, then the arguments fenced as JSON; V3.1 the name and the arguments
alone. Source: the chat templates in the models' own files.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import CallText, ForcedTool
from stenograph.text.grammar.lark import json_value, quoted
from stenograph.text.hermes import JsonScanner

BLOCK_OPEN, BLOCK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_OPEN, CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_TYPE = "function"
_FENCE_OPEN, _FENCE_CLOSE = "```json\n", "\n```"

_STRING_OR_CLOSE = re.compile(r'"(?:[^"\\\n]|\\[^\n])*\\?["\n]?|' + re.escape(CALL_CLOSE))
"""A JSON string, which a line break ends as in JsonScanner, or the end of a call outside of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekCalls:
    """The syntax; `fenced` as V3 writes it."""

    fenced: bool
    lead: str = ""
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one marker that begins a block."""
        return (BLOCK_OPEN,)

    @property
    def markers(self) -> tuple[str, ...]:
        """All five of its control tokens."""
        return (BLOCK_OPEN, BLOCK_CLOSE, CALL_OPEN, CALL_CLOSE, SEPARATOR)

    def scanner(self, opener: str) -> JsonScanner:
        """Looks past JSON strings."""
        del opener
        return JsonScanner(BLOCK_CLOSE)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a block, or what is wrong with the first that is wrong: then the block holds none."""
        del opener, tools
        calls: list[CallText] = []
        for piece in _pieces(body):
            call = ParseProblem.TOOL_CALL_WRONG_SHAPE if piece is None else self._read_call(piece)
            if isinstance(call, ParseProblem):
                return call
            calls.append(call)
        return tuple(calls) or ParseProblem.TOOL_CALL_WRONG_SHAPE

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A block that is not closed has no calls."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """A block of calls, spelled as the template spells them."""
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        between = '("\\n" one_call)*' if self.fenced else "one_call*"
        more = f" {between}" if parallel else ""
        lines = [f"start: {marker(BLOCK_OPEN)} one_call{more} {marker(BLOCK_CLOSE)}", f"one_call: {names}"]
        for tool in tools:
            arguments = f"arguments_{tool.number}"
            if self.fenced:
                head = quoted(tool.name + "\n" + _FENCE_OPEN)
                spelled = f"{quoted(_TYPE)} {marker(SEPARATOR)} {head} {arguments} {quoted(_FENCE_CLOSE)}"
            else:
                spelled = f"{quoted(tool.name)} {marker(SEPARATOR)} {arguments}"
            lines.append(f"call_{tool.number}: {marker(CALL_OPEN)} {spelled} {marker(CALL_CLOSE)}")
            lines.append(f"{arguments}: {json_value(tool.schema)}")
        return "\n".join(lines) + "\n"

    def _read_call(self, text: str) -> CallText | ParseProblem:
        """A call from the text between its two markers."""
        head, separator, arguments = text.partition(SEPARATOR)
        if not separator:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        name = head
        if self.fenced:
            name, _, arguments = arguments.partition("\n")
            if head.strip() != _TYPE or not arguments.startswith(_FENCE_OPEN) or not arguments.endswith(_FENCE_CLOSE):
                return ParseProblem.TOOL_CALL_WRONG_SHAPE
            arguments = arguments[len(_FENCE_OPEN) : -len(_FENCE_CLOSE)]
        try:
            is_object = isinstance(msgspec.json.decode(arguments), dict)
        except (msgspec.DecodeError, RecursionError, ValueError):
            return ParseProblem.TOOL_CALL_NOT_JSON
        if not is_object or not name.strip():
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        return CallText(name=name.strip(), arguments=arguments.strip())


def _pieces(body: str) -> Iterator[str | None]:
    """The text of each call of a block, without its two markers; None where something else stands. Linear."""
    at = 0
    while rest := len(body) - at:
        if body[at].isspace():
            at += 1
            continue
        start = at + len(CALL_OPEN)
        ends = _STRING_OR_CLOSE.finditer(body, start) if body.startswith(CALL_OPEN, at) and rest else ()
        end = next((found for found in ends if found.group() == CALL_CLOSE), None)
        if end is None:
            yield None
            return
        yield body[start : end.start()]
        at = end.end()
