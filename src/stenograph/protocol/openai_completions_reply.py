"""OpenAI completions, replies: a `ChatReply` for each prompt, and stream pieces, to bytes. Pure.

The ids of a reply are in vLLM's places: `prompt_token_ids` and `token_ids` in each choice.
"""

from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import msgspec

from stenograph.core.chat import ChatReply, ReplyOptions, StreamPiece
from stenograph.core.json_pieces import json_pieces
from stenograph.protocol.openai_reply_parts import Drawn, TokenText, reply_text, usage_body, whole_or_pieces
from stenograph.protocol.sse import DONE, data_event, data_event_pieces


def encode_completion(
    reply_id: str, replies: Sequence[ChatReply], options: ReplyOptions, token_text: TokenText
) -> bytes | Iterator[bytes]:
    """The body of a reply that is not streamed, a choice for each prompt; in pieces if it is long."""
    choices: list[dict[str, object]] = []
    for index, reply in enumerate(replies):
        logprobs = _logprobs((reply.sampled,), token_text, start=0)[0] if options.logprobs else None
        choice = _choice(index, reply.parsed.message.content or "", logprobs)
        choice |= _finish(reply)
        if options.return_token_ids:
            choice |= {"prompt_token_ids": reply.prompt.ids, "token_ids": reply.sampled.ids}
        choices.append(choice)
    body: dict[str, object] = {
        "id": reply_id,
        "object": "text_completion",
        "created": replies[0].created,
        "model": replies[0].model,
        "choices": choices,
        "usage": usage_body([reply.usage for reply in replies]),
    }
    num_ids = sum(len(reply.sampled.ids) + options.return_token_ids * len(reply.prompt.ids) for reply in replies)
    return reply_text(body, num_ids=num_ids)


class CompletionStreamEncoder:
    """Writes one streamed reply: any number of `pieces`, then `end` after the commit, or nothing.

    `prompts` are the ids of all prompts.
    """

    def __init__(
        self, *, reply_id: str, created: int, model: str, options: ReplyOptions, token_text: TokenText
    ) -> None:
        self._head = {"id": reply_id, "object": "text_completion", "created": created, "model": model}
        self._options = options
        self._token_text = token_text
        self._offsets: dict[int, int] = {}

    def start(self, prompts: Sequence["array[int]"]) -> bytes:
        """Nothing: the first event of each choice comes with its first piece."""
        return b""

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """An event for each piece in which the client sees something new; in pieces if many ids are in them."""
        events = chain.from_iterable(self._piece(piece, prompts[piece.index]) for piece in pieces)
        return whole_or_pieces(events, num_ids=self._num_first({piece.index for piece in pieces}, prompts))

    def end(self, replies: Sequence[ChatReply]) -> bytes | Iterator[bytes]:
        """The finish of each choice, the usage if it was asked for, and the terminal event. Only after the commit."""
        prompts = [reply.prompt.ids for reply in replies]
        return whole_or_pieces(self._end(replies), num_ids=self._num_first(range(len(replies)), prompts))

    def _end(self, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        for index, reply in enumerate(replies):
            choice = {**_choice(index, "", None), **_finish(reply), **self._first(index, reply.prompt.ids)}
            yield from self._event([choice])
        if self._options.include_usage:
            yield from self._event([], usage=usage_body([reply.usage for reply in replies]))
        yield DONE

    def _piece(self, piece: StreamPiece, prompt_ids: "array[int]") -> Iterator[bytes]:
        index = piece.index
        logprobs: object = None
        ids: dict[str, object] = {}
        if self._options.return_token_ids and piece.chunks:
            ids["token_ids"] = [id_ for chunk in piece.chunks for id_ in chunk.ids]
        if not piece.delta.content and not ids and not (self._options.logprobs and piece.chunks):
            return
        first = self._first(index, prompt_ids)
        if self._options.logprobs and piece.chunks:
            logprobs, self._offsets[index] = _logprobs(piece.chunks, self._token_text, start=self._offsets[index])
        yield from self._event([{**_choice(index, piece.delta.content, logprobs), **first, **ids}])

    def _first(self, index: int, prompt_ids: "array[int]") -> dict[str, object]:
        """What only a choice's first event has."""
        is_first = index not in self._offsets
        self._offsets.setdefault(index, 0)
        return {"prompt_token_ids": prompt_ids} if is_first and self._options.return_token_ids else {}

    def _num_first(self, indices: Collection[int], prompts: Sequence["array[int]"]) -> int:
        """How many ids the first events of these choices have that are yet to be written."""
        if not self._options.return_token_ids:
            return 0
        return sum(len(prompts[index]) for index in indices if index not in self._offsets)

    def _event(self, choices: list[dict[str, object]], **extra: object) -> Iterator[bytes]:
        body = {**self._head, "choices": choices, **extra}
        if any("prompt_token_ids" in choice for choice in choices):
            return data_event_pieces(json_pieces(body))
        return iter((data_event(msgspec.json.encode(body)),))


def _choice(index: int, text: str, logprobs: object) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}


def _finish(reply: ChatReply) -> dict[str, object]:
    finish = reply.sampled.finish
    return {"finish_reason": str(finish.reason), "stop_reason": finish.matched}


def _logprobs(drawn: Sequence[Drawn], token_text: TokenText, *, start: int) -> tuple[dict[str, object], int]:
    """OpenAI's lists, and where the next token's text begins. Offsets count the tokens' own texts, from `start` on.

    Alternatives are told by their texts; of several with one text the sampled token counts, else the likeliest.
    """
    tokens: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for some in drawn:
        rows = some.top_logprobs or ((),) * len(some.ids)
        for id_, logprob, row in zip(some.ids, some.logprobs, rows, strict=True):
            text = token_text(id_)
            top = {text: logprob}
            for other in row:
                top.setdefault(token_text(other.id), other.logprob)
            tokens.append(text)
            logprobs.append(logprob)
            tops.append(top)
            offsets.append(start)
            start += len(text)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}, start
