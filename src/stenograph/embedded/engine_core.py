"""The engine's core: takes requests, advances them one step at a time, returns events. One thread owns it.

Owns the waiting and the running requests. A step asks the scheduler for a plan, carries it out with blocks and one
forward pass, and samples a token for each sequence with all its tokens in the KV. Adding a request only checks and
enqueues it; its grammar compiles on a thread meanwhile. A failure of one request's grammar, logits or sampler ends that
request alone.
"""

import bisect
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.clock import Clock
from stenograph.core.types import Chunk, EngineTimes, RequestId, SamplingParams
from stenograph.embedded.forward.base import Forward, PreparedWeights
from stenograph.embedded.forward.weights import F32Array
from stenograph.embedded.grammar.cache import BadGrammar, CompilerBusy, GrammarCompiler, GrammarEngineFailed
from stenograph.embedded.kv.block_pool import BLOCK_TOKENS, BlockPool
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.sampler import BadLogits, DeadEnd
from stenograph.embedded.scheduler import Budget, Running, Share, Waiting, plan
from stenograph.embedded.sequence import ForcedSequence, Sequence
from stenograph.embedded.wire import Failed, FailureKind, Sampled, Times

if TYPE_CHECKING:
    from stenograph.model.tokenizer import Tokenizer

AFTER_TURNS = 2**62
"""Added to the arrival of a request for scores: every request for tokens is older, and so goes before it."""


SMOOTHING = 0.8
"""The weight of the old mean when a new interval arrives."""
SHORTEST_S = 1.0
LONGEST_S = 60.0


