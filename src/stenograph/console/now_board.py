"""The server at this moment, for the console: read at most twice a second, however many watch, written as JSON once.

A server of several processes merges those of all (cluster/all_moments.py).
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import msgspec

from stenograph import __version__
from stenograph.console.now import ConsoleNow, Counts, NowEngine, Readings, running_requests
from stenograph.http.metric_table import (
    COMPLETION_TOKENS,
    ERRORS,
    LOOP_LAG,
    PROMPT_TOKENS,
    TTFT,
    TURNS,
    WASTED_TOKENS,
)
from stenograph.http.part import Core
from stenograph.http.processes import EVERY_S, FRESH_S


class NowBoard:
    """This process at this moment."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._readings = Readings()
        self._last: tuple[float, bytes] | None = None

    def __repr__(self) -> str:
        return f"<NowBoard {len(self._readings.kept)} readings>"

    @property
    def is_draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._core.manager.sessions.is_draining

    def read(self) -> bytes:
        """The moment as JSON, or the one of half a second ago."""
        now_s = self._core.manager.sessions.clock.monotonic()
        if self._last is None or now_s - self._last[0] >= FRESH_S:
            self._last = (now_s, msgspec.json.encode(self._read(now_s)))
        return self._last[1]

    async def now(self) -> bytes:
        return self.read()

    async def watch(self) -> AsyncGenerator[bytes, None]:
        while not self.is_draining:
            yield self.read()
            await asyncio.sleep(EVERY_S)

    def _read(self, now_s: float) -> ConsoleNow:
        manager, metrics, readings = self._core.manager, self._core.metrics, self._readings
        running = manager.running
        # The metric counts a turn at its end.
        num_running_tokens = sum(turn.meter.num_sampled for task in running for turn in task.run.turns)
        counts = Counts(
            at_s=now_s,
            turns=metrics.count_of(TURNS),
            sampled_tokens=metrics.count_of(COMPLETION_TOKENS) + num_running_tokens,
            prompt_tokens=metrics.count_of(PROMPT_TOKENS),
            lags=metrics.buckets_of(LOOP_LAG),
            ttfts=metrics.buckets_of(TTFT),
        )
        readings.add(counts)
        return {
            "at": manager.sessions.clock.wall(),
            "version": __version__,
            "model": self._core.model,
            "instance_id": self._core.processes.instance_id,
            "workers": 1,
            "workers_away": 0,
            "num_sessions": manager.sessions.num_sessions,
            "num_held_tokens": manager.sessions.num_held_tokens,
            "num_in_flight": manager.num_in_flight,
            "running": running_requests(running, now_s),
            "turns": counts.turns,
            "errors": metrics.count_of(ERRORS),
            "sampled_tokens": counts.sampled_tokens,
            "prompt_tokens": counts.prompt_tokens,
            "wasted_tokens": metrics.count_of(WASTED_TOKENS),
            "turns_per_s": readings.rate(lambda one: one.turns),
            "sampled_per_s": readings.rate(lambda one: one.sampled_tokens),
            "prompt_per_s": readings.rate(lambda one: one.prompt_tokens),
            "loop_lag": readings.quantiles(lambda one: one.lags, LOOP_LAG.bounds),
            "ttft": readings.quantiles(lambda one: one.ttfts, TTFT.bounds),
            "engines": cast("list[NowEngine]", [status.shown() for status in self._core.services.engine.statuses()]),
            "weights": {
                "version": manager.weights.version,
                "paused": manager.weights.is_held,
                "changing": manager.weights.is_changing,
            },
        }
