"""Messages and tools as a chat template wants them: dictionaries in the form of the OpenAI wire, with sealed strings.

Owns the field names read by templates, and the sealing of every string of a client on the way, so none becomes a
control token: before a template sees it, each spelling of an added token in it is replaced by a seal, a noncharacter of
Unicode, the spelling's number, the noncharacter again. After rendering the seals are opened, and sealed text is
untrusted. Roles come from the Role enum only. Knows nothing of templates.
"""

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.loaded import entry
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.model.tokenizer import Span, Tokenizer

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode reserves these for internal use: texts hardly ever have one, and never all."""


class Sealer:
    """The seals of one rendering. `mark` occurs in no string given to the rendering.

    With `is_open` nothing is sealed: in a client's text, a control token's spelling is the token.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str], *, is_open: bool = False) -> None:
        texts = list(texts)
        mark = next((char for char in _NONCHARACTERS if not any(char in text for text in texts)), None)
        if mark is None:
            raise UnrenderableMessage(
                "The messages use every noncharacter from U+FDD0 to U+FDEF.", blame=Blame(RequestPart.MESSAGES)
            )
        self.mark = mark
        self._tokenizer = tokenizer
        self._is_open = is_open

    def seal(self, text: str) -> str:
        """`text` with every spelling of an added token sealed."""
        if self._is_open:
            return text
        pieces: list[str] = []
        numbers = self._tokenizer.added_numbers
        end = 0
        for start, stop in self._tokenizer.find_added(text):
            pieces.append(f"{text[end:start]}{self.mark}{numbers[text[start:stop]]}{self.mark}")
            end = stop
        return "".join(pieces) + text[end:] if pieces else text

    def seal_value(self, value: object) -> object:
        """A JSON-like value with all its strings sealed, keys included."""
        return map_strings(value, self.seal)

    def open(self, text: str) -> list[Span]:
        """A rendered text as spans: sealed text is untrusted, the rest trusted.

        Raises UnrenderableMessage: the template took a seal apart.
        """
        if self.mark not in text:
            return [Span(text=text, trusted=True)]
        spans: list[Span] = []
        spellings = self._tokenizer.added_spellings
        pieces = text.split(self.mark)
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                spans.append(Span(text=piece, trusted=True))
            elif piece.isascii() and piece.isdigit() and int(piece) < len(spellings):
                spans.append(Span(text=spellings[int(piece)], trusted=False))
            else:
                raise UnrenderableMessage("The model's chat template cuts up a control token's spelling in a message.")
        if len(pieces) % 2 == 0:
            raise UnrenderableMessage("The model's chat template cuts up a control token's spelling in a message.")
        return spans


def map_strings(value: object, change: Callable[[str], str]) -> object:
    """A JSON-like value with every string changed, keys included. The value itself stays as it is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {map_strings(key, change): map_strings(item, change) for key, item in items}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [map_strings(item, change) for item in cast("Sequence[object]", value)]
    return value


def strings_in(value: object) -> Iterator[str]:
    """Every string inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for item in cast("Sequence[object]", value):
            yield from strings_in(item)


class ArgumentsForm(enum.Enum):
    """Forms in which a template takes the arguments of a call."""

    OBJECT = "object"
    """Decoded, as most templates expect."""
    TEXT = "text"
    """JSON text, for a template that only joins strings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """A template's expectations of messages, where templates differ.

    `empty_content` stands for the content of a reply with calls and no text: some templates look for None there.
    `developer_as` is the role shown for a developer's message.
    """

    arguments: ArgumentsForm = ArgumentsForm.OBJECT
    empty_content: str | None = ""
    developer_as: Role = Role.DEVELOPER


def client_strings(messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]) -> Iterator[str]:
    """Every string of a client that a rendering may show, decoded: a seal's mark must not occur in any."""
    for message in messages:
        texts = (message.content, message.reasoning, message.tool_call_id, message.name)
        yield from (text for text in texts if text is not None)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
            yield from strings_in(_decoded_object(call.arguments))
    for tool in tools:
        yield from strings_in(_tool_value(tool))
    yield from strings_in(kwargs)


def occurs(mark: str, calls: Sequence[ToolCall], messages: Sequence[Message]) -> bool:
    """Whether `mark` is in a string of these messages, or of `calls`; cheaper than a look at `client_strings`."""
    for message in messages:
        if (message.content and mark in message.content) or (message.reasoning and mark in message.reasoning):
            return True
        if message.tool_calls or message.tool_call_id is not None or message.name is not None:
            calls = (*calls, *message.tool_calls)
            if mark in (message.tool_call_id or "") or mark in (message.name or ""):
                return True
    for call in calls:
        texts = (call.id, call.name, call.arguments, *strings_in(_decoded_object(call.arguments)))
        if any(mark in text for text in texts):
            return True
    return False


def message_dicts(messages: Iterable[Message], sealer: Sealer, form: MessageForm) -> list[dict[str, object]]:
    """Messages as the template takes them, sealed. Content is a string, but for `form.empty_content` and
    for media: some templates can only add to one."""
    values: list[dict[str, object]] = []
    for message in messages:
        is_bare = bool(message.tool_calls) and not message.content
        content: object = form.empty_content if is_bare else sealer.seal(message.content or "")
        if message.media:
            content = entry("stenograph.text.template.media:content_parts")(message, sealer.seal)
        role = form.developer_as if message.role is Role.DEVELOPER else message.role
        value: dict[str, object] = {"role": role.value, "content": content}
        if message.reasoning:
            value["reasoning_content"] = sealer.seal(message.reasoning)
        if message.tool_calls:
            value["tool_calls"] = [_call_dict(call, sealer, form) for call in message.tool_calls]
        if message.tool_call_id is not None:
            value["tool_call_id"] = sealer.seal(message.tool_call_id)
        if message.name is not None:
            value["name"] = sealer.seal(message.name)
        values.append(value)
    return values


def tool_values(tools: Sequence[Tool], sealer: Sealer) -> list[object] | None:
    """The tool list, or None where there is none: templates test for it."""
    return [sealer.seal_value(_tool_value(tool)) for tool in tools] if tools else None


def _call_dict(call: ToolCall, sealer: Sealer, form: MessageForm) -> dict[str, object]:
    """A call. `arguments` is decoded, unless the form says otherwise; `arguments_json` keeps the spelling.

    Arguments other than a JSON object are shown as a JSON string.
    """
    decoded = _decoded_object(call.arguments)
    is_text = decoded is None or form.arguments is ArgumentsForm.TEXT
    spelled = call.arguments if decoded is not None else json.dumps(call.arguments, ensure_ascii=False)
    function = {
        "name": sealer.seal(call.name),
        "arguments": sealer.seal(call.arguments) if is_text else sealer.seal_value(decoded),
        "arguments_json": sealer.seal(spelled),
    }
    return {"id": sealer.seal(call.id), "type": "function", "function": function}


def _decoded_object(text: str) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def _tool_value(tool: Tool) -> object:
    try:
        return msgspec.json.decode(tool.json)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise UnrenderableMessage(
            f"The tool {tool.name!r} is not JSON: {error}", blame=Blame(RequestPart.TOOLS)
        ) from error
