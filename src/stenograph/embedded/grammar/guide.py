"""One request's masks, filled on a thread while the forward pass runs.

Owns the order of the jobs on one grammar state: accept(n), then fill(n + 1), each job after the one before it and never
two at once. Its owner waits only in `mask`. Knows no grammar engine, and nothing of other requests.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from stenograph.embedded.grammar.base import GrammarState, no_other_error
from stenograph.embedded.sampler import Allowed


class Guide:
    """One request's position in its grammar. Owned by one thread; the state belongs to the jobs from now on.

    `threads` begin jobs in the order of their submission, so that none waits for one not yet begun.
    """

    def __init__(self, state: GrammarState, threads: ThreadPoolExecutor) -> None:
        self._state = state
        self._threads = threads
        self._mask = threads.submit(_fill, state)

    def __repr__(self) -> str:
        return f"<Guide {'ready' if self._mask.done() else 'filling'}>"

    @property
    def is_finished(self) -> bool:
        """Whether only the end can follow; waits, and raises, as `mask` does."""
        self._mask.result()  # and with it the last job: until the next `accept`, the state is its owner's to read
        return self._state.is_finished

    def mask(self) -> Allowed:
        """The ids [V] allowed next; waits for the mask. Raises BadGrammar, then and at every later call."""
        return self._mask.result()

    def accept(self, token_id: int) -> None:
        """Step over a sampled token. Returns at once; the next `mask` raises any error."""
        self._mask = self._threads.submit(_advance, self._state, self._mask, token_id)

    def abandon(self) -> None:
        """Begin no more jobs: the request was aborted. A running job ends by itself, and its result is dropped."""
        self._mask.cancel()


def _advance(state: GrammarState, before: "Future[Allowed]", token_id: int) -> Allowed:
    before.result()  # done already, unless its mask was never asked for; what went wrong before goes wrong still
    with no_other_error():
        state.accept(token_id)
    return _fill(state)


def _fill(state: GrammarState) -> Allowed:
    with no_other_error():
        return state.allowed()
