"""OpenAI's Responses, requests: bytes to `ChatRequest`. Pure.

Every field is honoured, recorded or refused (fields.py); nothing is accepted and ignored. Items become messages in
items.py, tools functions in tools.py. Replies are reply.py's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from stenograph.core.chat import ChatRequest, PastTurns
from stenograph.core.errors import InvalidRequest, PreviousResponseNotFound
from stenograph.core.message_json import encode_messages
from stenograph.core.messages import Message, Role
from stenograph.core.types import Grammar, GrammarKind
from stenograph.dialects.base import Incoming
from stenograph.dialects.common.json_bodies import MAX_MESSAGES, check_rest
from stenograph.dialects.common.pointers import shown
from stenograph.dialects.common.sampling import (
    Constraint,
    decode_fields,
    is_given,
    other_names,
    reply_options,
    request_json,
    routing_hints,
    sampling_params,
    schema_grammar,
    sent_sampling,
    text_view,
    truncation,
)
from stenograph.dialects.common.sampling_fields import Unread
from stenograph.dialects.common.template_input import template_kwargs
from stenograph.dialects.responses.fields import (
    ENCRYPTED_REASONING,
    OUTPUT_LOGPROBS,
    RESPONSES_FIELDS,
    WireResponsesRequest,
    WireTextConfig,
)
from stenograph.dialects.responses.ids import turn_of_response
from stenograph.dialects.responses.item_messages import ItemMessages, MessagePlace
from stenograph.dialects.responses.spelling import PLAIN, ReplyForm, ResponsesSpelling, form_of_record
from stenograph.dialects.responses.tools import ShownTool, ToolList, decode_choice, decode_tools, forms_of
from stenograph.dialects.settings import UnknownFields

RESPONSES_PATH = "/v1/responses"

_REQUEST = msgspec.json.Decoder(WireResponsesRequest)
_STRING = msgspec.json.Decoder(str)
_REPEATED: dict[str, msgspec.json.Decoder[Any]] = {
    "metadata": msgspec.json.Decoder(dict[str, str]),
    "max_tool_calls": msgspec.json.Decoder(int),
    "safety_identifier": _STRING,
    "prompt_cache_key": _STRING,
}
"""Recorded fields repeated in a response, by name."""


class DecodedResponse(NamedTuple):
    """A request, and its part of the record, as JSON."""

    request: ChatRequest
    request_json: bytes


def decode_response(incoming: Incoming, *, unknown_fields: UnknownFields = UnknownFields.REFUSE) -> DecodedResponse:
    """Read a request. Raises InvalidJson, InvalidRequest, UnrenderableMessage or PreviousResponseNotFound, with a JSON
    pointer."""
    check_rest(incoming.body, "input", called="input")
    wire, recorded = decode_fields(incoming.body, _REQUEST, RESPONSES_FIELDS, unknown_fields)
    tools = decode_tools(wire.tools)
    conversation = _conversation(wire, incoming)
    names = {one.tool.name for one in tools.shown}
    late = [one for name, one in conversation.found.items() if name not in names]
    callable_tools = (*tools.shown, *late)
    params, said, constraint = sampling_params(
        wire,
        max_tokens=_max_tokens(wire),
        max_tokens_name=_max_tokens_name(wire),
        num_top_logprobs=wire.top_logprobs or 0,
        top_logprobs_name="top_logprobs",
        constraint=_text_constraint(wire),
    )
    include = wire.include or ()
    form = ReplyForm(
        calls=forms_of(callable_tools),
        head=_head(wire, is_held=incoming.past is not None),
        instructions=wire.instructions is not None,
        seals_reasoning=ENCRYPTED_REASONING in include,
    )
    messages = tuple(conversation.messages)
    request = ChatRequest(
        messages=messages,
        messages_json=encode_messages(messages) if callable_tools else b"[]",
        model=wire.model,
        tools=tuple(one.tool for one in tools.shown),
        late_tools=tuple(one.tool for one in late),
        tool_choice=decode_choice(wire.tool_choice, callable_tools),
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        params=params,
        spelling=_spelling(wire, conversation, callable_tools, form, constraint),
        template_kwargs=template_kwargs(
            wire.chat_template_kwargs, effort=None if wire.reasoning is None else wire.reasoning.effort
        ),
        truncation=truncation(wire),
        routing=routing_hints(wire),
        text=text_view(wire),
        reply=reply_options(wire, logprobs=OUTPUT_LOGPROBS in include or bool(wire.top_logprobs)),
        recorded={**recorded, **_recorded(incoming.body, wire, tools)},
        sent=sent_sampling(wire),
        said=said,
        takes_echo=True,
        replies_of=frozenset(conversation.turns),
        media=conversation.media.items,
        earlier_media=conversation.earlier_media,
    )
    return DecodedResponse(request, _kept(request, form))


def _spelling(
    wire: WireResponsesRequest,
    conversation: ItemMessages,
    tools: Sequence[ShownTool],
    form: ReplyForm,
    constraint: Constraint,
) -> ResponsesSpelling:
    return ResponsesSpelling(
        places=conversation.places,
        tools=[one.at for one in tools],
        form=form,
        max_tokens=_max_tokens_name(wire),
        grammar=constraint.param if constraint.grammar is not None else "/text/format",
        other_names=other_names(wire),
    )


def _max_tokens_name(wire: WireResponsesRequest) -> str:
    """The field with the completion's limit."""
    return "max_tokens" if wire.max_tokens is not None and wire.max_output_tokens is None else "max_output_tokens"


