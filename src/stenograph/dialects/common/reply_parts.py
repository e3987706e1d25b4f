"""Parts of replies common to several protocols. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Protocol

from msgspec.structs import replace

from stenograph.core.chat import ChatReply, StreamPiece
from stenograph.core.json_pieces import PIECE_VALUES, joined, json_pieces, json_whole
from stenograph.core.messages import ReplyDelta
from stenograph.core.types import Chunk, FinishReason, TopLogprob
from stenograph.dialects.base import Body

TokenText = Callable[[int], str]
"""One token as text, for a person; bytes outside UTF-8 by themselves are U+FFFD."""


FINISH_HEADER = "x-stenograph-finish"
"""The header to tell an aborted reply from a cut one, in a protocol without a word for it."""


def json_body(content: bytes | Iterator[bytes], reply: ChatReply | None = None) -> Body:
    """JSON as an answer's body; of an aborted `reply`, with the header that says so."""
    is_aborted = reply is not None and reply.sampled.finish.reason is FinishReason.ABORT
    aborted = [(FINISH_HEADER, "abort")] if is_aborted else []
    return Body(content=content, headers=[("content-type", "application/json"), *aborted])


def token_name(id_: int, token_text: TokenText, *, as_id: bool) -> str:
    """A token's name in a reply's logprobs: its text, or its id as vLLM writes it when asked for ids."""
    return f"token_id:{id_}" if as_id else token_text(id_)


class Drawn(Protocol):
    """Source of written logprobs: a chunk or a whole turn."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def top_logprobs(self) -> tuple[tuple[TopLogprob, ...], ...] | None: ...


ROWS_AT_ONCE = 512
"""Tokens with logprobs written at once: 5 µs each."""


def row_slices(drawn: Drawn) -> Iterator[slice]:
    """The tokens, as many at once as have about ROWS_AT_ONCE logprobs with their alternatives."""
    num_rows = max(1, ROWS_AT_ONCE // (1 + max(map(len, drawn.top_logprobs or ()), default=0)))
    return (slice(start, start + num_rows) for start in range(0, len(drawn.ids), num_rows))


def token_rows(
    drawn: Drawn, token_text: TokenText, *, as_id: bool, no_bytes: Sequence[int] | None
) -> Iterator[list[dict[str, Any]]]:
    """OpenAI's row for each sampled token with its alternatives, some at once. The bytes are the token's own, whatever
    it is called; `no_bytes` stands where the token alone is not UTF-8."""

    def token(id_: int, logprob: float) -> dict[str, Any]:
        text = token_text(id_)
        return {
            "token": token_name(id_, token_text, as_id=as_id),
            "logprob": logprob,
            "bytes": no_bytes if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode()),
        }

    tops = drawn.top_logprobs or ((),) * len(drawn.ids)
    for part in row_slices(drawn):
        yield [
            {**token(id_, logprob), "top_logprobs": [token(top.id, top.logprob) for top in row]}
            for id_, logprob, row in zip(drawn.ids[part], drawn.logprobs[part], tops[part], strict=True)
        ]


def parts_of(piece: StreamPiece) -> list[StreamPiece]:
    """A piece as several, with chunks of at most about ROWS_AT_ONCE tokens together: the first has the text."""
    parts: list[list[Chunk]] = [[]]
    num_tokens = 0
    for chunk in piece.chunks:
        if parts[-1] and num_tokens + len(chunk.ids) > ROWS_AT_ONCE:
            parts.append([])
            num_tokens = 0
        parts[-1].append(chunk)
        num_tokens += len(chunk.ids)
    deltas = chain((piece.delta,), repeat(ReplyDelta()))
    return [replace(piece, delta=delta, chunks=tuple(part)) for part, delta in zip(parts, deltas, strict=False)]


def reply_text(body: Mapping[str, object], *, num_ids: int, num_rows: int) -> bytes | Iterator[bytes]:
    """A reply's body as JSON, in pieces if so many ids, or tokens with logprobs, are in it. Arrays are lists."""
    return joined(json_pieces(body)) if num_ids > PIECE_VALUES or num_rows > ROWS_AT_ONCE else json_whole(body)


def whole_or_pieces(fragments: Iterator[bytes], *, num_ids: int) -> bytes | Iterator[bytes]:
    """The bytes to send: made now, or, if so many ids are in them, a piece at a time as they are taken."""
    return joined(fragments) if num_ids > PIECE_VALUES else b"".join(fragments)
