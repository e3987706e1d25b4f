"""Anthropic's Messages, replies: `ChatReply` and stream pieces to bytes. Pure.

Blocks come in the order thinking, text, calls, whole or streamed. Calls are sent at the end of a stream, whole: so no
text comes after one, and no client acts on an uncommitted call.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NotRequired, TypedDict

import msgspec

from stenograph.core.chat import ChatReply, ReplyOptions, Spelling, StreamPiece
from stenograph.core.errors import StenographError
from stenograph.core.json_pieces import json_pieces
from stenograph.core.json_types import Count, TokenIds
from stenograph.core.messages import Message, ToolCall
from stenograph.core.sse import EVENT_STREAM_HEADERS, named_event, named_event_pieces
from stenograph.core.types import FinishReason, Usage
from stenograph.dialects.anthropic.errors import messages_error
from stenograph.dialects.anthropic.spelling import ID_PREFIX, MessagesSpelling, signature_of
from stenograph.dialects.common.reply_parts import reply_text, whole_or_pieces

_OBJECT = msgspec.json.Decoder(dict[str, object])

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class RepliedBlock(TypedDict):
    """A block: `text`; `thinking`, whose `signature` names the reply, and whose text is empty for a client that does
    not want to see it; or a call, `tool_use`, with its `id`, `name` and `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[Mapping[str, object]]


class ThinkingShare(TypedDict):
    """The part of the output that is reasoning."""

    thinking_tokens: Count


class MessagesUsage(TypedDict):
    """Tokens of a turn; `input_tokens` are those that the engine had not cached."""

    input_tokens: Count
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: ThinkingShare


class MessagesReply(TypedDict):
    """A reply. `prompt_token_ids` and `token_ids` with `return_token_ids`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: Sequence[RepliedBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    prompt_token_ids: NotRequired[TokenIds]
    token_ids: NotRequired[TokenIds]


def encode_message(reply: ChatReply, options: ReplyOptions, model: str, spelling: Spelling) -> bytes | Iterator[bytes]:
    """The body of a whole reply; in pieces if it is long."""
    stop = _stop_of(reply, spelling)
    body: MessagesReply = {
        "id": reply.id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks_of(reply.parsed.message, reply.id, spelling),
        "stop_reason": stop["stop_reason"],
        "stop_sequence": stop["stop_sequence"],
        "usage": _usage(reply.usage),
    }
    num_ids = 0
    if options.return_token_ids:
        body["prompt_token_ids"], body["token_ids"] = reply.prompt.ids, reply.sampled.ids
        num_ids = reply.prompt.num_tokens + len(reply.sampled.ids)
    return reply_text(body, num_ids=num_ids, num_rows=0)


def blocks_of(message: Message, reply_id: str, spelling: Spelling) -> list[RepliedBlock]:
    """A reply's blocks. A reply with nothing to show has an empty text."""
    blocks: list[RepliedBlock] = []
    if message.reasoning:
        text = "" if _omits_thinking(spelling) else message.reasoning
        blocks.append(
            {"type": "thinking", "thinking": text, "signature": signature_of(reply_id.removeprefix(ID_PREFIX))}
        )
    calls, as_text = _calls(message.tool_calls)
    if (text := (message.content or "") + as_text) or not calls:
        blocks.append({"type": "text", "text": text})
    return [*blocks, *calls]


def _calls(calls: Sequence[ToolCall]) -> tuple[list[RepliedBlock], str]:
    """Calls as blocks; those with arguments that are no object, as text: an engine's own parser lets them by."""
    blocks: list[RepliedBlock] = []
    texts: list[str] = []
    for call in calls:
        try:
            arguments = _OBJECT.decode(call.arguments or "{}")
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            texts.append(f"{call.name}({call.arguments})")
            continue
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks, "".join(texts)


def _omits_thinking(spelling: Spelling) -> bool:
    return isinstance(spelling, MessagesSpelling) and spelling.omits_thinking


class StopFacts(TypedDict):
    """The end of a reply."""

    stop_reason: StopReason
    stop_sequence: str | None


def _stop_of(reply: ChatReply, spelling: Spelling) -> StopFacts:
    finish, calls = reply.sampled.finish, reply.parsed.message.tool_calls
    match finish.reason:
        case FinishReason.ABORT:
            return {"stop_reason": "end_turn", "stop_sequence": None}
        case FinishReason.LENGTH:
            asked = spelling.max_tokens if isinstance(spelling, MessagesSpelling) else None
            is_cut_by_context = reply.fills_context and (asked is None or reply.usage.num_completion < asked)
            reason: StopReason = "model_context_window_exceeded" if is_cut_by_context else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        case FinishReason.STOP if _calls(calls)[0]:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        case FinishReason.STOP if isinstance(finish.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        case FinishReason.STOP:
            return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> MessagesUsage:
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning},
    }


class MessagesStream:
    """Writes one streamed reply: `start`, any number of `pieces`, then `end` after the commit, or nothing.

    At most one block is open: thinking, then text. `alive` begins the message where nothing has begun it.
    """

    headers = EVENT_STREAM_HEADERS

    def __init__(self, *, reply_id: str, model: str, options: ReplyOptions, spelling: Spelling) -> None:
        self._reply_id = reply_id
        self._model = model
        self._options = options
        self._spelling = spelling
        self._has_begun = False
        self._open: Literal["thinking", "text"] | None = None
        self._index = 0
        self._has_text = False

    def start(self, prompts: Sequence["array[int]"]) -> bytes:
        """`message_start` with a `ping`, where `alive` has not sent them."""
        if self._has_begun:
            return b""
        self._has_begun = True
        message: MessagesReply = {
            "id": self._reply_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(num_prompt=len(prompts[0]), num_completion=0)),
        }
        return _event("message_start", message=message) + _PING

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes:
        """The deltas of thinking and of text. Of calls nothing is seen before the end."""
        return b"".join(self._piece(piece) for piece in pieces)

    def _piece(self, piece: StreamPiece) -> bytes:
        delta, events = piece.delta, b""
        if delta.reasoning:
            events += self._switch_to("thinking")
            if not _omits_thinking(self._spelling):
                events += self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            events += self._switch_to("text")
            events += self._delta({"type": "text_delta", "text": delta.content})
        return events

    def _switch_to(self, kind: Literal["thinking", "text"]) -> bytes:
        if self._open == kind:
            return b""
        before = self._close()
        self._open = kind
        self._has_text = self._has_text or kind == "text"
        block: RepliedBlock = (
            {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}
        )
        return before + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        """The end of the open block, if there is one; of thinking with its signature."""
        if self._open is None:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta(
                {"type": "signature_delta", "signature": signature_of(self._reply_id.removeprefix(ID_PREFIX))}
            )
        events += _event("content_block_stop", index=self._index)
        self._open = None
        self._index += 1
        return events

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def end(self, replies: Sequence[ChatReply]) -> bytes | Iterator[bytes]:
        """The calls, the stop reason, the usage and the terminal event. Send only after the commit."""
        (reply,) = replies
        calls, as_text = _calls(reply.parsed.message.tool_calls)
        events = b""
        if as_text or not (self._has_text or calls):
            events += self._switch_to("text")
            events += self._delta({"type": "text_delta", "text": as_text}) if as_text else b""
        events += self._close()
        for call in calls:
            block: RepliedBlock = {**call, "input": {}}
            text = msgspec.json.encode(call.get("input")).decode()
            events += _event("content_block_start", index=self._index, content_block=block)
            events += self._delta({"type": "input_json_delta", "partial_json": text})
            events += _event("content_block_stop", index=self._index)
            self._index += 1
        last: dict[str, object] = {
            "type": "message_delta",
            "delta": _stop_of(reply, self._spelling),
            "usage": _usage(reply.usage),
        }
        stop = _event("message_stop")
        if not self._options.return_token_ids:
            return events + named_event(b"message_delta", msgspec.json.encode(last)) + stop
        last |= {"prompt_token_ids": reply.prompt.ids, "token_ids": reply.sampled.ids}
        fragments = _between(events, named_event_pieces(b"message_delta", json_pieces(last)), stop)
        return whole_or_pieces(fragments, num_ids=reply.prompt.num_tokens + len(reply.sampled.ids))

    def alive(self, prompts: Sequence["array[int]"]) -> bytes:
        """A `ping`, after the beginning of the message."""
        return _PING if self._has_begun else self.start(prompts)

    def failed(self, error: StenographError) -> bytes:
        """The error as an event, and no `message_stop`."""
        return named_event(b"error", messages_error(error, self._spelling, self._reply_id.removeprefix(ID_PREFIX)))


def _event(kind: str, **fields: object) -> bytes:
    return named_event(kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _between(before: bytes, pieces: Iterator[bytes], after: bytes) -> Iterator[bytes]:
    yield before
    yield from pieces
    yield after


_PING = _event("ping")
