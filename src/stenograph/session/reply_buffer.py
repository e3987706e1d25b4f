"""What a turn has produced, for any number of readers at any speed. Joins writer and readers without coupling them.

The turn never waits for a reader. Pieces stay until the turn is dropped, because a retry that joins late reads from
the beginning; they are merged when they are taken. Everything is on the loop.
"""

import asyncio

from stenograph.core.chat import ReplyDelta, StreamPiece, ToolCallDelta
from stenograph.core.types import Chunk


class ReplyBuffer:
    """One writer's pieces, in order."""

    def __init__(self) -> None:
        self.deltas: list[ReplyDelta] = []
        self.chunks: list[Chunk] = []
        self.is_closed = False
        self._readers: set[ReplyReader] = set()

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

    def reader(self) -> "ReplyReader":
        """A new reader, who begins at the beginning. Close it."""
        reader = ReplyReader(self)
        self._readers.add(reader)
        return reader

    def remove(self, reader: "ReplyReader") -> None:
        """Forget a reader; `ReplyReader.close` calls it."""
        self._readers.discard(reader)

    def _wake(self) -> None:
        for reader in self._readers:
            reader.changed.set()


class ReplyReader:
    """A place in a buffer."""

    def __init__(self, buffer: ReplyBuffer) -> None:
        self.changed = asyncio.Event()
        self._buffer = buffer
        self._is_closed = False
        self._num_deltas = 0
        self._num_chunks = 0

    async def take(self) -> StreamPiece | None:
        """Wait for something new and take all of it, merged; None once the buffer is closed and read to its end, or
        this reader is closed."""
        buffer = self._buffer
        while not self._is_closed and len(buffer.deltas) == self._num_deltas and len(buffer.chunks) == self._num_chunks:
            if buffer.is_closed:
                return None
            self.changed.clear()
            await self.changed.wait()
        if self._is_closed:
            return None
        piece = StreamPiece(
            delta=_merged(buffer.deltas[self._num_deltas :]), chunks=tuple(buffer.chunks[self._num_chunks :])
        )
        self._num_deltas, self._num_chunks = len(buffer.deltas), len(buffer.chunks)
        return piece

    def close(self) -> None:
        """Read no more; a `take` that waits ends."""
        self._is_closed = True
        self._buffer.remove(self)
        self.changed.set()


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
