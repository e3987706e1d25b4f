"""Costly values: each is made once, however many ask for it at the same time, and the latest are kept.

Owns the values and their bound; knows neither their kind nor for how long they are true: whoever knows drops them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class _KeptPlace(Generic[V]):
    """A value's place. `made` is empty until it is made; `settled` is set once it is, or has failed."""

    settled: asyncio.Event = field(default_factory=asyncio.Event)
    made: tuple[V, ...] = ()
    weight: int = 0


class KeptValues(Generic[K, V]):
    """The values last asked for, of at most `most` weight together."""

    def __init__(self, *, most: int, weigh: Callable[[V], int]) -> None:
        self._most = most
        self._weigh = weigh
        self._places: OrderedDict[K, _KeptPlace[V]] = OrderedDict()
        self.weight = 0
        """The weight of all kept values."""

    def __repr__(self) -> str:
        return f"<KeptValues {len(self._places)} of weight {self.weight}>"

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: K) -> V | None:
        """A kept value."""
        place = self._places.get(key)
        if place is None or not place.made:
            return None
        self._places.move_to_end(key)
        return place.made[0]

    async def get(self, key: K, make: Callable[[], Awaitable[V]]) -> V:
        """The value of a key. Of several callers at a time one makes it; where this one fails or is cancelled, it alone
        does, and the next one makes it. Raises as `make` does."""
        while (place := self._places.get(key)) is not None:
            if place.made:
                self._places.move_to_end(key)
                return place.made[0]
            await place.settled.wait()
            if place.made:  # also if it was dropped meanwhile, or is too heavy to be kept
                return place.made[0]
        place = self._places[key] = _KeptPlace[V]()
        try:
            value = await make()
            place.made = (value,)
        except BaseException:
            self._forget(key, place)
            raise
        finally:
            place.settled.set()
        if self._places.get(key) is place:
            self._keep(key, place, self._weigh(value))
        return value

    def drop(self, key: K) -> None:
        """Forget a value, also one being made: a call from now on gets another."""
        if (place := self._places.get(key)) is not None:
            self._forget(key, place)

    def drop_where(self, is_over: Callable[[V], bool]) -> None:
        """Forget the values for which `is_over` holds."""
        for key, place in list(self._places.items()):
            if place.made and is_over(place.made[0]):
                self._forget(key, place)

    def _keep(self, key: K, place: _KeptPlace[V], weight: int) -> None:
        """Keep a value in place of those asked for longest ago; one too heavy by itself is not kept."""
        if weight > self._most:
            self._forget(key, place)
            return
        place.weight = weight
        self.weight += weight
        self._places.move_to_end(key)
        while self.weight > self._most:
            oldest = next(other for other, old in self._places.items() if old.made)
            self._forget(oldest, self._places[oldest])

    def _forget(self, key: K, place: _KeptPlace[V]) -> None:
        if self._places.get(key) is place:
            del self._places[key]
            self.weight -= place.weight
