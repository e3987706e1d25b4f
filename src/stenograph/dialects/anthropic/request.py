"""Anthropic's Messages, requests: bytes to `ChatRequest`. Pure.

Every field is honoured, recorded or refused (fields.py); nothing is accepted and ignored. Whoever is to blame is named
by a JSON pointer. Blocks are blocks.py's, replies reply.py's.
"""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from stenograph.core.chat import ChatRequest, ReplyOptions, ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest
from stenograph.core.message_json import encode_messages
from stenograph.core.messages import MEDIA_LIMITS, MediaLimits, Message, Role, Tool
from stenograph.core.rewrites import AppliedRewrite, kept_text
from stenograph.core.types import Grammar
from stenograph.dialects.anthropic.blocks import BlockReader, blame_block_type, check_block_count
from stenograph.dialects.anthropic.fields import (
    MESSAGES_FIELDS,
    WireMessageParam,
    WireMessagesRequest,
    WireMessagesTool,
    WireMessagesToolChoice,
    names_in_params,
)
from stenograph.dialects.anthropic.spelling import MessagesSpelling
from stenograph.dialects.common.json_bodies import check_rest, type_at, wire_messages
from stenograph.dialects.common.pointers import nearest, shown
from stenograph.dialects.common.sampling import (
    ReadSampling,
    decode_by_rules,
    sampling_params,
    schema_grammar,
    sent_sampling,
)
from stenograph.dialects.common.sampling_fields import WireSampling
from stenograph.dialects.common.template_input import function_tool, template_kwargs
from stenograph.dialects.settings import UnknownFields

DEFERRED_TOOL = "deferred-tool"
"""The name in records of the rewrite to leave deferred tools out of the prompt."""


class _Edit(msgspec.Struct):
    """An edit of `context_management`."""

    type: object = None
    keep: object = None


class _Edits(msgspec.Struct):
    """`context_management`; its other fields have no effect."""

    edits: list[_Edit] | None = None


