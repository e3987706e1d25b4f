"""OpenAI completions, replies: a `ChatReply` for each prompt, and stream pieces, to bytes. Pure.

The ids of a reply are in vLLM's places: `prompt_token_ids` and `token_ids` in each choice.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal, NotRequired, TypedDict

import msgspec

from stenograph.core.chat import FINISHES, ChatReply, ReplyOptions, StreamPiece, TextFinish
from stenograph.core.json_pieces import as_chunked_list, json_pieces
from stenograph.core.json_types import Count, Logprob, TokenIds
from stenograph.core.sse import data_event, data_event_pieces
from stenograph.core.types import Chunk
from stenograph.dialects.common.reply_parts import (
    Drawn,
    TokenText,
    parts_of,
    reply_text,
    row_slices,
    token_name,
    whole_or_pieces,
)
from stenograph.dialects.openai.chat_reply import DONE, OpenAIStream, ReplyUsage, usage_body


class LegacyLogprobs(TypedDict):
    """OpenAI's lists: a token's text, its logprob, the alternatives by their texts, and where its text begins."""

    tokens: Sequence[str]
    token_logprobs: Sequence[Logprob]
    top_logprobs: Sequence[Mapping[str, Logprob]]
    text_offset: Sequence[Count]


class TextChoice(TypedDict):
    """The continuation of the prompt number `index`, or in a stream what an event adds to it. The ids come with
    `return_token_ids`: those of the prompt with a choice's first event."""

    index: Count
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: TextFinish | None
    stop_reason: int | str | None
    prompt_token_ids: NotRequired[TokenIds]
    token_ids: NotRequired[TokenIds]


class TextCompletion(TypedDict):
    """A reply to a completions request, or the data of one event. In a stream the usage, if requested, comes last,
    without a choice."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Sequence[TextChoice]
    usage: NotRequired[ReplyUsage]


def encode_completion(
    reply_id: str, replies: Sequence[ChatReply], options: ReplyOptions, token_text: TokenText
) -> bytes | Iterator[bytes]:
    """The body of a whole reply, a choice for each prompt; in pieces if it is long."""
    choices: list[TextChoice] = []
    for index, reply in enumerate(replies):
        logprobs = _whole_logprobs(reply.sampled, token_text, options) if options.logprobs else None
        choice = _choice(index, reply.parsed.message.content or "", logprobs)
        _finish(choice, reply)
        if options.return_token_ids:
            choice["prompt_token_ids"] = reply.prompt.ids
            choice["token_ids"] = reply.sampled.ids
        choices.append(choice)
    body: TextCompletion = {
        "id": reply_id,
        "object": "text_completion",
        "created": replies[0].created,
        "model": replies[0].model,
        "choices": choices,
        "usage": usage_body([reply.usage for reply in replies]),
    }
    num_sampled = sum(len(reply.sampled.ids) for reply in replies)
    num_ids = num_sampled + options.return_token_ids * sum(reply.prompt.num_tokens for reply in replies)
    return reply_text(body, num_ids=num_ids, num_rows=options.logprobs * num_sampled)


class CompletionStreamEncoder(OpenAIStream):
    """Writes one streamed reply: any number of `pieces`, then `end` after the commit, or nothing.

    `prompts` are the ids of all prompts.
    """

    @cached_property
    def _offsets(self) -> dict[int, int]:
        """Characters of each choice written so far."""
        return {}

    def _body(self, *choices: TextChoice) -> TextCompletion:
        return {
            "id": self._reply_id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }

    def start(self, prompts: Sequence["array[int]"]) -> bytes:
        """Nothing: the first event of each choice comes with its first piece."""
        return b""

    def pieces(self, pieces: Sequence[StreamPiece], prompts: Sequence["array[int]"]) -> bytes | Iterator[bytes]:
        """An event for each piece with something new to see; in pieces if many ids are in them.

        Log-probabilities of many tokens come as several events.
        """
        cut = [part for piece in pieces for part in parts_of(piece)] if self._options.logprobs else pieces
        events = chain.from_iterable(self._piece(piece, prompts[piece.index]) for piece in cut)
        if len(cut) > len(pieces):
            return events
        return whole_or_pieces(events, num_ids=self._num_first({piece.index for piece in pieces}, prompts))

    def end(self, replies: Sequence[ChatReply]) -> bytes | Iterator[bytes]:
        """The finish of each choice, the usage if it was asked for, and the terminal event. Only after the commit."""
        prompts = [reply.prompt.ids for reply in replies]
        return whole_or_pieces(self._end(replies), num_ids=self._num_first(range(len(replies)), prompts))

    def _end(self, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        for index, reply in enumerate(replies):
            choice = _choice(index, "", None)
            _finish(choice, reply)
            self._begin(choice, reply.prompt.ids)
            yield from self._event(choice)
        if self._options.include_usage:
            last = self._body()
            last["usage"] = usage_body([reply.usage for reply in replies])
            yield data_event(msgspec.json.encode(last))
        yield DONE

    def _piece(self, piece: StreamPiece, prompt_ids: "array[int]") -> Iterator[bytes]:
        index = piece.index
        returns_ids = bool(self._options.return_token_ids and piece.chunks)
        if not piece.delta.content and not returns_ids and not (self._options.logprobs and piece.chunks):
            return
        choice = _choice(index, piece.delta.content, None)
        self._begin(choice, prompt_ids)
        if self._options.logprobs and piece.chunks:
            choice["logprobs"] = self._logprobs(index, piece.chunks)
        if returns_ids:
            choice["token_ids"] = [id_ for chunk in piece.chunks for id_ in chunk.ids]
        yield from self._event(choice)

    def _logprobs(self, index: int, chunks: Sequence[Chunk]) -> LegacyLogprobs:
        """OpenAI's lists of an event's additions."""
        whole, text, options = slice(None), self._token_text, self._options
        ids = (id_ for chunk in chunks for id_ in chunk.ids)
        offsets, self._offsets[index] = _offsets(ids, text, self._offsets[index])
        return {
            "tokens": [name for chunk in chunks for name in _names(chunk.ids, text, options)],
            "token_logprobs": [logprob for chunk in chunks for logprob in chunk.logprobs],
            "top_logprobs": [top for chunk in chunks for top in _tops(chunk, whole, text, options)],
            "text_offset": offsets,
        }

    def _begin(self, choice: TextChoice, prompt_ids: "array[int]") -> None:
        """Add the fields of a choice's first event alone."""
        is_first = choice["index"] not in self._offsets
        self._offsets.setdefault(choice["index"], 0)
        if is_first and self._options.return_token_ids:
            choice["prompt_token_ids"] = prompt_ids

    def _num_first(self, indices: Collection[int], prompts: Sequence["array[int]"]) -> int:
        """Number of ids still to write in the first events of these choices."""
        if not self._options.return_token_ids:
            return 0
        return sum(len(prompts[index]) for index in indices if index not in self._offsets)

    def _event(self, choice: TextChoice) -> Iterator[bytes]:
        body = self._body(choice)
        if "prompt_token_ids" in choice:
            return data_event_pieces(json_pieces(body))
        return iter((data_event(msgspec.json.encode(body)),))


