"""Messages of Anthropic's clients as messages of core, block by block. Pure.

One message may become several: each result of a user's message is one, and so is each stretch of text between them. The
messages before a reply map the same with any continuation after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from stenograph.core.chat import SystemBlocks
from stenograph.core.errors import InvalidRequest, UnrenderableMessage
from stenograph.core.messages import MediaLimits, MediaRef, Message, Role, Tool, ToolCall
from stenograph.core.rewrites import AppliedRewrite, kept_text
from stenograph.dialects.anthropic.fields import (
    WireBlock,
    WireImageBlock,
    WireMessageParam,
    WireTextBlock,
    WireThinkingBlock,
    WireToolReference,
    WireToolResultBlock,
    WireToolUseBlock,
)
from stenograph.dialects.anthropic.spelling import signed_request
from stenograph.dialects.base import RequestMedia, joined
from stenograph.dialects.common.json_bodies import MAX_ARGUMENTS_CHARS, MAX_PARTS, type_at
from stenograph.dialects.common.pointers import nearest, shown, unknown_role

TOOL_REFERENCE = "tool-reference"
"""The name in records of the rewrite to show a deferred tool."""

_ROLES = {str(role): role for role in (Role.USER, Role.ASSISTANT, Role.SYSTEM)}
_BLOCKS: Mapping[Role, tuple[type[WireBlock], ...]] = {
    Role.USER: (WireTextBlock, WireImageBlock, WireToolResultBlock),
    Role.ASSISTANT: (WireTextBlock, WireThinkingBlock, WireToolUseBlock),
    Role.SYSTEM: (WireTextBlock,),
}
_TYPES = ("text", "image", "thinking", "tool_use", "tool_result")
_RESULT_TYPES = ("text", "image", "tool_reference")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])


@dataclass(slots=True)
class ReadMessages:
    """The messages read so far, with the pointer of each, and findings on the way.

    `references` are the names of tools in results, in order; `failed` the calls with an error as their result, among
    the results after the last reply. `system_blocks` are the blocks of the first message, if it is the system's;
    `replies_of` the requests named by signatures.
    """

    messages: list[Message] = field(default_factory=list[Message])
    places: list[str] = field(default_factory=list[str])
    references: dict[str, None] = field(default_factory=dict[str, None])
    failed: list[str] = field(default_factory=list[str])
    system_blocks: SystemBlocks | None = None
    rewrites: list[AppliedRewrite] = field(default_factory=list[AppliedRewrite])
    replies_of: set[str] = field(default_factory=set[str])

    def add(self, message: Message, place: str) -> None:
        """One more message."""
        self.messages.append(message)
        self.places.append(place)


class BlockReader:
    """Reads one request's messages; `tools` are all its declared tools, by name."""

    def __init__(self, tools: Mapping[str, Tool], limits: MediaLimits) -> None:
        self.read = ReadMessages()
        self.media = RequestMedia(limits)
        self._tools = tools

    def system(self, content: str | Sequence[WireBlock] | None) -> None:
        """The system text, blocks with a blank line between them. Raises InvalidRequest."""
        if content is None:
            return
        blocks = None
        if not isinstance(content, str):
            _check_blocks(Role.SYSTEM, content, "/system")
            texts = tuple(block.text for block in content if isinstance(block, WireTextBlock))
            blocks = SystemBlocks(texts=texts, separator="\n\n")
            content = blocks.joined
        if content:
            self.read.system_blocks = blocks
            self.read.add(Message(role=Role.SYSTEM, content=content), "/system")

    def message(self, wire: WireMessageParam, at: str) -> None:
        """One message. Raises InvalidRequest or UnrenderableMessage."""
        role = _ROLES.get(wire.role)
        if role is None:
            raise unknown_role(wire.role, _ROLES, at)
        if isinstance(wire.content, str):
            if role is Role.ASSISTANT:
                self.read.failed.clear()
            self.read.add(Message(role=role, content=wire.content), at)
            return
        _check_blocks(role, wire.content, f"{at}/content")
        if role is Role.ASSISTANT:
            self.read.failed.clear()
            signatures = (block.signature for block in wire.content if isinstance(block, WireThinkingBlock))
            self.read.replies_of.update(id_ for one in signatures if one and (id_ := signed_request(one)))
            self.read.add(_reply(wire.content, at), at)
        else:
            self._prompt(role, wire.content, at)

    def _prompt(self, role: Role, blocks: Sequence[WireBlock], at: str) -> None:
        """Texts, images and results in their order; what is said without a result between is one message."""
        said: list[str | MediaRef] = []
        start = 0
        for index, block in enumerate(blocks):
            start = start if said else index
            if isinstance(block, WireTextBlock):
                said.append(block.text)
            elif isinstance(block, WireImageBlock):
                said.append(self._image(block, f"{at}/content/{index}"))
            elif isinstance(block, WireToolResultBlock):
                self._said(role, said, f"{at}/content/{start}")
                said = []
                self._result(block, f"{at}/content/{index}")
        if said or not blocks:
            is_whole = len(said) == len(blocks)
            self._said(role, said or [""], at if is_whole else f"{at}/content/{start}")

    def _said(self, role: Role, said: Sequence[str | MediaRef], place: str) -> None:
        if said:
            content, media = joined(said)
            self.read.add(Message(role=role, content=content, media=media), place)

    def _image(self, block: WireImageBlock, at: str) -> MediaRef:
        source, at = block.source, f"{at}/source"
        if source.type == "url":
            if source.url is None:
                raise InvalidRequest("An image's source of type 'url' needs its url.", param=f"{at}/url")
            return self.media.reader.of_url(source.url, f"{at}/url")
        if source.data is None or source.media_type is None:
            missing = "data" if source.data is None else "media_type"
            raise InvalidRequest(f"An image's source of type 'base64' needs its {missing}.", param=f"{at}/{missing}")
        return self.media.reader.of_base64(source.data, source.media_type, f"{at}/data")

    def _result(self, block: WireToolResultBlock, at: str) -> None:
        said = [block.content] if isinstance(block.content, str) else self._result_parts(block.content or (), at)
        if block.is_error:
            self.read.failed.append(block.tool_use_id)
        content, media = joined(said)
        self.read.add(Message(role=Role.TOOL, content=content, tool_call_id=block.tool_use_id, media=media), at)

    def _result_parts(
        self, blocks: Sequence[WireTextBlock | WireImageBlock | WireToolReference], at: str
    ) -> list[str | MediaRef]:
        """Texts and images; a reference is a line with the tool's definition."""
        parts: list[str | MediaRef] = []
        before = ""
        for index, block in enumerate(blocks):
            if isinstance(block, WireImageBlock):
                parts.append(self._image(block, f"{at}/content/{index}"))
                before = ""
                continue
            if isinstance(block, WireToolReference):
                text = self._definition(block, f"{at}/content/{index}")
                text = text if before.endswith("\n") or not before else f"\n{text}"
            else:
                text = block.text
                was_reference = index > 0 and isinstance(blocks[index - 1], WireToolReference)
                text = f"\n{text}" if was_reference and text and not text.startswith("\n") else text
            parts.append(text)
            before = text or before
        return parts

    def _definition(self, block: WireToolReference, at: str) -> str:
        tool = self._tools.get(block.tool_name)
        if tool is None:
            raise InvalidRequest(
                f"A tool_reference names a tool that is not in tools: {shown(block.tool_name)}."
                f"{nearest(block.tool_name, self._tools)}",
                param=f"{at}/tool_name",
            )
        self.read.references[tool.name] = None
        self.read.rewrites.append(
            AppliedRewrite(
                rule=TOOL_REFERENCE,
                where=at,
                before=kept_text(block.tool_name),
                after=kept_text(tool.json),
                message=len(self.read.messages),
            )
        )
        return tool.json


