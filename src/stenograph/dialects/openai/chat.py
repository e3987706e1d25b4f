"""OpenAI chat completions, requests: bytes to `ChatRequest`. Pure.

Every field is honoured, recorded or refused (chat_fields.py); nothing is accepted and ignored. Whoever is to blame is
named by a JSON pointer. Replies are chat_reply.py's.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import msgspec
import numpy as np
from msgspec import UNSET, Raw
from msgspec.structs import replace

from stenograph.core.chat import (
    ChatRequest,
    KnownMessages,
    SystemBlocks,
    TextPrint,
    ToolChoice,
    ToolMode,
)
from stenograph.core.errors import CallerError, InvalidRequest, UnrenderableMessage
from stenograph.core.messages import (
    MEDIA_LIMITS,
    MediaItem,
    MediaLimits,
    MediaRef,
    Message,
    PlacedMedia,
    Role,
    Tool,
    ToolCall,
)
from stenograph.dialects.base import RequestMedia, joined
from stenograph.dialects.common.json_bodies import (
    MAX_MESSAGES,
    MAX_PARTS,
    ONLY_MESSAGES,
    check_arguments,
    check_rest,
    check_utf8,
    type_at,
    wire_messages,
)
from stenograph.dialects.common.pointers import shown, unknown_role
from stenograph.dialects.common.sampling import (
    decode_fields,
    is_given,
    other_names,
    reply_options,
    request_json,
    routing_hints,
    sampling_params,
    sent_sampling,
    text_view,
    truncation,
    unknown_type,
)
from stenograph.dialects.common.template_input import function_tool, template_kwargs
from stenograph.dialects.openai.chat_fields import (
    CHAT_FIELDS,
    ContentPart,
    WireChatRequest,
    WireMessage,
    WireNamedChoice,
    WireTool,
    WireToolCall,
    names_in_messages,
)
from stenograph.dialects.openai.spelling import OpenAISpelling
from stenograph.dialects.settings import UnknownFields

CHAT_PATH = "/v1/chat/completions"

MAX_KNOWN = 64
MAX_KNOWN_BYTES = 64 * 1024
"""Limits of the kept fields beside the messages: the number of different bodies, and the bytes of each. Tools are most
of it, and an agent sends the same ones with each turn."""

_REQUEST = msgspec.json.Decoder(WireChatRequest)
_MESSAGES = msgspec.json.Decoder(list[WireMessage])
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_JSON_SPACES = (b" ", b"\t", b"\r", b"\n")
_ROLES = {str(role): role for role in Role}
_INSTRUCTING = (Role.SYSTEM, Role.DEVELOPER)


def decode_chat(
    body: bytes,
    *,
    unknown_fields: UnknownFields = UnknownFields.REFUSE,
    known: Sequence[KnownMessages] = (),
    media: MediaLimits = MEDIA_LIMITS,
) -> ChatRequest:
    """Read a request. Raises InvalidJson, InvalidRequest or UnrenderableMessage, with a JSON pointer.

    The `known` messages at the beginning of the body are not read again. `media` limits its media.
    """
    return decode_with_record(body, unknown_fields, known, media)[0]


def decode_with_record(
    body: bytes, unknown_fields: UnknownFields, known: Sequence[KnownMessages], media: MediaLimits
) -> tuple[ChatRequest, bytes]:
    """The same, and the record of the request as it came."""
    for one in known:
        try:
            more = _read_more(body, one, unknown_fields, media)
        except CallerError:
            break  # reading all of it says where in the whole body it is
        if more is not None and len(one.messages) + len(more.messages) <= MAX_MESSAGES:
            return _request(more, body=body, known=one)
    read = _read(body, unknown_fields, media)
    if not read.messages:
        raise InvalidRequest("messages is empty: a conversation has at least one message.", param="/messages")
    return _request(read, body=body, known=None)


class _Beside(NamedTuple):
    """The fields of a body beside its messages: the same in most requests of a session.

    `request` has them, with other messages; `record` is the record of such a request. `after` are the bytes from the
    end of the list of messages on, the bracket included.
    """

    request: ChatRequest
    record: bytes
    after: bytes


_OTHER_MESSAGES = (Message(role=Role.USER, content=""),)


class _Read(NamedTuple):
    """A body after reading. `list_start` and `list_end` are the places of the brackets around its messages.

    `blocks` are the texts of its first message, if that is a system's of several. `media` are those of its messages.
    """

    beside: _Beside
    messages: tuple[Message, ...]
    list_start: int
    list_end: int
    blocks: SystemBlocks | None
    media: tuple[MediaItem, ...]


_LATEST: dict[bytes, _Beside] = {}
"""By the bytes before the messages of a body: the fields beside them in the latest such body, of about MAX_KNOWN. Any
thread may change it: each step alone is whole."""


def _read_more(body: bytes, known: KnownMessages, unknown_fields: UnknownFields, limits: MediaLimits) -> _Read | None:
    """Read the messages after the known ones. None if the body does not begin with these, or has no more.

    Raises as `decode_chat`, with a pointer as if the known messages were not there.
    """
    place = known.text_print.length
    while body[place : place + 1] in _JSON_SPACES:
        place += 1
    if body[place : place + 1] != b"," or not known.text_print.begins(body):
        return None
    place += 1
    start = known.list_start
    beside = _LATEST.get(body[:start])
    if beside is not None and body.endswith(beside.after, place) and unknown_fields is UnknownFields.REFUSE:
        # With these bytes on both sides it is a request, whatever list of messages is between them.
        end = len(body) - len(beside.after)
        text = b"[%b]" % body[place:end]
        try:
            check_utf8(text)
            messages, _, media = _messages(text, limits)
        except CallerError:
            messages, media = (), ()  # something in them is wrong, or their list ends before these bytes
        if messages:
            return _Read(beside=beside, messages=messages, list_start=start, list_end=end, blocks=None, media=media)
    read = _read(b"%b[%b" % (body[:start], body[place:]), unknown_fields, limits)
    if read.list_start != start or not read.messages:
        return None
    return read._replace(list_end=read.list_end - start - 1 + place)


def _read(body: bytes, unknown_fields: UnknownFields, limits: MediaLimits) -> _Read:
    check_rest(body)
    known = _known_beside(body, unknown_fields)
    try:
        wire, recorded = (None, {}) if known else decode_fields(body, _REQUEST, CHAT_FIELDS, unknown_fields)
        raw = known[0] if known else cast("WireChatRequest", wire).messages
        messages, parts, media = _messages(raw, limits)
    except InvalidRequest as error:
        _blame_type(body, error)
        raise
    beside = known[1] if known else _beside(cast("WireChatRequest", wire), recorded)
    start = known[2] if known else _start(raw, body)
    if start is None:  # it was read from a copy without fields that we do not know
        raw = ONLY_MESSAGES.decode(body).messages
        start = _start(raw, body) or 0
    end = start + len(memoryview(raw)) - 1
    blocks = None
    if len(parts) > 1 and messages[0].role in _INSTRUCTING:
        blocks = SystemBlocks(texts=tuple(part.text or "" for part in parts))
    return _Read(beside=beside, messages=messages, list_start=start, list_end=end, blocks=blocks, media=media)


def _messages(
    text: bytes | Raw, limits: MediaLimits
) -> tuple[tuple[Message, ...], list[ContentPart], tuple[MediaItem, ...]]:
    """The messages of a list, the parts of the first one, if it has several, and their media. Raises as
    `decode_chat`."""
    messages: list[Message] = []
    first: list[ContentPart] = []
    media: RequestMedia | None = None
    for wire in wire_messages(text, _MESSAGES, known=names_in_messages, check_parts=_check_parts):
        if not messages and isinstance(wire.content, list):
            first = wire.content
        if media is None and isinstance(wire.content, list):
            media = RequestMedia(limits)
        messages.append(_message(wire, len(messages), media))
    return tuple(messages), first, () if media is None else media.items


def _known_beside(body: bytes, unknown_fields: UnknownFields) -> tuple[Raw, _Beside, int] | None:
    """The body's messages, undecoded, the fields beside them, and their start; None: the body has to be read whole.

    So is a faulty body: the full reading reports its first fault.
    """
    if unknown_fields is UnknownFields.RECORD:
        return None
    try:
        check_utf8(body)
        raw = ONLY_MESSAGES.decode(body).messages
        start = _start(raw, body)
        if start is None or len(body) - len(memoryview(raw)) > MAX_KNOWN_BYTES:
            return None
        before = body[:start]
        beside = _beside_of(before, body[start + len(memoryview(raw)) - 1 :])
        _LATEST.pop(before, None)
        for oldest in list(_LATEST)[: max(0, len(_LATEST) + 1 - MAX_KNOWN)]:
            _LATEST.pop(oldest, None)  # another thread, which decodes a large body, may have taken it
        _LATEST[before] = beside
        return raw, beside, start
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, CallerError):
        return None


@lru_cache(maxsize=MAX_KNOWN)
def _beside_of(before: bytes, after: bytes) -> _Beside:
    """The fields of a body with these bytes before and after the messages in its list. Raises as `decode_chat`."""
    wire, recorded = decode_fields(b"%b[%b" % (before, after), _REQUEST, CHAT_FIELDS, UnknownFields.REFUSE)
    return _beside(wire, recorded, after)


def _start(raw: Raw, body: bytes) -> int | None:
    """The start of this part in the body it was decoded from; None if it is a copy."""
    start = _address(raw) - _address(body)
    return start if 0 <= start < len(body) else None


def _address(buffer: "bytes | Raw") -> int:
    """Address of its bytes in memory."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


