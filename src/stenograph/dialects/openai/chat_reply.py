"""OpenAI chat completions, replies: `ChatReply` and stream pieces to bytes. Pure.

The ids and logprobs of a reply are in vLLM's places: `prompt_token_ids` at the top, `token_ids` in the choice.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal, NotRequired, TypedDict, cast

import msgspec
from msgspec import Meta

from stenograph.core.chat import ChatReply, ReplyFinish, ReplyOptions, Spelling, StreamPiece, finish_of
from stenograph.core.errors import StenographError
from stenograph.core.json_pieces import PIECE_VALUES, as_chunked_list, joined, json_pieces
from stenograph.core.json_types import Count, Logprob, TokenIds
from stenograph.core.message_json import RepliedMessage, message_body, numbered_body
from stenograph.core.messages import ReplyDelta, ToolCallDelta
from stenograph.core.sse import EVENT_STREAM_HEADERS, STILL_ALIVE, data_event, data_event_pieces
from stenograph.core.types import Usage
from stenograph.dialects.common.errors import error_body, miles_body
from stenograph.dialects.common.reply_parts import (
    ROWS_AT_ONCE,
    Drawn,
    TokenText,
    parts_of,
    reply_text,
    token_rows,
    whole_or_pieces,
)

DONE = b"data: [DONE]\n\n"
"""OpenAI's terminal event."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class PromptDetails(TypedDict):
    """Prompt tokens that the engine had cached."""

    cached_tokens: Count


class CompletionDetails(TypedDict):
    """Completion tokens that are reasoning."""

    reasoning_tokens: Count


class ReplyUsage(TypedDict):
    """Tokens of a turn."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenLogprob(TypedDict):
    """A token's logprob in nats; `bytes` is null if the token alone is not UTF-8."""

    token: str
    logprob: Logprob
    bytes: Sequence[Annotated[int, Meta(ge=0, le=255)]] | None


class SampledLogprob(TokenLogprob):
    """The sampled token, and the requested alternatives."""

    top_logprobs: Sequence[TokenLogprob]


class ReplyLogprobs(TypedDict):
    """A logprob for each sampled token."""

    content: Sequence[SampledLogprob]


class ReplyChoice(TypedDict):
    """The reply. `stop_reason` is the token id or string that ended it; `token_ids` with `return_token_ids`."""

    index: Literal[0]
    message: RepliedMessage
    logprobs: ReplyLogprobs | None
    finish_reason: ReplyFinish
    stop_reason: int | str | None
    token_ids: NotRequired[TokenIds]


class ChatCompletion(TypedDict):
    """A reply. `prompt_token_ids` with `return_token_ids`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: Annotated[Sequence[ReplyChoice], Meta(min_length=1, max_length=1)]
    usage: ReplyUsage
    prompt_token_ids: NotRequired[TokenIds]


class FunctionDelta(TypedDict):
    """A piece of a call; `name` comes with the first."""

    arguments: str
    name: NotRequired[str]


class ToolCallPiece(TypedDict):
    """A piece of the tool call number `index`; `id` and `type` come with the first."""

    index: Count
    function: FunctionDelta
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]


class MessageDelta(TypedDict):
    """The part of the message that an event adds."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Sequence[ToolCallPiece]]


class ChunkChoice(TypedDict):
    """The part of the reply in one event; `stop_reason` comes with the finish."""

    index: Literal[0]
    delta: MessageDelta
    logprobs: ReplyLogprobs | None
    finish_reason: ReplyFinish | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[TokenIds]


