"""An engine as `stenograph bench engine` drives it, whichever it is; and the embedded engine as one."""

import itertools
import time
from array import array
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from benchmarks.engine.window import Instant
from benchmarks.kit.processes import CannotMeasure, cpu_s_of, rss_kib_of
from stenograph.core.errors import StenographError
from stenograph.core.types import Prompt, RequestId, SamplingParams
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.engine.base import GenerateRequest

OnSampled = Callable[[int], None]
"""Called with how many new tokens there are, as soon as they have come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnReply:
    """`ids` [T] were drawn, as far as the engine tells them; `num_cached` of the prompt's were not computed again."""

    ids: tuple[int, ...]
    num_cached: int


class TargetFailed(CannotMeasure):
    """A request was not answered as it was asked; `str()` says who answered what, in a line."""


class MeasuredEngine(Protocol):
    """An engine in a process of its own."""

    @property
    def name(self) -> str:
        """As progress shows it."""
        ...

    async def ask(self, ids: "array[int]", num_tokens: int, on_sampled: OnSampled) -> DrawnReply:
        """Draw exactly so many tokens, greedily. Raises TargetFailed."""
        ...

    def now(self) -> Instant:
        """Its process's CPU time and the clock. Raises OSError where the process is gone."""
        ...

    def rss_mib(self) -> float:
        """Memory of its process that is in RAM."""
        ...


class EmbeddedTarget:
    """The embedded engine, straight: no server, no text."""

    def __init__(self, name: str, engine: EmbeddedEngine) -> None:
        self.name = name
        self._engine = engine
        self._numbers = itertools.count()

    async def ask(self, ids: "array[int]", num_tokens: int, on_sampled: OnSampled) -> DrawnReply:
        request = GenerateRequest(
            request_id=RequestId(f"bench-{next(self._numbers)}"),
            prompt=Prompt(new_ids=ids),
            params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            streams=True,
        )
        try:
            reply = await self._drawn(request, on_sampled)
        except StenographError as error:
            raise TargetFailed(f"{self.name}: {error.status} {error.code}: {error}") from error
        if len(reply.ids) != num_tokens:
            raise TargetFailed(f"{self.name}: drew {len(reply.ids)} tokens where {num_tokens} were asked for")
        return reply

    async def _drawn(self, request: GenerateRequest, on_sampled: OnSampled) -> DrawnReply:
        drawn, num_cached = list[int](), 0
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                if chunk.ids:
                    on_sampled(len(chunk.ids))
                    drawn += chunk.ids
                num_cached = max(num_cached, chunk.num_cached_tokens)
        return DrawnReply(ids=tuple(drawn), num_cached=num_cached)

    def now(self) -> Instant:
        return Instant(cpu_s=cpu_s_of(self._engine.pid), wall_s=time.monotonic())

    def rss_mib(self) -> float:
        return rss_kib_of(self._engine.pid) / 1024
