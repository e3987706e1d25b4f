"""A tree of token lines: what several lines begin with is in it once. Pure.

Shared by the server, which writes samples as a tree, and its client. A token of the tree has a place, its number in the
order of arrival; a run of new tokens is a node below the place of the token before it, -1 for none. Two tokens are one
if all before them are, their ids are equal, and so are the rows to be replayed with them (a router's choices).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Ints = NDArray[np.integer[Any]]
Rows = Sequence[Ints | None]
"""Arrays with a row for each token of a run, or for each but the last; None where there are none."""

MAX_HELD_BYTES = 256 * 2**20
"""Keys and rows held for comparison. Beyond it the tree forgets: later lines share with none before."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeRun:
    """Tokens at the places `[start, end)`, the first below the token at `parent`."""

    parent: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class _HeldRun:
    start: int
    keys: Keys
    rows: Rows


class LineTree:
    """The lines so far. Places count on over everything that was ever added."""

    def __init__(self, *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self.num_tokens = 0
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._runs: list[_HeldRun] = []
        self._starts: list[int] = []
        self._below: dict[tuple[int, int], list[_HeldRun]] = {}

    def __repr__(self) -> str:
        return f"<LineTree {self.num_tokens} tokens, {len(self._runs)} nodes>"

    def add(self, parent: int, keys: Keys, rows: Rows = ()) -> tuple[NDArray[np.int32], TreeRun | None]:
        """Add a run of tokens below a place. Returns each one's place, and the node of those that are new, which are
        the last ones; None if all were there. `keys` are ids, but where a token stands for a medium (`token_keys`)."""
        spans, at, done = list[NDArray[np.int32]](), parent, 0
        while done < len(keys) and (found := self._longest(at, keys, rows, done)) is not None:
            start, num = found
            spans.append(np.arange(start, start + num, dtype=np.int32))
            at, done = start + num - 1, done + num
        node = None
        if done < len(keys):
            node = self._grown(at, keys[done:], [None if row is None else row[done:] for row in rows])
            spans.append(np.arange(node.start, node.end, dtype=np.int32))
        return np.concatenate(spans) if spans else np.zeros(0, np.int32), node

    def _longest(self, at: int, keys: Keys, rows: Rows, done: int) -> tuple[int, int] | None:
        """Where most of the tokens from `done` on are below the place `at`, and how many; None if nowhere."""
        best: tuple[int, int] | None = None
        for run, offset in self._nexts(at, int(keys[done])):
            num = _common(run, offset, keys, rows, done)
            if num and (best is None or num > best[1]):
                best = run.start + offset, num
        return best

    def _nexts(self, at: int, key: int) -> Iterator[tuple[_HeldRun, int]]:
        """The runs that go on below a place, and where in them."""
        index = bisect_right(self._starts, at) - 1
        if index >= 0 and at + 1 - self._starts[index] < len(self._runs[index].keys):
            yield self._runs[index], at + 1 - self._starts[index]
        for run in self._below.get((at, key), ()):
            yield run, 0

    def _grown(self, parent: int, keys: Keys, rows: Rows) -> TreeRun:
        num_bytes = keys.nbytes + sum(row.nbytes for row in rows if row is not None)
        if self._held_bytes + num_bytes > self._max_held_bytes:
            self._held_bytes, self._runs, self._starts, self._below = 0, [], [], {}
        start, self.num_tokens = self.num_tokens, self.num_tokens + len(keys)
        run = _HeldRun(start, keys.copy(), [None if row is None else row.copy() for row in rows])  # not the whole line
        self._held_bytes += num_bytes
        self._runs.append(run)
        self._starts.append(start)
        self._below.setdefault((parent, int(keys[0])), []).append(run)
        return TreeRun(parent=parent, start=start, end=self.num_tokens)


def _common(run: _HeldRun, offset: int, keys: Keys, rows: Rows, done: int) -> int:
    """The number of tokens of a run from `offset` on that are those of the line from `done` on."""
    num = _alike(run.keys[offset:], keys[done:])
    for ours, theirs in zip(run.rows, rows, strict=True):
        if ours is None or theirs is None:
            num = num if ours is theirs else 0
            continue
        mine, other = ours[offset:], theirs[done:]
        if mine.shape[1:] != other.shape[1:]:
            return 0
        both = min(len(mine), len(other))
        if len(mine) != len(other):
            num = min(num, both)  # the next token has a row in one of them alone
        alike = _alike(mine[:num], other[:num])
        num = alike if alike < min(num, both) else num
    return num


_AT_ONCE = 1 << 16


def _alike(one: Ints, other: Ints) -> int:
    """The number of first elements, or rows, that are equal."""
    num = min(len(one), len(other))
    for start in range(0, num, _AT_ONCE):
        differ = one[start : min(num, start + _AT_ONCE)] != other[start : min(num, start + _AT_ONCE)]
        if differ.any():
            return start + int(np.flatnonzero(differ.reshape(len(differ), -1).any(axis=1))[0])
    return num


_ODD, _LOW = np.uint64(0x9E3779B97F4A7C15), np.uint64(2**63 - 1)
"""Multiplied by an odd number, ids stay apart."""


def token_keys(tokens: Ints, media: Sequence[tuple[str, int, int]]) -> Keys:
    """Of each token its id, but below 0 where it stands for a medium, by its hash: different images have equal ids.

    `media` are hashes in hex, first tokens and numbers of tokens.
    """
    keys = tokens.astype(np.int64)
    for sha256, start, length in media:
        mixed = keys[start : start + length].astype(np.uint64) * _ODD + np.uint64(int(sha256[:16], 16))
        keys[start : start + length] = -1 - (mixed & _LOW).astype(np.int64)
    return keys
