"""An engine that says what a test wrote down, one token at a time, and remembers all that it was asked.

A complete engine: it keeps every law of `engine.base`, abort and early close included. Nothing in it waits for time;
a paused reply, or a paused engine, goes on when the test lets it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass

from stenograph.core.errors import EngineUnavailable, StenographError
from stenograph.core.routing import RoutingHint
from stenograph.core.types import Chunk, Finish, FinishReason, GrammarKind, RequestId
from stenograph.engine.base import Capabilities, Engine, EngineHealth, EngineLoad, EngineState, GenerateRequest
from stenograph.engine.scoring import Alternatives, ScoreRequest, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One reply: ids drawn one by one, then `finish`, or `error` in its place. Logprob of the i-th is -(i + 1) / 8.

    A paused script draws a token only when `ScriptedEngine.step` or `step_turn` allows it, and ends only after one step
    more. `num_cached` is what is said of the prompt. Three ways to break the laws of an engine: ids and `logprobs` of
    any value, no `finish`, and a `deaf` script, which no abort ends.
    """

    ids: tuple[int, ...]
    finish: Finish | None = Finish(reason=FinishReason.STOP)
    error: Exception | None = None
    paused: bool = False
    logprobs: tuple[float, ...] | None = None
    num_cached: int = 0
    deaf: bool = False


@dataclass(slots=True)
class _Running:
    """A generation under way: whether it is to end, and the steps that are allowed to it alone."""

    aborted: asyncio.Event
    steps: asyncio.Semaphore


def scripted_score(at: int, id_: int, policy: str | None = None) -> float:
    """The score of a token at a place."""
    return -(1 + (at * 31 + id_ + len(policy or "")) % 97) / 16


