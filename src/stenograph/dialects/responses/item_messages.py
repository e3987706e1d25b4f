"""Input items of Responses to messages. Pure.

Owns where messages begin and end. Reasoning, texts and calls in a row are one assistant message; a reasoning item
begins a new one, and so does an item known to be of another turn. So the items up to any
reply give the same messages, with any items after them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from stenograph.core.chat import PastTurns
from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import MEDIA_LIMITS, MediaLimits, MediaRef, Message, Role, ToolCall
from stenograph.dialects.base import RequestMedia, joined
from stenograph.dialects.common.json_bodies import MAX_PARTS, MAX_REST_BYTES, check_arguments, decode_part
from stenograph.dialects.common.pointers import shown, unknown_role
from stenograph.dialects.responses.ids import ItemId, item_id, turn_of_sealed
from stenograph.dialects.responses.items import (
    REASONING_TYPES,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    MessageItem,
    ReasoningItem,
    ReferenceItem,
    SearchCallItem,
    SearchOutputItem,
    read_items,
    said_of,
    text_of,
)
from stenograph.dialects.responses.tools import INPUT, SEARCH, ShownTool, flat_name, found_tools

_TEXT = msgspec.json.Decoder(str)
_ROLES = {str(role): role for role in (Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.DEVELOPER)}
_LEADING = (Role.SYSTEM, Role.DEVELOPER)
_BEFORE = "/previous_response_id"

MAX_REFERRED_CHARS = 32 * 2**20
"""Longest text behind the references of one request: each is small, and its target may not be."""


class MessagePlace(NamedTuple):
    """Pointers of a message: its own, and those of its role, of its text, and of its calls."""

    at: str
    role: str
    content: str
    calls: tuple[str, ...] = ()


class _OpenReply:
    """The open assistant message, growing by items. `turn` is the turn of the items, where an id names it."""

    def __init__(self, at: str, turn: str | None) -> None:
        self.at = at
        self.turn = turn
        self.contents: list[str] | None = None
        self.reasonings: list[str] = []
        self.calls: list[ToolCall] = []
        self.call_places: list[str] = []

    def message(self) -> Message:
        """The message of the items."""
        return Message(
            role=Role.ASSISTANT,
            content=None if self.contents is None else "".join(self.contents),
            reasoning="".join(self.reasonings) or None,
            tool_calls=tuple(self.calls),
        )

    def say(self, text: str) -> None:
        """Add a text item."""
        self.contents = self.contents or []
        self.contents.append(text)

    def place(self) -> MessagePlace:
        """Its place: that of its first item."""
        return MessagePlace(self.at, self.at, self.at, tuple(self.call_places))


class ItemMessages:
    """The messages read from items, each with its place. Call `end` after the last item.

    It begins with those of `before`, of the earlier response. `past` are the turns of the session, None without one.
    """

    def __init__(
        self,
        past: PastTurns | None = None,
        before: Sequence[Message] = (),
        limits: MediaLimits = MEDIA_LIMITS,
    ) -> None:
        self.messages: list[Message] = list(before)
        self.places: list[MessagePlace] = [MessagePlace(_BEFORE, _BEFORE, _BEFORE)] * len(before)
        self.found: dict[str, ShownTool] = {}
        """The tools found by searches, by name."""
        self.turns: set[str] = set()
        """The turns named by ids of items."""
        self.media = RequestMedia(limits)
        self.earlier_media = tuple(one.ref for message in before for one in message.media)
        if self.earlier_media:
            self.media.reader.count_earlier(self.earlier_media, _BEFORE)
        self._past = past
        self._num_referred_chars = 0
        self._num_found_bytes = 0
        self._open: _OpenReply | None = None
        self._is_leading = all(message.role in _LEADING for message in before)

    def read(self, wire: Raw) -> None:
        """Read `input`. Raises InvalidRequest or UnrenderableMessage, with a JSON pointer."""
        at = "/input"
        if bytes(memoryview(wire)[:1]) == b'"':
            self.add(Role.USER, (decode_part(wire, _TEXT, at=at),), MessagePlace(at, at, at))
            return
        for item, place in read_items(wire, at):
            self._take(item, place)
        self.end()

    def add(
        self, role: Role, said: Sequence[str | MediaRef], place: MessagePlace, *, call_id: str | None = None
    ) -> None:
        """Add a message other than a reply."""
        self.end()
        self._is_leading &= role in _LEADING
        content, media = joined(said)
        self.messages.append(Message(role=role, content=content, tool_call_id=call_id, media=media))
        self.places.append(place)

    def end(self) -> None:
        """End the open assistant message, if there is one."""
        if self._open is not None:
            self.messages.append(self._open.message())
            self.places.append(self._open.place())
            self._open, self._is_leading = None, False

    def _take(self, item: InputItem, at: str) -> None:
        match item:
            case MessageItem():
                self._take_message(item, at)
            case ReasoningItem():
                self._take_reasoning(item, at)
            case FunctionCallItem():
                check_arguments(item.arguments, f"{at}/arguments")
                self._add_call(item.id, item.call_id, flat_name(item.name, item.namespace), item.arguments, at)
            case CallOutputItem():
                place = MessagePlace(at, f"{at}/type", f"{at}/output")
                said = said_of(item.output, f"{at}/output", self.media)
                self.add(Role.TOOL, said, place, call_id=item.call_id or None)
            case CustomCallItem():
                check_arguments(item.input, f"{at}/input")
                arguments = msgspec.json.encode({INPUT: item.input}).decode()
                self._add_call(item.id, item.call_id, flat_name(item.name, item.namespace), arguments, at)
            case SearchCallItem():
                text = bytes(item.arguments).decode()
                check_arguments(text, f"{at}/arguments")
                self._add_call(item.id, item.call_id or "", SEARCH, text, at)
            case SearchOutputItem():
                self._take_found(item, at)
            case ReferenceItem():
                self._take_reference(item, at)

    def _take_message(self, item: MessageItem, at: str) -> None:
        role = _ROLES.get(item.role)
        if role is None:
            raise unknown_role(item.role, _ROLES, at)
        if role is Role.ASSISTANT:
            self._reply(item.id, at).say(text_of(item.content, f"{at}/content"))
            return
        if role is Role.USER:
            said = said_of(item.content, f"{at}/content", self.media)
        else:
            said = (text_of(item.content, f"{at}/content"),)
        if role is Role.DEVELOPER and not (self._is_leading and self._open is None):
            role = Role.SYSTEM
        self.add(role, said, MessagePlace(at, f"{at}/role", f"{at}/content"))

    def _take_reasoning(self, item: ReasoningItem, at: str) -> None:
        text = text_of(item.content, f"{at}/content", REASONING_TYPES)
        summary = item.summary or ()
        text_of(item.summary, f"{at}/summary", REASONING_TYPES)
        text = text or "\n\n".join([part.text or "" for part in summary])
        named = turn_of_sealed(item.encrypted_content)
        known = item_id(item.id)
        turn = named if known is None else known.turn
        self._note(turn)
        if self._open is None or turn is None or self._open.turn != turn:
            self.end()
            self._open = _OpenReply(at, turn)
        if not text and named is not None and self._past is not None and not self._open.reasonings:
            reply = self._past.reply_of(named)
            text = self._referred("" if reply is None else reply.reasoning or "", f"{at}/encrypted_content")
        if text:
            self._open.reasonings.append(text)

    def _take_found(self, item: SearchOutputItem, at: str) -> None:
        self._num_found_bytes += sum(len(memoryview(tool)) for tool in item.tools)
        if self._num_found_bytes > MAX_REST_BYTES:
            raise InvalidRequest(
                f"The tools that searches have found have {self._num_found_bytes} bytes; at most {MAX_REST_BYTES}.",
                param=f"{at}/tools",
            )
        self.found.update({one.tool.name: one for one in found_tools(item.tools, f"{at}/tools")})
        text = (b"[" + b",".join(item.tools) + b"]").decode()
        place = MessagePlace(at, f"{at}/type", f"{at}/tools")
        self.add(Role.TOOL, (text,), place, call_id=item.call_id or None)

    def _take_reference(self, head: ReferenceItem, at: str) -> None:
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
                self._open.reasonings = [self._referred(reply.reasoning, f"{at}/id")]
            case "msg":
                self._reply(str(known), at).say(self._referred(reply.content or "", f"{at}/id"))
            case _:
                if known.number >= len(reply.tool_calls):
                    return False
                call = reply.tool_calls[known.number]
                arguments = self._referred(call.arguments, f"{at}/id")
                self._add_call(str(known), call.id, call.name, arguments, at)
        return True

    def _referred(self, text: str, at: str) -> str:
        """A text referred to by the client, not sent. Raises InvalidRequest for more of it than a request may have."""
        self._num_referred_chars += len(text)
        if self._num_referred_chars > MAX_REFERRED_CHARS:
            raise InvalidRequest(
                f"The items that this request refers to have more than {MAX_REFERRED_CHARS} characters.", param=at
            )
        return text

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
        """The assistant message of an item other than reasoning."""
        known = item_id(own_id)
        turn = None if known is None else known.turn
        self._note(turn)
        reply = self._open
        if reply is None or (turn is not None and reply.turn not in (None, turn)):
            self.end()
            reply = self._open = _OpenReply(at, turn)
        reply.turn = reply.turn or turn
        return reply


def message_pointer(places: Sequence[MessagePlace], index: int | None, path: tuple[str | int, ...]) -> str:
    """The pointer of a part of a message; of a message not sent by the client, that of all items."""
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
