"""Memory for a set of weights: filled at once, and filled again with the next set of the same shape.

The cost of new memory for a set is the kernel's work for each page: 538 MB of float32 are 131,000 pages of 4 KiB, or
260 of 2 MiB; in a virtual machine that gives free pages back to its host, each of either is a fault of the host
besides. So pages are of 2 MiB where the system has them, and the memory of replaced weights is kept for the next ones.
Knows no tensors.
"""

import math
import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 32 * 2**20
"""A mapping's size, for arrays up to it."""
_ALIGNMENT = 64  # a cache line


class WeightMemory:
    """Hands out disjoint arrays, until it is cleared. Its mappings live as long as it, or an array in them."""

    def __init__(self) -> None:
        self._mappings: list[NDArray[np.uint8]] = []
        self._num_begun = 0
        self._rest = np.empty(0, np.uint8)

    def __repr__(self) -> str:
        return f"<WeightMemory {self.num_bytes} bytes in {len(self._mappings)} mappings>"

    @property
    def num_bytes(self) -> int:
        """The size of all mappings; pages never written to take no memory."""
        return sum(len(mapping) for mapping in self._mappings)

    def clear(self) -> None:
        """Hand out the same memory again. Whoever has an array of it must not read it any more."""
        self._num_begun = 0
        self._rest = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """An array of float32, C-contiguous. Raises MemoryError where there is no memory."""
        size = math.prod(shape) * np.dtype(np.float32).itemsize
        while size > len(self._rest):
            if self._num_begun == len(self._mappings):
                self._mappings.append(_mapped(max(size, CHUNK_BYTES)))
            self._rest = self._mappings[self._num_begun]
            self._num_begun += 1
        found, self._rest = self._rest[:size], self._rest[size + -size % _ALIGNMENT :]
        return found.view(np.float32).reshape(shape)


def _mapped(size: int) -> NDArray[np.uint8]:
    try:
        # Private: pages of 2 MiB of shared memory are another setting of the kernel, which is off as a rule.
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no mapping of {size} bytes") from error
    with suppress(OSError, AttributeError):  # a kernel, or a system, without pages of 2 MiB
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
