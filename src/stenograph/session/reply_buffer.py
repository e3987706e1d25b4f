"""A buffer of what turns have produced, for any number of readers at any speed. It couples no writer to a reader.

A turn never waits for a reader. Pieces stay until the turn is dropped, because a retry that joins late reads from
the beginning; they are merged when they are taken. Everything is on the loop.
"""

import asyncio
from collections.abc import Sequence

from stenograph.core.chat import ReplyDelta, StreamPiece, ToolCallDelta
from stenograph.core.types import Chunk


class ReplyBuffer:
    """One turn's pieces, in order."""

    def __init__(self) -> None:
        self.deltas: list[ReplyDelta] = []
        self.chunks: list[Chunk] = []
        self.is_closed = False
        self._readers: set[BufferReader] = set()

    def __repr__(self) -> str:
        return f"<ReplyBuffer {len(self.chunks)} chunks, {len(self._readers)} readers, closed={self.is_closed}>"

    def push(self, delta: ReplyDelta, chunk: Chunk | None = None) -> None:
        """Add what one step brought."""
        if delta:
            self.deltas.append(delta)
        if chunk is not None and chunk.ids:
            self.chunks.append(chunk)
        self._wake()

    def close(self) -> None:
        """Say that nothing more comes."""
        self.is_closed = True
        self._wake()

    def add(self, reader: "BufferReader") -> None:
        """Wake a reader whenever there is more; a `BufferReader` calls it."""
        self._readers.add(reader)

    def remove(self, reader: "BufferReader") -> None:
        """Forget a reader; `BufferReader.close` calls it."""
        self._readers.discard(reader)

    def _wake(self) -> None:
        for reader in self._readers:
            reader.changed.set()


class BufferReader:
    """A place in each of a request's buffers, from their beginnings on. Close it."""

    def __init__(self, buffers: Sequence[ReplyBuffer]) -> None:
        self.changed = asyncio.Event()
        self._places = [_BufferPlace(buffer, index) for index, buffer in enumerate(buffers)]
        self._is_closed = False
        self._is_called = False
        for buffer in buffers:
            buffer.add(self)

    async def take(self) -> list[StreamPiece] | None:
        """Wait for something new and take all of it, merged to a piece of each turn that has any.

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
        """End a `take` that waits, or the next one that would, though nothing is new."""
        self._is_called = True
        self.changed.set()

    def close(self) -> None:
        """Read no more; a `take` that waits ends."""
        self._is_closed = True
        for place in self._places:
            place.buffer.remove(self)
        self.changed.set()


class _BufferPlace:
    """Place up to which one buffer has been read."""

    def __init__(self, buffer: ReplyBuffer, index: int) -> None:
        self.buffer = buffer
        self._index = index
        self._num_deltas = 0
        self._num_chunks = 0

    def take(self) -> StreamPiece | None:
        """All that is new, merged; None if nothing is."""
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
