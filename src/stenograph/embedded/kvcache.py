"""Keys and values of sequences: one growing buffer each, all under one budget of tokens.

Owns which buffer belongs to whom. A running sequence has reserved all the tokens it may ever need, so it never waits
for memory half-way. A finished one's buffer stays idle under its ids: a prompt that goes on from it takes it over; one
that shares only its beginning gets a copy of that. Idle buffers are given up oldest first when the budget is short.
Knows nothing of requests or of time.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.embedded.weights import LlamaConfig

FIRST_CAPACITY_TOKENS = 64


class SequenceKv:
    """One sequence's keys and values, float32. The model appends; nobody else writes.

    `data` [layers, 2, kv_heads, capacity, head_dim]; positions [0, length) are valid. Capacity doubles, up to
    `max_tokens`.
    """

    __slots__ = ("data", "length", "max_tokens")

    def __init__(self, config: LlamaConfig, *, max_tokens: int, capacity: int = FIRST_CAPACITY_TOKENS) -> None:
        shape = (config.num_layers, 2, config.num_kv_heads, min(max(1, capacity), max_tokens), config.head_dim)
        self.data: NDArray[np.float32] = np.empty(shape, np.float32)
        self.length = 0
        self.max_tokens = max_tokens

    def __repr__(self) -> str:
        return f"<SequenceKv {self.length} of {self.capacity} tokens, at most {self.max_tokens}>"

    @property
    def capacity(self) -> int:
        """Tokens that fit without growing."""
        return int(self.data.shape[3])

    def grow(self, num_tokens: int) -> None:
        """Make room for positions [length, num_tokens). Raises ValueError beyond `max_tokens`."""
        if num_tokens > self.max_tokens:
            raise ValueError(f"{num_tokens} tokens do not fit a reservation of {self.max_tokens}")
        if num_tokens > self.capacity:
            self._move(min(self.max_tokens, max(num_tokens, 2 * self.capacity)))

    def trim(self) -> None:
        """Give back what is more than a quarter over the valid positions."""
        if self.capacity > self.length + self.length // 4 + 1:
            self._move(max(1, self.length))

    def _move(self, capacity: int) -> None:
        data = np.empty((*self.data.shape[:3], capacity, self.data.shape[4]), np.float32)
        data[:, :, :, : self.length] = self.data[:, :, :, : self.length]
        self.data = data


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStats:
    """Tokens by what holds them, and how often a prompt found a beginning."""

    budget_tokens: int
    reserved_tokens: int
    idle_tokens: int
    num_live: int
    num_idle: int
    num_handed_over: int
    num_copied: int
    num_evicted: int


@dataclass(frozen=True, slots=True, eq=False)
class _Idle:
    ids: "array[int]"
    kv: SequenceKv


class KvCache:
    """All sequences' buffers. Not for several threads."""

    def __init__(self, config: LlamaConfig, *, budget_tokens: int) -> None:
        if budget_tokens < 2:
            raise ValueError(f"a KV budget has at least 2 tokens, got {budget_tokens}")
        self._config = config
        self._budget_tokens = budget_tokens
        self._live: dict[int, SequenceKv] = {}
        self._idle: list[_Idle] = []
        self._num_handed_over = self._num_copied = self._num_evicted = 0

    def __repr__(self) -> str:
        return f"<KvCache {self.reserved_tokens} reserved, {self._idle_tokens()} idle of {self._budget_tokens} tokens>"

    @property
    def budget_tokens(self) -> int:
        """Tokens that all sequences together may hold."""
        return self._budget_tokens

    @property
    def reserved_tokens(self) -> int:
        """Tokens that live sequences may grow to."""
        return sum(kv.max_tokens for kv in self._live.values())

    def acquire(self, ids: "array[int]", *, max_tokens: int) -> SequenceKv:
        """A buffer for the prompt `ids`, `length` of whose positions are already valid; always fewer than len(ids).

        Raises ValueError where `max_tokens` do not fit beside the live sequences: the scheduler's mistake.
        """
        if self.reserved_tokens + max_tokens > self._budget_tokens:
            raise ValueError(f"{max_tokens} tokens do not fit beside {self.reserved_tokens} reserved")
        source, common = self._longest(ids)
        if source is None or common == 0:
            self._make_room(max_tokens, keep=None)
            kv = SequenceKv(self._config, max_tokens=max_tokens, capacity=len(ids))
        elif common == len(source.ids) or not self._make_room(max_tokens, keep=source):
            self._idle = [entry for entry in self._idle if entry is not source]
            kv = source.kv
            kv.length, kv.max_tokens = common, max_tokens
            if kv.capacity > max_tokens:
                kv.trim()
            self._make_room(max_tokens, keep=None)
            self._num_handed_over += 1
        else:
            kv = SequenceKv(self._config, max_tokens=max_tokens, capacity=len(ids))
            kv.data[:, :, :, :common] = source.kv.data[:, :, :, :common]
            kv.length = common
            self._num_copied += 1
        self._live[id(kv)] = kv
        return kv

    def release(self, kv: SequenceKv, ids: "array[int]") -> None:
        """Make a live buffer idle; `ids[:kv.length]` are the tokens it holds. An empty one is dropped."""
        del self._live[id(kv)]
        if kv.length:
            kv.trim()
            self._idle.append(_Idle(ids[: kv.length], kv))

    def stats(self) -> KvStats:
        """Counts, now."""
        return KvStats(
            budget_tokens=self._budget_tokens,
            reserved_tokens=self.reserved_tokens,
            idle_tokens=self._idle_tokens(),
            num_live=len(self._live),
            num_idle=len(self._idle),
            num_handed_over=self._num_handed_over,
            num_copied=self._num_copied,
            num_evicted=self._num_evicted,
        )

    def check(self) -> None:
        """Raises AssertionError where the books do not balance."""
        buffers = [*self._live.values(), *(entry.kv for entry in self._idle)]
        assert len({id(kv) for kv in buffers}) == len(buffers), "a buffer has two owners"
        assert len({kv.data.ctypes.data for kv in buffers}) == len(buffers), "two buffers share memory"
        for kv in buffers:
            assert 0 <= kv.length <= kv.capacity, f"{kv!r} holds more than fits"
        for kv in self._live.values():
            assert kv.capacity <= kv.max_tokens, f"{kv!r} is larger than its reservation"
        assert all(len(entry.ids) == entry.kv.length > 0 for entry in self._idle), "idle ids and positions differ"
        assert self.reserved_tokens + self._idle_tokens() <= self._budget_tokens, f"{self!r} is over its budget"

    def _idle_tokens(self) -> int:
        return sum(entry.kv.capacity for entry in self._idle)

    def _longest(self, ids: "array[int]") -> tuple[_Idle | None, int]:
        """The idle entry that shares most with `ids[:-1]` (the youngest of equals), and how much."""
        best, best_common = None, 0
        wanted = np.frombuffer(ids, np.intc)[:-1]
        for entry in self._idle:
            common = _common_length(wanted, np.frombuffer(entry.ids, np.intc))
            if common >= best_common:
                best, best_common = entry, common
        return best, best_common

    def _make_room(self, num_tokens: int, *, keep: _Idle | None) -> bool:
        """Evict idle entries, oldest first, until `num_tokens` fit; never `keep`. Returns whether they fit."""
        free = self._budget_tokens - self.reserved_tokens - self._idle_tokens()
        kept = 0 if keep is None else keep.kv.capacity
        if free + self._idle_tokens() - kept < num_tokens:
            return False
        for entry in list(self._idle):
            if free >= num_tokens:
                break
            if entry is not keep:
                self._idle.remove(entry)
                free += entry.kv.capacity
                self._num_evicted += 1
        return True


def _common_length(first: NDArray[np.intc], second: NDArray[np.intc]) -> int:
    size = min(len(first), len(second))
    differs = first[:size] != second[:size]
    return int(differs.argmax()) if differs.any() else size
