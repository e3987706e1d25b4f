"""Input items of Responses, from bytes to structs. Pure.

Owns the kinds of items, and the errors for unreadable ones. Well-formed items are decoded many at once, by their types;
malformed ones each by itself, for an error that points at it. Messages are item_messages.py's.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Raw

from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.messages import MediaRef
from stenograph.dialects.base import RequestMedia
from stenograph.dialects.common.json_bodies import MAX_MESSAGES, MAX_PARTS, decode_part, may_have_many, portions
from stenograph.dialects.common.pointers import nearest, shown
from stenograph.dialects.common.sampling import is_given
from stenograph.dialects.common.sampling_fields import Unread, in_schema
from stenograph.dialects.responses.tools import ToolName


class ItemPart(msgspec.Struct, forbid_unknown_fields=True):
    """A text, or an image: a data URI, or a URL of a host that is fetched from. What only decorates it is dropped."""

    type: str
    text: str | None = None
    image_url: str | None = None
    file_id: Annotated[Unread, in_schema(type="null")] = UNSET
    detail: Unread = UNSET
    annotations: Unread = UNSET
    logprobs: Unread = UNSET
    parsed: Unread = UNSET
    cache_control: Unread = UNSET
    prompt_cache_breakpoint: Unread = UNSET


ItemText = str | list[ItemPart] | None
"""The text of an item: a string, or parts joined without a separator."""


class ItemBase(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of any item; they only decorate it."""

    id: str | None = None
    status: Unread = UNSET
    created_by: Unread = UNSET
    caller: Unread = UNSET
    is_async: Unread = msgspec.field(default=UNSET, name="async")
    metadata: Unread = UNSET
    cache_control: Unread = UNSET
    internal_chat_message_metadata_passthrough: Unread = UNSET


class MessageItem(ItemBase, kw_only=True, tag="message"):
    """A message; `type` may be left out."""

    role: str
    content: ItemText
    phase: Unread = UNSET
    end_turn: Unread = UNSET
    name: Unread = UNSET


class ReasoningItem(ItemBase, kw_only=True, tag="reasoning"):
    """Reasoning of a reply."""

    summary: list[ItemPart] | None = None
    content: list[ItemPart] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(ItemBase, kw_only=True, tag="function_call"):
    """A call of a function."""

    call_id: str
    name: ToolName
    arguments: str
    namespace: ToolName | None = None
    parsed_arguments: Unread = UNSET


class CustomCallItem(ItemBase, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool."""

    call_id: str
    name: ToolName
    input: str
    namespace: ToolName | None = None


class SearchCallItem(ItemBase, kw_only=True, tag="tool_search_call"):
    """A call of the search for tools, which the client ran."""

    call_id: str | None = None
    execution: str | None = None
    arguments: Raw


class CallOutputItem(ItemBase, kw_only=True, tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: ItemText
    name: Unread = UNSET


class CustomOutputItem(CallOutputItem, kw_only=True, tag="custom_tool_call_output"):
    """The result of a custom tool's call."""


class SearchOutputItem(ItemBase, kw_only=True, tag="tool_search_output"):
    """The tools that a search has found."""

    call_id: str | None = None
    execution: str | None = None
    tools: list[Raw]


class ReferenceItem(ItemBase, kw_only=True, tag="item_reference"):
    """An item that was sent before, by its id; `type` may be left out."""


InputItem = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | SearchCallItem
    | CallOutputItem
    | CustomOutputItem
    | SearchOutputItem
    | ReferenceItem
)
"""Any readable item."""


class ItemHead(msgspec.Struct):
    """The part of an item with its kind."""

    type: str | None = None
    role: str | None = None


class ItemLists(msgspec.Struct):
    """The lists of an item, with any number of parts from the client."""

    content: Raw = Raw(b"null")
    output: Raw = Raw(b"null")
    summary: Raw = Raw(b"null")


class PartType(msgspec.Struct):
    """The type of a part."""

    type: str


TEXT_TYPES = ("input_text", "output_text", "text")
IMAGE = "input_image"
SHOWN_TYPES = (*TEXT_TYPES, IMAGE)
REASONING_TYPES = ("reasoning_text", "summary_text", "text")
KINDS: tuple[type[InputItem], ...] = (
    MessageItem, ReasoningItem, FunctionCallItem, CustomCallItem, SearchCallItem, CallOutputItem, CustomOutputItem,
    SearchOutputItem, ReferenceItem,
)  # fmt: skip
_OF_TYPE: dict[str, type[InputItem]] = {str(kind.__struct_config__.tag): kind for kind in KINDS}
_DECODERS = {kind: msgspec.json.Decoder(kind) for kind in KINDS}
_ALL = msgspec.json.Decoder(list[InputItem])
_ITEMS = msgspec.json.Decoder(list[Raw])
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_HEAD = msgspec.json.Decoder(ItemHead)
_LISTS = msgspec.json.Decoder(ItemLists)
_PART_TYPES = msgspec.json.Decoder(list[PartType])