def _choice(index: int, text: str, logprobs: LegacyLogprobs | None) -> TextChoice:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}


def _finish(choice: TextChoice, reply: ChatReply) -> None:
    choice["finish_reason"] = FINISHES[reply.sampled.finish.reason]
    choice["stop_reason"] = reply.sampled.finish.matched


def _whole_logprobs(drawn: Drawn, token_text: TokenText, options: ReplyOptions) -> LegacyLogprobs:
    """OpenAI's lists of a whole reply, to be written once: they are made meanwhile, some tokens at a time."""
    parts = list(row_slices(drawn))
    return {
        "tokens": as_chunked_list(_names(drawn.ids[part], token_text, options) for part in parts),
        "token_logprobs": drawn.logprobs,
        "top_logprobs": as_chunked_list(_tops(drawn, part, token_text, options) for part in parts),
        "text_offset": as_chunked_list(_whole_offsets((drawn.ids[part] for part in parts), token_text)),
    }


def _names(ids: Sequence[int], token_text: TokenText, options: ReplyOptions) -> list[str]:
    return [token_name(id_, token_text, as_id=options.tokens_as_ids) for id_ in ids]


def _tops(drawn: Drawn, part: slice, token_text: TokenText, options: ReplyOptions) -> list[dict[str, float]]:
    """The alternatives of some tokens by their texts; of several with one text the sampled token counts, else the
    likeliest."""
    names = _names(drawn.ids[part], token_text, options)
    tops = [{name: logprob} for name, logprob in zip(names, drawn.logprobs[part], strict=True)]
    for top, row in zip(tops, (drawn.top_logprobs or ())[part], strict=False):
        for other in row:
            top.setdefault(token_name(other.id, token_text, as_id=options.tokens_as_ids), other.logprob)
    return tops


def _whole_offsets(parts: Iterable[Sequence[int]], token_text: TokenText) -> Iterator[list[int]]:
    start = 0
    for ids in parts:
        offsets, start = _offsets(ids, token_text, start)
        yield offsets


def _offsets(ids: Iterable[int], token_text: TokenText, start: int) -> tuple[list[int], int]:
    """Where the text of each token begins, and of the next. Offsets count the tokens' own texts, from `start` on."""
    *offsets, end = accumulate((len(token_text(id_)) for id_ in ids), initial=start)
    return offsets, end
