"""Grammars compiled on threads and cached by content.

Owns the threads for compiling and for guides, how long a grammar may take and took, and the cache's contents. A
`GrammarBackend` compiles. A grammar's error fails its own request alone.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stenograph.core.loaded import entry
from stenograph.core.telemetry import GrammarStep
from stenograph.core.types import Grammar
from stenograph.embedded.grammar.base import BadGrammar as BadGrammar
from stenograph.embedded.grammar.base import CompiledGrammar, GrammarBackend, GrammarState, no_other_error
from stenograph.embedded.grammar.base import GrammarEngineFailed as GrammarEngineFailed
from stenograph.embedded.grammar.guide import Guide
from stenograph.embedded.sampler import Allowed

if TYPE_CHECKING:
    from stenograph.model.tokenizer import Tokenizer

NUM_MASK_THREADS = 2
"""A mask of SmolLM2's vocabulary takes some 0.1 ms, a step of the model tens of milliseconds."""
MAX_CACHED = 256
"""Compiled grammars kept, the most recently used."""
MAX_CACHED_CHARS = 8 * 2**20
"""Most characters of all sources together: the memory of a compiled grammar grows with its source."""
COMPILE_DEADLINE_S = 30.0
"""llguidance takes under 1 s for any realistic grammar."""
MAX_OVERDUE = 4
"""Compilations still running after their deadline, since no thread can be stopped, before no more are begun."""
_STACK_BYTES = 512 * 2**20
"""Stack of a compiling thread, as address space: grammar engines recurse as deep as references go. In the usual 8 MiB
a chain of 2,000 of them, 35 KB of schema, ended the process."""

_BACKEND = "stenograph.embedded.grammar.llguidance:LlguidanceBackend"

_stack_size_lock = threading.Lock()
"""The size is a setting of the process."""


class CompilerBusy(BadGrammar):
    """Nothing is known of this grammar: too many others take too long."""


class GrammarTimes:
    """Durations in seconds, by step, in the order of their ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations_s: dict[GrammarStep, list[float]] = {}

    def __repr__(self) -> str:
        return f"<GrammarTimes {sum(map(len, self._durations_s.values()))} durations>"

    @contextmanager
    def of(self, step: GrammarStep) -> Generator[None]:
        """Add the duration of the block, also if it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began
            with self._lock:
                self._durations_s.setdefault(step, []).append(took_s)

    def take(self) -> Mapping[GrammarStep, tuple[float, ...]]:
        """The durations added since the last call; steps without any are left out."""
        with self._lock:
            taken, self._durations_s = self._durations_s, {}
        return {step: tuple(durations) for step, durations in taken.items()}


class TimedState:
    """A grammar state with timed masks and steps."""

    def __init__(self, state: GrammarState, times: GrammarTimes) -> None:
        self._state = state
        self._times = times

    @property
    def is_finished(self) -> bool:
        """Whether the state is a finished one."""
        return self._state.is_finished

    def allowed(self) -> Allowed:
        """The state's mask; raises as it does."""
        with self._times.of(GrammarStep.FILL):
            return self._state.allowed()

    def accept(self, token_id: int) -> None:
        """The state's step; raises as it does."""
        with self._times.of(GrammarStep.ACCEPT):
            self._state.accept(token_id)


class GrammarCompiler:
    """Compiles grammars off the caller's thread. Close it with `close`.

    `tokenizer` is asked for when the first grammar is compiled.
    """

    def __init__(
        self,
        tokenizer: "Callable[[], Tokenizer]",
        *,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        num_threads: int = 2,
        deadline_s: float = COMPILE_DEADLINE_S,
    ) -> None:
        self._made_backend: GrammarBackend | None = None
        self._backend_lock = threading.Lock()

        def make_backend() -> GrammarBackend:
            made: GrammarBackend = entry(_BACKEND)(tokenizer(), vocab_size=vocab_size, eos_ids=eos_ids)
            return made

        self._make_backend = make_backend
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._masks = ThreadPoolExecutor(NUM_MASK_THREADS, thread_name_prefix="mask")
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._num_cached_chars = 0
        self._overdue: list[Future[CompiledGrammar]] = []
        self._overdue_lock = threading.Lock()
        self.times = GrammarTimes()

    def __repr__(self) -> str:
        return f"<GrammarCompiler {len(self._compiled)} cached>"

    def compile(self, grammar: Grammar, when_done: Callable[[], None]) -> "Future[CompiledGrammar]":
        """Begin to compile; `when_done` is called on some thread when `state` can be asked for."""
        future = self._compiled.get(grammar)
        if future is None or (future.done() and isinstance(future.exception(), CompilerBusy)):
            future = self._keep(grammar, self._threads.submit(self._compile, grammar))
        self._compiled.move_to_end(grammar)
        future.add_done_callback(lambda _: when_done())
        return future

    def guide(self, compiled: "Future[CompiledGrammar]") -> Guide:
        """The beginning of a compiled grammar, for one request. Raises BadGrammar if it did not compile."""
        with no_other_error():
            return Guide(TimedState(compiled.result().start(), self.times), self._masks)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _keep(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> "Future[CompiledGrammar]":
        if grammar not in self._compiled:
            self._num_cached_chars += len(grammar.source)
        self._compiled[grammar] = future
        while len(self._compiled) > MAX_CACHED or (
            self._num_cached_chars > MAX_CACHED_CHARS and len(self._compiled) > 1
        ):
            oldest, _ = self._compiled.popitem(last=False)
            self._num_cached_chars -= len(oldest.source)
        return future

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        with self._overdue_lock:
            self._overdue = [future for future in self._overdue if not future.done()]
            is_busy = len(self._overdue) >= MAX_OVERDUE
        if is_busy:
            raise CompilerBusy(
                f"{MAX_OVERDUE} other grammars have been compiling for more than {self._deadline_s:g} s; retry later"
            )
        compiling = _on_a_deep_stack(lambda: self._timed(grammar))
        try:
            return compiling.result(self._deadline_s)
        except TimeoutError:
            with self._overdue_lock:
                self._overdue.append(compiling)
            raise BadGrammar(f"it takes longer than {self._deadline_s:g} s to compile") from None

    def _timed(self, grammar: Grammar) -> CompiledGrammar:
        backend = self._backend()
        with self.times.of(GrammarStep.COMPILE):
            return backend.compile(grammar)

    def _backend(self) -> GrammarBackend:
        """The backend, made once, by whoever is first."""
        with self._backend_lock:
            if self._made_backend is None:
                self._made_backend = self._make_backend()
            return self._made_backend


def _on_a_deep_stack(compile_: Callable[[], CompiledGrammar]) -> "Future[CompiledGrammar]":
    """Run on a thread of its own; the process's end does not wait for it."""
    outcome: Future[CompiledGrammar] = Future()

    def run() -> None:
        try:
            outcome.set_result(compile_())
        except BaseException as error:  # noqa: BLE001  (raised where the outcome is asked for)
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="compile", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return outcome
