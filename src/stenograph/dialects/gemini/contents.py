"""Gemini's contents as messages. Pure.

A content has parts, and a part is a text, a call or a result; so a user's content may be several messages. A model's
contents that follow each other are one message: a client that streams keeps what came as a content for each event. The
messages before a reply are the same, whatever follows that reply.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.messages import Message, Role, ToolCall
from stenograph.dialects.gemini.fields import (
    NotShown,
    WireContent,
    WireFunctionCall,
    WireFunctionResponse,
    WirePart,
    WireSystemInstruction,
)
from stenograph.dialects.json_errors import nearest, shown
from stenograph.dialects.message_list import MAX_ARGUMENTS_CHARS, MAX_MESSAGES, MAX_PARTS
from stenograph.dialects.openai.sampling_fields import NEUTRAL
from stenograph.dialects.template_kwargs import check_depth

_ROLES = {"user": Role.USER, "function": Role.USER, "model": Role.ASSISTANT}
_OBJECT = msgspec.json.Decoder(dict[str, object])


@dataclass(slots=True)
class _Open:
    """Calls of the last reply that have no result yet, in order."""

    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    num_seen: int = 0

    def called(self, wire: WireFunctionCall, at: str) -> ToolCall:
        """A call. One without an id gets one that depends on its place alone."""
        arguments = _object_text(wire.args, f"{at}/args")
        if len(arguments) > MAX_ARGUMENTS_CHARS:
            raise InvalidRequest(
                f"A call's args have at most {MAX_ARGUMENTS_CHARS} characters, these {len(arguments)}.",
                param=f"{at}/args",
            )
        call = ToolCall(id=wire.id or f"call_{self.num_seen}", name=wire.name, arguments=arguments)
        self.num_seen += 1
        self.calls.append(call)
        return call

    def answered(self, wire: WireFunctionResponse, at: str) -> str:
        """The id of the call that a result answers. Raises InvalidRequest if it says none and none is open."""
        found = [call for call in self.calls if call.id == wire.id or (not wire.id and call.name == wire.name)]
        if found:
            self.calls.remove(found[0])
        elif not wire.id:
            raise InvalidRequest(
                f"No open call of {shown(wire.name)} comes before this result. Send the id of the call that it"
                " answers.",
                param=at,
            )
        return wire.id or found[0].id


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContents:
    """Messages, and for each the pointer of what it was made of."""

    messages: tuple[Message, ...]
    pointers: tuple[str, ...]


def read_contents(system: WireSystemInstruction | None, contents: Sequence[WireContent]) -> ReadContents:
    """The messages of a request. Raises InvalidRequest or UnrenderableMessage, with a JSON pointer."""
    if not contents:
        raise InvalidRequest("contents is empty: a conversation has at least one message.", param="/contents")
    if len(contents) > MAX_MESSAGES:
        raise InvalidRequest(f"A conversation has at most {MAX_MESSAGES} contents, this one {len(contents)}.")
    found = list(_system(system))
    found += _messages(contents)
    if len(found) > MAX_MESSAGES:
        raise InvalidRequest(f"A conversation has at most {MAX_MESSAGES} messages, this one {len(found)}.")
    return ReadContents(messages=tuple(one for one, _ in found), pointers=tuple(at for _, at in found))


def _system(wire: WireSystemInstruction | None) -> Iterator[tuple[Message, str]]:
    if wire is None:
        return
    at = "/systemInstruction"
    texts = [_only_text(part, f"{at}/parts/{index}") for index, part in enumerate(wire.parts)]
    if text := "".join(texts):
        yield Message(role=Role.SYSTEM, content=text), at


def _messages(contents: Sequence[WireContent]) -> Iterator[tuple[Message, str]]:
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
            yield _reply(reply, still_open), reply_at
            reply, reply_at = [], ""
        yield from _said(parts, still_open)
    if reply_at:
        yield _reply(reply, still_open), reply_at


def _role(content: WireContent, at: str) -> Role:
    role = _ROLES.get(content.role or "user")
    if role is None:
        raise InvalidRequest(
            f"Unknown role {shown(content.role or '')}; known are {', '.join(_ROLES)}. A system text is in"
            f" systemInstruction.{nearest(content.role or '', _ROLES)}",
            param=f"{at}/role",
        )
    return role


def _parts(content: WireContent, at: str) -> list[tuple[WirePart, str]]:
    parts = content.parts or []
    if not parts:
        raise InvalidRequest("A content needs at least one part.", param=f"{at}/parts")
    if len(parts) > MAX_PARTS:
        raise InvalidRequest(f"A content has at most {MAX_PARTS} parts, this one {len(parts)}.", param=f"{at}/parts")
    found = [(part, f"{at}/parts/{index}") for index, part in enumerate(parts)]
    for part, place in found:
        _check_part(part, place)
    return found


def _check_part(part: WirePart, at: str) -> None:
    """Raise for a part that is not one text, call or result."""
    check_shown(part, at, "part")
    given = [name for name in ("text", "function_call", "function_response") if getattr(part, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("A part must have exactly one of text, functionCall and functionResponse.", param=at)


def check_shown(struct: msgspec.Struct, at: str, what: str) -> None:
    """Raise UnrenderableMessage for a field whose data is no text, unless it asks for nothing."""
    for one in msgspec.structs.fields(struct):
        value = getattr(struct, one.name)
        if one.type == NotShown and isinstance(value, msgspec.Raw) and not _is_nothing(value):
            raise UnrenderableMessage(
                f"A {what} with {one.encode_name} cannot be shown to the model; only text, functions and their results"
                " can.",
                param=f"{at}/{one.encode_name}",
            )


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
    still_open.calls.clear()
    for part, at in parts:
        if part.function_response is not None:
            raise InvalidRequest("A result of a call is the user's, not the model's.", param=f"{at}/functionResponse")
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


def _said(parts: Sequence[tuple[WirePart, str]], still_open: _Open) -> Iterator[tuple[Message, str]]:
    """The user's parts as messages: each result is one, and so are the texts between them."""
    texts: list[str] = []
    texts_at = ""
    for part, at in parts:
        if part.function_call is not None:
            raise InvalidRequest("A call is the model's, not the user's.", param=f"{at}/functionCall")
        if part.thought:
            raise InvalidRequest("A thought is the model's, not the user's.", param=f"{at}/thought")
        if part.function_response is None:
            texts_at = texts_at or at
            texts.append(part.text or "")
            continue
        if _is_copy(part.function_response, parts):
            continue
        if texts_at:
            yield Message(role=Role.USER, content="".join(texts)), texts_at
            texts, texts_at = [], ""
        yield _result(part.function_response, f"{at}/functionResponse", still_open)
    if texts_at:
        yield Message(role=Role.USER, content="".join(texts)), texts_at


def _is_copy(wire: WireFunctionResponse, parts: Sequence[tuple[WirePart, str]]) -> bool:
    """Whether a result stands before in the same content, word for word. Gemini CLI sends each result twice when it
    resumes a conversation."""
    if not wire.id:
        return False
    same = [one.function_response for one, _ in parts if one.function_response == wire]
    return same[0] is not wire


def _result(wire: WireFunctionResponse, at: str, still_open: _Open) -> tuple[Message, str]:
    check_shown(wire, at, "result")
    content = _object_text(wire.response, f"{at}/response")
    return Message(role=Role.TOOL, content=content, tool_call_id=still_open.answered(wire, at), name=wire.name), at


def _object_text(raw: msgspec.Raw | msgspec.UnsetType, at: str) -> str:
    """The text of a JSON object without its spaces. Raises InvalidRequest for another value."""
    if isinstance(raw, msgspec.UnsetType) or bytes(raw) == b"null":
        return "{}"
    try:
        check_depth(_OBJECT.decode(raw), at=at)
        return msgspec.json.format(bytes(raw), indent=-1).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"Expected a JSON object: {error}.", param=at) from error
