"""What is untracked is looked through no more by the collector, is freed all the same, and nothing else is touched."""

import gc
import weakref
from array import array
from collections.abc import Generator
from dataclasses import dataclass

import pytest

from stenograph.offload.memory import trim_memory, untrack


class Other:
    """Something that a record is not made of."""


@dataclass(frozen=True)  # without slots, so that a weak reference can tell when it is freed
class Record:
    parent: "Record | None"
    parts: tuple[object, ...]


@pytest.fixture(autouse=True)
def _no_collector() -> Generator[None]:
    gc.disable()
    yield
    gc.enable()


def record(parent: Record | None = None) -> Record:
    return Record(parent=parent, parts=(array("i", [1]), {"ids": [array("d", [0.5])]}, Other()))


def reached(one: Record) -> list[object]:
    ids, kept, _ = one.parts
    assert isinstance(kept, dict)
    return [one, one.parts, ids, kept, kept["ids"], kept["ids"][0]]


def test_a_record_is_untracked_and_what_is_none_is_not() -> None:
    one = record()
    assert all(gc.is_tracked(part) for part in reached(one))
    untrack(one)
    assert not any(gc.is_tracked(part) for part in reached(one))
    assert gc.is_tracked(one.parts[2])
    assert gc.is_tracked(Record)


def test_it_is_freed_with_its_last_reference_and_so_is_all_of_a_long_line() -> None:
    line = [record()]
    untrack(line[0])
    for _ in range(10_000):
        line.append(record(line[-1]))
        untrack(line[-1])
    first, last = weakref.ref(line[0]), line[-1]
    del line
    assert first() is not None
    del last
    assert first() is None


def test_a_record_that_was_untracked_before_is_not_entered() -> None:
    parent = record()
    untrack(parent)
    _, kept, _ = parent.parts
    assert isinstance(kept, dict)
    kept["new"] = [[]]
    untrack(record(parent))
    assert gc.is_tracked(kept["new"])


def test_trimming_can_be_done_at_any_time() -> None:
    trim_memory()
    trim_memory()


@pytest.mark.parametrize("one", [7, 2.5, "text", b"bytes", None, (), {"a": 1}], ids=repr)
def test_objects_that_the_garbage_collector_does_not_scan_are_left_alone(one: object) -> None:
    untrack(one)
    assert not gc.is_tracked(one)
