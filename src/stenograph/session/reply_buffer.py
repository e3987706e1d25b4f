"""The chunks of a turn as they come: in parts for the loop, timed, and kept for any number of readers at any speed.

A turn never waits for a reader: `ReplyBuffer` couples no writer to a reader. Pieces stay until the turn is dropped,
because a late retry reads from the beginning; they are merged when they are taken. Everything is on the loop, and the
caller passes the time.
"""

import asyncio
from collections.abc import Iterator, Sequence

from msgspec import Struct

from stenograph.core.chat import StreamPiece
from stenograph.core.messages import Message, ReplyDelta, Role, ToolCall, ToolCallDelta
from stenograph.core.types import Chunk, SampledTurn

READ_AT_ONCE = 512
"""Ids read at once: up to 5 µs each where reasoning is counted, and as much again for 64 stop strings. Most engines not
asked to stream give a whole reply in one chunk."""


def parts_of(sampled: Chunk | SampledTurn) -> Iterator[Chunk]:
    """Sampled ids with their log-probabilities and alternatives, at most READ_AT_ONCE in each part."""
    tops = sampled.top_logprobs
    for start in range(0, len(sampled.ids), READ_AT_ONCE):
        part = slice(start, start + READ_AT_ONCE)
        top_logprobs = None if tops is None else tops[part]
        yield Chunk(ids=sampled.ids[part], logprobs=sampled.logprobs[part], top_logprobs=top_logprobs)


class TurnMeter(Struct, eq=False, gc=False):
    """Counts the tokens of one turn as they come, for TTFT, ITL and TPOT. Times are monotonic seconds.

    `gaps_s` are those between the engine's steps: the ITL.
    """

    started: float
    num_sampled: int = 0
    unasked_replay: tuple[str, ...] = ()
    gaps_s: list[float] = []
    first: float | None = None
    num_first: int = 0
    last: float = 0.0

    def __repr__(self) -> str:
        return f"<TurnMeter {self.num_sampled} tokens>"

    def sampled(self, num_tokens: int, now: float, unasked_replay: tuple[str, ...] = ()) -> None:
        """Note one step of the engine, and payloads in it beyond the requested ones. A step without tokens is none."""
        self.unasked_replay += unasked_replay
        if not num_tokens:
            return
        if self.first is None:
            self.first, self.num_first = now, num_tokens
        else:
            self.gaps_s.append(now - self.last)
        self.last = now
        self.num_sampled += num_tokens

    @property
    def ttft_s(self) -> float | None:
        """From the turn's start to its first tokens.

        None while there are none, and where all came at once: then it is unknown when the first was sampled.
        """
        came_at_once = self.num_sampled == self.num_first > 1
        return None if self.first is None or came_at_once else self.first - self.started

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first step; None if nothing came after it."""
        num_later = self.num_sampled - self.num_first
        return None if self.first is None or not num_later else (self.last - self.first) / num_later


class ReplyBuffer(Struct, eq=False):
    """One turn's pieces, in order, and the readers woken whenever there is more."""

    deltas: list[ReplyDelta] = []
    chunks: list[Chunk] = []
    readers: "set[BufferReader]" = set()
    is_closed: bool = False

    def __repr__(self) -> str:
        return f"<ReplyBuffer {len(self.chunks)} chunks, {len(self.readers)} readers, closed={self.is_closed}>"

    @property
    def message(self) -> Message:
        """The message made by all pieces so far."""
        whole = _merged(self.deltas)
        calls = [ToolCall(id=one.id or "", name=one.name or "", arguments=one.arguments) for one in whole.tool_calls]
        said, reasoning = whole.content, whole.reasoning or None
        return Message(role=Role.ASSISTANT, content=said, reasoning=reasoning, tool_calls=tuple(calls))

    def push(self, delta: ReplyDelta, chunk: Chunk | None = None) -> None:
        """Add the delta and the chunk of one step."""
        if delta:
            self.deltas.append(delta)
        if chunk is not None and chunk.ids:
            self.chunks.append(chunk)
        for reader in self.readers:
            reader.changed.set()

    def close(self) -> None:
        """Mark the end: nothing more comes."""
        self.is_closed = True
        for reader in self.readers:
            reader.changed.set()


class BufferReader:
    """A place in each of a request's buffers, from their beginnings on. Close it."""

    def __init__(self, buffers: Sequence[ReplyBuffer]) -> None:
        self.changed = asyncio.Event()
        self._places = [_BufferPlace(buffer, index) for index, buffer in enumerate(buffers)]
        self._is_closed = False
        self._is_called = False
        for buffer in buffers:
            buffer.readers.add(self)

    async def take(self) -> list[StreamPiece] | None:
        """Wait for something new and take all of it, merged to a piece of each turn with any.

        None once all buffers are closed and read to their ends, or this reader is closed. Nothing after a `call`, if
        there is nothing new.
        """
        while not self._is_closed:
            pieces = [piece for place in self._places if (piece := place.take())]
            if pieces or self._is_called:
                self._is_called = False
                return pieces
            if all(place.buffer.is_closed for place in self._places):
                break
            self.changed.clear()
            await self.changed.wait()
        return None

    def call(self) -> None:
        """End a waiting `take`, or the next one to wait, though nothing is new."""
        self._is_called = True
        self.changed.set()

    def close(self) -> None:
        """Read no more; a waiting `take` ends."""
        self._is_closed = True
        for place in self._places:
            place.buffer.readers.discard(self)
        self.changed.set()


class _BufferPlace:
    """End of the read part of one buffer."""

    def __init__(self, buffer: ReplyBuffer, index: int) -> None:
        self.buffer = buffer
        self._index = index
        self._num_deltas = 0
        self._num_chunks = 0

    def take(self) -> StreamPiece | None:
        """Everything new, merged; None if there is nothing."""
        deltas, chunks = self.buffer.deltas[self._num_deltas :], self.buffer.chunks[self._num_chunks :]
        if not deltas and not chunks:
            return None
        self._num_deltas += len(deltas)
        self._num_chunks += len(chunks)
        return StreamPiece(delta=_merged(deltas), chunks=tuple(chunks), index=self._index)


def _merged(deltas: list[ReplyDelta]) -> ReplyDelta:
    calls: dict[int, ToolCallDelta] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        before = calls.get(call.index)
        calls[call.index] = (
            call
            if before is None
            else ToolCallDelta(
                index=call.index,
                id=before.id or call.id,
                name=before.name or call.name,
                arguments=before.arguments + call.arguments,
            )
        )
    return ReplyDelta(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(calls[index] for index in sorted(calls)),
    )
