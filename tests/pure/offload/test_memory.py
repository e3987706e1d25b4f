"""What is untracked is looked through no more by the collector, is freed all the same, and nothing else is touched; and
the collector waits while large values are worked on."""

import gc
import weakref
from array import array
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from stenograph.offload.collector_pause import MOST_JOINED, UNCOLLECTED_FROM_BYTES, CollectorPause
from stenograph.offload.memory import trim_memory, untrack
from stenograph.offload.pool import CpuPool


@dataclass(frozen=True)  # without slots, so that a weak reference can tell when it is freed
class Record:
    parent: "Record | None"
    ids: "array[int]"
    others: list[object]


@pytest.fixture(autouse=True)
def _no_collector() -> Generator[None]:
    gc.disable()
    yield
    gc.enable()


def record(parent: Record | None = None) -> Record:
    return Record(parent=parent, ids=array("i", [1]), others=[])


def test_the_parts_that_are_named_are_untracked_and_no_others() -> None:
    one = record()
    assert all(gc.is_tracked(part) for part in (one, one.ids, one.others))
    untrack((one, one.ids, None))
    assert not gc.is_tracked(one)
    assert not gc.is_tracked(one.ids)
    assert gc.is_tracked(one.others)
    assert gc.is_tracked(Record)


def test_a_record_is_freed_with_its_last_reference_and_so_is_all_of_a_long_line() -> None:
    line = [record()]
    for _ in range(10_000):
        untrack((line[-1], line[-1].ids))
        line.append(record(line[-1]))
    first, last = weakref.ref(line[0]), line[-1]
    del line
    assert first() is not None
    del last
    assert first() is None


def test_trimming_can_be_done_at_any_time() -> None:
    trim_memory()
    trim_memory()


@pytest.mark.parametrize("one", [7, 2.5, "text", b"bytes", None, (), {"a": 1}], ids=repr)
def test_objects_that_the_garbage_collector_does_not_scan_are_left_alone(one: object) -> None:
    untrack((one, one))
    assert not gc.is_tracked(one)


def test_the_collector_is_off_until_the_last_one_of_a_pause_leaves() -> None:
    gc.enable()
    pause = CollectorPause()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(pause.held())
        second.enter_context(pause.held())
        assert not gc.isenabled()
        first.close()
        assert not gc.isenabled()
        second.close()
        assert gc.isenabled()


def test_a_pause_ends_however_many_overlap() -> None:
    gc.enable()
    pause = CollectorPause()
    held = deque([ExitStack()])
    held[0].enter_context(pause.held())
    for _ in range(MOST_JOINED):  # each comes before the one before it leaves
        held.append(ExitStack())
        held[-1].enter_context(pause.held())
        held.popleft().close()
    assert gc.isenabled()
    held.pop().close()
    assert gc.isenabled()


def test_a_collector_that_somebody_else_has_turned_off_stays_off() -> None:
    with CollectorPause().held():
        pass
    assert not gc.isenabled()


async def test_no_garbage_is_collected_while_a_worker_has_large_input() -> None:
    gc.enable()
    pool = CpuPool(1)
    assert await pool.run(gc.isenabled, num_bytes=UNCOLLECTED_FROM_BYTES - 1)
    assert not await pool.run(gc.isenabled, num_bytes=UNCOLLECTED_FROM_BYTES)
    assert gc.isenabled()
    pool.close()
