"""An engine that says what a test wrote down, one token at a time, and remembers all that it was asked.

A complete engine: it keeps every law of `engine.base`, abort and early close included. Nothing in it waits for time;
a paused reply goes on when the test lets it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from stenograph.core.errors import EngineUnavailable
from stenograph.core.types import Chunk, Finish, FinishReason, GrammarKind, RequestId
from stenograph.engine.base import Capabilities, EngineHealth, EngineState, GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One reply: ids drawn one by one, then `finish`, or `error` in its place. Logprob of the i-th is -(i + 1) / 8.

    A paused script draws a token only when `ScriptedEngine.step` allows it, and ends only after one step more.
    """

    ids: tuple[int, ...]
    finish: Finish = Finish(reason=FinishReason.STOP)
    error: Exception | None = None
    paused: bool = False


class ScriptedEngine:
    """Plays scripts in the order in which they were planned."""

    def __init__(self, *, vocab_size: int, max_context_tokens: int = 65536) -> None:
        self.requests: list[GenerateRequest] = []
        self.chunks: list[Chunk] = []
        self.stopped: list[RequestId] = []
        self._capabilities = Capabilities(
            engine="scripted",
            model="scripted",
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            grammars=frozenset(GrammarKind),
            streams=True,
        )
        self._scripts: deque[Script] = deque()
        self._aborts: dict[RequestId, asyncio.Event] = {}
        self._steps = asyncio.Semaphore(0)
        self._changed = asyncio.Condition()
        self._state = EngineState.READY

    def __repr__(self) -> str:
        return f"<ScriptedEngine {len(self._scripts)} scripts left, {len(self._aborts)} running>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def num_running(self) -> int:
        """Generations that have begun and not ended."""
        return len(self._aborts)

    def plan(self, *scripts: Script) -> None:
        """Add replies to play."""
        self._scripts.extend(scripts)

    def step(self, num_steps: int = 1) -> None:
        """Let paused replies draw this many tokens in all."""
        for _ in range(num_steps):
            self._steps.release()

    async def begun(self, num_requests: int) -> None:
        """Wait until this many generations have begun since the engine was made."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= num_requests)

    async def idle(self) -> None:
        """Wait until no generation runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._aborts)

    async def start(self) -> None:
        self._state = EngineState.READY

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self._state is not EngineState.READY:
            raise EngineUnavailable("the scripted engine is stopped", retry_after_s=1.0)
        if not self._scripts:
            raise EngineUnavailable("no script is left for this request")
        script = self._scripts.popleft()
        aborted = self._aborts[request.request_id] = asyncio.Event()
        async with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        ended = False
        try:
            async for chunk in self._play(script, aborted):
                ended = chunk.finish is not None
                self.chunks.append(chunk)
                yield chunk
        finally:
            del self._aborts[request.request_id]
            if not ended:
                self.stopped.append(request.request_id)
            async with self._changed:
                self._changed.notify_all()

    async def abort(self, request_id: RequestId) -> bool:
        event = self._aborts.get(request_id)
        if event is not None:
            event.set()
        return event is not None

    def health(self) -> EngineHealth:
        return EngineHealth(state=self._state)

    async def aclose(self) -> None:
        self._state = EngineState.STOPPED
        for event in self._aborts.values():
            event.set()

    async def _play(self, script: Script, aborted: asyncio.Event) -> AsyncGenerator[Chunk, None]:
        for index, id_ in enumerate(script.ids):
            if script.paused and await self._aborted_before_step(aborted):
                yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
                return
            last = index == len(script.ids) - 1 and script.error is None and not script.paused
            logprob = -(index + 1) / 8
            yield Chunk(
                ids=(id_,),
                logprobs=(logprob,),
                sampling_logprobs=(logprob,),
                finish=script.finish if last else None,
            )
            if last:
                return
        if script.paused and await self._aborted_before_step(aborted):
            yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
            return
        if script.error is not None:
            raise script.error
        yield Chunk(ids=(), logprobs=(), finish=script.finish)

    async def _aborted_before_step(self, aborted: asyncio.Event) -> bool:
        """Wait for a step or an abort, whichever comes first; tell which it was."""
        loop = asyncio.get_running_loop()
        waits = [loop.create_task(self._steps.acquire()), loop.create_task(aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
        return aborted.is_set()
