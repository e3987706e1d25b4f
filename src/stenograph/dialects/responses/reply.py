"""OpenAI's Responses, replies: a message to items, and a response around them. Pure.

Items are in one order, in whatever order the model wrote them: reasoning, text, calls. A reply with nothing to see is
one empty text; a message without even that (content None) is none, and has no items.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Literal, NotRequired, TypedDict, cast

import msgspec
from msgspec import Meta

from stenograph.core.chat import ChatReply, ReplyOptions
from stenograph.core.json_pieces import as_chunked_list
from stenograph.core.json_types import Count, Logprob, TokenIds
from stenograph.core.messages import Message, ToolCall
from stenograph.core.types import FinishReason, SamplingParams, Usage
from stenograph.dialects.common.reply_parts import Drawn, TokenText, reply_text, token_rows
from stenograph.dialects.responses.ids import RESPONSE, ItemId, sealed
from stenograph.dialects.responses.spelling import ReplyForm
from stenograph.dialects.responses.tools import INPUT, CallForm

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseState = Literal["in_progress", "completed", "incomplete", "failed"]


class ReasoningText(TypedDict):
    """The text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(TypedDict):
    """A summary of reasoning. There is none: the reasoning itself is shown."""

    type: Literal["summary_text"]
    text: str


class ReasoningOutput(TypedDict):
    """Reasoning. `encrypted_content` names its turn, where it was included."""

    id: str
    type: Literal["reasoning"]
    summary: Sequence[SummaryText]
    content: Sequence[ReasoningText]
    encrypted_content: NotRequired[str]
    status: ItemStatus


class TopToken(TypedDict):
    """An alternative at a position; `bytes` is empty if the token alone is not UTF-8."""

    token: str
    logprob: Logprob
    bytes: Sequence[Annotated[int, Meta(ge=0, le=255)]]


class OutputToken(TopToken):
    """A sampled token, and the requested alternatives."""

    top_logprobs: Sequence[TopToken]


class OutputText(TypedDict):
    """A text. `logprobs` has all sampled tokens of the turn, where they were included."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Sequence[str], Meta(max_length=0)]
    logprobs: Sequence[OutputToken]


class MessageOutput(TypedDict):
    """The text of a reply."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: Sequence[OutputText]


class FunctionCallOutput(TypedDict):
    """A call of a function; `namespace` if the tool is in one."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str
    status: ItemStatus


class CustomCallOutput(TypedDict):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str
    status: ItemStatus


class SearchCallOutput(TypedDict):
    """A call of the search for tools."""

    id: str
    type: Literal["tool_search_call"]
    call_id: str
    execution: Literal["client"]
    arguments: Mapping[str, object]
    status: ItemStatus


OutputItem = ReasoningOutput | MessageOutput | FunctionCallOutput | CustomCallOutput | SearchCallOutput


class InputDetails(TypedDict):
    """Input tokens that the engine had cached. Nothing is written to a cache for a price."""

    cached_tokens: Count
    cache_write_tokens: Count


class OutputDetails(TypedDict):
    """Output tokens that are reasoning."""

    reasoning_tokens: Count


class ResponseTokens(TypedDict):
    """Tokens of a turn."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class IncompleteReason(TypedDict):
    """The reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class FailedReason(TypedDict):
    """The error of a response that failed while it was streamed."""

    code: str
    message: str


class ReasoningSaid(TypedDict):
    """The reasoning that was asked for, in the request's own words."""

    effort: str | None
    summary: str | None


TextSaid = Mapping[str, object]
"""`text` as its request has it, with a format."""
ChoiceSaid = str | Mapping[str, object]
AnyItem = Mapping[str, object]
"""One of `OutputItem`; the schema of a response lists them."""


class ResponseBody(TypedDict):
    """A response, with the sampling that was used for it. `instructions` and `tools` are not repeated, `store` says
    whether the session holds it, whatever the request says. Ids with `return_token_ids`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseState
    model: str
    output: Sequence[AnyItem]
    error: FailedReason | None
    incomplete_details: IncompleteReason | None
    instructions: None
    tools: Annotated[Sequence[str], Meta(max_length=0)]
    tool_choice: ChoiceSaid
    parallel_tool_calls: bool
    max_tool_calls: int | None
    previous_response_id: str | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    max_output_tokens: int | None
    top_logprobs: int
    truncation: Literal["disabled"]
    text: TextSaid
    reasoning: ReasoningSaid | None
    store: bool
    background: Literal[False]
    service_tier: Literal["default"]
    safety_identifier: str | None
    prompt_cache_key: str | None
    metadata: Mapping[str, str]
    usage: ResponseTokens | None
    prompt_token_ids: NotRequired[TokenIds]
    token_ids: NotRequired[TokenIds]


def turn_of_reply(reply_id: str) -> str:
    """The id of a reply's request, as in its items."""
    return reply_id.removeprefix(RESPONSE)


def response_head(reply_id: str, created: int, model: str, form: ReplyForm, params: SamplingParams) -> ResponseBody:
    """A response at its beginning."""
    body: ResponseBody = {
        "id": reply_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tool_calls": None,
        "previous_response_id": None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "max_output_tokens": None,
        "top_logprobs": params.num_top_logprobs,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "reasoning": None,
        "store": True,
        "background": False,
        "service_tier": "default",
        "safety_identifier": None,
        "prompt_cache_key": None,
        "metadata": {},
        "usage": None,
    }
    cast("dict[str, object]", body).update(form.head)
    return body