def read_items(wire: Raw, at: str) -> Iterator[tuple[InputItem, str]]:
    """Decode a list of items, each with its pointer. Raises InvalidJson, InvalidRequest or UnrenderableMessage."""
    raws = decode_part(wire, _ITEMS, at=at)
    if not raws:
        raise InvalidRequest("input is empty: there is nothing to answer.", param=at)
    if len(raws) > MAX_MESSAGES:
        raise InvalidRequest(f"A request has at most {MAX_MESSAGES} items, this one {len(raws)}.", param=at)
    for start, end in portions(raws):
        items = _decoded_together(raws[start:end])
        for index in range(start, end):
            place = f"{at}/{index}"
            yield _decoded(raws[index], place) if items is None else items[index - start], place


def _decoded_together(raws: Sequence[Raw]) -> Sequence[InputItem] | None:
    """Well-formed items; None if one is malformed, or may have too many parts."""
    if any(map(may_have_many, raws)):
        return None
    try:
        return _ALL.decode(b"[" + b",".join(raws) + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decoded(raw: Raw, at: str) -> InputItem:
    """One item. Raises as `read_items`, with the fault in it."""
    head = decode_part(raw, _HEAD, at=at)
    name = head.type or ("message" if head.role is not None else "item_reference")
    kind = _OF_TYPE.get(name)
    if kind is None:
        raise UnrenderableMessage(
            f"An item of type {shown(name)} cannot be shown to the model; known are {', '.join(_OF_TYPE)}."
            f"{nearest(name, _OF_TYPE)}",
            param=f"{at}/type",
        )
    if head.type is None:  # null is the same as nothing
        members = {key: value for key, value in decode_part(raw, _OBJECT, at=at).items() if key != "type"}
        raw = Raw(msgspec.json.encode(members))
    _check_lists(raw, REASONING_TYPES if kind is ReasoningItem else SHOWN_TYPES, at)

    def known(pointer: str) -> Sequence[str]:
        return (kind if pointer == at else ItemPart).__struct_encode_fields__

    return decode_part(raw, _DECODERS[kind], at=at, known=known)


def _check_lists(raw: Raw, types: Sequence[str], at: str) -> None:
    """Raise for a part of a type that cannot be shown, before its own fields are blamed, or for too many parts."""
    lists = decode_part(raw, _LISTS, at=at)
    for name in ItemLists.__struct_fields__:
        value: Raw = getattr(lists, name)
        if bytes(memoryview(value)[:1]) != b"[":
            continue
        parts = decode_part(value, _PART_TYPES, at=f"{at}/{name}")
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(f"An item has at most {MAX_PARTS} parts, this one {len(parts)}.", param=f"{at}/{name}")
        for index, part in enumerate(parts):
            check_part(part, types, f"{at}/{name}/{index}")


def check_part(part: PartType | ItemPart, types: Sequence[str], at: str) -> None:
    """Raise UnrenderableMessage for a part of none of these types."""
    if part.type not in types:
        raise UnrenderableMessage(
            f"A content part of type {shown(part.type)} cannot be shown to the model; only"
            f" {'text and images' if IMAGE in types else 'text'} can.",
            param=f"{at}/type",
        )


def text_of(text: ItemText, at: str, types: Sequence[str] = TEXT_TYPES) -> str:
    """The text of an item, at this pointer. Raises UnrenderableMessage or InvalidRequest."""
    if text is None or isinstance(text, str):
        return text or ""
    return "".join([_text(part, f"{at}/{index}", types) for index, part in enumerate(text)])


def said_of(text: ItemText, at: str, media: RequestMedia) -> Sequence[str | MediaRef]:
    """The texts and images of an item. Raises as `text_of`."""
    if text is None or isinstance(text, str):
        return (text or "",)
    return [
        _text(part, f"{at}/{index}", SHOWN_TYPES) if part.type != IMAGE else _image(part, f"{at}/{index}", media)
        for index, part in enumerate(text)
    ]


def _text(part: ItemPart, at: str, types: Sequence[str]) -> str:
    check_part(part, types, at)
    if part.text is None:
        raise InvalidRequest("Required field 'text' is missing.", param=f"{at}/text")
    for name, value in (("image_url", part.image_url), ("file_id", part.file_id), ("detail", part.detail)):
        if value is not None and is_given(value):
            raise InvalidRequest(f"A text part cannot have {name}.", param=f"{at}/{name}")
    return part.text


def _image(part: ItemPart, at: str, media: RequestMedia) -> MediaRef:
    if part.image_url is None or is_given(part.file_id):
        raise InvalidRequest("An input_image needs its image_url: this server keeps no files.", param=f"{at}/image_url")
    if part.text is not None:
        raise InvalidRequest("An image cannot have text.", param=f"{at}/text")
    return media.reader.of_url(part.image_url, f"{at}/image_url")
