"""The time in which a whole batch decodes: no prompt in it, and every step in it whole."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engine.window import Instant, WholeBatch, Window

STEP_CPU_S, STEP_WALL_S = 2.0, 3.0


class Steps:
    """An engine whose steps all cost the same, but those until the last to start has begun: ten times that."""

    def __init__(self, starts: list[int], order: list[int]) -> None:
        self._starts = starts
        self._order = order
        self._at = Instant(cpu_s=0.0, wall_s=0.0)

    def run(self, num_tokens: int) -> WholeBatch:
        """Every request from its own first step to its end."""
        batch = WholeBatch(num_requests=len(self._starts), num_tokens=num_tokens, now=lambda: self._at)
        for step in range(max(self._starts) + num_tokens):
            times = 1.0 if step > max(self._starts) else 10.0
            self._at = Instant(cpu_s=self._at.cpu_s + times * STEP_CPU_S, wall_s=self._at.wall_s + times * STEP_WALL_S)
            for request in self._order:
                if self._starts[request] <= step < self._starts[request] + num_tokens:
                    batch.drew(request, 1)
        return batch


@given(st.data())
def test_a_window_has_whole_steps_of_the_whole_batch_and_nothing_else(data: st.DataObject) -> None:
    starts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(starts))))
    num_tokens = max(starts) - min(starts) + data.draw(st.integers(3, 8))
    batch = Steps(starts, order).run(num_tokens)
    window = batch.window()
    assert window is not None
    num_steps = window.cpu_s / STEP_CPU_S
    assert num_steps >= 1
    assert window == Window(
        num_tokens=round(len(starts) * num_steps), cpu_s=STEP_CPU_S * num_steps, wall_s=STEP_WALL_S * num_steps
    )
    assert batch.num_drawn == len(starts) * num_tokens


def test_a_batch_that_is_never_whole_has_no_window() -> None:
    assert Steps([0, 4], [0, 1]).run(4).window() is None
    assert Steps([0, 0], [0, 1]).run(1).window() is None


def test_what_no_clock_saw_has_no_window() -> None:
    batch = WholeBatch(num_requests=1, num_tokens=3, now=lambda: Instant(cpu_s=1.0, wall_s=1.0))
    for _ in range(3):
        batch.drew(0, 1)
    assert batch.window() is None
