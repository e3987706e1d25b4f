"""Gemini's contents as messages. Pure.

A content has parts, and a part is a text, a call or a result; so a user's content may be several messages. A model's
contents in a row are one message: a streaming client keeps each event as a content. The messages before a reply are the
same with any continuation after it.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import repeat
from operator import is_

import msgspec

from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.json_shape import without_spaces
from stenograph.core.messages import MEDIA_LIMITS, MediaLimits, MediaRef, Message, Role, ToolCall
from stenograph.core.rewrites import AppliedRewrite, kept_text
from stenograph.dialects.base import RequestMedia, joined
from stenograph.dialects.common.json_bodies import MAX_MESSAGES, MAX_PARTS, check_arguments
from stenograph.dialects.common.pointers import shown, unknown_role
from stenograph.dialects.common.sampling_fields import NEUTRAL
from stenograph.dialects.common.template_input import check_json_depth
from stenograph.dialects.gemini.fields import (
    NotShown,
    WireBlob,
    WireContent,
    WireFunctionCall,
    WireFunctionResponse,
    WirePart,
    WireSystemInstruction,
)

_CONTENTS = ("text", "inline_data", "function_call", "function_response")
_ROLES = {"user": Role.USER, "function": Role.USER, "model": Role.ASSISTANT}
_LIST = msgspec.json.Decoder(list[msgspec.Raw])

RESULT_COPY = "result-copy"
"""The rewrite to leave out the second copy of a result in a content."""


class _Parts(msgspec.Struct):
    """The parts of a content; nothing else is looked into."""

    parts: msgspec.Raw = msgspec.Raw(b"null")


_PARTS = msgspec.json.Decoder(_Parts)


@dataclass(slots=True)
class _Open:
    """Calls of the last reply without a result so far: their ids by name, in order."""

    ids: dict[str, deque[str]] = field(default_factory=dict[str, deque[str]])
    answered_ids: set[str] = field(default_factory=set[str])
    num_seen: int = 0

    def clear(self) -> None:
        """Forget them: a new reply has come."""
        self.ids.clear()
        self.answered_ids.clear()

    def called(self, wire: WireFunctionCall, at: str) -> ToolCall:
        """A call. Without an id it gets one from its place alone."""
        arguments = _object_text(wire.args, f"{at}/args")
        check_arguments(arguments, f"{at}/args", what="A call's args")
        call = ToolCall(id=wire.id or f"call_{self.num_seen}", name=wire.name, arguments=arguments)
        self.num_seen += 1
        self.ids.setdefault(wire.name, deque()).append(call.id)
        return call

    def answered(self, wire: WireFunctionResponse, at: str) -> str:
        """The id of the call for a result. Raises InvalidRequest if it gives none and no call is open."""
        if wire.id:
            self.answered_ids.add(wire.id)
            return wire.id
        waiting = self.ids.get(wire.name, deque())
        while waiting:
            if (first := waiting.popleft()) not in self.answered_ids:
                return first
        raise InvalidRequest(
            f"No open call of {shown(wire.name)} comes before this result. Send the id of the call that it answers.",
            param=at,
        )


@dataclass(slots=True, kw_only=True)
class ReadContents:
    """Messages, the pointer of each one's origin, and the changes made to the client's contents."""

    messages: list[Message] = field(default_factory=list[Message])
    pointers: list[str] = field(default_factory=list[str])
    rewrites: list[AppliedRewrite] = field(default_factory=list[AppliedRewrite])
    media: RequestMedia = field(default_factory=partial(RequestMedia, MEDIA_LIMITS))

    def add(self, message: Message, at: str) -> None:
        """Add a message made of the value at a pointer."""
        self.messages.append(message)
        self.pointers.append(at)


def read_contents(
    system: WireSystemInstruction | None, contents: Iterable[WireContent], limits: MediaLimits = MEDIA_LIMITS
) -> ReadContents:
    """The messages of a request. Raises InvalidRequest or UnrenderableMessage, with a JSON pointer."""
    read = ReadContents(media=RequestMedia(limits))
    _read_system(system, read)
    num_before = len(read.messages)
    _read_messages(contents, read)
    if len(read.messages) == num_before:
        raise InvalidRequest("contents is empty: a conversation has at least one message.", param="/contents")
    if len(read.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"A conversation has at most {MAX_MESSAGES} messages, this one {len(read.messages)}.", param="/contents"
        )
    return read


def check_part_count(raw: msgspec.Raw, at: str) -> None:
    """Raise InvalidRequest, before they are made, for a content with more parts than it may have.

    A content of another shape is for the decoder to refuse.
    """
    try:
        parts = _PARTS.decode(raw).parts
        num = len(_LIST.decode(parts)) if bytes(memoryview(parts)[:1]) == b"[" else 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if num > MAX_PARTS:
        raise InvalidRequest(f"A content has at most {MAX_PARTS} parts, this one {num}.", param=f"{at}/parts")


def _read_system(wire: WireSystemInstruction | None, read: ReadContents) -> None:
    if wire is None:
        return
    at = "/systemInstruction"
    texts = [_only_text(part, f"{at}/parts/{index}") for index, part in enumerate(wire.parts)]
    if text := "".join(texts):
        read.add(Message(role=Role.SYSTEM, content=text), at)


def _read_messages(contents: Iterable[WireContent], read: ReadContents) -> None:
    still_open = _Open()
    reply: list[tuple[WirePart, str]] = []
    reply_at = ""
    for index, content in enumerate(contents):
        at = f"/contents/{index}"
        parts = _parts(content, at)
        if _role(content, at) is Role.ASSISTANT:
            reply_at = reply_at or at
            reply += parts
            continue
        if reply_at:
            read.add(_reply(reply, still_open), reply_at)
            reply, reply_at = [], ""
        _read_said(parts, still_open, read)
    if reply_at:
        read.add(_reply(reply, still_open), reply_at)


def _role(content: WireContent, at: str) -> Role:
    role = _ROLES.get(content.role or "user")
    if role is None:
        raise unknown_role(content.role or "", _ROLES, at, remark=" A system text is in systemInstruction.")
    return role


def _parts(content: WireContent, at: str) -> list[tuple[WirePart, str]]:
    parts = content.parts or []
    if not parts:
        raise InvalidRequest("A content needs at least one part.", param=f"{at}/parts")
    found = [(part, f"{at}/parts/{index}") for index, part in enumerate(parts)]
    for part, place in found:
        _check_part(part, place)
    return found


def _check_part(part: WirePart, at: str) -> None:
    """Raise for a part with anything but one text, image, call or result."""
    check_shown(part, at, "part")
    given = [name for name in _CONTENTS if getattr(part, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            "A part must have exactly one of text, inlineData, functionCall and functionResponse.", param=at
        )


def check_shown(struct: msgspec.Struct, at: str, what: str) -> None:
    """Raise UnrenderableMessage for a field with data other than text, unless it asks for nothing."""
    names = _not_shown(type(struct))
    if all(map(is_, map(getattr, repeat(struct), names), repeat(msgspec.UNSET))):
        return
    for name, encode_name in names.items():
        value = getattr(struct, name)
        if value is not msgspec.UNSET and not _is_nothing(value):
            raise UnrenderableMessage(
                f"A {what} with {encode_name} cannot be shown to the model; only text, images, functions and"
                " their results can.",
                param=f"{at}/{encode_name}",
            )


@cache
def _not_shown(struct: type[msgspec.Struct]) -> Mapping[str, str]:
    """The fields of a struct with data other than text: their names here, and in JSON."""
    return {one.name: one.encode_name for one in msgspec.structs.fields(struct) if one.type == NotShown}


def _is_nothing(value: msgspec.Raw) -> bool:
    text = bytes(value).strip()
    return text in (b"null", b"[]") or text in [msgspec.json.encode(one) for one in NEUTRAL]


def _only_text(part: WirePart, at: str) -> str:
    _check_part(part, at)
    if part.text is None or part.thought:
        raise InvalidRequest("systemInstruction can have only text parts.", param=at)
    return part.text


def _reply(parts: Sequence[tuple[WirePart, str]], still_open: _Open) -> Message:
    """The model's parts as one message. Its calls are open then, and no earlier ones."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    still_open.clear()
    for part, at in parts:
        if part.function_response is not None:
            raise InvalidRequest("A result of a call is the user's, not the model's.", param=f"{at}/functionResponse")
        if part.inline_data is not None:
            raise UnrenderableMessage("An image of the model's cannot be shown to it.", param=f"{at}/inlineData")
        if part.function_call is not None:
            check_shown(part.function_call, f"{at}/functionCall", "call")
            calls.append(still_open.called(part.function_call, f"{at}/functionCall"))
        elif part.thought:
            thoughts.append(part.text or "")
        else:
            texts.append(part.text or "")
    content = "".join(texts)
    return Message(
        role=Role.ASSISTANT,
        content=content if content or not calls else None,
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _read_said(parts: Sequence[tuple[WirePart, str]], still_open: _Open, read: ReadContents) -> None:
    """Add the user's parts as messages: each result is one, and so are the texts and images between them.

    A result already in the content, word for word, is left out: Gemini CLI sends each result twice when it resumes a
    conversation.
    """
    said: list[str | MediaRef] = []
    said_at = ""
    seen: set[tuple[str, str, bytes]] = set()
    for part, at in parts:
        if part.function_call is not None:
            raise InvalidRequest("A call is the model's, not the user's.", param=f"{at}/functionCall")
        if part.thought:
            raise InvalidRequest("A thought is the model's, not the user's.", param=f"{at}/thought")
        result = part.function_response
        if result is None:
            said_at = said_at or at
            said.append(part.text or "" if part.inline_data is None else _image(part.inline_data, at, read))
            continue
        if said_at:
            _add_said(said, said_at, read)
            said, said_at = [], ""
        word = (result.id or "", result.name, bytes(result.response))
        if word in seen and not result.parts:
            read.rewrites.append(_left_out(word, at, number=len(read.messages) - 1))
            continue
        read.add(*_result(result, f"{at}/functionResponse", still_open, read))
        if result.id and not result.parts:
            seen.add(word)
    if said_at:
        _add_said(said, said_at, read)


def _add_said(said: Sequence[str | MediaRef], at: str, read: ReadContents) -> None:
    content, media = joined(said)
    read.add(Message(role=Role.USER, content=content, media=media), at)


def _image(blob: WireBlob, at: str, read: ReadContents) -> MediaRef:
    return read.media.reader.of_base64(blob.data, blob.mime_type, f"{at}/inlineData", is_url_safe=True)


def _left_out(said: tuple[str, str, bytes], at: str, *, number: int) -> AppliedRewrite:
    before = kept_text(said[2].decode())
    return AppliedRewrite(rule=RESULT_COPY, where=f"{at}/functionResponse", before=before, after="", message=number)


def _result(wire: WireFunctionResponse, at: str, still_open: _Open, read: ReadContents) -> tuple[Message, str]:
    """A result: its JSON, then its images."""
    check_shown(wire, at, "result")
    said: list[str | MediaRef] = [_object_text(wire.response, f"{at}/response")]
    for index, part in enumerate(wire.parts or ()):
        place = f"{at}/parts/{index}"
        _check_part(part, place)
        if part.inline_data is None:
            raise UnrenderableMessage("A part of a result can only be an image, in inlineData.", param=place)
        said.append(_image(part.inline_data, place, read))
    content, media = joined(said)
    call_id = still_open.answered(wire, at)
    return Message(role=Role.TOOL, content=content, tool_call_id=call_id, name=wire.name, media=media), at


def _object_text(raw: msgspec.Raw | msgspec.UnsetType, at: str) -> str:
    """The text of a JSON object without its spaces. Raises InvalidRequest for another value."""
    if isinstance(raw, msgspec.UnsetType) or bytes(raw) == b"null":
        return "{}"
    if bytes(memoryview(raw)[:1]) != b"{":
        begin = bytes(memoryview(raw)[:40]).decode("utf-8", "replace")
        raise InvalidRequest(f"Expected a JSON object, got {shown(begin)}.", param=at)
    check_json_depth(raw, at=at)
    return without_spaces(raw).decode()
