"""Collapsed stacks: how they are named, written and read."""

import sys

import pytest

from benchmarks.kit.sampler import collapsed, read_collapsed, stack_of


def test_a_stack_is_named_from_the_outermost_function_to_the_innermost() -> None:
    def inner() -> tuple[str, ...]:
        return stack_of(sys._getframe())

    names = inner()
    assert names[-1].endswith("test_a_stack_is_named_from_the_outermost_function_to_the_innermost.<locals>.inner")
    assert names[-2].endswith("test_a_stack_is_named_from_the_outermost_function_to_the_innermost")


def test_stacks_survive_being_written_and_read() -> None:
    stacks = {("main", "work"): 0.25, ("main",): 0.5}
    assert collapsed(stacks) == "main 500000\nmain;work 250000\n"
    assert read_collapsed(collapsed(stacks)) == pytest.approx(stacks)
