"""GIL-bound work for one result, in pieces on the event loop. Bounds no sum: of several works each makes a piece."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


async def in_pieces(work: Generator[None, None, T]) -> T:
    """The result of `work`, run piece by piece, each in an event-loop iteration of its own."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)
