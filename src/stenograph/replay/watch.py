"""A recorded reply at its own pace.

A record has the times of a turn's stages, not those of its tokens: the first piece comes when the first token came, the
others in even steps until the last. Where the engine gave no times, all comes at the end.
"""

import asyncio
import math

from msgspec.structs import replace

from stenograph.core.chat import StreamPiece
from stenograph.core.messages import ReplyDelta, ToolCallDelta
from stenograph.core.stages import StageTimes
from stenograph.session.kept import KeptReply, KeptWatch
from stenograph.session.turn import TurnOutcome

STEP_S = 0.02
"""The least time from one piece to the next: 50 a second look like a stream."""

EARLY_S = 0.001
"""A loop's timer may be early by so much."""


class PacedWatch(KeptWatch):
    """One client's view of a recorded reply, piece by piece. A `Watch`."""

    def __init__(self, kept: KeptReply, stages: StageTimes) -> None:
        """`stages` are those of the recorded turn."""
        super().__init__(kept)
        self._loop = asyncio.get_running_loop()
        end = stages.decode_tokens or stages.start
        first = end if stages.prefill is None else min(stages.prefill, end)
        self._end = self._loop.time() + end - stages.start
        self._first = self._end - (end - first)
        self._left: list[StreamPiece] | None = None
        self._num_taken = 0
        self._news = asyncio.Event()
        self._has_left = False

    async def take(self) -> list[StreamPiece] | None:
        """The pieces due by now, once there is one; as `Watch.take`."""
        if self._left is None:
            num = 1 + int((self._end - self._first) / STEP_S)
            self._left = [part for piece in await super().take() or () for part in parts_of(piece, num)]
        num_left = len(self._left) - self._num_taken
        if not num_left:
            return None
        step_s = (self._end - self._first) / max(1, len(self._left) - 1)
        await self._wait(self._first + self._num_taken * step_s)
        if self._has_left:
            return None
        late_s = self._loop.time() - self._first - self._num_taken * step_s
        num = 0 if late_s < -EARLY_S else num_left if not step_s else min(num_left, 1 + int(max(0.0, late_s) / step_s))
        self._num_taken += num
        return self._left[self._num_taken - num : self._num_taken]

    def call(self) -> None:
        self._news.set()

    async def result(self) -> TurnOutcome:
        """The outcome, when the recorded turn had ended; at once for whoever has left."""
        while not self._has_left and self._loop.time() < self._end:
            await self._wait(self._end)
        return await super().result()

    def leave(self) -> None:
        self._has_left = True
        self._news.set()
        super().leave()

    async def _wait(self, until: float) -> None:
        """Wait until a time of the loop's, or for a call; not at all once it has left."""
        if self._has_left:
            return
        self._news.clear()
        timer = self._loop.call_at(until, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()


def parts_of(piece: StreamPiece, num: int) -> list[StreamPiece]:
    """A piece in about so many parts of one length; the first has the ids."""
    whole = piece.delta
    num_chars = len(whole.reasoning) + len(whole.content) + sum(len(call.arguments) for call in whole.tool_calls)
    size = max(1, math.ceil(num_chars / num))
    deltas = [ReplyDelta(reasoning=text) for text in _cut(whole.reasoning, size)]
    deltas += [ReplyDelta(content=text) for text in _cut(whole.content, size)]
    for call in whole.tool_calls:
        first, *others = _cut(call.arguments, size) or [""]
        calls = [replace(call, arguments=first), *(ToolCallDelta(index=call.index, arguments=text) for text in others)]
        deltas += [ReplyDelta(tool_calls=(one,)) for one in calls]
    first_piece = StreamPiece(delta=deltas[0] if deltas else whole, chunks=piece.chunks, index=piece.index)
    return [first_piece, *(StreamPiece(delta=delta, index=piece.index) for delta in deltas[1:])]


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
