"""DSML calls (DeepSeek V3.2 and V4): a block of invocations, each with one element for each argument.

Text stands in an argument as it is, anything else as JSON; an attribute says which. Nothing is escaped. So an argument
ends only where what has to follow one follows: text that spells an end alone is text. Knows nothing of tokens.
Source: the encoders published with the models (encoding_dsv32.py, encoding_dsv4.py).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.families.deepseek.dsml_grammar import dsml_grammar
from stenograph.text.call_syntax import CallText, ForcedTool

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DsmlCalls:
    """The syntax; `block` is the name of the element around the invocations."""

    block: str
    lead: str = "\n\n"
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one tag that begins a block."""
        return (f"<{MARK}{self.block}>",)

    @property
    def markers(self) -> tuple[str, ...]:
        """The one token that all of its tags have."""
        return (MARK,)

    def scanner(self, opener: str) -> "DsmlScanner":
        """Looks past arguments."""
        del opener
        return DsmlScanner(f"</{MARK}{self.block}>")

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a block, or what is wrong with the first that is wrong: then the block holds none."""
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

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A block that is not closed has no calls."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """A block after its lead, each argument an element as the tool's schema has it."""
        return dsml_grammar(tools, parallel, lead=self.lead, block=self.block, mark=MARK, item=marker(MARK))


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
        """Find the closing tag's span in `text`, which continues the text of the call before; None: not there yet."""
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
    """The invocation at `at`, and where it ends; or what is wrong with it."""
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
