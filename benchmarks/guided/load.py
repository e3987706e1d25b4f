"""Drives the embedded engine for `bench guided`: phases of a closed loop, and the event loop's heartbeat beside it.

Owns the order of requests and their times. Knows neither options nor figures.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from benchmarks.guided.figures import Phase
from benchmarks.kit.processes import cpu_s_of
from benchmarks.kit.quantiles import latencies_of_due
from benchmarks.kit.requests import GeneratedReply, read_reply
from benchmarks.kit.steps import nothing_collected
from stenograph.core.errors import StenographError
from stenograph.core.types import Chunk, Grammar, Prompt, RequestId, SamplingParams
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.engine.base import GenerateRequest
from stenograph.model.tokenizer import Tokenizer

BEAT_PERIOD_S = 0.005
LIMIT_S = 600.0
"""The limit of a request."""


class Heartbeat:
    """Due every `BEAT_PERIOD_S` on the loop that it runs on; how late it comes is what any callback had to wait.

    Beats that fall due while the loop is held count too, each from the time at which it was due. The loop's timers have
    steps of a millisecond.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._stopped = False

    async def run(self) -> None:
        """Beat until `stop`."""
        due = time.monotonic() + BEAT_PERIOD_S
        while not self._stopped:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if (now := time.monotonic()) < due:
                continue
            late = list(latencies_of_due(due, now, BEAT_PERIOD_S))
            self.late_s += late
            due += BEAT_PERIOD_S * len(late)

    def stop(self) -> None:
        """The next beat is the last."""
        self._stopped = True


class GuidedLoad:
    """The prompts, and the engine that they are put to."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        *,
        concurrency: int,
        params_of: Callable[[int, Grammar | None], SamplingParams],
        note: Callable[[object], None],
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._concurrency = concurrency
        self._params_of = params_of
        self._note = note
        self._num_sent = 0

    async def phase(self, mode: str, grammar: Grammar | None, order: Sequence[int]) -> Phase:
        """Every prompt once, in `order`, `concurrency` at a time.

        It stays so many to the end: a client that has nothing left to ask asks again, and that is not counted. Else the
        batch of the mode whose replies are shorter would be smaller, and its tokens faster for no reason of their own.
        """
        phase, heart = Phase(mode=mode, num_asked=len(order)), Heartbeat()
        pid, engine_cpu_s, begin_s = self._engine.pid, _cpu_s(self._engine.pid), time.monotonic()
        with nothing_collected():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(heart.run())
                await self._ask_all(grammar, order, phase)
                heart.stop()
        phase.seconds = time.monotonic() - begin_s
        if pid == self._engine.pid and engine_cpu_s is not None and (now_s := _cpu_s(pid)) is not None:
            phase.engine_cpu_s = now_s - engine_cpu_s
        phase.late_s = heart.late_s
        return phase

    async def _ask_all(self, grammar: Grammar | None, order: Sequence[int], phase: Phase) -> None:
        waiting = iter(order)
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._concurrency):
                tasks.create_task(self._client(waiting, order[number % len(order)], grammar, phase))

    async def _client(self, waiting: Iterator[int], again: int, grammar: Grammar | None, phase: Phase) -> None:
        for number in waiting:
            try:
                async with asyncio.timeout(LIMIT_S):
                    phase.heard[number] = await self._ask(number, grammar, phase)
            except StenographError as error:
                phase.failed(f"{error.status} {error.code}", str(error))
            except TimeoutError:
                phase.failed("timeout", f"no whole reply within {LIMIT_S:g} s")
        with contextlib.suppress(StenographError):  # one that cannot be asked leaves a gap, and that is all
            while not phase.is_over:
                await self._fill(again, grammar, phase)

    async def _ask(self, number: int, grammar: Grammar | None, phase: Phase) -> GeneratedReply:
        """Raises StenographError."""
        reply = await read_reply(self._engine, self._request(number, grammar), partial(self._count, phase))
        said = reply.ids[:-1] if isinstance(reply.finish.matched, int) else reply.ids
        reply.text = self._tokenizer.decode(said, skip_special=True)
        return reply

    async def _fill(self, number: int, grammar: Grammar | None, phase: Phase) -> None:
        """Ask for the sake of the batch; end it when the phase is over. Raises StenographError."""
        request = self._request(number, grammar)
        async with aclosing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                self._count(phase, chunk)
                if phase.is_over and chunk.finish is None:
                    await self._engine.abort(request.request_id)

    def _request(self, number: int, grammar: Grammar | None) -> GenerateRequest:
        self._num_sent += 1
        return GenerateRequest(
            request_id=RequestId(f"guided-{self._num_sent}"),
            prompt=self._prompts[number],
            params=self._params_of(number, grammar),
            streams=True,
        )

    def _count(self, phase: Phase, chunk: Chunk) -> None:
        phase.num_sampled += len(chunk.ids)
        self._note(phase)


async def idle_lateness_s(seconds: float) -> list[float]:
    """Lateness of the heartbeat while this loop does nothing: the part of every beat that is the machine's."""
    heart = Heartbeat()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(heart.run())
        await asyncio.sleep(seconds)
        heart.stop()
    return heart.late_s


def _cpu_s(pid: int) -> float | None:
    """CPU time of a process so far; None where it is gone."""
    try:
        return cpu_s_of(pid)
    except OSError:
        return None
