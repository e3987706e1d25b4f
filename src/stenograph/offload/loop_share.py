"""Runs GIL-bound work on the event loop, in pieces, so the loop serves others in between.

A thread would not help: the loop would wait for the GIL at each of its own system calls (docs/performance.md). At most
one piece runs in each event-loop iteration, however many callers have work. Knows nothing of the pieces' content.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

T = TypeVar("T")


class LoopShare:
    """The share of one loop for work in pieces. First come, first served."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<LoopShare locked={self._turn.locked()}>"

    async def pieces(self, work: Iterator[T]) -> AsyncGenerator[T, None]:
        """Yield the pieces of `work`, each made in an event-loop iteration of its own."""
        while True:
            async with self._turn:  # held over the iteration, so that no other piece runs in it
                await asyncio.sleep(0)
                try:
                    piece = next(work)
                except StopIteration:
                    return
            yield piece
