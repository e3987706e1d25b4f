"""Answered requests: their times, the columns of an artifact that they become, and the figures of every benchmark.

The columns, a list a fact: `ttft_ms`, `tpot_ms` (None where it cannot be known), `e2e_ms`, `gaps_ms` (a list a
request), `num_prompt`, `num_completion` and `num_cached`; a benchmark has more of its own.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.kit.figures import Figures
from benchmarks.kit.quantiles import latency_figures, milliseconds
from stenograph.core.stages import Stage
from stenograph.core.types import Chunk, EngineTimes, Finish, FinishReason, token_ids
from stenograph.engine.base import Engine, GenerateRequest

Columns = dict[str, list[Any]]


@dataclass(slots=True, kw_only=True)
class TimedReply:
    """A reply. Times are monotonic seconds; `pieces_s` has those at which something to read came.

    `stages_s` is what the other side says of its own time, by stage; it may come later.
    """

    sent_s: float = 0.0
    end_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list[float])
    num_prompt: int = 0
    num_completion: int = 0
    num_cached: int = 0
    finish_reason: str | None = None
    text: str = ""
    request_id: str = ""
    stages_s: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def is_cut(self) -> bool:
        """Whether the reply had no room."""
        return self.finish_reason == FinishReason.LENGTH

    def facts(self, due_s: float) -> dict[str, Any]:
        """The columns of every benchmark. Latencies count from `due_s`; TPOT is from the first piece to the last."""
        pieces_s = self.pieces_s
        tokens_s = pieces_s[-1] - pieces_s[0] if len(pieces_s) > 1 else None
        return {
            "ttft_ms": milliseconds(pieces_s[0] - due_s) if pieces_s else None,
            "tpot_ms": None if tokens_s is None else milliseconds(tokens_s / (self.num_completion - 1)),
            "e2e_ms": milliseconds(self.end_s - due_s),
            "gaps_ms": [milliseconds(after - before) for before, after in pairwise(pieces_s)],
            "num_prompt": self.num_prompt,
            "num_cached": self.num_cached,
            "num_completion": self.num_completion,
        }


@dataclass(slots=True, kw_only=True)
class GeneratedReply(TimedReply):
    """An engine's own reply: the ids [T] that it sampled, and no text."""

    ids: "array[int]" = field(default_factory=token_ids)
    finish: Finish = Finish(reason=FinishReason.ABORT)


async def read_reply(engine: Engine, request: GenerateRequest, note: Callable[[Chunk], None]) -> GeneratedReply:
    """Generate; `note` takes each chunk as it comes. Raises StenographError."""
    reply = GeneratedReply(sent_s=time.monotonic(), num_prompt=len(request.prompt.ids), request_id=request.request_id)
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            if chunk.ids:
                reply.pieces_s.append(time.monotonic())
                reply.ids.extend(chunk.ids)
            if chunk.finish is not None:
                reply.finish, reply.num_cached = chunk.finish, chunk.num_cached_tokens
                reply.stages_s = {} if chunk.times is None else _stages_s(reply.sent_s, chunk.times)
            note(chunk)
    reply.end_s = time.monotonic()
    reply.num_completion, reply.finish_reason = len(reply.ids), reply.finish.reason
    return reply


def _stages_s(sent_s: float, times: EngineTimes) -> dict[str, float]:
    """The engine's stages under the server's names, from the same start: the request's leaving this process."""
    return {
        Stage.QUEUE: times.admitted - sent_s,
        Stage.PREFILL: times.first_token - times.admitted,
        Stage.DECODE_TOKENS: times.finished - times.first_token,
    }


def as_columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Requests as an artifact keeps them."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def request_figures(requests: Columns) -> Figures:
    """Tokens, the share of them that was cached, and latencies; ITL are the gaps of all requests as one set."""
    num_prompt = sum(requests["num_prompt"])
    figures: Figures = {"prompt_tokens": num_prompt, "completion_tokens": sum(requests["num_completion"])}
    if num_prompt:
        figures["cached_share"] = sum(requests["num_cached"]) / num_prompt
    for name in ("ttft", "tpot", "e2e"):
        figures |= latency_figures(name, [value for value in requests[f"{name}_ms"] if value is not None])
    return figures | latency_figures("itl", [gap for gaps in requests["gaps_ms"] for gap in gaps])


def without_gaps(requests: Columns) -> Columns:
    """The columns as an artifact keeps them: of the gaps, the longest of each request."""
    if not requests:
        return {}
    kept = {name: values for name, values in requests.items() if name != "gaps_ms"}
    return {**kept, "longest_gap_ms": [max(gaps, default=None) for gaps in requests["gaps_ms"]]}