def ended_response(
    head: ResponseBody, output: Sequence[OutputItem], reply: ChatReply, options: ReplyOptions
) -> ResponseBody:
    """The response once its turn has ended."""
    body = head.copy()
    is_whole = reply.sampled.finish.reason is FinishReason.STOP
    body["status"] = "completed" if is_whole else "incomplete"
    body["completed_at"] = reply.created if is_whole else None
    body["incomplete_details"] = None if is_whole else {"reason": "max_output_tokens"}
    body["output"] = output
    body["usage"] = response_tokens(reply.usage)
    if options.return_token_ids:
        body["prompt_token_ids"] = reply.prompt.ids
        body["token_ids"] = reply.sampled.ids
    return body


def encode_response(
    reply: ChatReply, options: ReplyOptions, form: ReplyForm, model: str, token_text: TokenText
) -> bytes | Iterator[bytes]:
    """The body of a whole reply; in pieces if it is long."""
    head = response_head(reply.id, reply.created, model, form, reply.params)
    rows = logprob_rows(reply.sampled, token_text, options) if options.logprobs else iter(())
    output = output_items(turn_of_reply(reply.id), reply.parsed.message, form, reply.sampled.finish.reason, rows)
    num_sampled = len(reply.sampled.ids)
    num_ids = options.return_token_ids * (num_sampled + reply.prompt.num_tokens)
    body = ended_response(head, output, reply, options)
    return reply_text(body, num_ids=num_ids, num_rows=options.logprobs * num_sampled)


def output_items(
    turn: str,
    message: Message,
    form: ReplyForm,
    finish: FinishReason = FinishReason.STOP,
    rows: Iterator[Sequence[OutputToken]] = iter(()),  # noqa: B008 -- an empty one stays empty
) -> list[OutputItem]:
    """The items of a message. If it was cut, its text or final reasoning is incomplete; a call is always whole."""
    cut: ItemStatus = "completed" if finish is FinishReason.STOP else "incomplete"
    has_text = shows_text(message)
    items: list[OutputItem] = []
    if message.reasoning:
        is_last = not has_text and not message.tool_calls
        items.append(reasoning_item(turn, message.reasoning, form, cut if is_last else "completed"))
    if has_text:
        items.append(message_item(turn, message.content or "", cut, rows))
    items.extend(call_item(turn, number, call, form) for number, call in enumerate(message.tool_calls))
    return items


def shows_text(message: Message) -> bool:
    """Whether a message has a text item: some text, or an empty one where there is nothing else."""
    if message.content:
        return True
    return message.content is not None and not message.reasoning and not message.tool_calls


def reasoning_item(turn: str, text: str, form: ReplyForm, status: ItemStatus, number: int = 0) -> ReasoningOutput:
    """A reasoning item."""
    item: ReasoningOutput = {
        "id": str(ItemId(prefix="rs", turn=turn, number=number)),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }
    if form.seals_reasoning:
        item["encrypted_content"] = sealed(turn)
    return item


def message_item(turn: str, text: str, status: ItemStatus, rows: Iterator[Sequence[OutputToken]]) -> MessageOutput:
    """A text item."""
    return {
        "id": str(ItemId(prefix="msg", turn=turn)),
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [text_part(text, rows)],
    }


def text_part(text: str, rows: Iterator[Sequence[OutputToken]]) -> OutputText:
    """The one part of a text item. `rows` are taken when it is written."""
    first = next(rows, None)
    logprobs: Sequence[OutputToken] = () if first is None else as_chunked_list(chain((first,), rows))
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(
    turn: str, number: int, call: ToolCall, form: ReplyForm
) -> FunctionCallOutput | CustomCallOutput | SearchCallOutput:
    """A call in its client's own form. Arguments unfit for that form go out as a function's, as they are."""
    known = form.calls.get(call.name) or CallForm(name=call.name)
    arguments = None if known.kind == "function" else _object(call.arguments)
    if known.kind == "search" and arguments is not None:
        return {
            "id": str(ItemId(prefix="tsc", turn=turn, number=number)),
            "type": "tool_search_call",
            "call_id": call.id,
            "execution": "client",
            "arguments": arguments,
            "status": "completed",
        }
    text = None if arguments is None or len(arguments) != 1 else arguments.get(INPUT)
    if known.kind == "custom" and isinstance(text, str):
        custom: CustomCallOutput = {
            "id": str(ItemId(prefix="ctc", turn=turn, number=number)),
            "type": "custom_tool_call",
            "call_id": call.id,
            "name": known.name,
            "input": text,
            "status": "completed",
        }
        if known.namespace is not None:
            custom["namespace"] = known.namespace
        return custom
    item: FunctionCallOutput = {
        "id": str(ItemId(prefix="fc", turn=turn, number=number)),
        "type": "function_call",
        "call_id": call.id,
        "name": known.name,
        "arguments": call.arguments,
        "status": "completed",
    }
    if known.namespace is not None:
        item["namespace"] = known.namespace
    return item


def logprob_rows(drawn: Drawn, token_text: TokenText, options: ReplyOptions) -> Iterator[list[OutputToken]]:
    """A row for each sampled token, some at once."""
    rows = token_rows(drawn, token_text, as_id=options.tokens_as_ids, no_bytes=())
    return cast("Iterator[list[OutputToken]]", rows)


def response_tokens(usage: Usage) -> ResponseTokens:
    """The tokens of a turn, as Responses counts them."""
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_completion,
    }


_OBJECT = msgspec.json.Decoder(dict[str, object])


def _object(text: str) -> dict[str, object] | None:
    """A JSON object; None for any other text."""
    try:
        return _OBJECT.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
