"""Hermes calls: one JSON object `{"name": …, "arguments": {…}}` between two markers; and where its text ends.

Source: the chat templates of Qwen2.5, Qwen3 and NousResearch's Hermes models.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParseProblem
from stenograph.core.messages import Tool
from stenograph.text.call_syntax import CallText, ForcedTool, is_json_object
from stenograph.text.grammar.lark import json_value, quoted

_END = "}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class HermesCalls:
    """The syntax, as data: its markers and the line break before a block."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    lead: str = "\n"
    only_at_start: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        """The one marker that begins a call."""
        return (self.open,)

    @property
    def markers(self) -> tuple[str, ...]:
        """Both of its markers."""
        return (self.open, self.close)

    def scanner(self, opener: str) -> "JsonScanner":
        """Looks past JSON strings."""
        del opener
        return JsonScanner(self.close)

    def read(self, opener: str, body: str, tools: Mapping[str, Tool]) -> tuple[CallText, ...] | ParseProblem:
        """The one call of a block."""
        del opener, tools
        call = read_call(body)
        return (call,) if isinstance(call, CallText) else call

    def read_cut(self, opener: str, body: str, tools: Mapping[str, Tool]) -> ParseProblem:
        """A call that is not closed does not count."""
        del opener, body, tools
        return ParseProblem.TOOL_CALL_UNCLOSED

    def grammar(self, tools: Sequence[ForcedTool], parallel: bool, marker: Callable[[str], str]) -> str:
        """Calls on lines of their own, with the white space of the families' templates."""
        names = " | ".join(f"call_{tool.number}" for tool in tools)
        lines = ["start: one_call" + (' ("\\n" one_call)*' if parallel else ""), f"one_call: {names}"]
        for tool in tools:
            head = f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
            opening = f"{marker(self.open)} {quoted(head)}"
            closing = f"{quoted(_END)} {marker(self.close)}"
            lines.append(f"call_{tool.number}: {opening} arguments_{tool.number} {closing}")
            lines.append(f"arguments_{tool.number}: {json_value(tool.schema)}")
        return "\n".join(lines) + "\n"


class _HermesCall(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def read_call(text: str) -> CallText | ParseProblem:
    """A call from the JSON between its markers, or what is wrong with it. Never raises.

    Arguments may also come as a JSON string that holds an object; then the string's content is kept.
    """
    try:
        wire = msgspec.json.decode(text.strip(), type=_HermesCall)
        arguments = bytes(wire.arguments).decode()
        value: object = msgspec.json.decode(arguments)
    except msgspec.ValidationError:
        return ParseProblem.TOOL_CALL_WRONG_SHAPE
    except (msgspec.DecodeError, RecursionError, ValueError):
        return ParseProblem.TOOL_CALL_NOT_JSON
    if isinstance(value, str):
        arguments = value
    if not wire.name or not is_json_object(arguments):
        return ParseProblem.TOOL_CALL_WRONG_SHAPE
    return CallText(name=wire.name, arguments=arguments)


class JsonScanner:
    """Finds the closing marker after JSON in a growing text, looking past JSON strings. Linear in the text.

    A line break ends a string: JSON has none in strings, and so a missing quote spoils no later call.
    """

    def __init__(self, close: str) -> None:
        self._close = close
        self._at = 0
        self._in_string = False

    def find(self, text: str) -> tuple[int, int] | None:
        """Find the marker's span in `text`, which continues the text of the call before; None: not there yet."""
        while self._at < len(text):
            char = text[self._at]
            if self._in_string:
                if char == "\\" and self._at + 1 == len(text):
                    return None
                self._at += 2 if char == "\\" and text[self._at + 1] != "\n" else 1
                self._in_string = char not in '"\n'
            elif text.startswith(self._close, self._at):
                return self._at, self._at + len(self._close)
            elif self._close.startswith(text[self._at : self._at + len(self._close)]):
                return None
            else:
                self._at += 1
                self._in_string = char == '"'
        return None
