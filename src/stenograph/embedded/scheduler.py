"""What the engine does in its next step. Pure functions from state to plan.

Running sequences that decode come first, one token each; what is left of the step's tokens goes to prefill, in chunks,
to the oldest first. Waiting requests are admitted in their order: one that does not fit holds back those behind it,
so that a long one is not passed for ever.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[Key]):
    """A request that waits; it needs `max_tokens` of KV, its prompt included."""

    key: Key
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Running(Generic[Key]):
    """A sequence that runs; `num_pending` tokens of it are not in its KV: one while it decodes, more in prefill."""

    key: Key
    num_pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share(Generic[Key]):
    """`num_tokens` of a sequence's pending tokens are computed in this step."""

    key: Key
    num_tokens: int


def admissions(
    waiting: Sequence[Waiting[Key]], *, num_running: int, max_batch: int, free_tokens: int
) -> tuple[Key, ...]:
    """The waiting requests that begin now: the longest prefix that fits batch and KV."""
    admitted: list[Key] = []
    for request in waiting:
        if num_running + len(admitted) >= max_batch or request.max_tokens > free_tokens:
            break
        free_tokens -= request.max_tokens
        admitted.append(request.key)
    return tuple(admitted)


def shares(running: Sequence[Running[Key]], *, step_tokens: int) -> tuple[Share[Key], ...]:
    """Who computes how many tokens in this step, in the order of `running`.

    Every decoding sequence gets its token, even beyond `step_tokens`; prefill gets the rest, and at least one token
    when nothing decodes.
    """
    room = step_tokens - sum(sequence.num_pending == 1 for sequence in running)
    if not any(sequence.num_pending == 1 for sequence in running):
        room = max(1, room)
    planned: list[Share[Key]] = []
    for sequence in running:
        if sequence.num_pending == 1:
            planned.append(Share(key=sequence.key, num_tokens=1))
        elif room > 0:
            num_tokens = min(room, sequence.num_pending)
            planned.append(Share(key=sequence.key, num_tokens=num_tokens))
            room -= num_tokens
    return tuple(planned)
