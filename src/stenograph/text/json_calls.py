"""Calls with arguments in JSON: where a block of them closes, and each call in it.

Knows no family but Hermes, with calls shared by many others: one object `{"name": …, "arguments": {…}}` between two
markers. Source: the chat templates of Qwen2.5, Qwen3 and NousResearch's Hermes models.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import QUOTED_NAME, BlockScanner, CallSpelling, CallSyntax, CallText

JSON_SPACE = " \t\r\n"

_STRING_CHARS = re.compile(r'(?:[^"\\\n]|\\[^\n])*+')
_BLANK = re.compile(r"\s*")
_BAD_JSON = (msgspec.DecodeError, RecursionError, ValueError)


class OutsideStrings:
    """Looks for a regular expression outside JSON strings in a growing text. Linear in the text.

    A match has at most `max_chars`. A line break ends a string: JSON has none in strings, and so a missing quote spoils
    no later call.
    """

    def __init__(self, wanted: str, max_chars: int, *, start: int = 0) -> None:
        self._wanted = re.compile(f'"|{wanted}')
        self._max_chars = max_chars
        self._at: int = start
        self._in_string = False

    def next(self, text: str) -> re.Match[str] | None:
        """The next match in `text`, the text of the previous `next` and more; None: not there yet."""
        while not self._in_string or self._ends_string(text):
            found = self._wanted.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - self._max_chars + 1)
                return None
            self._at = found.end()
            if found[0] != '"':
                return found
            self._in_string = True
        return None

    def _ends_string(self, text: str) -> bool:
        """Read to the quote or line break at a string's end; False: it is not there yet."""
        chars = _STRING_CHARS.match(text, self._at)
        assert chars is not None, "no characters match, too"
        self._at = chars.end()
        after = text[self._at : self._at + 2]
        if after in ("", "\\"):
            return False
        self._at += 2 if after[0] == "\\" else 1
        self._in_string = False
        return True


class MarkerSearch:
    """Finds a marker outside JSON strings in a growing text."""

    def __init__(self, marker: str, *, start: int = 0) -> None:
        self._outside = OutsideStrings(re.escape(marker), len(marker), start=start)

    def find(self, text: str) -> tuple[int, int] | None:
        """Find the marker's span in `text`, the text of the previous `find` and more; None: not there yet."""
        found = self._outside.next(text)
        return None if found is None else found.span()


class JsonExtent:
    """Finds the end of a JSON object or array without a closing marker, by its brackets; in any text.

    The value begins at `start`, and `depth` of its brackets are open before; it ends before the marker `until` in any
    case; this marker begins with a bracket.
    """

    def __init__(self, *, start: int = 0, depth: int = 0, until: str = "") -> None:
        self._depth = depth
        self._until = until
        cut = "".join(f"(?:{re.escape(char)}" for char in until[1:-1]) + ")?" * len(until[1:-1])
        ends = rf"{re.escape(until)}|{re.escape(until[0])}(?!{cut}\Z)|" if until else ""
        brackets = "".join(re.escape(one) for one in "{}[]" if one != until[:1])
        self._outside = OutsideStrings(f"{ends}[{brackets}]", max(1, len(until)), start=start)

    def find(self, text: str) -> tuple[int, int] | None:
        """The end [end, end) of the value in `text`, the text of the previous `find` and more; None: not yet."""
        while (found := self._outside.next(text)) is not None:
            if found[0] == self._until:
                return found.start(), found.start()
            self._depth += 1 if found[0] in "{[" else -1
            if self._depth <= 0:
                return found.end(), found.end()
        return None


def is_json_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except _BAD_JSON:
        return False


