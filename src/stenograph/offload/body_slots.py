"""Few bodies at a time: while some large ones flow and are decoded, the others wait in their sockets.

Under load the stall is not one slow decode, it is one pass of the loop that serves every ready connection. A slot is
held around reading and decoding; whoever waits for one does not read, and flow control tells the other side to wait. A
body that stops flowing gives its slot up until it flows again, so a peer that stalls holds up nobody. Of the large ones
that are whole, one is decoded at a time; small ones are there with one read, and a few of them are served in one pass
of the loop. Knows nothing of HTTP.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

LARGE_BODY_BYTES = 64 * 1024
"""Smaller bodies need no slot: they arrive in one or two reads."""

DEFAULT_BODY_SLOTS = 2

STALL_S = 0.05
"""A body that brings nothing for this long gives up its slot."""

SERVED_IN_A_PASS = 8
"""Small bodies that are served in one pass of the loop: each takes about half a millisecond, to the next wait."""


class BodySlots:
    """At most `num_slots` bodies flow at a time, and one is decoded. First come, first served."""

    def __init__(self, num_slots: int) -> None:
        self._free = asyncio.Semaphore(num_slots)
        self._decoder = asyncio.Semaphore(1)
        self._num_slots = num_slots
        self._passes = _Passes(SERVED_IN_A_PASS)

    def __repr__(self) -> str:
        return f"<BodySlots {self._num_slots}, locked={self._free.locked()}>"

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator["Slot"]:
        """Hold a slot for one body."""
        slot = Slot(self._free)
        await slot.take()
        try:
            yield slot
        finally:
            slot.give_up()

    async def small(self) -> None:
        """Wait for the pass of the loop in which this small body is served."""
        await self._passes.enter()

    @asynccontextmanager
    async def decoding(self) -> AsyncGenerator[None]:
        """Decode one large body. A decoder holds the GIL: two at once would only hold the loop for longer."""
        async with self._decoder:
            yield


class _Passes:
    """So many are served in one pass of the loop, in the order in which they came. Nobody holds what could be lost."""

    def __init__(self, num_in_a_pass: int) -> None:
        self._num_in_a_pass = num_in_a_pass
        self._num_left = num_in_a_pass
        self._num_called = 0
        """Of those who waited: they are served in the next pass, and whoever comes before that waits behind them."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_pass, loop)
        if self._num_left and not self._waiting and not self._num_called:
            self._num_left -= 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        was_used = self._num_called or self._num_left < self._num_in_a_pass
        self._num_left = self._num_in_a_pass - self._num_called
        self._num_called = 0
        while self._waiting and self._num_called < self._num_in_a_pass:
            waiter = self._waiting.popleft()
            if not waiter.done():  # cancelled
                waiter.set_result(None)
                self._num_called += 1
        self._is_counting = bool(was_used or self._num_called)
        if self._is_counting:
            loop.call_soon(self._next_pass, loop)


class Slot:
    """One body's place among those that flow."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free = free
        self._is_held = False

    async def take(self) -> None:
        """Wait for the slot. Does nothing if it is held."""
        if not self._is_held:
            await self._free.acquire()
            self._is_held = True

    def give_up(self) -> None:
        """Let another body flow. Does nothing if the slot is not held."""
        if self._is_held:
            self._is_held = False
            self._free.release()

    async def piece(self, read: Awaitable[T]) -> T:
        """Wait for the next piece of the body, without the slot if it is long in coming."""
        stall = asyncio.get_running_loop().call_later(STALL_S, self.give_up)
        try:
            piece = await read
        finally:
            stall.cancel()
        await self.take()
        return piece