def _beside(wire: WireChatRequest, recorded: dict[str, str], after: bytes = b"") -> _Beside:
    tools = tuple(_tool(tool, index) for index, tool in enumerate(wire.tools or ()))
    max_tokens_name = "max_tokens" if wire.max_completion_tokens is None else "max_completion_tokens"
    params, said, constraint = sampling_params(
        wire,
        max_tokens=_max_tokens(wire),
        max_tokens_name=max_tokens_name,
        num_top_logprobs=_num_top_logprobs(wire),
        top_logprobs_name="top_logprobs",
    )
    request = ChatRequest(
        messages=_OTHER_MESSAGES,
        model=wire.model,
        tools=tools,
        tool_choice=_tool_choice(wire.tool_choice, tools),
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        params=params,
        said=said,
        spelling=OpenAISpelling(max_tokens=max_tokens_name, grammar=constraint.param, other_names=other_names(wire)),
        template_kwargs=template_kwargs(wire.chat_template_kwargs, effort=wire.reasoning_effort),
        truncation=truncation(wire),
        routing=routing_hints(wire),
        text=text_view(wire, separates_reasoning=wire.separate_reasoning is not False),
        reply=reply_options(wire, logprobs=bool(wire.logprobs)),
        recorded=recorded,
        sent=sent_sampling(wire),
    )
    record = request_json(CHAT_PATH, request.model, request.recorded, request.sent)
    return _Beside(request=request, record=record, after=after)


