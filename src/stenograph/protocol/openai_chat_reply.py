"""OpenAI chat completions, replies: `ChatReply` and stream pieces to bytes. Pure.

The ids and logprobs of a reply are in vLLM's places: `prompt_token_ids` at the top, `token_ids` in the choice.
"""

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from stenograph.core.chat import ChatReply, ReplyDelta, ReplyOptions, StreamPiece
from stenograph.core.json_pieces import json_pieces
from stenograph.core.messages import Message
from stenograph.core.types import FinishReason
from stenograph.protocol.openai_reply_parts import Drawn, TokenText, reply_text, usage_body, whole_or_pieces
from stenograph.protocol.sse import DONE, data_event, data_event_pieces

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def encode_reply(reply: ChatReply, options: ReplyOptions, token_text: TokenText) -> bytes | Iterator[bytes]:
    """The body of a reply that is not streamed; in pieces if it is long."""
    choice: dict[str, object] = {
        "index": 0,
        "message": message_body(reply.parsed.message),
        "logprobs": {"content": _logprobs(reply.sampled, token_text)} if options.logprobs else None,
        "finish_reason": _finish_reason(reply),
        "stop_reason": reply.sampled.finish.matched,
    }
    body: dict[str, object] = {
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
    return reply_text(body, num_ids=len(reply.sampled.ids) + options.return_token_ids * len(reply.prompt.ids))


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


class StreamEncoder:
    """Writes one streamed reply: `start`, any number of `pieces`, then `end` after the commit, or nothing.

    A chat has one prompt and one reply.
    """

    def __init__(
        self, *, reply_id: str, created: int, model: str, options: ReplyOptions, token_text: TokenText
    ) -> None:
        self._head = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._options = options
        self._token_text = token_text

    def start(self, prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """The first event: the role, and the prompt's ids if they were asked for; in pieces if they are many."""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        body: dict[str, object] = {**self._head, "choices": [choice]}
        if not self._options.return_token_ids:
            return data_event(msgspec.json.encode(body))
        body["prompt_token_ids"] = prompts[0]
        return whole_or_pieces(data_event_pieces(json_pieces(body)), num_ids=len(prompts[0]))

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes:
        """Everything that each piece holds, in one event; nothing if the client would see nothing new."""
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: StreamPiece) -> bytes:
        extra: dict[str, object] = {}
        if self._options.logprobs and piece.chunks:
            extra["logprobs"] = {
                "content": [row for chunk in piece.chunks for row in _logprobs(chunk, self._token_text)]
            }
        if self._options.return_token_ids and piece.chunks:
            extra["token_ids"] = [id_ for chunk in piece.chunks for id_ in chunk.ids]
        if not piece.delta and not extra:
            return b""
        return self._event(_delta(piece.delta), **extra)

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The finish reason, the usage if it was asked for, and the terminal event. Send only after the commit."""
        (reply,) = replies
        extra: dict[str, object] = {"finish_reason": _finish_reason(reply), "stop_reason": reply.sampled.finish.matched}
        body = self._event({}, **extra)
        if self._options.include_usage:
            body += data_event(msgspec.json.encode({**self._head, "choices": [], "usage": usage_body([reply.usage])}))
        return body + DONE

    def _event(self, delta: dict[str, object], **extra: object) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        return data_event(msgspec.json.encode({**self._head, "choices": [choice]}))


def _delta(delta: ReplyDelta) -> dict[str, object]:
    body: dict[str, object] = {}
    if delta.content:
        body["content"] = delta.content
    if delta.reasoning:
        body["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        body["tool_calls"] = [
            {
                "index": call.index,
                **({"id": call.id, "type": "function"} if call.id is not None else {}),
                "function": {**({"name": call.name} if call.name is not None else {}), "arguments": call.arguments},
            }
            for call in delta.tool_calls
        ]
    return body


def message_body(message: Message) -> dict[str, object]:
    """A message as OpenAI writes it; what only a request's messages have is left out."""
    body: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return body


def _finish_reason(reply: ChatReply) -> str:
    reason = reply.sampled.finish.reason
    if reason is FinishReason.STOP and reply.parsed.message.tool_calls:
        return "tool_calls"
    return str(reason)


def _logprobs(drawn: Drawn, token_text: TokenText) -> list[dict[str, object]]:
    tops = drawn.top_logprobs or ((),) * len(drawn.ids)
    return [
        {
            **_token(id_, logprob, token_text),
            "top_logprobs": [_token(top.id, top.logprob, token_text) for top in row],
        }
        for id_, logprob, row in zip(drawn.ids, drawn.logprobs, tops, strict=True)
    ]


def _token(id_: int, logprob: float, token_text: TokenText) -> dict[str, object]:
    text = token_text(id_)
    return {
        "token": text,
        "logprob": logprob,
        "bytes": None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode()),
    }
