"""Values that are made once for all who ask, and kept within a bound."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.offload.kept_values import KeptValues


class Maker:
    """Makes a value when it is let to, and counts how often it was asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_let = asyncio.Event()
        self.fails = False

    async def make(self) -> int:
        self.num_asked += 1
        number = self.num_asked
        await self.is_let.wait()
        if self.fails:
            raise ValueError(number)
        return number


def kept(most: int = 10) -> KeptValues[str, int]:
    return KeptValues(most=most, weigh=lambda value: value)


async def begun(*asking: "asyncio.Task[int]") -> None:
    """Let tasks run until each of them waits."""
    for _ in range(3 * len(asking)):
        await asyncio.sleep(0)


async def test_of_those_who_ask_at_the_same_time_one_makes_the_value() -> None:
    values, maker = kept(), Maker()
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(values.get("a", maker.make)) for _ in range(5)]
        await begun(*asking)
        maker.is_let.set()
    assert [task.result() for task in asking] == [1] * 5
    assert (await values.get("a", maker.make), values.find("a"), values.find("b")) == (1, 1, None)
    assert (maker.num_asked, values.weight, len(values)) == (1, 1, 1)


async def test_a_maker_that_is_cancelled_leaves_it_to_the_next() -> None:
    values, maker = kept(), Maker()
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(values.get("a", maker.make)) for _ in range(3)]
        await begun(*asking)
        asking[0].cancel()
        await begun(*asking)
        maker.is_let.set()
    assert asking[0].cancelled()
    assert [task.result() for task in asking[1:]] == [2, 2]


async def test_a_failure_is_that_of_whoever_made_it() -> None:
    values, maker = kept(), Maker()
    maker.fails = True
    maker.is_let.set()
    for number in (1, 2):
        with pytest.raises(ValueError, match=str(number)):
            await values.get("a", maker.make)
    assert (len(values), values.weight) == (0, 0)


async def test_what_is_dropped_while_it_is_made_is_not_kept() -> None:
    values, maker = kept(), Maker()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(values.get("a", maker.make))
        waiting = tasks.create_task(values.get("a", maker.make))
        await begun(first, waiting)
        values.drop("a")
        later = tasks.create_task(values.get("a", maker.make))
        await begun(later)
        maker.is_let.set()
    assert [task.result() for task in (first, waiting, later)] == [1, 1, 2]
    assert (values.find("a"), values.weight) == (2, 2)


@given(asked=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_the_values_asked_for_last_are_kept_within_the_bound(asked: list[tuple[str, int]]) -> None:
    async def check() -> None:
        values, model = kept(), dict[str, int]()
        for key, weight in asked:

            async def make(weight: int = weight) -> int:
                return weight

            value = model.pop(key, weight)
            assert await values.get(key, make) == value
            if value <= 10:
                model[key] = value
            while sum(model.values()) > 10:
                del model[next(iter(model))]
            assert (values.weight, len(values)) == (sum(model.values()), len(model))
        values.drop_where(lambda value: value % 2 == 0)
        assert {key: values.find(key) for key in model} == {k: v if v % 2 else None for k, v in model.items()}

    asyncio.run(check())
