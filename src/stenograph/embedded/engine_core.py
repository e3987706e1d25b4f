"""The engine: requests in, one step at a time, events out. One thread owns it.

Owns the waiting and the running requests. A step asks the scheduler what to do, does it with blocks and one forward,
and draws a token where a sequence's tokens are all in. Adding a request only checks and enqueues it; its grammar
compiles on a thread while others run. A failure of one request's grammar, logits or sampler ends that request alone.
"""

import bisect
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stenograph.core.clock import Clock
from stenograph.core.types import Chunk, EngineTimes, RequestId, SamplingParams
from stenograph.embedded.block_pool import BLOCK_TOKENS, BlockPool
from stenograph.embedded.forward import Forward
from stenograph.embedded.grammar import BadGrammar, CompilerBusy, GrammarCompiler, GrammarEngineFailed
from stenograph.embedded.pace import Pace
from stenograph.embedded.sampler import BadLogits, DeadEnd
from stenograph.embedded.scheduler import Budget, Running, Share, Waiting, plan
from stenograph.embedded.sequence import Sequence
from stenograph.embedded.times import RequestTimes, Times
from stenograph.embedded.weights import F32Array
from stenograph.embedded.wire import Drew, Failed, FailureKind
from stenograph.render.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What bounds a step and the whole: sequences in a batch, tokens computed in a step, tokens of KV, requests that
    may wait (more are refused rather than kept without bound)."""

    max_batch: int
    kv_tokens: int
    step_tokens: int = 256
    max_waiting: int = 1024
    reuses_prefixes: bool = True

    def __post_init__(self) -> None:
        if self.step_tokens <= self.max_batch:
            raise ValueError(f"step_tokens must be above max_batch, {self.max_batch}, got {self.step_tokens}")
        if self.kv_tokens < 2:
            raise ValueError(f"kv_tokens must be at least 2, got {self.kv_tokens}")

    @property
    def num_blocks(self) -> int:
        """Blocks of KV: `kv_tokens`, rounded up to whole ones."""
        return -(-self.kv_tokens // BLOCK_TOKENS)

    @property
    def num_kv_rows(self) -> int:
        """Rows of the KV store: those of all blocks."""
        return self.num_blocks * BLOCK_TOKENS


class EngineCore:
    """All requests of one model. Not thread-safe, but for the `wake` that it is given."""

    def __init__(
        self,
        forward: Forward,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        *,
        eos_ids: tuple[int, ...],
        limits: EngineLimits,
        clock: Clock,
        wake: Callable[[], None],
        weight_version: str,
    ) -> None:
        self._forward = forward
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._eos_ids = frozenset(eos_ids)
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._weight_version = weight_version
        self._pace = Pace()
        self.pool = BlockPool(limits.num_blocks, reuse=limits.reuses_prefixes)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[RequestId, Sequence] = {}
        self._num_preempted = 0
        self._ended: dict[RequestId, RequestTimes] = {}

    def __repr__(self) -> str:
        return f"<EngineCore {len(self._waiting)} waiting, {len(self._running)} running>"

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence that fits model and KV."""
        return min(self._forward.config.max_context, self._limits.kv_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: something runs, or something that waits could begin."""
        return bool(self._running) or any(sequence.is_ready for sequence in self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether anything waits or runs, a request whose grammar still compiles included."""
        return bool(self._by_id)

    @property
    def num_preempted(self) -> int:
        """How often a sequence gave up its blocks for others, since the start."""
        return self._num_preempted

    def add(
        self, request_id: RequestId, prompt: "array[int]", params: SamplingParams, times: Times, arrival: int
    ) -> Failed | None:
        """Enqueue a request among those that wait, by `arrival`; tells at once if it can never run, or not now.

        Light: no arithmetic, no compilation.
        """
        problem = self._problem(request_id, prompt, params)
        if problem is not None:
            return problem
        room = self.max_context_tokens - len(prompt)
        sequence = self._by_id[request_id] = Sequence(
            request_id=request_id,
            arrival=arrival,
            prompt=prompt,
            params=params,
            max_tokens=min(room, params.max_tokens or room),
            eos_ids=self._eos_ids,
            grammar=None if params.grammar is None else self._grammars.compile(params.grammar, self._wake),
            text=self._tokenizer.text_stream(skip_special=True),
            times=times,
        )
        self._wait(sequence)
        return None

    def abort(self, request_id: RequestId) -> Drew | None:
        """End a request now; None if it is not there any more."""
        sequence = self._by_id.get(request_id)
        return None if sequence is None else self._end(sequence, sequence.aborted())

    def pop_times(self, request_id: RequestId) -> RequestTimes | None:
        """The times of a request that has ended, once: they are kept until whoever takes its last event takes them."""
        return self._ended.pop(request_id, None)

    def step(self) -> list[Drew | Failed]:
        """Preempt, admit and compute what the plan says; draw where a sequence's tokens are all in. Events in order."""
        events: list[Drew | Failed] = self._begin_grammars()
        batch = self._follow_plan()
        if not batch:
            return events
        logits = self._forward.forward([sequence.segment(num_tokens) for sequence, num_tokens in batch])
        now = self._clock.monotonic()
        for sequence, num_tokens in batch:
            assert sequence.table is not None, "what was computed runs"
            self.pool.fill(sequence.table, sequence.ids, sequence.num_filled + num_tokens)
        whole = [sequence for sequence, _ in batch if not sequence.num_pending]
        events += [self._draw(sequence, row, now) for sequence, row in zip(whole, logits, strict=True)]
        return events

    def check(self) -> None:
        """Raises AssertionError where the books do not balance."""
        self.pool.check()
        assert len(self._by_id) == len(self._waiting) + len(self._running), f"{self!r} has lost a request"
        assert all(sequence.table is None for sequence in self._waiting), "one that waits holds blocks"
        assert all(sequence.table is not None for sequence in self._running), "one that runs holds no blocks"
        assert self._running or not self.pool.stats().num_held, "blocks are held for nobody"

    # -- what a step does

    def _begin_grammars(self) -> list[Drew | Failed]:
        """Give those that wait what their grammars were compiled to, and end those whose grammar does not compile."""
        events: list[Drew | Failed] = []
        for sequence in list(self._waiting):
            if sequence.grammar is not None and sequence.guide is None and sequence.grammar.done():
                try:
                    sequence.guide = self._grammars.guide(sequence.grammar)
                except CompilerBusy as error:
                    events.append(self._fail(sequence, str(error), FailureKind.UNAVAILABLE))
                except GrammarEngineFailed as error:
                    events.append(self._fail(sequence, _engine_failed(error), FailureKind.INTERNAL))
                except BadGrammar as error:
                    events.append(self._fail(sequence, f"The grammar does not compile: {error}"))
        return events

    def _follow_plan(self) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens now, with room for them."""
        planned = plan(self._candidates(), [self._seen_running(one) for one in self._running], self._budget())
        for key in planned.preempted:
            self._preempt(self._by_id[key])
        for key in planned.admitted:
            self._admit(self._by_id[key])
        assert planned.shares or planned.preempted or not self._running, f"{self!r} would stand still"
        return [self._with_room(share) for share in planned.shares]

    def _candidates(self) -> Iterator[Waiting[RequestId]]:
        """Those that could begin, in order; each is looked up in the KV only when the plan comes to it."""
        for sequence in self._waiting:
            if sequence.grammar is None or sequence.guide is not None:  # compiled since `_begin_grammars`: next step
                found = self.pool.match(sequence.ids)
                yield Waiting(
                    key=sequence.request_id,
                    num_tokens=len(sequence.ids),
                    num_cached=found.num_tokens,
                    num_new_blocks=-(-(len(sequence.ids) + 1) // BLOCK_TOKENS) - found.num_shared_blocks,
                )

    def _seen_running(self, sequence: Sequence) -> Running[RequestId]:
        assert sequence.table is not None, "what runs holds blocks"
        return Running(
            key=sequence.request_id,
            num_tokens=len(sequence.ids),
            num_filled=sequence.num_filled,
            num_blocks=sequence.table.num_tokens // BLOCK_TOKENS,
            num_own_blocks=self.pool.own_blocks(sequence.table),
        )

    def _budget(self) -> Budget:
        return Budget(
            step_tokens=self._limits.step_tokens,
            max_batch=self._limits.max_batch,
            block_tokens=BLOCK_TOKENS,
            available_blocks=self.pool.num_available,
        )

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.table, copy = self.pool.open(sequence.ids)
        if copy is not None:
            self._forward.copy_kv(copy.source, copy.target, copy.num_tokens)
        if not sequence.times.admitted:
            sequence.times.admitted = self._clock.monotonic()
            sequence.num_cached_tokens = sequence.num_filled
        bisect.insort(self._running, sequence, key=_arrival)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits in its old place, and computes again what is no longer found."""
        self._num_preempted += 1
        self._running.remove(sequence)
        self._close(sequence)
        self._wait(sequence)

    def _with_room(self, share: Share[RequestId]) -> tuple[Sequence, int]:
        sequence = self._by_id[share.key]
        assert sequence.table is not None, "what has a share runs"
        has_room = self.pool.extend(sequence.table, sequence.num_filled + share.num_tokens)
        assert has_room, f"the plan gave {sequence!r} blocks that {self.pool!r} does not have"
        return sequence, share.num_tokens

    def _draw(self, sequence: Sequence, row: F32Array, now: float) -> Drew | Failed:
        try:
            chunk = sequence.draw(row, now, weight_version=self._weight_version)
        except DeadEnd:
            return self._fail(sequence, "No token of the vocabulary is what the grammar goes on with.")
        except BadLogits:
            return self._fail(sequence, "The model computed what are no numbers.", FailureKind.INTERNAL)
        except GrammarEngineFailed as error:
            return self._fail(sequence, _engine_failed(error), FailureKind.INTERNAL)
        except BadGrammar as error:
            return self._fail(sequence, f"The grammar failed on what was drawn: {error}")
        if chunk.finish is not None:
            return self._end(sequence, chunk)
        return Drew(request_id=sequence.request_id, chunk=chunk)

    # -- a request's place

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_arrival)

    def _end(self, sequence: Sequence, chunk: Chunk) -> Drew:
        """Forget a request; `chunk`, its last, gets its times."""
        times = self._forget(sequence)
        told = EngineTimes(
            submitted=times.submitted,
            admitted=times.admitted or times.finished,
            first_token=times.first_token or times.finished,
            finished=times.finished,
        )
        return Drew(request_id=sequence.request_id, chunk=replace(chunk, times=told))

    def _fail(self, sequence: Sequence, message: str, kind: FailureKind = FailureKind.INVALID_REQUEST) -> Failed:
        self._forget(sequence)
        return Failed(request_id=sequence.request_id, kind=kind, message=message)

    def _forget(self, sequence: Sequence) -> Times:
        now = self._clock.monotonic()
        self._pace.ended(now)
        sequence.times.finished = now
        self._ended[sequence.request_id] = sequence.times.view()
        del self._by_id[sequence.request_id]
        (self._waiting if sequence.table is None else self._running).remove(sequence)
        if sequence.guide is not None:
            sequence.guide.abandon()
        self._close(sequence)
        return sequence.times

    def _close(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self.pool.close(sequence.table, sequence.ids)
            sequence.table = None

    def _problem(self, request_id: RequestId, prompt: "array[int]", params: SamplingParams) -> Failed | None:
        vocab = self._forward.config.vocab_size
        kind, message, param, retry_after_s = FailureKind.INVALID_REQUEST, "", None, None
        if len(self._waiting) >= self._limits.max_waiting:
            kind, retry_after_s = FailureKind.UNAVAILABLE, self._pace.retry_after_s
            message = f"{self._limits.max_waiting} requests wait for the engine already."
        elif not prompt or min(prompt) < 0 or max(prompt) >= vocab:
            message = f"A prompt has at least one id, each in [0, {vocab})."
        elif len(prompt) + (params.max_tokens or 1) > self.max_context_tokens:
            message = f"{len(prompt)} prompt tokens and max_tokens do not fit {self.max_context_tokens} tokens."
        elif (foreign := params.foreign_id(vocab)) is not None:
            name, id_ = foreign
            message, param = f"{id_} is no token id of a vocabulary of {vocab}.", f"/{name}"
        if not message:
            return None
        return Failed(request_id=request_id, kind=kind, message=message, param=param, retry_after_s=retry_after_s)


def _engine_failed(error: GrammarEngineFailed) -> str:
    return f"The grammar engine failed: {error}"


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