class ScriptedEngine(Engine):
    """Plays scripts in the order in which they were planned, but for those that are planned for a seed.

    `model` answers requests for which nothing is planned. `weight_version`, if set, comes with each token. `drawn` has
    the ids of each generation so far. `num_passes` is how many passes of the loop an abort takes, and a generation that
    is left early until the engine knows of it (`stopped`), as if the word had a way to go.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_context_tokens: int = 65536,
        num_passes: int = 0,
        model: Callable[[GenerateRequest], Script] | None = None,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.chunks: list[Chunk] = []
        self.stopped: list[RequestId] = []
        self.drawn: dict[RequestId, list[int]] = {}
        self._capabilities = Capabilities(
            engine="scripted",
            model="scripted",
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            grammars=frozenset(GrammarKind),
            streams=True,
            hints=frozenset(RoutingHint),
        )
        self.load: EngineLoad | StenographError | None = None
        """Its own word about its memory; None: it never says."""
        self.scored: list[ScoreRequest] = []
        """Requests for scores, in order."""
        self.unscored: list[RequestId] = []
        """Those of them that somebody left."""
        self.was_left = asyncio.Event()
        """Set once there is one."""
        self.on_score: Callable[[ScoreRequest], None] = lambda request: None
        """Called when one comes."""
        self.weight_version: str | None = None
        self._model = model
        self._scripts: deque[Script] = deque()
        self._scripts_by_seed: dict[int, Script] = {}
        self._num_passes = num_passes
        self._running: dict[RequestId, _Running] = {}
        self._steps = asyncio.Semaphore(0)
        self._changed = asyncio.Condition()
        self._state = EngineState.READY
        self._going = asyncio.Event()
        self._going.set()
        self._closed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ScriptedEngine {len(self._scripts)} scripts left, {len(self._running)} running>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def num_running(self) -> int:
        """Generations that have begun and not ended."""
        return len(self._running)

    def plan(self, *scripts: Script) -> None:
        """Add replies to play."""
        self._scripts.extend(scripts)

    def plan_for(self, seed: int, script: Script) -> None:
        """Play this reply to every request with that seed, in whatever order they come."""
        self._scripts_by_seed[seed] = script

    def step(self, num_steps: int = 1) -> None:
        """Let paused replies draw this many tokens in all."""
        for _ in range(num_steps):
            self._steps.release()

    def step_turn(self, request_id: RequestId, num_steps: int = 1) -> None:
        """Let this generation alone draw so many tokens; it must be running."""
        for _ in range(num_steps):
            self._running[request_id].steps.release()

    def pause(self) -> None:
        """Draw nothing any more, in no generation."""
        self._going.clear()

    def resume(self) -> None:
        """Go on."""
        self._going.set()

    async def begun(self, num_requests: int) -> None:
        """Wait until this many generations have begun since the engine was made."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.requests) >= num_requests)

    async def idle(self) -> None:
        """Wait until no generation runs."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running)

    async def start(self) -> None:
        self._state = EngineState.READY
        self._closed.clear()

    async def find_version(self) -> str | None:
        return self.weight_version

    async def find_load(self) -> EngineLoad | None:
        if isinstance(self.load, StenographError):
            raise self.load
        return self.load

    async def score(self, request: ScoreRequest) -> Scores:
        """Scores made up of ids and places, and of the policy's name; a paused engine gives none."""
        self.scored.append(request)
        self.on_score(request)
        async with self._changed:
            self._changed.notify_all()
        try:
            await self._going.wait()
        except asyncio.CancelledError:
            self.unscored.append(request.request_id)
            self.was_left.set()
            raise
        places = range(request.start, len(request.ids))
        logprobs = [scripted_score(at, request.ids[at], request.policy) for at in places]
        best = Alternatives()
        for _ in places:
            best.add([(id_, -float(id_)) for id_ in range(request.num_top)], request.num_top)
        return request.answered(logprobs, best, version=self.weight_version)

    async def scoring(self, num_requests: int) -> None:
        """Wait until this many requests for scores have come."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.scored) >= num_requests)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self._state is not EngineState.READY:
            raise EngineUnavailable("the scripted engine is stopped", retry_after_s=1.0)
        script = self._script_for(request)
        running = self._running[request.request_id] = _Running(asyncio.Event(), asyncio.Semaphore(0))
        drawn = self.drawn[request.request_id] = []
        async with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        ended = False
        try:
            async with aclosing(self._play(script, running)) as chunks:
                async for chunk in chunks:
                    ended = chunk.finish is not None
                    self.chunks.append(chunk)
                    drawn.extend(chunk.ids)
                    yield chunk
        finally:
            try:
                if not ended:
                    await self._pass()
                    self.stopped.append(request.request_id)
            finally:
                del self._running[request.request_id]
            async with self._changed:
                self._changed.notify_all()

    async def abort(self, request_id: RequestId) -> bool:
        await self._pass()
        running = self._running.get(request_id)
        if running is not None:
            running.aborted.set()
        return running is not None

    def health(self) -> EngineHealth:
        return EngineHealth(state=self._state)

    async def aclose(self) -> None:
        self._state = EngineState.STOPPED
        self._closed.set()

    def _script_for(self, request: GenerateRequest) -> Script:
        seed = request.params.seed
        if seed is not None and seed in self._scripts_by_seed:
            return self._scripts_by_seed[seed]
        if not self._scripts and self._model is not None:
            return self._model(request)
        if not self._scripts:
            raise EngineUnavailable("no script is left for this request")
        return self._scripts.popleft()

    async def _pass(self) -> None:
        for _ in range(self._num_passes):
            await asyncio.sleep(0)

    async def _play(self, script: Script, running: _Running) -> AsyncGenerator[Chunk, None]:
        for index, id_ in enumerate(script.ids):
            if await self._is_aborted(script, running):
                yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
                return
            last = index == len(script.ids) - 1 and script.error is None and not script.paused
            logprob = -(index + 1) / 8 if script.logprobs is None else script.logprobs[index]
            yield Chunk(
                ids=(id_,),
                logprobs=(logprob,),
                finish=script.finish if last else None,
                num_cached_tokens=script.num_cached,
                weight_version=self.weight_version,
            )
            if last:
                return
        if await self._is_aborted(script, running):
            yield Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT))
            return
        if script.error is not None:
            raise script.error
        yield Chunk(ids=(), logprobs=(), finish=script.finish, num_cached_tokens=script.num_cached)

    async def _is_aborted(self, script: Script, running: _Running) -> bool:
        """Wait until the script may go on, or for an abort, whichever comes first; tell which it was.

        Raises EngineUnavailable once the engine is closed.
        """
        if not self._going.is_set():
            await self._first_of(script, running, self._going.wait())
        if script.paused and not self._is_told_to_end(script, running):
            await self._first_of(script, running, self._steps.acquire(), running.steps.acquire())
        if self._closed.is_set():
            raise EngineUnavailable("The turn was lost: the engine was stopped.")
        return self._is_told_to_end(script, running)

    def _is_told_to_end(self, script: Script, running: _Running) -> bool:
        return running.aborted.is_set() and not script.deaf

    async def _first_of(self, script: Script, running: _Running, *news: Coroutine[None, None, bool]) -> None:
        """Wait for any of these, an abort that is heard, or the engine's end."""
        loop = asyncio.get_running_loop()
        waits = {loop.create_task(wait) for wait in (*news, self._closed.wait())}
        if not script.deaf:
            waits.add(loop.create_task(running.aborted.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
