"""The free blocks of the KV store, handed out in long runs. Pure.

Attention costs a product for each contiguous span of a sequence, so few, long runs are cheapest. Knows nothing of the
blocks' content.
"""

import re

_RUN = re.compile(b"\1+")


class FreeBlocks:
    """A map of the free blocks: a byte for each, to find runs by searching bytes."""

    def __init__(self, num_blocks: int) -> None:
        self._is_free = bytearray(b"\1") * num_blocks
        self._num_free = num_blocks

    def __repr__(self) -> str:
        return f"<FreeBlocks {self._num_free} of {len(self._is_free)}>"

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block: int) -> bool:
        return self._is_free[block] == 1

    def give(self, block: int) -> None:
        """Take back a taken block."""
        assert block not in self, f"block {block} is free already"
        self._is_free[block] = 1
        self._num_free += 1

    def take(self, num_blocks: int, *, after: int | None) -> list[range]:
        """Take so many, as runs in the order of their use; there must be as many.

        The first run is right after the block `after` if it is free. Any other begins inside the longest free run, with
        as much space before it, for the sequence ending there, as after it.
        """
        assert num_blocks <= self._num_free, f"{num_blocks} blocks of {self!r}"
        runs: list[range] = []
        begin = len(self._is_free) if after is None else after + 1
        while num_blocks:
            if run := self._run_at(begin, num_blocks):
                self._is_free[run.start : run.stop] = bytes(len(run))
                self._num_free -= len(run)
                num_blocks -= len(run)
                runs.append(run)
            if num_blocks:
                begin = self._roomy_place(num_blocks)
        return runs

    def _run_at(self, begin: int, num_blocks: int) -> range:
        """The free blocks from `begin` on, at most so many."""
        stop = self._is_free.find(0, begin, begin + num_blocks)
        return range(begin, min(begin + num_blocks, len(self._is_free)) if stop < 0 else stop)

    def _roomy_place(self, num_blocks: int) -> int:
        """Start of such a run; there is a free block."""
        begin, end = max((run.span() for run in _RUN.finditer(self._is_free)), key=lambda span: span[1] - span[0])
        return begin + max(0, end - begin - num_blocks) // 2

    def check(self) -> None:
        """Raises AssertionError where the count differs from the map's."""
        assert self._num_free == self._is_free.count(1), f"{self!r} counts wrong"
