"""Work that holds the GIL wherever it runs, done on the loop: in pieces, between which the loop serves others.

A thread would not help: the loop would wait for the GIL at each of its own system calls (docs/performance.md). However
many have pieces to do, one of them does one in each pass of the loop. Knows nothing of what the pieces are.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

T = TypeVar("T")


class LoopShare:
    """The share of one loop that goes to work in pieces. First come, first served."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<LoopShare locked={self._turn.locked()}>"

    async def pieces(self, work: Iterator[T]) -> AsyncGenerator[T, None]:
        """What `work` gives, each piece in a pass of the loop in which no other work was done here."""
        while True:
            async with self._turn:  # over the pass: that nobody else begins in it is what it is for
                await asyncio.sleep(0)
                try:
                    piece = next(work)
                except StopIteration:
                    return
            yield piece