def _kept(request: ChatRequest, form: ReplyForm) -> bytes:
    """The record of a request, with the form of its reply where it is not the plain one."""
    kept = request_json(RESPONSES_PATH, request.model, request.recorded, request.sent)
    if form == PLAIN:
        return kept
    return kept[:-1] + b',"wire":' + msgspec.json.encode(form) + b"}"


def _conversation(wire: WireResponsesRequest, incoming: Incoming) -> ItemMessages:
    """The messages: instructions, the line of the response before, the items."""
    before = _line_before(wire.previous_response_id, incoming.past)
    if wire.instructions is not None:
        before = (Message(role=Role.SYSTEM, content=wire.instructions), *before)
    conversation = ItemMessages(incoming.past, before, limits=incoming.media)
    if wire.instructions is not None:
        conversation.places[0] = MessagePlace("/instructions", "/instructions", "/instructions")
    conversation.read(wire.input)
    if len(conversation.messages) > MAX_MESSAGES:
        raise InvalidRequest(
            f"A conversation has at most {MAX_MESSAGES} messages, this one {len(conversation.messages)}.",
            param="/input",
        )
    return conversation


def _line_before(response_id: str | None, past: PastTurns | None) -> tuple[Message, ...]:
    """The messages up to a response and with it, but without the instructions of its own request."""
    if response_id is None:
        return ()
    at = "/previous_response_id"
    if past is None:
        raise InvalidRequest(
            "previous_response_id needs a session: without one no response is kept. Send the request to"
            " /sessions/{id}/v1/responses, or send all items.",
            param=at,
        )
    turn = turn_of_response(response_id)
    line = None if turn is None else past.line_of(turn)
    if line is None:
        raise PreviousResponseNotFound(
            f"Previous response with id {shown(response_id)} not found: this session has no such turn. Send all items"
            " instead.",
            param=at,
        )
    messages = tuple(line.messages)
    has_instructions = form_of_record(line.request_json).instructions and messages[0].role is Role.SYSTEM
    return messages[1:] if has_instructions else messages


def _max_tokens(wire: WireResponsesRequest) -> int | None:
    if wire.max_tokens is not None and wire.max_output_tokens not in (None, wire.max_tokens):
        raise InvalidRequest("max_tokens and max_output_tokens disagree; send one.", param="/max_tokens")
    return wire.max_tokens if wire.max_output_tokens is None else wire.max_output_tokens


def _text_constraint(wire: WireResponsesRequest) -> Constraint | None:
    """The grammar of `text.format`."""
    wanted = None if wire.text is None else wire.text.format
    if wanted is None:
        return None
    at = "/text/format"
    match wanted.type:
        case "json_schema" if wanted.schema is not None:
            return Constraint(schema_grammar(wanted.schema, f"{at}/schema"), f"{at}/schema")
        case "json_schema":
            raise InvalidRequest("text.format needs its schema.", param=f"{at}/schema")
        case "text" | "json_object" if wanted.schema is not None:
            raise InvalidRequest(f"A text.format of type {wanted.type!r} has no schema.", param=f"{at}/schema")
        case "json_object":
            return Constraint(Grammar(kind=GrammarKind.JSON_OBJECT), at)
        case "text":
            return None
        case kind:
            raise InvalidRequest(
                f"text.format.type must be 'text', 'json_object' or 'json_schema', got {shown(kind)}.",
                param=f"{at}/type",
            )


def _head(wire: WireResponsesRequest, *, is_held: bool) -> dict[str, Raw]:
    """The part of the response decided by its request. Values outside OpenAI's type are only recorded."""
    said: dict[str, object] = {
        "max_output_tokens": _max_tokens(wire),
        "previous_response_id": wire.previous_response_id,
    }
    if isinstance(wire.tool_choice, Raw) and is_given(wire.tool_choice):
        said["tool_choice"] = Raw(bytes(wire.tool_choice))
    if wire.parallel_tool_calls is False:
        said["parallel_tool_calls"] = False
    for name, decoder in _REPEATED.items():
        said[name] = _of_type(decoder, getattr(wire, name))
    if wire.text is not None:
        said["text"] = _text_said(wire.text)
    if wire.reasoning is not None:
        said["reasoning"] = {"effort": wire.reasoning.effort, "summary": _of_type(_STRING, wire.reasoning.summary)}
    if not is_held:
        said["store"] = False
    return {name: Raw(msgspec.json.encode(value)) for name, value in said.items() if value is not None}


def _of_type(decoder: msgspec.json.Decoder[Any], raw: Unread) -> object:
    """A recorded value of its decoder's type, else None."""
    try:
        return decoder.decode(raw) if isinstance(raw, Raw) else None
    except msgspec.DecodeError:
        return None


def _text_said(text: WireTextConfig) -> dict[str, object]:
    """`text` as its response has it. A schema always holds, whatever `strict` says."""
    wanted, said = text.format, dict[str, object](format={"type": "text"})
    if wanted is not None and wanted.schema is None:
        said["format"] = {"type": wanted.type}
    elif wanted is not None:
        about = {"name": wanted.name or "", "description": wanted.description}
        said["format"] = {"type": wanted.type, **about, "schema": wanted.schema, "strict": True}
    if (verbosity := _of_type(_STRING, text.verbosity)) is not None:
        said["verbosity"] = verbosity
    return said


def _recorded(body: bytes, wire: WireResponsesRequest, tools: ToolList) -> dict[str, str]:
    """Fields honoured only in part, as they came, and the tools not shown."""
    found: dict[str, str] = {}
    if wire.previous_response_id is not None:
        found["previous_response_id"] = msgspec.json.encode(wire.previous_response_id).decode()
    if wire.include:
        found["include"] = msgspec.json.encode(wire.include).decode()
    if tools.hosted:
        found["tools"] = msgspec.json.encode(tools.hosted).decode()
    return found