class ChatCompletionChunk(TypedDict):
    """The data of one event. The usage, if requested, comes last, without a choice."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: Annotated[Sequence[ChunkChoice], Meta(max_length=1)]
    usage: NotRequired[ReplyUsage]
    prompt_token_ids: NotRequired[TokenIds]


def encode_reply(reply: ChatReply, options: ReplyOptions, token_text: TokenText) -> bytes | Iterator[bytes]:
    """The body of a whole reply; in pieces if it is long."""
    choice: ReplyChoice = {
        "index": 0,
        "message": message_body(reply.parsed.message),
        "logprobs": {"content": as_chunked_list(_rows(reply.sampled, token_text, options))}
        if options.logprobs
        else None,
        "finish_reason": finish_of(reply.sampled.finish.reason, reply.parsed.message),
        "stop_reason": reply.sampled.finish.matched,
    }
    body: ChatCompletion = {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [choice],
        "usage": usage_body([reply.usage]),
    }
    if options.return_token_ids:
        choice["token_ids"] = reply.sampled.ids
        body["prompt_token_ids"] = reply.prompt.ids
    num_sampled = len(reply.sampled.ids)
    num_ids = num_sampled + options.return_token_ids * reply.prompt.num_tokens
    return reply_text(body, num_ids=num_ids, num_rows=options.logprobs * num_sampled)


def with_token_ids(body: bytes, reply: ChatReply) -> bytes:
    """An engine's own reply with the ids in vLLM's places, for a client that asks for them: `prompt_token_ids` at the
    top, `token_ids` in the choice. Every other value is spelled as it came. `body` is a reply with one choice."""
    whole = _OBJECT.decode(body)
    (choice,) = _LIST.decode(whole["choices"])
    members = {**_OBJECT.decode(choice), "token_ids": _raw_ids(reply.sampled.ids)}
    whole["choices"] = msgspec.Raw(msgspec.json.encode([members]))
    whole["prompt_token_ids"] = _raw_ids(reply.prompt.ids)
    return msgspec.json.encode(whole)


def _raw_ids(ids: "array[int]") -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(ids.tolist()))


class OpenAIStream:
    """A stream of a chat or of a completion: its events are data, and `[DONE]` is the last."""

    headers = EVENT_STREAM_HEADERS

    def __init__(
        self,
        *,
        reply_id: str,
        created: int,
        model: str,
        options: ReplyOptions,
        token_text: TokenText,
        spelling: Spelling | None = None,
    ) -> None:
        self._reply_id = reply_id
        self._created = created
        self._model = model
        self._options = options
        self._token_text = token_text
        self._spelling = spelling

    def alive(self, prompts: Sequence["array[int]"]) -> bytes:
        """A comment: OpenAI has no event for it."""
        return STILL_ALIVE

    def failed(self, error: StenographError) -> bytes:
        """The error as an event, and no `[DONE]`."""
        return data_event(error_body(error, self._spelling))


class StreamEncoder(OpenAIStream):
    """Writes one streamed reply: `start`, any number of `pieces`, then `end` after the commit, or nothing.

    A chat has one prompt and one reply.
    """

    def _chunk(self, *choices: ChunkChoice) -> ChatCompletionChunk:
        return {
            "id": self._reply_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }

    def start(self, prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """The first event: the role, and the prompt's ids if they were asked for; in pieces if they are many."""
        if self._options.as_miles:
            return b""
        delta: MessageDelta = {"role": "assistant", "content": ""}
        choice: ChunkChoice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._chunk(choice)
        if not self._options.return_token_ids:
            return data_event(msgspec.json.encode(body))
        body["prompt_token_ids"] = prompts[0]
        return whole_or_pieces(data_event_pieces(json_pieces(body)), num_ids=len(prompts[0]))

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """The contents of each piece, in one event; nothing if the client would see nothing new.

        Log-probabilities of many tokens come as several events; between them the loop serves others.
        """
        if self._options.as_miles:
            return b""
        if not self._options.logprobs:
            return b"".join(map(self._piece, pieces))
        cut = [part for piece in pieces for part in parts_of(piece)]
        events = map(self._piece, cut)
        return b"".join(events) if len(cut) == len(pieces) else events

    def _piece(self, piece: StreamPiece) -> bytes:
        if not piece.delta and not (piece.chunks and (self._options.logprobs or self._options.return_token_ids)):
            return b""
        choice: ChunkChoice = {"index": 0, "delta": _delta(piece.delta), "logprobs": None, "finish_reason": None}
        if self._options.logprobs and piece.chunks:
            rows = chain.from_iterable(_rows(chunk, self._token_text, self._options) for chunk in piece.chunks)
            choice["logprobs"] = {"content": list(chain.from_iterable(rows))}
        if self._options.return_token_ids and piece.chunks:
            choice["token_ids"] = [id_ for chunk in piece.chunks for id_ in chunk.ids]
        return data_event(msgspec.json.encode(self._chunk(choice)))

    def end(self, replies: Sequence[ChatReply]) -> bytes | Iterator[bytes]:
        """The finish reason, the usage if it was asked for, and the terminal event. Send only after the commit."""
        (reply,) = replies
        if self._options.as_miles:
            return one_event(reply, self._options, self._token_text)
        choice: ChunkChoice = {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": finish_of(reply.sampled.finish.reason, reply.parsed.message),
            "stop_reason": reply.sampled.finish.matched,
        }
        body = data_event(msgspec.json.encode(self._chunk(choice)))
        if self._options.include_usage:
            last = self._chunk()
            last["usage"] = usage_body([reply.usage])
            body += data_event(msgspec.json.encode(last))
        return body + DONE

    def failed(self, error: StenographError) -> bytes:
        """The error as an event, and no `[DONE]`."""
        return data_event(miles_body(error)) if self._options.as_miles else super().failed(error)