class Pace:
    """A moving mean of the seconds between two ends."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._mean_s: float | None = None

    def __repr__(self) -> str:
        return f"<Pace one each {self.retry_after_s:.3g} s>"

    def ended(self, now: float) -> None:
        """A request ended at `now`, monotonic seconds."""
        if self._last is not None:
            interval_s = now - self._last
            self._mean_s = (
                interval_s if self._mean_s is None else SMOOTHING * self._mean_s + (1 - SMOOTHING) * interval_s
            )
        self._last = now

    @property
    def retry_after_s(self) -> float:
        """Seconds until a waiting request will probably have begun and freed a place. In [1, 60]."""
        return min(LONGEST_S, max(SHORTEST_S, self._mean_s or SHORTEST_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits of a step and of the engine.

    `max_batch` sequences run together; a step computes at most `step_tokens` tokens, of at most `max_prefills` prompts
    (None: as many as fit); the KV store holds `kv_tokens`. At most `max_waiting` requests wait; more are refused.
    """

    max_batch: int
    kv_tokens: int
    step_tokens: int = 256
    max_waiting: int = 1024
    reuses_prefixes: bool = True
    max_prefills: int | None = None

    @classmethod
    def of(cls, options: EmbeddedOptions) -> "EngineLimits":
        """The limits in the options of the engine's process."""
        return cls(
            max_batch=options.max_batch,
            kv_tokens=options.kv_tokens,
            step_tokens=options.step_tokens,
            max_waiting=options.max_waiting,
            reuses_prefixes=options.reuses_prefixes,
        )

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
    """All requests of one model. Not thread-safe; other threads call only its `wake`.

    `tokenizer` is asked for by the first request with stop strings.
    """

    def __init__(
        self,
        forward: Forward,
        tokenizer: "Callable[[], Tokenizer]",
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
        self.weight_version = weight_version
        """Name of the sampling weights."""
        self._pace = Pace()
        self.pool = BlockPool(limits.num_blocks, reuse=limits.reuses_prefixes)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[RequestId, Sequence] = {}
        self._num_preempted = 0
        self._is_paused = False

    def __repr__(self) -> str:
        return f"<EngineCore {len(self._waiting)} waiting, {len(self._running)} running>"

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence to fit model and KV."""
        return min(self._forward.config.max_context, self._limits.kv_tokens)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: a request runs, or a waiting one could begin. A paused one has none."""
        if self._is_paused:
            return False
        return bool(self._running) or any(sequence.is_ready for sequence in self._waiting)

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs, including one whose grammar is still compiling."""
        return bool(self._by_id)

    @property
    def num_preempted(self) -> int:
        """Preemptions since the start: a sequence gave up its blocks for others."""
        return self._num_preempted

    def add(
        self,
        request_id: RequestId,
        prompt: "array[int]",
        params: SamplingParams,
        times: Times,
        arrival: int,
        *,
        routes_from: int | None = None,
        score_from: int | None = None,
    ) -> Failed | None:
        """Enqueue a request, ordered by `arrival`. Returns Failed if it can never run, or if the queue is full.

        Cheap: no arithmetic, no compilation. The last chunk has the experts of positions from `routes_from` on. With
        `score_from` nothing is sampled: the one chunk has the prompt's tokens from there on, with their
        log-probabilities, once no request for tokens needs the step or the blocks.
        """
        problem = self._problem(request_id, prompt, params, score_from)
        if problem is not None:
            return problem
        if score_from is not None:
            self._by_id[request_id] = forced = ForcedSequence(
                request_id=request_id,
                arrival=arrival + AFTER_TURNS,
                line=prompt,
                start=score_from,
                params=params,
                times=times,
                vocab_size=self._forward.config.vocab_size,
            )
            self._wait(forced)
            return None
        num_left = self.max_context_tokens - len(prompt)
        sequence = self._by_id[request_id] = Sequence(
            request_id=request_id,
            arrival=arrival,
            prompt=prompt,
            params=params,
            max_tokens=min(num_left, params.max_tokens or num_left),
            eos_ids=self._eos_ids,
            grammar=None if params.grammar is None else self._grammars.compile(params.grammar, self._wake),
            text=self._tokenizer().text_stream(skip_special=True) if params.stop else None,
            times=times,
            vocab_size=self._forward.config.vocab_size,
            routes_from=routes_from,
        )
        self._wait(sequence)
        return None

    def abort(self, request_id: RequestId) -> Sampled | None:
        """End a request now; None if it has already ended."""
        sequence = self._by_id.get(request_id)
        return None if sequence is None else self._end(sequence, sequence.aborted())

    def pause(self, *, retracts: bool) -> int:
        """Sample nothing until `resume`; requests are taken and aborted as before. Returns how many run.

        `retracts`: they give up their blocks, and wait again in their old places.
        """
        self._is_paused, num_running = True, len(self._running)
        if retracts:
            self._retract()
        return num_running

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    def flush(self) -> None:
        """Forget computed prefixes, but those of running sequences."""
        self.pool.forget_idle()

    def swap(self, prepared: PreparedWeights, version: str) -> tuple[PreparedWeights, int]:
        """Sample with other weights from the next step on. Returns those before, and how many requests ran.

        Those go on: with their ids, samplers and grammars, and keys and values that are computed again. Results of the
        old weights are not found any more.
        """
        num_running = len(self._running)
        self._retract()
        self.pool.forget_idle()
        self.weight_version = version
        for sequence in self._by_id.values():
            sequence.restart()
        return self._forward.swap(prepared), num_running

    def step(self) -> list[Sampled | Failed]:
        """Run one step: preempt, admit and compute as planned, then sample. Returns the events in order."""
        events: list[Sampled | Failed] = self._begin_grammars()
        batch = self._follow_plan()
        if not batch:
            return events
        segments = [sequence.segment(num_tokens) for sequence, num_tokens in batch]
        logits = self._forward.forward(segments)
        now = self._clock.monotonic()
        for sequence, num_tokens in batch:
            assert sequence.table is not None, "what was computed runs"
            self.pool.fill(sequence.table, sequence.ids, sequence.num_filled + num_tokens)
        end = 0
        for (sequence, _), segment in zip(batch, segments, strict=True):
            begin, end = end, end + segment.num_logits
            if begin < end and (event := self._advance(sequence, logits[begin:end], segment.start, now)) is not None:
                events.append(event)
        return events

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self.pool.check()
        assert len(self._by_id) == len(self._waiting) + len(self._running), f"{self!r} has lost a request"
        assert all(sequence.table is None for sequence in self._waiting), "one that waits holds blocks"
        assert all(sequence.table is not None for sequence in self._running), "one that runs holds no blocks"
        assert self._running or not self.pool.stats().num_held, "blocks are held, but no sequence runs"

    # -- what a step does

    def _begin_grammars(self) -> list[Sampled | Failed]:
        """Hand compiled grammars to their waiting requests; end requests if their grammar does not compile."""
        events: list[Sampled | Failed] = []
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
        """Carry out the plan. Returns each sequence to compute and how many of its tokens; it has the blocks."""
        self._hold_scores()
        planned = plan(self._candidates(), [self._seen_running(one) for one in self._running], self._budget())
        for key in planned.preempted:
            self._preempt(self._by_id[key])
        for key in planned.admitted:
            self._admit(self._by_id[key])
        assert planned.shares or planned.preempted or not self._running, f"{self!r} would stand still"
        return [self._with_blocks(share) for share in planned.shares]

    def _hold_scores(self) -> None:
        """Take the blocks of running requests for scores, as long as one for tokens could begin: half a line scored is
        kept, and a prompt behind a whole one would wait for its end."""
        if not self._running or not isinstance(self._running[-1], ForcedSequence):  # they are the youngest
            return
        first = next((one for one in self._waiting if one.grammar is None or one.guide is not None), None)
        if first is not None and not isinstance(first, ForcedSequence):
            for sequence in [one for one in self._running if isinstance(one, ForcedSequence)]:
                self._preempt(sequence)

    def _candidates(self) -> Iterator[Waiting[RequestId]]:
        """Requests that could begin, in order. Each is looked up in the KV only when the plan reaches it."""
        for sequence in self._waiting:
            if sequence.grammar is None or sequence.guide is not None:  # compiled since `_begin_grammars`: next step
                found = self.pool.match(sequence.findable_ids)
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
            max_prefills=self._limits.max_prefills,
        )

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.table, copy = self.pool.open(sequence.findable_ids)
        if copy is not None:
            self._forward.copy_kv(copy.source, copy.target, copy.num_tokens)
        if not sequence.times.admitted:
            sequence.times.admitted = self._clock.monotonic()
        if not sequence.times.first_token:  # what an admission found that gave no token was not used
            sequence.num_cached_tokens, sequence.cached_from = sequence.num_filled, self.weight_version
        bisect.insort(self._running, sequence, key=_arrival)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks. It waits again in its old place, and recomputes evicted tokens."""
        self._num_preempted += 1
        self._running.remove(sequence)
        self._close(sequence)
        self._wait(sequence)

    def _retract(self) -> None:
        for sequence in list(self._running):
            self._preempt(sequence)

    def _with_blocks(self, share: Share[RequestId]) -> tuple[Sequence, int]:
        sequence = self._by_id[share.key]
        assert sequence.table is not None, "what has a share runs"
        has_blocks = self.pool.extend(sequence.table, sequence.num_filled + share.num_tokens)
        assert has_blocks, f"the plan gave {sequence!r} blocks that {self.pool!r} does not have"
        return sequence, share.num_tokens

    def _advance(self, sequence: Sequence, rows: F32Array, start: int, now: float) -> Sampled | Failed | None:
        try:
            chunk = sequence.advance(rows, start, now, weight_version=self.weight_version)
        except DeadEnd:
            return self._fail(sequence, "No token of the vocabulary can continue the grammar.")
        except BadLogits:
            return self._fail(sequence, "The model produced NaN or infinite logits.", FailureKind.INTERNAL)
        except GrammarEngineFailed as error:
            return self._fail(sequence, _engine_failed(error), FailureKind.INTERNAL)
        except BadGrammar as error:
            return self._fail(sequence, f"The grammar failed on a sampled token: {error}")
        if chunk is not None and chunk.ids and (spans := sequence.unreported_rows()):
            sequence.report(self._forward.routes(spans))
        if chunk is not None and chunk.finish is not None:
            return self._end(sequence, chunk)
        return None if chunk is None else Sampled(request_id=sequence.request_id, chunk=chunk)

    # -- a request's place

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=_arrival)

    def _end(self, sequence: Sequence, chunk: Chunk) -> Sampled:
        """Forget a request; `chunk`, its last, gets its times."""
        times, now = sequence.times, self._forget(sequence)
        engine_times = EngineTimes(
            submitted=times.submitted,
            admitted=times.admitted or now,
            first_token=times.first_token or now,
            finished=now,
        )
        return Sampled(
            request_id=sequence.request_id,
            chunk=replace(chunk, times=engine_times, replay=sequence.replay(), cached_from=sequence.cached_from),
        )

    def _fail(self, sequence: Sequence, message: str, kind: FailureKind = FailureKind.INVALID_REQUEST) -> Failed:
        self._forget(sequence)
        return Failed(request_id=sequence.request_id, kind=kind, message=message)

    def _forget(self, sequence: Sequence) -> float:
        """Give back what it holds. Returns the time of its end."""
        now = self._clock.monotonic()
        self._pace.ended(now)
        del self._by_id[sequence.request_id]
        (self._waiting if sequence.table is None else self._running).remove(sequence)
        if sequence.guide is not None:
            sequence.guide.abandon()
        self._close(sequence)
        return now

    def _close(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self.pool.close(sequence.table, sequence.ids)
            sequence.table = None

    def _problem(
        self, request_id: RequestId, prompt: "array[int]", params: SamplingParams, score_from: int | None
    ) -> Failed | None:
        num_more = (params.max_tokens or 1) if score_from is None else 0
        vocab = self._forward.config.vocab_size
        kind, message, blame, retry_after_s = FailureKind.INVALID_REQUEST, "", None, None
        if len(self._waiting) >= self._limits.max_waiting:
            kind, retry_after_s = FailureKind.UNAVAILABLE, self._pace.retry_after_s
            message = f"{self._limits.max_waiting} requests are already waiting for the engine."
        elif not prompt or min(prompt) < 0 or max(prompt) >= vocab:
            message = f"A prompt needs at least one id, each a token id: the vocabulary has {vocab} ids."
        elif score_from is not None and not 0 < score_from < len(prompt):
            message = f"Of {len(prompt)} tokens those from {score_from} on cannot be scored."
        elif len(prompt) + num_more > self.max_context_tokens:
            plus = " plus max_tokens" if num_more else ""
            message = f"{len(prompt)} prompt tokens{plus} exceed the engine's {self.max_context_tokens} tokens."
        elif (foreign := params.foreign_id(vocab)) is not None:
            name, id_ = foreign
            message = f"{id_} is not a token id: the vocabulary has {vocab} ids."
            blame = Blame(RequestPart.SAMPLING, path=(name,))
        if not message:
            return None
        return Failed(request_id=request_id, kind=kind, message=message, blame=blame, retry_after_s=retry_after_s)


def _engine_failed(error: GrammarEngineFailed) -> str:
    return f"The grammar engine failed: {error}"


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
