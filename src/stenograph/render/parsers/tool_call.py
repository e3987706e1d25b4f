"""One tool call as the model wrote it, read as JSON; and where its text ends."""

from dataclasses import dataclass

import msgspec

from stenograph.core.chat import ParseProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """A call's name and its arguments as the model spelled them: the text of a JSON object."""

    name: str
    arguments: str


class _Wire(msgspec.Struct, gc=False):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def read_call(text: str) -> CallText | ParseProblem:
    """A call from the JSON between its markers, or what is wrong with it. Never raises.

    Arguments may also come as a JSON string that holds an object; then the string's content is kept.
    """
    try:
        wire = msgspec.json.decode(text.strip(), type=_Wire)
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


def is_json_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False


class CallScanner:
    """Finds the closing marker of a call in a growing text, looking past JSON strings. Linear in the text.

    A line break ends a string: JSON has none in strings, and so a missing quote spoils no later call.
    """

    def __init__(self, close: str) -> None:
        self._close = close
        self._at = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Where the marker starts in `text`, which continues the text of the call before; None: not there yet."""
        while self._at < len(text):
            char = text[self._at]
            if self._in_string:
                if char == "\\" and self._at + 1 == len(text):
                    return None
                self._at += 2 if char == "\\" and text[self._at + 1] != "\n" else 1
                self._in_string = char not in '"\n'
            elif text.startswith(self._close, self._at):
                return self._at
            elif self._close.startswith(text[self._at : self._at + len(self._close)]):
                return None
            else:
                self._at += 1
                self._in_string = char == '"'
        return None
