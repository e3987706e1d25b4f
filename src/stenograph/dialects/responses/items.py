"""Input items of Responses to messages. Pure.

Owns where one message ends and the next begins. Reasoning, texts and calls that follow one another are one assistant
message; a reasoning item begins a new one, and so does an item that is known to be of another turn. So the items up to
any reply give the same messages, whatever comes after them.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Raw

from stenograph.core.chat import PastTurns
from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.dialects.json_errors import decode_part, nearest, shown
from stenograph.dialects.message_list import MAX_ARGUMENTS_CHARS, MAX_MESSAGES, MAX_PARTS
from stenograph.dialects.openai.sampling_fields import Unread
from stenograph.dialects.responses.ids import ItemId, item_id, turn_of_sealed
from stenograph.dialects.responses.tools import INPUT, SEARCH, CallForm, ToolName, flat_name, found_tools


class ItemHead(msgspec.Struct):
    """The part of an item that says what it is."""

    type: str | None = None
    role: str | None = None


class ItemPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item's text. Fields that only decorate it are dropped."""

    type: str
    text: str
    annotations: Unread = UNSET
    logprobs: Unread = UNSET
    parsed: Unread = UNSET
    cache_control: Unread = UNSET
    prompt_cache_breakpoint: Unread = UNSET


class PartType(msgspec.Struct):
    """The type of a part."""

    type: str


