"""Durations of the steps of grammars, kept until they are taken to be counted.

Owns the durations. The compiling, filling and accepting threads add them; any thread takes them.
"""

import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from stenograph.core.telemetry import GrammarStep
from stenograph.embedded.grammar.base import GrammarState
from stenograph.embedded.sampler import Allowed


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
