"""What is untracked is looked through no more by the collector, is freed all the same, and nothing else is touched."""

import gc
import weakref
from array import array
from collections.abc import Generator
from dataclasses import dataclass

import pytest

from stenograph.offload.memory import trim_memory, untrack


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
