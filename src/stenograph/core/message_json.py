"""Messages as JSON: the shape shared by chats, records and engines with a chat route. Pure."""

from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict

import msgspec

from stenograph.core.json_types import Count
from stenograph.core.messages import MediaKind, Message, Role


class RepliedFunction(TypedDict):
    """The called function; `arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class RepliedToolCall(TypedDict):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: RepliedFunction


class NumberedCall(RepliedToolCall):
    """A tool call with its place among those of its message, as SGLang writes it and a stream has it."""

    index: Count


class NumberedMessage(TypedDict):
    """A reply with such calls."""

    role: Role
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Sequence[NumberedCall]]


class ShownMedia(TypedDict):
    """A medium before character `at` of a message's content. Its bytes are kept by their SHA-256."""

    at: Count
    sha256: str
    kind: MediaKind
    media_type: str
    num_bytes: Count


class MediaRow(TypedDict):
    """A medium of a sample: its SHA-256, in hex, and the `length` tokens from `start` that stand for it."""

    sha256: str
    kind: MediaKind
    start: Count
    length: Count


class RepliedMessage(TypedDict):
    """A message as OpenAI writes it, but for `media`."""

    role: Role
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Sequence[RepliedToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    media: NotRequired[Sequence[ShownMedia]]


def message_body(message: Message) -> RepliedMessage:
    """A message; fields of requests' messages alone are left out."""
    body: RepliedMessage = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.media:
        body["media"] = [
            {
                "at": one.at,
                "sha256": one.ref.sha256,
                "kind": one.ref.kind,
                "media_type": one.ref.media_type,
                "num_bytes": one.ref.num_bytes,
            }
            for one in message.media
        ]
    return body


def numbered_body(message: Message) -> NumberedMessage:
    """A reply with its calls numbered."""
    body = message_body(message)
    numbered: NumberedMessage = {"role": body["role"], "content": body["content"]}
    if "reasoning_content" in body:
        numbered["reasoning_content"] = body["reasoning_content"]
    if "tool_calls" in body:
        numbered["tool_calls"] = [{**call, "index": index} for index, call in enumerate(body["tool_calls"])]
    return numbered


def encode_messages(messages: Sequence[Message]) -> bytes:
    """The messages of a request, for engines that parse replies by them."""
    return msgspec.json.encode([_sent_body(message) for message in messages])


def _sent_body(message: Message) -> RepliedMessage:
    body = message_body(message)
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    return body
