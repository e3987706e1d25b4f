"""The messages of a conversation, in one form for all dialects and all renderers.

Owns what a message is. Knows neither a wire format nor a template.
"""

import enum
from array import array
from collections.abc import Mapping
from itertools import pairwise

from msgspec import Struct, field


class Role(enum.StrEnum):
    """The author of a message. Dialects map their own words onto these; a family says which of them it can render."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(Struct, frozen=True, kw_only=True, gc=False):
    """A call by the model. `arguments` is JSON text as it was spelled; it may be malformed."""

    id: str
    name: str
    arguments: str


class MediaKind(enum.StrEnum):
    """Kinds of media in a message."""

    IMAGE = "image"


class MediaRef(Struct, frozen=True, kw_only=True, gc=False):
    """A medium by its content: SHA-256 of its `num_bytes` bytes, as 64 hex digits. `media_type`: `image/png`."""

    sha256: str
    kind: MediaKind
    media_type: str
    num_bytes: int


class PlacedMedia(Struct, frozen=True, kw_only=True, gc=False):
    """A medium within a message, before character `at` of its content."""

    at: int
    ref: MediaRef


class MediaItem(Struct, frozen=True, kw_only=True, gc=False):
    """A medium with its bytes, as base64 text: so clients send them, and so engines take them."""

    ref: MediaRef
    base64: bytes


class MediaLimits(Struct, frozen=True, kw_only=True, gc=False):
    """Limits of a request's media: the bytes of each, their number, the bytes of all only named by it. `fetches`: URLs
    of other servers are taken; `fetched` are those fetched so far, with the media types that their servers told."""

    max_bytes: int = 20 * 2**20
    max_items: int = 256
    max_named_bytes: int = 64 * 2**20
    fetches: bool = False
    fetched: Mapping[str, MediaItem] = field(default_factory=dict[str, MediaItem])


MEDIA_LIMITS = MediaLimits()


class Expansion(Struct, frozen=True, kw_only=True, gc=False):
    """The effective ids put by an engine in the place of one placeholder: the one at `position` of the logical line."""

    position: int
    ref: MediaRef
    ids: "array[int]"


class Message(Struct, frozen=True, kw_only=True, gc=False):
    """One message. `content` None and "" render alike, but are kept apart because the wire keeps them apart.

    `tool_calls` and `reasoning` only on an assistant's, `tool_call_id` only on a tool's, `media` only on a user's or a
    tool's, in order of their places.
    """

    role: Role
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    media: tuple[PlacedMedia, ...] = ()

    def __post_init__(self) -> None:
        if self.media:
            self._check_media()
        if self.role is not Role.ASSISTANT and (self.tool_calls or self.reasoning is not None):
            raise ValueError(f"a {self.role} message has no tool calls and no reasoning")
        if self.role is not Role.TOOL and self.tool_call_id is not None:
            raise ValueError(f"a {self.role} message answers no tool call")

    def _check_media(self) -> None:
        if self.role not in (Role.USER, Role.TOOL):
            raise ValueError(f"a {self.role} message has no media")
        places = [0, *(one.at for one in self.media), len(self.content or "")]
        if any(first > second for first, second in pairwise(places)):
            raise ValueError(f"media at {places[1:-1]} of a content of {places[-1]} characters")


class Tool(Struct, frozen=True, kw_only=True, gc=False):
    """A function for the model to call. `json` is the whole tool as sent, `parameters_json` its JSON Schema."""

    name: str
    json: str
    parameters_json: str = "{}"


class ToolCallDelta(Struct, frozen=True, kw_only=True, gc=False):
    """A piece of the tool call number `index`; `id` and `name` come once, with its first piece."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ReplyDelta(Struct, frozen=True, kw_only=True, gc=False):
    """A stream's addition to a message. The deltas of a turn, joined, are its `ParsedReply.message`."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def whole_delta(message: Message) -> ReplyDelta:
    """A message as a single delta."""
    return ReplyDelta(
        content=message.content or "",
        reasoning=message.reasoning or "",
        tool_calls=tuple(
            ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
            for index, call in enumerate(message.tool_calls)
        ),
    )
