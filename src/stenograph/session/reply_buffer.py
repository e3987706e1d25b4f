"""What a turn has produced and its reader has not yet taken. Joins the two without coupling their speed.

The turn never waits for a reader: pieces pile up and are merged when they are taken, so the buffer holds at most one
reply. One reader, one writer, both on the loop.
"""

import asyncio

from stenograph.core.chat import ReplyDelta, StreamPiece, ToolCallDelta
from stenograph.core.types import Chunk


class ReplyBuffer:
    """A one-reader queue of stream pieces that merges what the reader has not taken yet."""

    def __init__(self) -> None:
        self._deltas: list[ReplyDelta] = []
        self._chunks: list[Chunk] = []
        self._closed = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ReplyBuffer {len(self._chunks)} chunks waiting, closed={self._closed}>"

    def push(self, delta: ReplyDelta, chunk: Chunk | None = None) -> None:
        """Add what one step brought."""
        if delta:
            self._deltas.append(delta)
        if chunk is not None and chunk.ids:
            self._chunks.append(chunk)
        self._changed.set()

    def close(self) -> None:
        """Say that nothing more comes."""
        self._closed = True
        self._changed.set()

    async def take(self) -> StreamPiece | None:
        """Wait for something new and take all of it, merged; None once the buffer is closed and empty."""
        while not (self._deltas or self._chunks):
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        piece = StreamPiece(delta=_merged(self._deltas), chunks=tuple(self._chunks))
        self._deltas, self._chunks = [], []
        return piece


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
