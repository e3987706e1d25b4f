"""Calls with arguments as bare text between tags: where a value ends, where the block around it closes, each call.

A value is not escaped, so it may hold any marker. It ends where its closing tag is followed by an allowed tag: with
anything else after it, a closing tag is text, and so is one within a string of a JSON object or array. Knows nothing of
any family's tags.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import NAME, BlockScanner, CallSyntax, CallText, ForcedTool, Marker
from stenograph.text.grammar.argument_grammar import argument_rules
from stenograph.text.grammar.lark import quoted
from stenograph.text.typed_arguments import arguments_json

_GAP = r"\s{0,8}"
"""White space between two tags. Bounded, so a search has to look back only so far."""
_LOOKBACK_CHARS = 512
"""No tag, and no end of a value with its follower, is longer."""
_JSON_CHAR = r"[ \t\r\n{}\[\],:0-9+\-.eEaflnrstu]"
_STRING_CHAR = r'([^"\\\x00-\x1f]|\\[^\x00-\x1f])'
_JSON_CHARS = re.compile(f"{_JSON_CHAR}*+")
_STRING_CHARS = re.compile(f"{_STRING_CHAR}*+")

OPEN_STRING = rf'[{{\[]({_JSON_CHAR}|"{_STRING_CHAR}*")*"{_STRING_CHAR}*\\?'
"""A regular expression: JSON cut within a string, where a closing tag on the same line is taken for text."""


def value_end(close: str, *followers: Sequence[str]) -> re.Pattern[str]:
    """A closing tag with one of `followers` after it: each is tags with nothing but white space between them."""
    after = "|".join(_GAP.join(map(re.escape, tags)) for tags in followers)
    return re.compile(f"{re.escape(close)}{_GAP}(?={after})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementCalls(CallSyntax):
    """Blocks of calls, up to `close`. Patterns of a call: its `call` and each `argument`, with the name as their group,
    and `call_end`.

    A value follows `value_head`, a pattern found wherever it stands outside of values, and `value_end` ends it. A value
    after a line break (not part of it) ends at `end_in_lines`; without such a pattern, text in JSON strings is looked
    past. A template writes `argument_head` and `argument_tail` around a value; the tail begins with `value_close`.
    `never` is a pattern found in no forced value; without it, a value is tested by where it ends.
    """

    close: str
    call: re.Pattern[str]
    argument: re.Pattern[str]
    call_end: re.Pattern[str] = re.compile("")
    value_head: re.Pattern[str]
    value_end: re.Pattern[str]
    end_in_lines: re.Pattern[str] | None = None
    argument_head: str
    argument_tail: str
    value_close: str
    never: str = ""

    def scanner(self, opener: str) -> BlockScanner:
        """Looks past values."""
        del opener
        return ElementScanner(self)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a block, or none of them, if one is malformed; arguments as the tools' schemas type them."""
        del opener
        text, at = f"{body}{self.close}\n", 0
        calls: list[CallText] = []
        while head := self.call.match(text, at):
            found = self._arguments(text, head.end())
            if found is None:
                return ParseProblem.TOOL_CALL_WRONG_SHAPE
            arguments, at = found
            calls.append(CallText(name=head[1], arguments=arguments_json(arguments, tools.get(head[1]))))
        return tuple(calls) if calls and text[at:].strip() == self.close else ParseProblem.TOOL_CALL_WRONG_SHAPE

    def _arguments(self, text: str, at: int) -> tuple[list[tuple[str, str]], int] | None:
        """A call's arguments, as name and text, and where its own end ends. None: it is not well formed."""
        arguments: list[tuple[str, str]] = []
        while opened := self.argument.match(text, at):
            value = ValueSearch(self, opened.end())
            ended = value.find(text)
            if ended is None or not ended[0]:
                return None
            arguments.append((opened[1], text[value.start : ended.start()]))
            at = ended.end()
        closed = self.call_end.match(text, at)
        return (arguments, closed.end()) if closed else None

    def arguments(self, tool: ForcedTool, marker: Marker) -> tuple[str, Sequence[str]]:
        """Each argument in its tags."""
        return argument_rules(tool, _ElementFrame(syntax=self, marker=marker))

    def shared_rules(self, marker: Marker) -> Sequence[str]:
        """Free text of any length up to its end."""
        return _ElementFrame(syntax=self, marker=marker).text_rules("free_text", 0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ElementFrame:
    """A value's tags, with one model's tokens."""

    syntax: ElementCalls
    marker: Marker

    def head(self, name: str) -> str:
        """The items before the value of that name."""
        return self.syntax.items(self.syntax.argument_head, self.marker, name)

    @property
    def end(self) -> str:
        """The items after a value."""
        return self.syntax.items(self.syntax.argument_tail, self.marker)

    def tail(self, name: str) -> str:
        """Nothing: a closing tag has no name."""
        del name
        return ""

    def text_rules(self, rule: str, shortest: int, longest: int | None) -> Sequence[str]:
        """The rules of free text of so many characters, up to its end."""
        close = re.escape(self.syntax.value_close).replace("/", r"\/")
        terminal, most = rule.upper(), "" if longest is None else longest
        without = f"~/(?s:.*){self.syntax.never or close}(?s:.*)/"
        text = without if self.syntax.end_in_lines else f"{without} & ~/{OPEN_STRING}/"
        if self._is_plain:
            end = quoted(self.syntax.argument_tail)
            return (f"{rule}[lazy]: {terminal} {end}", f"{terminal}: /(?s:.{{{shortest},{most}}})/ & {text}")
        optional = "" if shortest else "?"
        return (
            f"{rule}: {terminal}{optional} {self.end}",
            f"{terminal}: /(?s:.{{{max(1, shortest)},{most}}})/ & {text}",
        )

    @property
    def _is_plain(self) -> bool:
        """Whether the closing tag is no token of its own."""
        close = self.syntax.value_close
        return close not in self.syntax.markers or self.marker(close) == quoted(close)

    def is_read_back(self, value: str) -> bool:
        """Whether a value ends where its closing tag is."""
        if self.syntax.never:
            return not re.search(self.syntax.never, value)
        text = f"{value}{self.syntax.argument_tail}{self.syntax.argument_head.replace(NAME, 'a')}"
        found = ValueSearch(self.syntax, 0).find(text)
        return found is not None and found.start() == len(value)


class _Form(Enum):
    """Forms of a value, as far as it has come."""

    NOTHING = "nothing"
    JSON = "json"
    STRING = "a string in json"
    TEXT = "text"


class ValueSearch:
    """Looks for the end of one value in a growing text; its tag ends at `at`. Linear in the text."""

    def __init__(self, syntax: ElementCalls, at: int) -> None:
        self.start = at
        self._end = syntax.value_end
        self._end_in_lines = syntax.end_in_lines
        self._at = at
        self._form = _Form.NOTHING
        self._quote_at = at

    def find(self, text: str) -> re.Match[str] | None:
        """The closing tag in `text`, the text of the previous `find` and more; None: not there yet."""
        while self._form is not _Form.TEXT:
            if not self._read_json(text):
                return None
        found = self._end.search(text, self._at)
        if found is None:
            self._at = max(self._at, len(text) - _LOOKBACK_CHARS)
        return found

    def _read_json(self, text: str) -> bool:
        """Read on to a change of form; False when more text is needed. From the first break of JSON on, all is text."""
        if self._form is _Form.NOTHING:
            return self._begin(text[self._at : self._at + 1])
        in_string = self._form is _Form.STRING
        chars = (_STRING_CHARS if in_string else _JSON_CHARS).match(text, self._at)
        assert chars is not None, "no characters match, too"
        self._at = chars.end()
        after = text[self._at : self._at + 2]
        if not after or (in_string and after == "\\"):
            return False
        if after[0] == '"':
            self._form = _Form.JSON if in_string else _Form.STRING
            self._quote_at = self._at
            self._at += 1
            return True
        self._form = _Form.TEXT
        self._at = self._quote_at if in_string else self._at
        return True

    def _begin(self, first: str) -> bool:
        """Settle a value's form by its first character."""
        if self._end_in_lines is None:
            self._form = _Form.JSON if first in ("{", "[") else _Form.TEXT if first else _Form.NOTHING
        elif first:
            self._form = _Form.TEXT
            if first == "\n":
                self._end = self._end_in_lines
                self.start = self._at = self._at + 1
        return first != ""


class ElementScanner:
    """Finds a block's closing marker in a growing text, looking past values. Linear in the text."""

    def __init__(self, syntax: ElementCalls) -> None:
        self._syntax = syntax
        self._outside = re.compile(f"{syntax.value_head.pattern}|{re.escape(syntax.close)}")
        self._at = 0
        self._value: ValueSearch | None = None

    def find(self, text: str) -> tuple[int, int] | None:
        """Find the marker's span in `text`, the text of the previous `find` and more; None: not there yet."""
        while True:
            if self._value is not None:
                ended = self._value.find(text)
                if ended is None:
                    return None
                self._at, self._value = ended.end(), None
            found = self._outside.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - _LOOKBACK_CHARS)
                return None
            if found[0] == self._syntax.close:
                return found.span()
            self._value = ValueSearch(self._syntax, found.end())
