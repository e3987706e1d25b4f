"""Grammars inside the engine: they compile and fill beside the model, and a dead end ends its request alone."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from stenograph.core.types import FinishReason, Grammar, GrammarKind
from stenograph.embedded.forward.base import Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import F32Array
from stenograph.embedded.grammar.base import CompiledGrammar, GrammarState
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.grammar.guide import Guide
from stenograph.embedded.sampler import Allowed
from stenograph.embedded.wire import FailureKind
from stenograph.model.tokenizer import Tokenizer

from .conftest import Bench, Loaded

LETTERS = Grammar(kind=GrammarKind.REGEX, source="[a-c]{8}")
PROMPT = [1, 17, 240, 3]


class Masks:
    """How many have been filled."""

    def __init__(self) -> None:
        self._num = 0
        self._filled = threading.Condition()

    def add(self) -> None:
        with self._filled:
            self._num += 1
            self._filled.notify_all()

    def wait_for(self, num: int) -> None:
        with self._filled:
            self._filled.wait_for(lambda: self._num >= num)


class Told:
    """A state that tells of its masks, and after so many of them allows nothing."""

    def __init__(self, state: GrammarState, masks: Masks, num_left: int) -> None:
        self._state = state
        self._masks = masks
        self._num_left = num_left

    @property
    def is_finished(self) -> bool:
        return self._state.is_finished

    def allowed(self) -> Allowed:
        mask = self._state.allowed() & (self._num_left > 0)
        self._num_left -= 1
        self._masks.add()
        return mask

    def accept(self, token_id: int) -> None:
        self._state.accept(token_id)


class Compiler(GrammarCompiler):
    """Compiles while its gate is open, and guides by states that tell of their masks."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, num_masks: int = 1000) -> None:
        super().__init__(lambda: tokenizer, vocab_size=vocab_size, eos_ids=(2,))
        self.gate = threading.Event()
        self.gate.set()
        self.filled = Masks()
        self._num_masks = num_masks

    def guide(self, compiled: "Future[CompiledGrammar]") -> Guide:
        return Guide(Told(compiled.result().start(), self.filled, self._num_masks), self._masks)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        self.gate.wait()
        return super()._compile(grammar)


class Breaks:
    """A grammar engine, its grammars and their states in one; it fails where it is told to."""

    is_finished = False
    kinds = frozenset(GrammarKind)

    def __init__(self, at: str, vocab_size: int) -> None:
        self._at = at
        self._all = np.ones(vocab_size, np.bool_)

    def compile(self, grammar: Grammar) -> "Breaks":
        return self._unless("compile")

    def start(self) -> "Breaks":
        return self._unless("start")

    def allowed(self) -> Allowed:
        self._unless("allowed")
        return self._all

    def accept(self, token_id: int) -> None:
        self._unless("accept")

    def _unless(self, here: str) -> "Breaks":
        if here == self._at:
            raise Panic("out of\nfuel")
        return self


class Panic(BaseException):
    """As libraries in Rust raise it."""


class Broken(GrammarCompiler):
    """Compiles with an engine that fails."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, at: str) -> None:
        super().__init__(lambda: tokenizer, vocab_size=vocab_size, eos_ids=(2,))
        self._made_backend = Breaks(at, vocab_size)


@pytest.fixture
def compiler(loaded: Loaded, tokenizer: Tokenizer) -> Callable[..., Compiler]:
    def make(**options: int) -> Compiler:
        return Compiler(tokenizer, loaded[0].vocab_size, **options)

    return make


def test_the_next_mask_is_filled_while_the_model_computes(
    loaded: Loaded, tokenizer: Tokenizer, compiler: Callable[..., Compiler]
) -> None:
    grammars = compiler()

    class Patient(NumpyForward):
        """Has not computed step n before mask n is filled."""

        num_steps = 0

        def forward(self, segments: Sequence[Segment]) -> F32Array:
            self.num_steps += 1
            grammars.filled.wait_for(self.num_steps)
            return super().forward(segments)

    run = Bench(loaded, tokenizer, grammars=grammars, forward=Patient)
    run.add("r", PROMPT, grammar=LETTERS, max_tokens=20)
    run.run()
    assert run.chunks["r"][-1].finish is not None
    assert run.chunks["r"][-1].finish.reason is FinishReason.STOP
    assert len(tokenizer.decode(run.ids("r"), skip_special=True)) == 8


def test_a_request_whose_grammar_compiles_keeps_its_place_and_delays_no_other(
    loaded: Loaded, tokenizer: Tokenizer, compiler: Callable[..., Compiler]
) -> None:
    grammars = compiler()
    grammars.gate.clear()
    run = Bench(loaded, tokenizer, grammars=grammars, max_batch=1)
    run.add("first", PROMPT, grammar=LETTERS, max_tokens=20)
    for name in ("second", "third"):
        run.add(name, PROMPT, max_tokens=3)
    while len(run.chunks.get("second", ())) < 3:
        run.step()
    assert run.core.has_work
    grammars.gate.set()
    grammars.compile(LETTERS, lambda: None).result()
    run.run()
    assert list(run.chunks) == ["second", "first", "third"]


def test_a_dead_end_ends_its_request_alone(
    loaded: Loaded, tokenizer: Tokenizer, compiler: Callable[..., Compiler]
) -> None:
    run = Bench(loaded, tokenizer, grammars=compiler(num_masks=3))
    run.add("guided", PROMPT, grammar=LETTERS, seed=1)
    run.add("free", PROMPT, seed=1)
    run.run()
    assert run.failures["guided"].kind is FailureKind.INVALID_REQUEST
    assert len(run.ids("guided")) == 3
    alone = Bench(loaded, tokenizer)
    alone.add("free", PROMPT, seed=1)
    alone.run()
    assert run.ids("free") == alone.ids("free")


@pytest.mark.parametrize("at", ["compile", "start", "allowed", "accept"])
def test_a_failure_of_a_grammar_engine_ends_one_request_with_an_internal_error(
    loaded: Loaded, tokenizer: Tokenizer, at: str
) -> None:
    run = Bench(loaded, tokenizer, grammars=Broken(tokenizer, loaded[0].vocab_size, at))
    run.add("guided", PROMPT, grammar=LETTERS)
    run.add("free", PROMPT)
    run.run()
    assert run.failures["guided"].kind is FailureKind.INTERNAL
    assert run.failures["guided"].message == "The grammar engine failed: Panic: out of fuel"
    assert len(run.ids("free")) == 8
