"""A request to an engine in this process: its reply to the end, and the time of each piece."""

import time
from array import array
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

from stenograph.core.types import Chunk, EngineTimes, Finish, FinishReason, token_ids
from stenograph.engine.base import Engine, GenerateRequest


@dataclass(slots=True, kw_only=True)
class TimedReply:
    """The ids [T] that an engine sampled. Times are monotonic seconds; `pieces_s` has those at which ids came."""

    sent_s: float
    end_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list[float])
    ids: "array[int]" = field(default_factory=token_ids)
    num_cached: int = 0
    finish: Finish = Finish(reason=FinishReason.ABORT)
    times: EngineTimes | None = None

    @property
    def ttft_s(self) -> float | None:
        """Until the first piece; None where nothing was sampled."""
        return self.pieces_s[0] - self.sent_s if self.pieces_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first piece; None of fewer than two pieces."""
        if len(self.pieces_s) < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (len(self.ids) - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces."""
        return [after - before for before, after in pairwise(self.pieces_s)]


async def read_reply(engine: Engine, request: GenerateRequest, note: Callable[[Chunk], None]) -> TimedReply:
    """Generate; `note` takes each chunk as it comes. Raises StenographError."""
    reply = TimedReply(sent_s=time.monotonic())
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            if chunk.ids:
                reply.pieces_s.append(time.monotonic())
                reply.ids.extend(chunk.ids)
            if chunk.finish is not None:
                reply.finish, reply.times, reply.num_cached = chunk.finish, chunk.times, chunk.num_cached_tokens
            note(chunk)
    reply.end_s = time.monotonic()
    return reply
