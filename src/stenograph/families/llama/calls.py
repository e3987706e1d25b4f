"""Llama's calls: the whole reply is one JSON object `{"name": …, "parameters": {…}}`, with no marker around it.

So an object is a call only at the start of a reply, or after another, and only if it looks like one; any other object
is text. After `<|python_tag|>`, a token of its own, an object is a call wherever it stands. Several calls are parted by
`; `, as servers of these models read them; the models are made for one.

Source: the chat templates in the files of Llama 3.1 and 3.2.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import QUOTED_NAME, CallSpelling, CallSyntax, CallText
from stenograph.text.json_calls import JSON_SPACE, JsonExtent, is_json_object

PYTHON_TAG = "<|python_tag|>"
SEPARATOR = "; "

_FIRST_KEYS = ("name", "type", "parameters", "arguments")
_ARGUMENTS = ("parameters", "arguments")
_HAS_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')
_NAMED = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)("?)')


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCalls(CallSyntax):
    """Bare objects."""

    def scanner(self, opener: str) -> "ObjectScanner":
        """Looks past JSON strings, and gives up on an object with another beginning than a call's."""
        return ObjectScanner(is_tagged=opener == PYTHON_TAG)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The one call of an object; none where it is not meant as one."""
        if not body:
            return ()
        is_tagged = opener == PYTHON_TAG
        return _read_object(f"{body}}}" if is_tagged else f"{{{body}}}", tools, is_tagged=is_tagged)

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """An unclosed call does not count; nor is text a cut call unless it is meant as one."""
        is_meant = bool(body.strip()) if opener == PYTHON_TAG else _is_meant(f"{{{body}", tools)
        return ParseProblem.TOOL_CALL_UNCLOSED if is_meant else ()


LLAMA_CALLS = LlamaCalls(
    # The tag, and the brace that begins an object, alone and after a call.
    openers=(PYTHON_TAG, "{", "; {", ";{"),
    markers=(PYTHON_TAG,),
    only_at_start=True,
    spelling=CallSpelling(head=f'{{"name": {QUOTED_NAME}, "parameters": ', tail="}", between=SEPARATOR),
)


class ObjectScanner:
    """Finds where an object closes: its last brace is the closing marker. Linear in the text.

    An object with another first key than a call's is closed at once with an empty body, and so is text after the tag
    other than an object: both are passed on as text.
    """

    def __init__(self, *, is_tagged: bool) -> None:
        self._is_tagged = is_tagged
        self._extent = JsonExtent(depth=0 if is_tagged else 1)
        self._blank_end = 0
        self._may_be_call = False

    def find(self, text: str) -> tuple[int, int] | None:
        """The last brace [start, end) in `text`, the text of the previous `find` and more; None: not yet."""
        if not self._may_be_call:
            while self._blank_end < len(text) and text[self._blank_end] in JSON_SPACE:
                self._blank_end += 1
            begin = text[self._blank_end : self._blank_end + 16]
            verdict = _begins_object(begin) if self._is_tagged else _begins_call(begin)
            if verdict is None:
                return None
            if not verdict:
                return 0, 0
            self._may_be_call = True
        found = self._extent.find(text)
        return None if found is None else (found[1] - 1, found[1])


def _begins_object(text: str) -> bool | None:
    return text[0] == "{" if text else None


def _begins_call(text: str) -> bool | None:
    """Whether an object's text after the brace has a call's key first; None: it does not show yet."""
    if not text:
        return None
    key, quote, _ = text[1:].partition('"')
    if text[0] != '"' or (quote and key not in _FIRST_KEYS):
        return False
    if quote:
        return True
    return None if any(known.startswith(key) for known in _FIRST_KEYS) else False


def _read_object(text: str, tools: Mapping[str, Tool], *, is_tagged: bool) -> tuple[CallText, ...] | ParseProblem:
    """The call in an object, or its problem as a call. Never raises.

    Parameters may also come as a JSON string with an object in it; a known tool may go without.
    """
    try:
        value = msgspec.json.decode(text, type=dict[str, object])
        spelled = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ParseProblem.TOOL_CALL_NOT_JSON if is_tagged or _is_meant(text, tools) else ()
    name, key = value.get("name"), next((key for key in _ARGUMENTS if key in value), None)
    needs_arguments = key is None and not (isinstance(name, str) and name in tools)
    if not is_tagged and ("name" not in value or needs_arguments):
        return ()
    if not isinstance(name, str) or not name or needs_arguments:
        return ParseProblem.TOOL_CALL_WRONG_SHAPE
    arguments = "{}"
    if key is not None:
        given = value[key]
        arguments = given if isinstance(given, str) else bytes(spelled[key]).decode()
    return (
        (CallText(name=name, arguments=arguments),)
        if is_json_object(arguments)
        else (ParseProblem.TOOL_CALL_WRONG_SHAPE)
    )


def _is_meant(text: str, tools: Collection[str]) -> bool:
    """Whether an unreadable object was to be a call: it has parameters, or the name of a tool, maybe cut."""
    if _HAS_ARGUMENTS.search(text):
        return True
    named = _NAMED.match(text)
    if named is None:
        return False
    name, quote = named.groups()
    return name in tools if quote else any(tool.startswith(name) for tool in tools)