_REQUEST = msgspec.json.Decoder(WireMessagesRequest)
_MESSAGES = msgspec.json.Decoder(list[WireMessageParam])
_EDITS = msgspec.json.Decoder(_Edits)
_AS_CHAT = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Sampling fields with the same meaning as in a chat."""

_RECORDED_HEADERS = (b"anthropic-beta", b"anthropic-version")


def decode_messages(
    body: bytes,
    *,
    unknown_fields: UnknownFields = UnknownFields.REFUSE,
    only_counts: bool = False,
    headers: Iterable[tuple[bytes, bytes]] = (),
    media: MediaLimits = MEDIA_LIMITS,
) -> ChatRequest:
    """Read a request. Raises InvalidJson, InvalidRequest or UnrenderableMessage, with a JSON pointer.

    One that `only_counts` needs no `max_tokens`, and may end with a reply. Of the `headers`, only those for choosing a
    version of the protocol are recorded. `media` limits its media.
    """
    check_rest(body)
    try:
        wire, recorded = decode_by_rules(
            body, _REQUEST, MESSAGES_FIELDS, unknown_fields, blame_type=_blame_unknown_type
        )
        tools = [_tool(tool, index) for index, tool in enumerate(wire.tools or ())]
        by_name = {tool.name: tool for tool in tools}
        reader = BlockReader(by_name, media)
        reader.system(wire.system)
        found = wire_messages(wire.messages, _MESSAGES, known=names_in_params, check_parts=check_block_count)
        for index, message in enumerate(found):
            reader.message(message, f"/messages/{index}")
    except InvalidRequest as error:
        blame_block_type(body, error)
        raise
    _check(wire, reader.read.messages, only_counts=only_counts)
    recorded |= _beside_the_fields(headers, reader.read.failed)
    shown_at = tuple(index for index, tool in enumerate(wire.tools or ()) if not tool.defer_loading)
    late_at = _late(tools, shown_at, reader.read.references)
    messages = tuple(reader.read.messages)
    sampling = _sampling(wire)
    choice, is_parallel = _tool_choice(wire.tool_choice, [tools[index] for index in (*shown_at, *late_at)])
    return ChatRequest(
        messages=messages,
        messages_json=encode_messages(messages) if tools else b"[]",
        model=wire.model,
        tools=tuple(tools[index] for index in shown_at),
        late_tools=tuple(tools[index] for index in late_at),
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        params=sampling.params,
        said=sampling.said,
        spelling=MessagesSpelling(
            places=tuple(reader.read.places),
            tools=(*shown_at, *late_at),
            grammar=sampling.constraint.param,
            max_tokens=wire.max_tokens,
            omits_thinking=wire.thinking is not None and wire.thinking.display == "omitted",
        ),
        template_kwargs=template_kwargs(wire.chat_template_kwargs),
        thinks=None if wire.thinking is None or wire.thinking.type == "adaptive" else wire.thinking.type == "enabled",
        effort=None if wire.output_config is None else wire.output_config.effort,
        replies_of=frozenset(reader.read.replies_of),
        system_blocks=reader.read.system_blocks,
        reply=ReplyOptions(stream=bool(wire.stream), return_token_ids=bool(wire.return_token_ids)),
        recorded=recorded,
        sent=sent_sampling(wire),
        rewrites=(*_deferred(tools, shown_at), *reader.read.rewrites),
        media=reader.media.items,
    )


def _check(wire: WireMessagesRequest, messages: Sequence[Message], *, only_counts: bool) -> None:
    """Raise InvalidRequest for values the struct cannot refuse."""
    if not messages or all(message.role is Role.SYSTEM for message in messages):
        raise InvalidRequest("messages is empty: a conversation has at least one message.", param="/messages")
    _check_edits(wire.context_management)
    if only_counts:
        return
    if wire.max_tokens is None:
        raise InvalidRequest("Required field 'max_tokens' is missing.", param="/max_tokens")
    if messages[-1].role is Role.ASSISTANT:
        raise InvalidRequest(
            "The last message is the assistant's: a reply is not continued. End with a user's message.",
            param="/messages",
        )


def _check_edits(raw: "Raw | msgspec.UnsetType") -> None:
    """Raise InvalidRequest for an edit to take something out of the conversation."""
    if not isinstance(raw, Raw) or bytes(raw) == b"null":
        return
    try:
        edits = _EDITS.decode(raw).edits or []
    except msgspec.DecodeError:  # it asks for nothing that is known
        return
    for index, edit in enumerate(edits):
        if edit.keep != "all" or not str(edit.type).startswith("clear_thinking"):
            raise InvalidRequest(
                f"The edit {shown(str(edit.type))} is refused: a session keeps its whole history. Only clear_thinking"
                " with keep 'all' is taken.",
                param=f"/context_management/edits/{index}",
            )


def _tool(wire: WireMessagesTool, index: int) -> Tool:
    at = f"/tools/{index}"
    if wire.type not in (None, "custom"):
        raise _unknown_tool_type(wire.type, index)
    if wire.input_schema is None:
        raise InvalidRequest("A tool needs its input_schema.", param=f"{at}/input_schema")
    return function_tool(wire.name, wire.description, wire.input_schema, at=f"{at}/input_schema")


def _unknown_tool_type(kind: str, index: int) -> InvalidRequest:
    """The error of a tool of the vendor's own. Claude Code leaves such a tool out when it reads these words."""
    return InvalidRequest(
        f"tools.{index}: Input tag {shown(kind)} found using 'type' does not match any of the expected tags: 'custom'",
        param=f"/tools/{index}/type",
    )


def _blame_unknown_type(body: bytes, error: InvalidRequest) -> None:
    """Raise InvalidRequest if the error points into a tool of another type: its fields are others too."""
    blame_block_type(body, error)
    match (error.param or "").split("/")[1:]:
        case ["tools", index, *_] if index.isdigit():
            pass
        case _:
            return
    if (kind := type_at(body, ("tools", index))) not in (None, "custom"):
        raise _unknown_tool_type(kind, int(index)) from error


