"""The engine: requests in, one step at a time, events out. One thread owns it.

Owns the waiting and the running requests and calls, in each step: scheduler, forward, samplers. Adding a request only
checks and enqueues it; its grammar compiles on a thread while others run. A failure of one request's grammar or sampler
ends that request alone.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from stenograph.core.clock import Clock
from stenograph.core.types import Chunk, EngineTimes, Finish, FinishReason, RequestId, SamplingParams
from stenograph.embedded.grammar import BadGrammar, GrammarCompiler, GrammarState
from stenograph.embedded.kvcache import KvCache
from stenograph.embedded.model import LlamaModel, LogitsFor, Segment
from stenograph.embedded.sampler import DeadEnd
from stenograph.embedded.scheduler import Running, Waiting, admissions, shares
from stenograph.embedded.sequence import Sequence, Times
from stenograph.embedded.wire import Drew, Failed, FailureKind
from stenograph.render.tokenizer import Tokenizer

MAX_WAITING = 1024
"""Requests that may wait; more are refused rather than kept without bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What bounds a step and the whole: sequences in a batch, tokens computed in a step, tokens of KV."""

    max_batch: int
    kv_tokens: int
    step_tokens: int = 256


@dataclass(slots=True, kw_only=True)
class _Queued:
    """A request that has not begun."""

    prompt: "array[int]"
    params: SamplingParams
    max_tokens: int
    grammar: "Future[LLMatcher] | None"
    times: Times


class EngineCore:
    """All requests of one model. Not thread-safe, but for the `wake` that it is given."""

    def __init__(
        self,
        model: LlamaModel,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        *,
        eos_ids: tuple[int, ...],
        limits: EngineLimits,
        clock: Clock,
        wake: Callable[[], None],
        weight_version: str,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._eos_ids = frozenset(eos_ids)
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._weight_version = weight_version
        self.kv = KvCache(model.config, budget_tokens=limits.kv_tokens)
        self._waiting: OrderedDict[RequestId, _Queued] = OrderedDict()
        self._running: OrderedDict[RequestId, Sequence] = OrderedDict()

    def __repr__(self) -> str:
        return f"<EngineCore {len(self._waiting)} waiting, {len(self._running)} running>"

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence that fits model and KV."""
        return min(self._model.config.max_context, self._limits.kv_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: something runs, or something that waits could begin."""
        return bool(self._running) or any(
            queued.grammar is None or queued.grammar.done() for queued in self._waiting.values()
        )

    @property
    def has_requests(self) -> bool:
        """Whether anything waits or runs, a request whose grammar still compiles included."""
        return bool(self._running or self._waiting)

    def add(self, request_id: RequestId, prompt: "array[int]", params: SamplingParams) -> Failed | None:
        """Enqueue a request; tells at once if it can never run. Light: no arithmetic, no compilation."""
        problem = self._problem(request_id, prompt, params)
        if problem is not None:
            return problem
        room = self.max_context_tokens - len(prompt)
        self._waiting[request_id] = _Queued(
            prompt=prompt,
            params=params,
            max_tokens=min(room, params.max_tokens or room),
            grammar=None if params.grammar is None else self._grammars.compile(params.grammar, self._wake),
            times=Times(submitted=self._clock.monotonic()),
        )
        return None

    def abort(self, request_id: RequestId) -> Drew | None:
        """End a request now; None if it is not there any more."""
        now = self._clock.monotonic()
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._end(sequence)
            return Drew(request_id=request_id, chunk=sequence.aborted(now))
        queued = self._waiting.pop(request_id, None)
        if queued is None:
            return None
        times = EngineTimes(submitted=queued.times.submitted, admitted=now, first_token=now, finished=now)
        chunk = Chunk(ids=(), logprobs=(), finish=Finish(reason=FinishReason.ABORT), times=times)
        return Drew(request_id=request_id, chunk=chunk)

    def step(self) -> list[Drew | Failed]:
        """Admit what fits, compute one batch, draw where a sequence's tokens are all in. The events, in order."""
        events: list[Drew | Failed] = []
        self._admit(events)
        running = [Running(key=id_, num_pending=s.num_pending) for id_, s in self._running.items()]
        planned = shares(running, step_tokens=self._limits.step_tokens)
        if not planned:
            return events
        batch = [(self._running[share.key], share.num_tokens) for share in planned]
        whole = [sequence for sequence, num_tokens in batch if num_tokens == sequence.num_pending]
        logits = self._model.forward([_segment(sequence, num_tokens) for sequence, num_tokens in batch])
        now = self._clock.monotonic()
        for sequence, row in zip(whole, logits, strict=True):
            try:
                chunk = sequence.draw(row, now, weight_version=self._weight_version)
            except (DeadEnd, BadGrammar) as error:
                events.append(self._fail(sequence, error))
                continue
            if chunk.finish is not None:
                self._end(sequence)
            events.append(Drew(request_id=sequence.request_id, chunk=chunk))
        return events

    def _admit(self, events: list[Drew | Failed]) -> None:
        ready = [(id_, q) for id_, q in self._waiting.items() if q.grammar is None or q.grammar.done()]
        admitted = admissions(
            [Waiting(key=id_, max_tokens=len(q.prompt) + q.max_tokens) for id_, q in ready],
            num_running=len(self._running),
            max_batch=self._limits.max_batch,
            free_tokens=self.kv.budget_tokens - self.kv.reserved_tokens,
        )
        for request_id in admitted:
            queued = self._waiting.pop(request_id)
            try:
                grammar = None if queued.grammar is None else self._grammars.state(queued.grammar)
            except BadGrammar as error:
                events.append(
                    Failed(
                        request_id=request_id,
                        kind=FailureKind.INVALID_REQUEST,
                        message=f"The grammar does not compile: {error}",
                    )
                )
                continue
            self._start(request_id, queued, grammar)

    def _start(self, request_id: RequestId, queued: _Queued, grammar: GrammarState | None) -> None:
        queued.times.admitted = self._clock.monotonic()
        self._running[request_id] = Sequence(
            request_id=request_id,
            prompt=queued.prompt,
            params=queued.params,
            max_tokens=queued.max_tokens,
            eos_ids=self._eos_ids,
            grammar=grammar,
            text=self._tokenizer.text_stream(skip_special=True),
            kv=self.kv.acquire(queued.prompt, max_tokens=len(queued.prompt) + queued.max_tokens),
            times=queued.times,
        )

    def _end(self, sequence: Sequence) -> None:
        del self._running[sequence.request_id]
        self.kv.release(sequence.kv, sequence.ids)

    def _fail(self, sequence: Sequence, error: Exception) -> Failed:
        self._end(sequence)
        if isinstance(error, DeadEnd):
            message = "No token is possible any more: grammar and logit_bias exclude each other."
        else:
            message = f"The grammar failed on what was drawn: {error}"
        return Failed(request_id=sequence.request_id, kind=FailureKind.INVALID_REQUEST, message=message)

    def _problem(self, request_id: RequestId, prompt: "array[int]", params: SamplingParams) -> Failed | None:
        vocab = self._model.config.vocab_size
        kind, message, param = FailureKind.INVALID_REQUEST, "", None
        if len(self._waiting) >= MAX_WAITING:
            kind, message = FailureKind.UNAVAILABLE, f"{MAX_WAITING} requests wait for the engine already."
        elif not prompt or min(prompt) < 0 or max(prompt) >= vocab:
            message = f"A prompt has at least one id, each in [0, {vocab})."
        elif len(prompt) + (params.max_tokens or 1) > self.max_context_tokens:
            message = f"{len(prompt)} prompt tokens and max_tokens do not fit {self.max_context_tokens} tokens."
        elif not all(0 <= id_ < vocab for id_ in params.stop_token_ids):
            message, param = f"Token ids are in [0, {vocab}).", "/stop_token_ids"
        elif not all(0 <= id_ < vocab for id_, _ in params.logit_bias):
            message, param = f"Token ids are in [0, {vocab}).", "/logit_bias"
        return Failed(request_id=request_id, kind=kind, message=message, param=param) if message else None


def _segment(sequence: Sequence, num_tokens: int) -> Segment:
    """The next `num_tokens` of a sequence; logits are wanted when they are its last."""
    start = sequence.kv.length
    return Segment(
        ids=np.array(sequence.ids[start : start + num_tokens], np.intc),
        kv=sequence.kv,
        logits_for=LogitsFor.LAST if num_tokens == sequence.num_pending else LogitsFor.NONE,
    )