def _reply(blocks: Sequence[WireBlock], at: str) -> Message:
    """An assistant's message: texts and reasoning are joined by nothing."""
    texts = [block.text for block in blocks if isinstance(block, WireTextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, WireThinkingBlock)]
    calls = [
        _call(block, f"{at}/content/{index}")
        for index, block in enumerate(blocks)
        if isinstance(block, WireToolUseBlock)
    ]
    return Message(
        role=Role.ASSISTANT,
        content="".join(texts) if texts else None,
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(calls),
    )


def _call(block: WireToolUseBlock, at: str) -> ToolCall:
    arguments = bytes(block.input).decode().strip()
    if not arguments.startswith("{"):
        raise InvalidRequest("The input of a tool_use must be an object.", param=f"{at}/input")
    if len(arguments) > MAX_ARGUMENTS_CHARS:
        raise InvalidRequest(
            f"A tool call's input has at most {MAX_ARGUMENTS_CHARS} characters, this one {len(arguments)}.",
            param=f"{at}/input",
        )
    return ToolCall(id=block.id, name=block.name, arguments=arguments)


def _check_blocks(role: Role, blocks: Sequence[WireBlock], at: str) -> None:
    known = _BLOCKS[role]
    for index, block in enumerate(blocks):
        if not isinstance(block, known):
            kind = block.__struct_config__.tag
            names = ", ".join(str(one.__struct_config__.tag) for one in known)
            raise InvalidRequest(
                f"A {role} message cannot have a block of type {kind!r}; it can have {names}.",
                param=f"{at}/{index}/type",
            )


class _Content(msgspec.Struct):
    """The blocks of a message or of a result; a client may make any number of them."""

    content: Raw = Raw(b"null")


_CONTENT = msgspec.json.Decoder(_Content)


def check_block_count(raw: Raw, at: str) -> None:
    """Raise InvalidRequest, before they are made, for a message with more blocks than it may have, those of its results
    included.

    A message of another shape is for the decoder to refuse.
    """
    try:
        blocks = list(_blocks(raw))
        num = len(blocks) + sum(1 for block in blocks for _ in _blocks(block))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if num > MAX_PARTS:
        raise InvalidRequest(f"A message has at most {MAX_PARTS} blocks, this one {num}.", param=f"{at}/content")


def _blocks(raw: Raw) -> Iterator[Raw]:
    content = _CONTENT.decode(raw).content
    if bytes(memoryview(content)[:1]) == b"[":
        yield from _LIST.decode(content)


def blame_block_type(body: bytes, error: InvalidRequest) -> None:
    """Raise UnrenderableMessage if the error points into a block of a type that cannot be shown.

    Such a block has fields of its own, and they are not the fault.
    """
    steps: tuple[str, ...]
    match (error.param or "").split("/")[1:]:
        case ["messages", index, "content", block, "content", inner, *_]:
            steps = ("messages", index, "content", block, "content", inner)
        case ["messages", index, "content", block, *_]:
            steps = ("messages", index, "content", block)
        case ["system", block, *_]:
            steps = ("system", block)
        case _:
            return
    kind = type_at(body, steps)
    known = _RESULT_TYPES if len(steps) == 6 else _TYPES
    if kind is not None and kind not in known:
        raise UnrenderableMessage(
            f"A content block of type {shown(kind)} cannot be shown to the model; only {', '.join(known)} can.",
            param="/" + "/".join((*steps, "type")),
        ) from error
