"""Mistral's calls, which run to the end of a reply: in a JSON list after one marker, or one by one, named before it.

Up to version 7 of the format `[TOOL_CALLS]` is followed by a list of objects with `name`, `arguments` and mostly `id`;
from version 11 on each call has the marker, its name, in version 11 its id, and the JSON of its arguments.

Source: the encoders in the package mistral-common.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import CALL_ID, NAME, QUOTED_NAME, BlockScanner, CallSpelling, CallSyntax, CallText
from stenograph.text.json_calls import FramedCalls, JsonExtent, WireCall

TOOL_CALLS, ID_MARK, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_ID = "[a-zA-Z0-9]{9}"
"""An id as the format's own library demands it."""


class _ListedCall(WireCall, gc=False):
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCalls(CallSyntax):
    """The syntax up to version 7."""

    def scanner(self, opener: str) -> BlockScanner:
        """Looks for the end of the list."""
        return JsonExtent(until=opener)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of the list, or what is wrong with it: then it holds none."""
        del opener, tools
        try:
            calls = [wire.read(wire.id or None) for wire in msgspec.json.decode(body, type=list[_ListedCall])]
        except msgspec.ValidationError:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        except (msgspec.DecodeError, RecursionError, ValueError):
            return ParseProblem.TOOL_CALL_NOT_JSON
        problem = next((call for call in calls if isinstance(call, ParseProblem)), None)
        found = tuple(call for call in calls if isinstance(call, CallText))
        return problem or found or ParseProblem.TOOL_CALL_WRONG_SHAPE


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls(FramedCalls):
    """The syntax from version 11 on."""

    def scanner(self, opener: str) -> BlockScanner:
        """Looks for the end of the arguments."""
        del opener
        return NamedScanner()


class NamedScanner:
    """Finds where a call's arguments end, or where the next call begins without any. Linear in the text."""

    def __init__(self) -> None:
        self._at = 0
        self._extent: JsonExtent | None = None

    def find(self, text: str) -> tuple[int, int] | None:
        """The end of the call [end, end) in `text`, which continues the text of the call before; None: not yet."""
        if self._extent is None:
            args, following = text.find(ARGS, self._at), text.find(TOOL_CALLS, self._at)
            if following >= 0 and (args < 0 or following < args):
                return following, following
            if args < 0:
                self._at = max(0, len(text) - len(TOOL_CALLS))
                return None
            self._extent = JsonExtent(start=args + len(ARGS), until=TOOL_CALLS)
        return self._extent.find(text)


LIST_CALLS = ListCalls(
    openers=(TOOL_CALLS,),
    markers=(TOOL_CALLS,),
    spelling=CallSpelling(
        begin=f"{TOOL_CALLS}[",
        head=f'{{"name": {QUOTED_NAME}, "arguments": ',
        tail=f', "id": "{CALL_ID}"}}',
        between=", ",
        end="]",
        call_id=_ID,
    ),
)


_CALL = re.compile(
    r"(?s)(?>(?P<name>.*?)(?=\[CALL_ID\]|\[ARGS\]))(?:\[CALL_ID\](?>(?P<id>.*?)(?=\[ARGS\])))?\[ARGS\](?P<arguments>.*)"
)


def _named_calls(*, id_marks: tuple[str, ...]) -> NamedCalls:
    head = "".join((TOOL_CALLS, NAME, *(mark + CALL_ID for mark in id_marks), ARGS))
    return NamedCalls(
        openers=(TOOL_CALLS,),
        close="",
        markers=(TOOL_CALLS, *id_marks, ARGS),
        call=_CALL,
        in_strings=True,
        spelling=CallSpelling(head=head, call_id=_ID),
    )


NAMED_CALLS = _named_calls(id_marks=())
NAMED_CALLS_WITH_IDS = _named_calls(id_marks=(ID_MARK,))
