"""The whole engine, driven anyhow in rooms that are too small: each request gets, to the bit, what it gets alone.

Requests come, are aborted, compile, are preempted and find each other's blocks, weights are swapped and steps paused,
in any order. The forward is one whose logits tell every wrong row, so a block that was shared, copied, taken over,
evicted, or kept from other weights wrongly is a wrong logprob.
"""

import functools
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from standins.teacher_forcing import log_softmax
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.clock import SystemClock
from stenograph.core.types import Chunk, FinishReason, Grammar, GrammarKind, RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.grammar.base import CompiledGrammar
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.wire import Failed, FailureKind, Sampled, Times
from stenograph.model.tokenizer import Tokenizer

from .ledger_forward import CONTEXT, VOCAB, LedgerForward, LedgerWeights, logits_of

EOS = 2


class GatedCompiler(GrammarCompiler):
    """Compiles at once, and says so when the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(tokenizer, vocab_size=VOCAB, eos_ids=(EOS,))
        self.held: list[tuple[Future[CompiledGrammar], Future[CompiledGrammar]]] = []

    def compile(self, grammar: Grammar, when_done: Callable[[], None]) -> "Future[CompiledGrammar]":
        told: Future[CompiledGrammar] = Future()
        self.held.append((told, super().compile(grammar, when_done)))
        return told

    def open(self, index: int) -> None:
        told, compiled = self.held.pop(index)
        error = compiled.exception()
        if error is None:
            told.set_result(compiled.result())
        else:
            told.set_exception(error)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer_json())


@functools.cache
def grammars() -> GatedCompiler:
    return GatedCompiler()


def core_of(limits: EngineLimits) -> EngineCore:
    return EngineCore(
        LedgerForward(limits.num_kv_rows),
        tokenizer,
        grammars(),
        eos_ids=(EOS,),
        limits=limits,
        clock=SystemClock(),
        wake=lambda: None,
        weight_version="0",
    )


@dataclass(kw_only=True)
class Asked:
    """A request, and what was said of it: its end is a chunk with a finish, or a failure."""

    prompt: list[int]
    params: SamplingParams
    drawn: list[int] = field(default_factory=list[int])
    sampling_logprobs: list[float] = field(default_factory=list[float])
    weights: list[int] = field(default_factory=list[int])
    """The number of the weights that drew each token."""
    end: Chunk | Failed | None = None

    def take(self, event: Sampled | Failed) -> None:
        assert self.end is None, "something came after the end"
        if isinstance(event, Failed):
            self.end = event
            return
        chunk = event.chunk
        for id_, logprob in zip(chunk.ids, chunk.logprobs, strict=True):
            assert chunk.weight_version is not None
            self.weights.append(int(chunk.weight_version))
            row = logits_of([*self.prompt, *self.drawn], self.weights[-1]).astype(float)
            assert abs(logprob - log_softmax(row)[id_]) < 1e-9, "the logprob is not that of the line"
            self.drawn.append(id_)
        self.sampling_logprobs += chunk.sampling_logprobs or ()
        assert chunk.num_cached_tokens < len(self.prompt)
        assert chunk.ids or chunk.finish is not None, "a chunk says nothing"
        if chunk.finish is not None:
            self.end = chunk

    @property
    def why(self) -> object:
        """The end, as far as it does not depend on the others."""
        return self.end.message if isinstance(self.end, Failed) else self.end and self.end.finish


def alone(prompt: list[int], params: SamplingParams, kv_tokens: int, weights: list[int]) -> Asked:
    """What the request gets with all blocks, nobody beside it, and nothing to be found; `weights` draw each token."""
    core = core_of(EngineLimits(max_batch=1, kv_tokens=kv_tokens, step_tokens=CONTEXT, reuses_prefixes=False))
    held = grammars().held
    num_held = len(held)
    asked = Asked(prompt=prompt, params=params)
    assert core.add(RequestId("r"), array("i", prompt), params, Times(submitted=1.0), 1) is None
    while len(held) > num_held:
        grammars().open(num_held)
    while core.has_requests:
        number = str(weights[min(len(asked.drawn), len(weights) - 1)]) if weights else "0"
        if core.weight_version != number:
            core.swap(LedgerWeights(int(number)), number)
        for event in core.step():
            asked.take(event)
    return asked


GRAMMARS = [
    Grammar(kind=GrammarKind.REGEX, source="[a-c]{3,6}"),
    Grammar(kind=GrammarKind.REGEX, source="(a|b)*"),
    Grammar(kind=GrammarKind.REGEX, source="("),
    Grammar(kind=GrammarKind.REGEX, source="a{1000000}"),  # fails on what was drawn
    Grammar(kind=GrammarKind.CHOICE, source='["left", "right", "☃"]'),
    Grammar(kind=GrammarKind.EBNF, source='root ::= "is " [A-C]{2}'),
    Grammar(kind=GrammarKind.JSON_OBJECT, source=""),
    Grammar(kind=GrammarKind.LARK, source='start: "" | "x"'),
]
IDS = st.integers(0, VOCAB - 1)
BIASES = st.lists(st.tuples(IDS, st.sampled_from([-100.0, 1.0, 100.0])), max_size=3).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-5, 1.0, 100.0]),
    top_p=st.sampled_from([1.0, 0.9, 1e-9]),
    top_k=st.sampled_from([0, 0, 1, 5, VOCAB]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([None, 1, 2, 5, 17, 40]),
    stop=st.sampled_from([(), (), ("a",), ("the", "\ufffd")]),
    stop_token_ids=st.sampled_from([(), (), (5, 6), (EOS,)]),
    ignore_eos=st.booleans(),
    presence_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.01, 100.0]),
    logit_bias=BIASES,
    grammar=st.none() | st.none() | st.sampled_from(GRAMMARS),
)
NEW_IDS = st.lists(st.integers(5, 6), min_size=1, max_size=3) | st.integers(1, 40).map(lambda size: [5] * size)
"""Few ids and long runs of one: prompts share beginnings, and part inside blocks."""


class EngineMachine(RuleBasedStateMachine):
    """Requests in any order, in any state of the others."""

    @initialize(
        kv_tokens=st.sampled_from([17, 33, 48, 80, CONTEXT]),
        max_batch=st.integers(1, 4),
        spare_tokens=st.sampled_from([1, 2, 16, 40]),
        max_waiting=st.sampled_from([2, 100]),
        reuses=st.sampled_from([True, True, True, False]),
    )
    def start(self, *, kv_tokens: int, max_batch: int, spare_tokens: int, max_waiting: int, reuses: bool) -> None:
        self.limits = EngineLimits(
            max_batch=max_batch,
            kv_tokens=kv_tokens,
            step_tokens=max_batch + spare_tokens,
            max_waiting=max_waiting,
            reuses_prefixes=reuses,
        )
        grammars().held.clear()
        self.core = core_of(self.limits)
        self.live: dict[RequestId, Asked] = {}
        self.lines: list[list[int]] = [[]]
        self.num_submitted = self.num_swaps = 0

    @rule()
    def swap(self) -> None:
        self.num_swaps += 1
        before, num_running = self.core.swap(LedgerWeights(self.num_swaps), str(self.num_swaps))
        assert isinstance(before, LedgerWeights)
        assert before.number == self.num_swaps - 1
        assert num_running <= self.limits.max_batch
        assert self.core.pool.stats().num_free == self.limits.num_blocks, "something of the old weights is found"

    @rule(retracts=st.booleans(), flushes=st.booleans(), swaps=st.booleans())
    def pause_and_resume(self, *, retracts: bool, flushes: bool, swaps: bool) -> None:
        self.core.pause(retracts=retracts)
        assert not self.core.has_work
        assert not retracts or not self.core.pool.stats().num_held
        if flushes:
            self.core.flush()
            assert not self.core.pool.stats().num_idle
        if swaps:
            self.swap()
        self.core.resume()

    @rule(data=st.data(), cut=st.integers(0, 20), new=NEW_IDS, params=PARAMS, num=st.sampled_from([1, 1, 1, 3]))
    def submit(self, data: st.DataObject, cut: int, new: list[int], params: SamplingParams, num: int) -> None:
        line = data.draw(st.sampled_from(self.lines))
        prompt = [*line[: max(0, len(line) - cut)], *new]
        for _ in range(num):  # the same at once
            self.num_submitted += 1
            free = (RequestId(f"r{number}") for number in range(len(self.live) + 1))  # ids come again
            request_id = next(id_ for id_ in free if id_ not in self.live)
            times = Times(submitted=1.0)
            failed = self.core.add(request_id, array("i", prompt), params, times, self.num_submitted)
            fits = len(prompt) + (params.max_tokens or 1) <= min(CONTEXT, self.limits.kv_tokens)
            if failed is None:
                assert fits
                self.live[request_id] = Asked(prompt=prompt, params=params)
            else:
                assert not fits or failed.kind is FailureKind.UNAVAILABLE

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for event in self.core.step():
                self.take(event)
            self.core.check()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        event = self.core.abort(request_id)
        assert event is not None
        assert event.chunk.finish is not None
        assert event.chunk.finish.reason is FinishReason.ABORT
        self.take(event)
        assert self.core.abort(request_id) is None

    @precondition(lambda self: bool(grammars().held))
    @rule(data=st.data())
    def compiled(self, data: st.DataObject) -> None:
        grammars().open(data.draw(st.integers(0, len(grammars().held) - 1)))

    @invariant()
    def the_books_balance(self) -> None:
        self.core.check()
        assert self.core.has_requests == bool(self.live)

    def take(self, event: Sampled | Failed) -> None:
        """Hear an event; the last one of a request is held to what it gets alone."""
        asked = self.live[event.request_id]
        asked.take(event)
        if asked.end is None:
            return
        if isinstance(event, Sampled):
            assert event.chunk.times is not None
            assert event.chunk.times.first_token <= event.chunk.times.finished
        assert len(asked.prompt) + len(asked.drawn) <= self.limits.kv_tokens
        del self.live[event.request_id]
        self.lines.append([*asked.prompt, *asked.drawn])
        whole = alone(asked.prompt, asked.params, self.limits.kv_tokens, asked.weights)
        num_drawn = len(asked.drawn)
        assert asked.drawn == whole.drawn[:num_drawn]
        assert asked.sampling_logprobs == whole.sampling_logprobs[:num_drawn]
        was_aborted = isinstance(event, Sampled) and not event.chunk.ids
        assert was_aborted or (asked.why, num_drawn) == (whole.why, len(whole.drawn))

    def teardown(self) -> None:
        """Everybody ends, and within the steps that all of them would take one after the other."""
        if not hasattr(self, "core"):
            return
        while grammars().held:
            grammars().open(0)
        num_left = sum(2 * CONTEXT for _ in self.live)
        while self.live:
            assert num_left > 0, f"{self.core!r} starves {sorted(self.live)}"
            num_left -= 1
            self.step(1)
        assert self.core.pool.stats().num_held == 0


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=80, stateful_step_count=30)