class ItemBase(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that any item may have, and that only decorate it."""

    type: str | None = None
    id: str | None = None
    status: Unread = UNSET
    created_by: Unread = UNSET
    caller: Unread = UNSET
    is_async: Unread = msgspec.field(default=UNSET, name="async")
    metadata: Unread = UNSET
    cache_control: Unread = UNSET
    internal_chat_message_metadata_passthrough: Unread = UNSET


class MessageItem(ItemBase, kw_only=True):
    """A message; `type` may be left out."""

    role: str
    content: Raw
    phase: Unread = UNSET
    end_turn: Unread = UNSET
    name: Unread = UNSET


class ReasoningItem(ItemBase, kw_only=True):
    """Reasoning of a reply."""

    summary: list[ItemPart] | None = None
    content: list[ItemPart] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(ItemBase, kw_only=True):
    """A call of a function."""

    call_id: str
    name: ToolName
    arguments: str
    namespace: ToolName | None = None
    parsed_arguments: Unread = UNSET


class CustomCallItem(ItemBase, kw_only=True):
    """A call of a custom tool."""

    call_id: str
    name: ToolName
    input: str
    namespace: ToolName | None = None


class ReferenceItem(ItemBase, kw_only=True):
    """An item that was sent before, by its id."""


class SearchCallItem(ItemBase, kw_only=True):
    """A call of the search for tools, which the client ran."""

    call_id: str | None = None
    execution: str | None = None
    arguments: Raw


class CallOutputItem(ItemBase, kw_only=True):
    """The result of a call."""

    call_id: str
    output: Raw
    name: Unread = UNSET


class SearchOutputItem(ItemBase, kw_only=True):
    """The tools that a search has found."""

    call_id: str | None = None
    execution: str | None = None
    tools: list[Raw]


class MessagePlace(NamedTuple):
    """Pointers of a message: its own, that of its role, that of its text, and those of its calls."""

    at: str
    role: str
    content: str
    calls: tuple[str, ...] = ()


I = TypeVar("I", bound=ItemBase)  # noqa: E741

_ITEMS = msgspec.json.Decoder(list[Raw])
_HEAD = msgspec.json.Decoder(ItemHead)
_PARTS = msgspec.json.Decoder(list[ItemPart])
_PART_TYPES = msgspec.json.Decoder(list[PartType])
_TEXT = msgspec.json.Decoder(str)
_MESSAGE = msgspec.json.Decoder(MessageItem)
_REASONING = msgspec.json.Decoder(ReasoningItem)
_FUNCTION_CALL = msgspec.json.Decoder(FunctionCallItem)
_CUSTOM_CALL = msgspec.json.Decoder(CustomCallItem)
_SEARCH_CALL = msgspec.json.Decoder(SearchCallItem)
_REFERENCE = msgspec.json.Decoder(ReferenceItem)
_OUTPUT = msgspec.json.Decoder(CallOutputItem)
_SEARCH_OUTPUT = msgspec.json.Decoder(SearchOutputItem)
TEXT_TYPES = ("input_text", "output_text", "text")
REASONING_TYPES = ("reasoning_text", "summary_text", "text")
_ROLES = {str(role): role for role in (Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.DEVELOPER)}
_LEADING = (Role.SYSTEM, Role.DEVELOPER)
_KNOWN_TYPES = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "tool_search_call", "tool_search_output", "item_reference",
)  # fmt: skip


class _OpenReply:
    """The assistant message that items are added to. `turn` is the one that they are of, where an id says it."""

    def __init__(self, at: str, turn: str | None) -> None:
        self.at = at
        self.turn = turn
        self.content: str | None = None
        self.reasoning: str | None = None
        self.calls: list[ToolCall] = []
        self.call_places: list[str] = []

    def message(self) -> Message:
        """The message of the items."""
        return Message(
            role=Role.ASSISTANT, content=self.content, reasoning=self.reasoning or None, tool_calls=tuple(self.calls)
        )

    def place(self) -> MessagePlace:
        """Its place: that of its first item."""
        return MessagePlace(self.at, self.at, self.at, tuple(self.call_places))


class ItemMessages:
    """The messages that items are read into, each with its place. Call `end` after the last item.

    It begins with those of `before`, which are at `before_at`. `past` are the turns of the session, None without one.
    """

    def __init__(
        self, past: PastTurns | None = None, before: Sequence[Message] = (), before_at: str = "/previous_response_id"
    ) -> None:
        self.messages: list[Message] = list(before)
        self.places: list[MessagePlace] = [MessagePlace(before_at, before_at, before_at)] * len(before)
        self.found: dict[str, CallForm] = {}
        """The forms of the calls of tools that a search has found."""
        self.turns: set[str] = set()
        """The turns that ids of items name."""
        self._past = past
        self._open: _OpenReply | None = None
        self._is_leading = all(message.role in _LEADING for message in before)

    def read(self, wire: Raw) -> None:
        """Read `input`. Raises InvalidRequest or UnrenderableMessage, with a JSON pointer."""
        at = "/input"
        if bytes(memoryview(wire)[:1]) == b'"':
            self.add(Role.USER, decode_part(wire, _TEXT, at=at), MessagePlace(at, at, at))
            return
        items = decode_part(wire, _ITEMS, at=at)
        if not items:
            raise InvalidRequest("input is empty: there is nothing to answer.", param=at)
        if len(items) > MAX_MESSAGES:
            raise InvalidRequest(f"A request has at most {MAX_MESSAGES} items, this one {len(items)}.", param=at)
        for index, raw in enumerate(items):
            self._read_item(raw, f"{at}/{index}")
        self.end()

    def add(self, role: Role, content: str, place: MessagePlace, *, call_id: str | None = None) -> None:
        """Add a message that is no reply."""
        self.end()
        self._is_leading &= role in _LEADING
        self.messages.append(Message(role=role, content=content, tool_call_id=call_id))
        self.places.append(place)

    def end(self) -> None:
        """End the assistant message that items are added to, if there is one."""
        if self._open is not None:
            self.messages.append(self._open.message())
            self.places.append(self._open.place())
            self._open, self._is_leading = None, False

    def _read_item(self, raw: Raw, at: str) -> None:
        head = decode_part(raw, _HEAD, at=at)
        match head.type or ("message" if head.role is not None else "item_reference"):
            case "message":
                self._read_message(_decoded(raw, _MESSAGE, at), at)
            case "reasoning":
                self._read_reasoning(raw, at)
            case "function_call":
                call = _decoded(raw, _FUNCTION_CALL, at)
                _check_arguments(call.arguments, f"{at}/arguments")
                self._add_call(call.id, call.call_id, flat_name(call.name, call.namespace), call.arguments, at)
            case "custom_tool_call":
                custom = _decoded(raw, _CUSTOM_CALL, at)
                _check_arguments(custom.input, f"{at}/input")
                arguments = msgspec.json.encode({INPUT: custom.input}).decode()
                self._add_call(custom.id, custom.call_id, flat_name(custom.name, custom.namespace), arguments, at)
            case "tool_search_call":
                search = _decoded(raw, _SEARCH_CALL, at)
                text = bytes(search.arguments).decode()
                _check_arguments(text, f"{at}/arguments")
                self._add_call(search.id, search.call_id or "", SEARCH, text, at)
            case "function_call_output" | "custom_tool_call_output":
                output = _decoded(raw, _OUTPUT, at)
                place = MessagePlace(at, f"{at}/type", f"{at}/output")
                self.add(Role.TOOL, _text(output.output, f"{at}/output"), place, call_id=output.call_id or None)
            case "tool_search_output":
                self._read_found(_decoded(raw, _SEARCH_OUTPUT, at), at)
            case "item_reference":
                self._read_reference(_decoded(raw, _REFERENCE, at), at)
            case kind:
                known = ", ".join(_KNOWN_TYPES)
                raise UnrenderableMessage(
                    f"An item of type {shown(kind)} cannot be shown to the model; known are {known}."
                    f"{nearest(kind, _KNOWN_TYPES)}",
                    param=f"{at}/type",
                )

    def _read_message(self, item: MessageItem, at: str) -> None:
        role = _ROLES.get(item.role)
        if role is None:
            raise InvalidRequest(
                f"Unknown role {shown(item.role)}; known are {', '.join(_ROLES)}.{nearest(item.role, _ROLES)}",
                param=f"{at}/role",
            )
        text = _text(item.content, f"{at}/content")
        if role is Role.ASSISTANT:
            reply = self._reply(item.id, at)
            reply.content = (reply.content or "") + text
            return
        if role is Role.DEVELOPER and not (self._is_leading and self._open is None):
            role = Role.SYSTEM
        self.add(role, text, MessagePlace(at, f"{at}/role", f"{at}/content"))

    def _read_reasoning(self, raw: Raw, at: str) -> None:
        item = _decoded(raw, _REASONING, at)
        for name, parts in (("summary", item.summary), ("content", item.content)):
            for index, part in enumerate(parts or ()):
                if part.type not in REASONING_TYPES:
                    raise _part_error(part.type, f"{at}/{name}/{index}")
        text = "".join(part.text for part in item.content or ())
        text = text or "\n\n".join(part.text for part in item.summary or ())
        named = turn_of_sealed(item.encrypted_content)
        known = item_id(item.id)
        turn = named if known is None else known.turn
        self._note(turn)
        if self._open is None or turn is None or self._open.turn != turn:
            self.end()
            self._open = _OpenReply(at, turn)
        if not text and named is not None and self._past is not None and self._open.reasoning is None:
            reply = self._past.reply_of(named)
            text = "" if reply is None else reply.reasoning or ""
        if text:
            self._open.reasoning = (self._open.reasoning or "") + text

    def _read_found(self, item: SearchOutputItem, at: str) -> None:
        self.found.update(found_tools(item.tools, f"{at}/tools"))
        text = (b"[" + b",".join(item.tools) + b"]").decode()
        place = MessagePlace(at, f"{at}/type", f"{at}/tools")
        self.add(Role.TOOL, text, place, call_id=item.call_id or None)

    def _read_reference(self, head: ReferenceItem, at: str) -> None:
        if head.id is None:
            raise InvalidRequest("An item needs its type, or the id of another item that it stands for.", param=at)
        if self._past is None:
            raise InvalidRequest(
                "An item_reference needs a session: without one no item is kept. Send the item itself.",
                param=f"{at}/id",
            )
        known = item_id(head.id)
        reply = None if known is None else self._past.reply_of(known.turn)
        if known is None or reply is None or not self._refer(known, reply, at):
            raise InvalidRequest(
                f"This session has given out no item {shown(head.id)}. Send the item itself.", param=f"{at}/id"
            )

    def _refer(self, known: ItemId, reply: Message, at: str) -> bool:
        """Add an item of a reply; False if the reply has none such."""
        match known.prefix:
            case "rs":
                if reply.reasoning is None:
                    return False
                if self._open is None or self._open.turn != known.turn:
                    self.end()
                    self._open = _OpenReply(at, known.turn)
                self._open.reasoning = reply.reasoning
            case "msg":
                opened = self._reply(str(known), at)
                opened.content = (opened.content or "") + (reply.content or "")
            case _:
                if known.number >= len(reply.tool_calls):
                    return False
                call = reply.tool_calls[known.number]
                self._add_call(str(known), call.id, call.name, call.arguments, at)
        return True

    def _add_call(self, own_id: str | None, call_id: str, name: str, arguments: str, at: str) -> None:
        reply = self._reply(own_id, at)
        if len(reply.calls) >= MAX_PARTS:
            raise InvalidRequest(f"A message has at most {MAX_PARTS} tool calls.", param=at)
        reply.calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
        reply.call_places.append(at)

    def _note(self, turn: str | None) -> None:
        if turn is not None:
            self.turns.add(turn)

    def _reply(self, own_id: str | None, at: str) -> _OpenReply:
        """The assistant message that an item belongs to, which is no reasoning."""
        known = item_id(own_id)
        turn = None if known is None else known.turn
        self._note(turn)
        reply = self._open
        if reply is None or (turn is not None and reply.turn not in (None, turn)):
            self.end()
            reply = self._open = _OpenReply(at, turn)
        reply.turn = reply.turn or turn
        return reply


def _decoded(raw: Raw, decoder: "msgspec.json.Decoder[I]", at: str) -> I:
    kind: type[I] = decoder.type

    def known(pointer: str) -> Sequence[str]:
        return (kind if pointer == at else ItemPart).__struct_encode_fields__

    return decode_part(raw, decoder, at=at, known=known)


def _text(wire: Raw, at: str) -> str:
    """The text of an item: a string, or parts that are joined by nothing."""
    first = bytes(memoryview(wire)[:1])
    if first == b'"':
        return decode_part(wire, _TEXT, at=at)
    if first == b"n":
        return ""
    types = decode_part(wire, _PART_TYPES, at=at)
    if len(types) > MAX_PARTS:
        raise InvalidRequest(f"An item has at most {MAX_PARTS} parts, this one {len(types)}.", param=at)
    for index, part in enumerate(types):
        if part.type not in TEXT_TYPES:
            raise _part_error(part.type, f"{at}/{index}")
    return "".join([part.text for part in decode_part(wire, _PARTS, at=at, known=ItemPart.__struct_encode_fields__)])


def _part_error(kind: str, at: str) -> UnrenderableMessage:
    return UnrenderableMessage(
        f"A content part of type {shown(kind)} cannot be shown to the model; only text can.", param=f"{at}/type"
    )


def _check_arguments(text: str, at: str) -> None:
    if len(text) > MAX_ARGUMENTS_CHARS:
        raise InvalidRequest(
            f"A tool call's arguments have at most {MAX_ARGUMENTS_CHARS} characters, these {len(text)}.", param=at
        )


def message_pointer(places: Sequence[MessagePlace], index: int | None, path: tuple[str | int, ...]) -> str:
    """The pointer of a part of a message; of one that the client did not send, that of all items."""
    if index is None or not 0 <= index < len(places):
        return "/input"
    place = places[index]
    match path:
        case ("role", *_):
            return place.role
        case ("content", *_):
            return place.content
        case ("tool_calls", int(number), *_) if number < len(place.calls):
            return place.calls[number]
        case ("tool_calls", *_) if place.calls:
            return place.calls[0]
        case _:
            return place.at
