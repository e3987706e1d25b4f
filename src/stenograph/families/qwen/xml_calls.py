"""Qwen's XML calls: `<tool_call>` around `<function=name>`, and in it each argument in `<parameter=key>` as bare text.

An argument's text is not escaped, so it may hold any marker: a value ends where what closes it is followed by what may
come next. The template gives a value lines of its own, and so its end needs a line break too, which JSON within a
value never has; a value that begins on its marker's line may end anywhere. The end of a whole call ends a value as
well: a model that forgets one closing marker loses that call, and not the next.

Source: the chat templates of Qwen3-Coder and Qwen3.5.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.families.qwen.xml_grammar import qwen_xml_grammar
from stenograph.text.call_syntax import CallText, ForcedTool
from stenograph.text.typed_arguments import arguments_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
_MARKER = re.compile(rf"<parameter=[^<>\n]{{1,256}}>(?=(?s:.))|{CLOSE}")
_MARKER_CHARS = 272
"""No marker outside a value is longer, the character after it included."""

_NEXT = rf"<parameter=|</function>|{CLOSE}"
_LINES_END = re.compile(
    rf"\n?</parameter>[ \t]{{0,8}}\n\s{{0,8}}(?={_NEXT})|(?=</function>[ \t]{{0,8}}\n\s{{0,8}}{CLOSE})"
)
_INLINE_END = re.compile(rf"</parameter>\s{{0,8}}(?={_NEXT})|(?=</function>\s{{0,8}}{CLOSE})")
_END_CHARS = 64
"""No end of a value, with what has to follow it, is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenXmlCalls:
    """The syntax. `lead` is what the template writes between content and a block."""

    lead: str = "\n\n"
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one marker that begins a call."""
        return (OPEN,)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of the block; all within it is plain text."""
        return (OPEN, CLOSE)

    def scanner(self, opener: str) -> "QwenXmlScanner":
        """Looks past values."""
        del opener
        return QwenXmlScanner()

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The call of a block, or its calls, if it has several; arguments as the tool's schema types them."""
        del opener
        text, at = body + CLOSE, 0
        calls: list[CallText] = []
        while head := _FUNCTION.match(text, at):
            found = _read_arguments(text, head.end())
            if found is None:
                return ParseProblem.TOOL_CALL_WRONG_SHAPE
            arguments, at = found
            calls.append(CallText(name=head[1], arguments=arguments_json(arguments, tools.get(head[1]))))
        return tuple(calls) if calls and text[at:] == CLOSE else ParseProblem.TOOL_CALL_WRONG_SHAPE

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A block that is not closed is no call."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """Calls on lines of their own, with the white space of the families' templates."""
        return qwen_xml_grammar(tools, parallel, opening=marker(OPEN), closing=marker(CLOSE))


class QwenXmlScanner:
    """Finds the closing marker in a growing text, looking past values. Linear in the text."""

    def __init__(self) -> None:
        self._at = 0
        self._value_end: re.Pattern[str] | None = None  # None: not in a value

    def find(self, text: str) -> tuple[int, int] | None:
        """Find the marker's span in `text`, which continues the text of the call before; None: not there yet."""
        while True:
            found = (self._value_end or _MARKER).search(text, self._at)
            if found is None:
                num_open_chars = _END_CHARS if self._value_end else _MARKER_CHARS
                self._at = max(self._at, len(text) - num_open_chars)
                return None
            if self._value_end is not None:
                self._at, self._value_end = found.end(), None
            elif found[0] == CLOSE:
                return found.span()
            else:
                self._at, self._value_end = _value_start(text, found.end())


def _value_start(text: str, at: int) -> tuple[int, re.Pattern[str]]:
    """Start of a value whose marker ends at `at`, and the pattern that ends it."""
    return (at + 1, _LINES_END) if text.startswith("\n", at) else (at, _INLINE_END)


def _read_arguments(text: str, at: int) -> tuple[list[tuple[str, str]], int] | None:
    """A function's arguments, as name and text, and where its own end ends. None: it is not well formed."""
    arguments: list[tuple[str, str]] = []
    while opened := _PARAMETER.match(text, at):
        start, value_end = _value_start(text, opened.end())
        ended = value_end.search(text, start)
        if ended is None or not ended[0]:
            return None
        arguments.append((opened[1], text[start : ended.start()]))
        at = ended.end()
    closed = _FUNCTION_END.match(text, at)
    return (arguments, closed.end()) if closed else None