def _request(read: _Read, *, body: bytes, known: KnownMessages | None) -> tuple[ChatRequest, bytes]:
    """The request of a body, with the known messages at its beginning, and its record."""
    end, view = read.list_end, memoryview(body)
    while body[end - 1 : end] in _JSON_SPACES:
        end -= 1
    before = TextPrint() if known is None else known.text_print
    request = replace(
        read.beside.request,
        messages=read.messages if known is None else known.messages + read.messages,
        messages_json=view[read.list_start : read.list_end + 1],
        # The next request is read whole: it has to bring the media again.
        text_print=None if read.media else before.then(view[before.length : end]),
        list_start=read.list_start,
        known=known,
        system_blocks=read.blocks if known is None else known.system_blocks,
        media=read.media,
    )
    return request, read.beside.record


class _Lists(msgspec.Struct):
    """The lists of a message, with any number of objects from the client."""

    content: Raw = Raw(b"null")
    tool_calls: Raw = Raw(b"null")


_LISTS = msgspec.json.Decoder(_Lists)


def _check_parts(raw: Raw, at: str) -> None:
    """Raise InvalidRequest, before they are made, for a message with more parts or calls than it may have.

    A message of another shape is for the decoder to refuse.
    """
    try:
        lists = _LISTS.decode(raw)
        for name, value in (("content", lists.content), ("tool_calls", lists.tool_calls)):
            num = len(_LIST.decode(value)) if bytes(memoryview(value)[:1]) == b"[" else 0
            if num > MAX_PARTS:
                what = "content parts" if name == "content" else "tool calls"
                raise InvalidRequest(f"A message has at most {MAX_PARTS} {what}, this one {num}.", param=f"{at}/{name}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return


def _blame_type(body: bytes, error: InvalidRequest) -> None:
    """Raise UnrenderableMessage if the error points into an object of a type that cannot be shown: that comes first.

    Such parts and tools have fields of their own, and they are not the fault.
    """
    steps: tuple[str, ...]
    known: tuple[str, ...] = ("function",)
    them = "functions"
    match (error.param or "").split("/")[1:]:
        case ["tools", index, *_]:
            steps, what = ("tools", index), "tool"
        case ["messages", index, "content", part, *_]:
            steps, what = ("messages", index, "content", part), "content part"
            known, them = ("text", "image_url"), "text and image_url"
        case ["messages", index, "tool_calls", call, *_]:
            steps, what = ("messages", index, "tool_calls", call), "tool call"
        case _:
            return
    kind = type_at(body, steps)
    if kind is not None and kind not in known:
        raise UnrenderableMessage(
            f"A {what} of type {shown(kind)} cannot be shown to the model; only {them} can.",
            param="/" + "/".join((*steps, "type")),
        ) from error


def _message(wire: WireMessage, index: int, media: RequestMedia | None) -> Message:
    """A message, by its number. Raises InvalidRequest or UnrenderableMessage."""
    role = _ROLES.get(wire.role)
    if role is None:
        raise unknown_role(wire.role, _ROLES, f"/messages/{index}")
    content = wire.content
    if role is not Role.ASSISTANT:
        if wire.tool_calls or wire.reasoning_content or wire.reasoning:
            name = "tool_calls" if wire.tool_calls else "reasoning_content" if wire.reasoning_content else "reasoning"
            raise InvalidRequest(f"A {role} message cannot have {name}.", param=f"/messages/{index}/{name}")
        if role is Role.TOOL and not wire.tool_call_id:
            raise InvalidRequest(
                "A tool message needs the tool_call_id that it answers.", param=f"/messages/{index}/tool_call_id"
            )
    if wire.tool_call_id and role is not Role.TOOL:
        raise InvalidRequest(f"A {role} message cannot have a tool_call_id.", param=f"/messages/{index}/tool_call_id")
    if wire.images is not UNSET and bytes(wire.images).strip() not in (b"[]", b"null"):
        raise UnrenderableMessage(
            "Images of this field cannot be shown to the model; send them as parts of type image_url.",
            param=f"/messages/{index}/images",
        )
    if wire.reasoning and wire.reasoning_content and wire.reasoning != wire.reasoning_content:
        raise InvalidRequest(
            "reasoning and reasoning_content disagree; send one.", param=f"/messages/{index}/reasoning"
        )
    placed: tuple[PlacedMedia, ...] = ()
    if isinstance(content, list):
        assert media is not None, "what may have images has their reader"
        content, placed = joined(_said(content, role, f"/messages/{index}/content", media))
    elif content is None and role is not Role.ASSISTANT:
        raise InvalidRequest(f"A {role} message needs content.", param=f"/messages/{index}/content")
    return Message(
        role=role,
        content=content,
        reasoning=(wire.reasoning_content or wire.reasoning or None) if role is Role.ASSISTANT else None,
        tool_calls=_calls(wire.tool_calls, f"/messages/{index}/tool_calls") if wire.tool_calls else (),
        tool_call_id=wire.tool_call_id or None,
        name=wire.name,
        media=placed,
    )


def _calls(wire: list[WireToolCall], at: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    for index, call in enumerate(wire):
        name, arguments = call.function.name, call.function.arguments
        if call.type != "function":
            raise UnrenderableMessage(
                f"A tool call of type {shown(call.type)} cannot be shown to the model.", param=f"{at}/{index}/type"
            )
        check_arguments(arguments, f"{at}/{index}/function/arguments")
        calls.append(ToolCall(id=call.id, name=name, arguments=arguments))
    return tuple(calls)


def _said(content: list[ContentPart], role: Role, at: str, media: RequestMedia) -> list[str | MediaRef]:
    said: list[str | MediaRef] = []
    for index, part in enumerate(content):
        if part.type not in ("text", "image_url") or (part.type != "text" and role not in (Role.USER, Role.TOOL)):
            known = "text and image_url" if role in (Role.USER, Role.TOOL) else f"text, in a {role} message,"
            raise UnrenderableMessage(
                f"A content part of type {shown(part.type)} cannot be shown to the model; only {known} can.",
                param=f"{at}/{index}/type",
            )
        own, other = ("text", "image_url") if part.type == "text" else ("image_url", "text")
        if getattr(part, own) is None:
            raise InvalidRequest(f"A part of type {own} needs its {own}.", param=f"{at}/{index}/{own}")
        for name in (other, "input_audio", "file"):
            if getattr(part, name) is not None and is_given(getattr(part, name)):
                raise InvalidRequest(f"A part of type {own} cannot have {name}.", param=f"{at}/{index}/{name}")
        if part.image_url is not None:
            said.append(media.reader.of_url(part.image_url.url, f"{at}/{index}/image_url/url"))
        else:
            said.append(part.text or "")
    return said


def _tool(wire: WireTool, index: int) -> Tool:
    at = f"/tools/{index}"
    if wire.type != "function":
        raise UnrenderableMessage(
            f"A tool of type {shown(wire.type)} cannot be shown to the model; only functions can.", param=f"{at}/type"
        )
    if wire.function is None:
        raise InvalidRequest("A tool of type 'function' needs its function.", param=f"{at}/function")
    function = wire.function
    return function_tool(
        function.name,
        function.description,
        function.parameters,
        at=f"{at}/function/parameters",
        strict=function.strict,
    )


def _tool_choice(wire: str | WireNamedChoice | None, tools: tuple[Tool, ...]) -> ToolChoice:
    at = "/tool_choice"
    if isinstance(wire, WireNamedChoice):
        if wire.type != "function":
            raise unknown_type("tool_choice", wire.type)
        if wire.function.name not in {tool.name for tool in tools}:
            raise InvalidRequest(
                f"tool_choice names a tool that is not in tools: {shown(wire.function.name)}.",
                param=f"{at}/function/name",
            )
        return ToolChoice(mode=ToolMode.NAMED, name=wire.function.name)
    if wire is None:
        return ToolChoice()
    if wire not in ("auto", "none", "required"):
        raise InvalidRequest(f"tool_choice must be auto, none, required or a function, got {shown(wire)}.", param=at)
    if wire == "required" and not tools:
        raise InvalidRequest("tool_choice 'required' needs tools.", param=at)
    return ToolChoice(mode=ToolMode(wire))


def _max_tokens(wire: WireChatRequest) -> int | None:
    if wire.max_tokens is not None and wire.max_completion_tokens not in (None, wire.max_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens disagree; send one.", param="/max_completion_tokens")
    return wire.max_tokens if wire.max_completion_tokens is None else wire.max_completion_tokens


def _num_top_logprobs(wire: WireChatRequest) -> int:
    if wire.top_logprobs and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="/top_logprobs")
    return wire.top_logprobs or 0