def _beside_the_fields(headers: Iterable[tuple[bytes, bytes]], failed: Sequence[str]) -> dict[str, str]:
    """The recorded headers and the ids of the failed calls, as JSON text by name."""
    found: dict[str, object] = {
        name.decode(): value.decode("latin-1") for name, value in headers if name in _RECORDED_HEADERS
    }
    if failed:
        found["is_error"] = failed
    return {name: msgspec.json.encode(value).decode() for name, value in found.items()}


def _late(tools: Sequence[Tool], shown_at: Sequence[int], references: Iterable[str]) -> list[int]:
    """The places of tools named by results, and not shown from the beginning."""
    places = {tool.name: index for index, tool in enumerate(tools)}
    shown_names = {tools[index].name for index in shown_at}
    return [places[name] for name in references if name not in shown_names]


def _deferred(tools: Sequence[Tool], shown_at: Sequence[int]) -> tuple[AppliedRewrite, ...]:
    """The deferred tools, absent from the list of tools in the prompt."""
    shown_too = set(shown_at)
    names = [tool.name for index, tool in enumerate(tools) if index not in shown_too]
    if not names:
        return ()
    before = kept_text(msgspec.json.encode(names).decode())
    return (AppliedRewrite(rule=DEFERRED_TOOL, where="/tools", before=before, after=""),)


def _tool_choice(wire: WireMessagesToolChoice | None, callable_tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """The choice, and whether several calls may be made at once."""
    at = "/tool_choice"
    if wire is None:
        return ToolChoice(), True
    is_parallel = wire.disable_parallel_tool_use is not True
    names = [tool.name for tool in callable_tools]
    if wire.type != "tool" and wire.name is not None:
        raise InvalidRequest("A name belongs to the tool_choice of type 'tool'.", param=f"{at}/name")
    match wire.type:
        case "auto":
            return ToolChoice(), is_parallel
        case "none":
            return ToolChoice(mode=ToolMode.NONE), is_parallel
        case "any":
            if not names:
                raise InvalidRequest("tool_choice 'any' needs tools.", param=at)
            return ToolChoice(mode=ToolMode.REQUIRED), is_parallel
        case "tool":
            if wire.name not in names:
                called = shown(wire.name or "")
                raise InvalidRequest(
                    f"tool_choice names a tool that cannot be called: {called}.{nearest(wire.name or '', names)}",
                    param=f"{at}/name",
                )
            return ToolChoice(mode=ToolMode.NAMED, name=wire.name), is_parallel
        case _:
            raise InvalidRequest(
                f"tool_choice.type must be auto, any, tool or none, got {shown(wire.type)}.", param=f"{at}/type"
            )


def _sampling(wire: WireMessagesRequest) -> ReadSampling:
    """The sampling parameters, read as a chat's are, under Anthropic's names."""
    values = {name: getattr(wire, name) for name in _AS_CHAT}
    try:
        read = sampling_params(
            WireSampling(**values, stop=wire.stop_sequences or None),
            max_tokens=wire.max_tokens,
            max_tokens_name="max_tokens",
            num_top_logprobs=0,
            top_logprobs_name="top_logprobs",
        )
    except InvalidRequest as error:
        if error.param == "/stop":
            error.param = "/stop_sequences"
        raise
    grammar, param = _format(wire)
    constraint = read.constraint._replace(grammar=grammar, param=param)
    return read._replace(params=replace(read.params, grammar=grammar), constraint=constraint)


def _format(wire: WireMessagesRequest) -> tuple[Grammar | None, str]:
    """The grammar of the answer, and the field with it."""
    at, asked = "/output_config/format", None if wire.output_config is None else wire.output_config.format
    if wire.output_format is not None:
        if asked is not None:
            raise InvalidRequest(
                "'output_config.format' and 'output_format' each ask for a format; send one.", param="/output_format"
            )
        at, asked = "/output_format", wire.output_format
    return None if asked is None else schema_grammar(asked.schema, f"{at}/schema"), at