def json_call(
    name: str,
    arguments: str,
    call_id: str | None = None,
    *,
    in_strings: bool = True,
    no_object: ParseProblem = ParseProblem.TOOL_CALL_WRONG_SHAPE,
) -> CallText | ParseProblem:
    """A call from its name and the text of its arguments, or its problem. Never raises.

    With `in_strings` arguments may also come as a JSON string with an object in it; then the string's content is kept.
    """
    try:
        value: object = msgspec.json.decode(arguments)
    except _BAD_JSON:
        return ParseProblem.TOOL_CALL_NOT_JSON
    if in_strings and isinstance(value, str):
        arguments = value
    if not is_json_object(arguments):
        return no_object
    return CallText(name=name, arguments=arguments, call_id=call_id) if name else ParseProblem.TOOL_CALL_WRONG_SHAPE


class WireCall(msgspec.Struct, gc=False):
    """A call written as one object."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")

    def read(self, call_id: str | None = None) -> CallText | ParseProblem:
        """The call, or its problem."""
        return json_call(self.name, bytes(self.arguments).decode(), call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class HermesCalls(CallSyntax):
    """Blocks of one object."""

    close: str

    def scanner(self, opener: str) -> BlockScanner:
        """Looks past JSON strings."""
        del opener
        return MarkerSearch(self.close)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The one call of a block."""
        del opener, tools
        try:
            call = msgspec.json.decode(body.strip(), type=WireCall).read()
        except msgspec.ValidationError:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        except _BAD_JSON:
            return ParseProblem.TOOL_CALL_NOT_JSON
        return (call,) if isinstance(call, CallText) else call


HERMES = HermesCalls(
    openers=("<tool_call>",),
    close="</tool_call>",
    markers=("<tool_call>", "</tool_call>"),
    lead="\n",
    spelling=CallSpelling(
        head=f'<tool_call>\n{{"name": {QUOTED_NAME}, "arguments": ', tail="}\n</tool_call>", between="\n"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedCalls(CallSyntax):
    """Blocks of calls, each a name and the JSON of its arguments in a frame of its own.

    A call follows `head`, up to `call_close` outside strings; without a `head` a block is one call. The text between
    matches `call`. Groups of the two are the `name`, the `arguments` and the `id`. `space` is allowed around arguments,
    `no_object` the problem of JSON other than an object, `in_strings` as in `json_call`.
    """

    close: str
    head: re.Pattern[str] | None = None
    call_close: str = ""
    call: re.Pattern[str]
    space: str | None = JSON_SPACE
    in_strings: bool = False
    no_object: ParseProblem = ParseProblem.TOOL_CALL_WRONG_SHAPE

    def scanner(self, opener: str) -> BlockScanner:
        """Looks past JSON strings."""
        del opener
        return MarkerSearch(self.close)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of a block, or the problem of the first faulty one: then the block holds none."""
        del opener, tools
        calls: list[CallText] = []
        for groups in self._groups(body):
            call = ParseProblem.TOOL_CALL_WRONG_SHAPE if groups is None else self._call(groups)
            if isinstance(call, ParseProblem):
                return call
            calls.append(call)
        return tuple(calls) or ParseProblem.TOOL_CALL_WRONG_SHAPE

    def _groups(self, body: str) -> Iterator[dict[str, str | None] | None]:
        """The groups of each call; None where something else stands."""
        if self.head is None:
            found = self.call.fullmatch(body)
            yield None if found is None else found.groupdict()
            return
        at = 0
        while not _BLANK.fullmatch(body, at):
            head = self.head.match(body, at)
            end = None if head is None else MarkerSearch(self.call_close, start=head.end()).find(body)
            call = None if head is None or end is None else self.call.fullmatch(body, head.end(), end[0])
            if head is None or end is None or call is None:
                yield None
                return
            yield {**head.groupdict(), **call.groupdict()}
            at = end[1]

    def _call(self, groups: Mapping[str, str | None]) -> CallText | ParseProblem:
        return json_call(
            (groups["name"] or "").strip(),
            (groups["arguments"] or "").strip(self.space),
            (groups.get("id") or "").strip() or None,
            in_strings=self.in_strings,
            no_object=self.no_object,
        )
