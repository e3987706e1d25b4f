"""Mistral's calls, which run to the end of a reply: in a JSON list after one marker, or one by one, named before it.

Up to version 7 of the format `[TOOL_CALLS]` is followed by a list of objects with `name`, `arguments` and mostly `id`;
from version 11 on each call has the marker, its name, in version 11 its id, and the JSON of its arguments.

Source: the encoders in the package mistral-common.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import CallText, ForcedTool, is_json_object
from stenograph.text.grammar.lark import json_value, quoted
from stenograph.text.json_extent import JsonExtent

TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

_ID_RULE = "call_id: /[a-zA-Z0-9]{9}/"
"""An id as the format's own library demands it."""
_JSON_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralListCalls:
    """The syntax up to version 7."""

    lead: str = ""
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one marker."""
        return (TOOL_CALLS,)

    @property
    def markers(self) -> tuple[str, ...]:
        """The same."""
        return (TOOL_CALLS,)

    def scanner(self, opener: str) -> "ListScanner":
        """Looks past JSON strings."""
        del opener
        return ListScanner()

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """All calls of the list, or what is wrong with it: then it holds none."""
        del opener, tools
        try:
            wires = msgspec.json.decode(body, type=list[_MistralCall])
        except msgspec.ValidationError:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        except (msgspec.DecodeError, RecursionError, ValueError):
            return ParseProblem.TOOL_CALL_NOT_JSON
        calls = [_call(wire.name, bytes(wire.arguments).decode(), wire.id) for wire in wires]
        problem = next((call for call in calls if isinstance(call, ParseProblem)), None)
        found = tuple(call for call in calls if isinstance(call, CallText))
        return problem or found or ParseProblem.TOOL_CALL_WRONG_SHAPE

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A list that is not closed has no calls."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """A list of calls with ids, with the white space of the format."""
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        more = ' (", " one_call)*' if parallel else ""
        lines = [f'start: {marker(TOOL_CALLS)} "[" one_call{more} "]"', f"one_call: {names}", _ID_RULE]
        for tool in tools:
            head = quoted(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
            lines.append(
                f"""call_{tool.number}: {head} arguments_{tool.number} {quoted(', "id": "')} call_id "\\"}}" """
            )
            lines.append(f"arguments_{tool.number}: {json_value(tool.schema)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralNamedCalls:
    """The syntax from version 11 on; `has_ids` in version 11 alone."""

    has_ids: bool
    lead: str = ""
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The marker of each call."""
        return (TOOL_CALLS,)

    @property
    def markers(self) -> tuple[str, ...]:
        """Its markers."""
        return (TOOL_CALLS, CALL_ID, ARGS) if self.has_ids else (TOOL_CALLS, ARGS)

    def scanner(self, opener: str) -> "NamedScanner":
        """Looks past JSON strings."""
        del opener
        return NamedScanner()

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The one call."""
        del opener, tools
        head, separator, arguments = body.partition(ARGS)
        name, _, call_id = head.partition(CALL_ID)
        if not separator:
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
        try:
            msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError, ValueError):
            return ParseProblem.TOOL_CALL_NOT_JSON
        call = _call(name.strip(), arguments.strip(_JSON_SPACE), call_id.strip() or None)
        return call if isinstance(call, ParseProblem) else (call,)

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A call that is not closed does not count."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """Calls one after another."""
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        lines = ["start: one_call" + ("+" if parallel else ""), f"one_call: {names}"]
        call_id = f"{marker(CALL_ID)} call_id " if self.has_ids else ""
        if self.has_ids:
            lines.append(_ID_RULE)
        for tool in tools:
            opening = f"{marker(TOOL_CALLS)} {quoted(tool.name)} {call_id}{marker(ARGS)}"
            lines.append(f"call_{tool.number}: {opening} arguments_{tool.number}")
            lines.append(f"arguments_{tool.number}: {json_value(tool.schema)}")
        return "\n".join(lines) + "\n"


class _MistralCall(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")
    id: str | None = None


def _call(name: str, arguments: str, call_id: str | None) -> CallText | ParseProblem:
    """Arguments may also come as a JSON string that holds an object; then the string's content is kept."""
    if not is_json_object(arguments):
        try:
            arguments = msgspec.json.decode(arguments, type=str)
        except (msgspec.DecodeError, RecursionError, ValueError):
            return ParseProblem.TOOL_CALL_WRONG_SHAPE
    if not name or not is_json_object(arguments):
        return ParseProblem.TOOL_CALL_WRONG_SHAPE
    return CallText(name=name, arguments=arguments, call_id=call_id or None)


class ListScanner:
    """Finds where the list ends, or where the marker comes again. Linear in the text."""

    def __init__(self) -> None:
        self._extent = JsonExtent(until=TOOL_CALLS)

    def find(self, text: str) -> tuple[int, int] | None:
        """The end of the list [end, end) in `text`, which continues the text of the call before; None: not yet."""
        end = self._extent.end(text)
        return None if end is None else (end, end)


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
        end = self._extent.end(text)
        return None if end is None else (end, end)