def one_event(reply: ChatReply, options: ReplyOptions, token_text: TokenText) -> bytes | Iterator[bytes]:
    """A whole stream: the one event of a reply, and the terminal one; in pieces if it is long."""
    if reply.written is not None:
        return data_event(_engines_event(reply, options)) + DONE
    message = reply.parsed.message
    choice: dict[str, object] = {
        "index": 0,
        "delta": numbered_body(message),
        "finish_reason": finish_of(reply.sampled.finish.reason, message),
        "stop_reason": reply.sampled.finish.matched,
    }
    event: dict[str, object] = {
        "id": reply.id,
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": reply.model,
        "choices": [choice],
        "usage": usage_body([reply.usage]),
    }
    num_sampled = len(reply.sampled.ids)
    num_ids = options.return_token_ids * (num_sampled + reply.prompt.num_tokens)
    if options.logprobs:
        choice["logprobs"] = {"content": as_chunked_list(_rows(reply.sampled, token_text, options))}
    if options.return_token_ids:
        choice["token_ids"], event["prompt_token_ids"] = reply.sampled.ids, reply.prompt.ids
    fragments = chain(data_event_pieces(json_pieces(event)), (DONE,))
    is_long = num_ids > PIECE_VALUES or (options.logprobs and num_sampled > ROWS_AT_ONCE)
    return joined(fragments) if is_long else b"".join(fragments)


def _engines_event(reply: ChatReply, options: ReplyOptions) -> bytes:
    """The engine's own reply, as an event, with the engine's own usage and nothing for training."""
    assert reply.written is not None, "the engine wrote it"
    whole = _OBJECT.decode(reply.written.body)
    (choice,) = _OBJECTS.decode(whole["choices"])
    message = _OBJECT.decode(choice["message"])
    texts = ("role", "content", "reasoning_content")
    delta: dict[str, msgspec.Raw] = {name: message[name] for name in texts if name in message}
    if reply.parsed.message.tool_calls:
        calls = _OBJECTS.decode(message["tool_calls"])
        numbered = [{**call, "index": number} for number, call in enumerate(calls)]
        delta["tool_calls"] = msgspec.Raw(msgspec.json.encode(numbered))
    shown = ("finish_reason", *(("logprobs",) if options.logprobs else ()))
    part: dict[str, object] = {"index": 0, "delta": delta, **{name: choice[name] for name in shown if name in choice}}
    event: dict[str, object] = {name: whole[name] for name in ("id", "created", "model", "usage") if name in whole}
    event |= {"object": "chat.completion.chunk", "choices": [part]}
    if options.return_token_ids:
        part["token_ids"], event["prompt_token_ids"] = _raw_ids(reply.sampled.ids), _raw_ids(reply.prompt.ids)
    return msgspec.json.encode(event)


def _delta(delta: ReplyDelta) -> MessageDelta:
    body: MessageDelta = {}
    if delta.content:
        body["content"] = delta.content
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        body["tool_calls"] = list(map(_call_piece, delta.tool_calls))
    return body


def _call_piece(call: ToolCallDelta) -> ToolCallPiece:
    function: FunctionDelta = {"arguments": call.arguments}
    if call.name is not None:
        function = {"name": call.name, "arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _rows(drawn: Drawn, token_text: TokenText, options: ReplyOptions) -> Iterator[list[SampledLogprob]]:
    rows = token_rows(drawn, token_text, as_id=options.tokens_as_ids, no_bytes=None)
    return cast("Iterator[list[SampledLogprob]]", rows)


def usage_body(usages: Sequence[Usage]) -> ReplyUsage:
    """The tokens of a reply's turns."""
    num_prompt = sum(usage.num_prompt for usage in usages)
    num_completion = sum(usage.num_completion for usage in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached for usage in usages)},
        "completion_tokens_details": {"reasoning_tokens": sum(usage.num_reasoning for usage in usages)},
    }
