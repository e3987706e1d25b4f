"""Limits how many large bodies are read and decoded at a time; the others wait in their sockets.

Under load the stall is not one slow decode, but one event-loop iteration with every ready connection in it. A slot is
held around reading and decoding; a waiter for one does not read, and flow control makes the other side wait. A slot
asks for a least rate: a slower body has none and needs none, because it costs the loop nothing; so a stalled or
dripping peer delays no other. Of the whole large ones, one is decoded at a time, or in one iteration; small ones arrive
with one read, and a few of them are served in one iteration. Knows nothing of HTTP.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")

LARGE_BODY_BYTES = 64 * 1024
"""Smaller bodies need no slot: they arrive in one or two reads."""

DEFAULT_BODY_SLOTS = 2

STALL_S = 0.05
"""A body below the least rate for this long gives up its slot."""

LEAST_BYTES_PER_S = 256 * 1024
"""Slower bodies flow without a slot. A hundred of them together bring 25 MiB/s, a tenth of one decoder's capacity."""

SERVED_IN_A_PASS = 8
"""Small bodies served in one event-loop iteration: each takes about half a millisecond, to the next wait."""


class Source(Protocol):
    """A body in the making: gathers its pieces, and hands them over a large part at a time."""

    @property
    def num_pending(self) -> int:
        """Bytes received, and not handed over yet."""
        ...

    def hand_over(self) -> None:
        """Let the reader have the received bytes, at the latest once more come."""
        ...


class BodySlots:
    """At most `num_slots` bodies flow fast at a time, and one is decoded. First come, first served."""

    def __init__(self, num_slots: int) -> None:
        self._free = asyncio.Semaphore(num_slots)
        self._decoder = asyncio.Semaphore(1)
        self._num_slots = num_slots
        self.num_held = 0
        """Slots held now; counted by them."""
        self.small = Passes(SERVED_IN_A_PASS)
        """To wait for the event-loop iteration of a small body."""
        self.large = Passes(1)
        """To wait for the event-loop iteration of a large body with a slot, decoded on the loop: bodies flowing side by
        side are whole in the same one."""

    def apart(self) -> "BodySlots":
        """As many slots for bodies of another kind: these wait for none of those; small ones share its iterations."""
        slots = BodySlots(self._num_slots)
        slots.small = self.small
        return slots

    def __repr__(self) -> str:
        return f"<BodySlots {self._num_slots}, {self.num_held} held>"

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator["Slot"]:
        """A slot for one body: not held at first, and released at exit."""
        slot = Slot(self, self._free)
        try:
            yield slot
        finally:
            slot.give_up()

    @asynccontextmanager
    async def decoding(self) -> AsyncGenerator[None]:
        """Decode one large body. A decoder holds the GIL: two at once would only hold the loop for longer."""
        async with self._decoder:
            yield


class Passes:
    """Serves a few waiters, or one, in each event-loop iteration, in order. A waiter holds nothing that can leak."""

    def __init__(self, num_in_a_pass: int) -> None:
        self._num_in_a_pass = num_in_a_pass
        self._num_left = num_in_a_pass
        self._num_called = 0
        """Waiters served in the next iteration; later ones queue behind them."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False

    async def __call__(self) -> None:
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


def _most_ahead() -> float:
    """Most bytes counted beyond the least rate: after `STALL_S` without any, none are left."""
    return STALL_S * LEAST_BYTES_PER_S


class Slot:
    """One body's place among the fast ones: held while it brings more than the least rate."""

    def __init__(self, owner: BodySlots, free: asyncio.Semaphore) -> None:
        self._owner = owner
        self._free = free
        self.is_held = False
        self._stall: asyncio.TimerHandle | None = None
        self._num_ahead = 0.0
        """Bytes beyond the least rate at `_since`."""
        self._since = 0.0
        self._num_counted = 0
        """Bytes of the piece under way already counted in it."""

    async def take(self) -> None:
        """Wait for the slot. Does nothing if it is held."""
        if not self.is_held:
            await self._free.acquire()
            self.is_held = True
            self._owner.num_held += 1
            self._num_ahead = _most_ahead()

    def give_up(self) -> None:
        """Let another body flow. Does nothing if the slot is not held."""
        if self.is_held:
            self.is_held = False
            self._owner.num_held -= 1
            self._free.release()

    async def piece(self, read: Awaitable[T], size: Callable[[T], int], source: Source | None = None) -> T:
        """Wait for the next piece of the body, of `size(piece)` bytes, and for the slot if it comes fast.

        While a piece is long in coming the slot is given up; one that `source` gathers is, while too little comes.
        """
        loop = asyncio.get_running_loop()
        self._since, self._num_counted = loop.time(), 0
        if self.is_held:
            self._stall = loop.call_later(self._num_ahead / LEAST_BYTES_PER_S, self._check, loop, source)
        try:
            piece = await read
        finally:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None
        num_ahead = max(0.0, self._num_ahead - (loop.time() - self._since) * LEAST_BYTES_PER_S)
        if not num_ahead:
            self.give_up()
        num_ahead += size(piece) - self._num_counted
        self._num_ahead = min(num_ahead, _most_ahead())
        if num_ahead > self._num_ahead:
            await self.take()
        return piece

    def _check(self, loop: asyncio.AbstractEventLoop, source: Source | None) -> None:
        """Its lead is used up: wait on for as long as the bytes gathered meanwhile by `source` allow, or give it up."""
        num_pending = 0 if source is None else source.num_pending
        self._num_ahead = min(num_pending - self._num_counted, _most_ahead())
        self._since, self._num_counted = loop.time(), num_pending
        if self._num_ahead > 0:
            self._stall = loop.call_later(self._num_ahead / LEAST_BYTES_PER_S, self._check, loop, source)
            return
        self._stall = None
        self.give_up()
        if source is not None:
            source.hand_over()
