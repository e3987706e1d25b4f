"""Deficit round robin: tokens go by shares, nobody is lost, and a tenant that may have none keeps nobody waiting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.tenants.fair_queue import FairQueue


@pytest.mark.parametrize(("share", "tokens"), [(1.0, 10), (1.0, 1000), (3.0, 10), (0.5, 70)])
def test_tokens_go_by_shares_whatever_a_turn_costs(share: float, tokens: int) -> None:
    queue, given_to = FairQueue[str](), {"one": 0.0, "other": 0.0}
    cost = {"one": float(tokens), "other": 100.0}
    for _ in range(5000):
        queue.push("one", "one", share=share, cost=cost["one"], is_behind=False)
        queue.push("other", "other", share=1.0, cost=cost["other"], is_behind=False)
    while queue.num_of("one") and queue.num_of("other"):
        name = queue.pop(lambda _: True)
        assert name is not None
        given_to[name] += cost[name]
    slack = 2 * (cost["one"] + cost["other"] * share)
    assert abs(given_to["one"] - share * given_to["other"]) <= slack


def test_who_may_not_have_one_waits_and_keeps_nobody() -> None:
    queue = FairQueue[int]()
    for number, name in zip(range(6), itertools.cycle(["held", "free"]), strict=False):
        queue.push(name, number, share=1.0, cost=10.0, is_behind=True)
    assert [queue.pop(lambda name: name == "free") for _ in range(4)] == [1, 3, 5, None]
    assert [queue.pop(lambda _: True) for _ in range(4)] == [0, 2, 4, None]


def test_a_debt_is_paid_before_the_next_turn_and_a_lone_tenant_still_goes_on() -> None:
    queue = FairQueue[str]()
    for _ in range(3):
        queue.push("debtor", "debtor", share=1.0, cost=10.0, is_behind=False)
    queue.charge("debtor", 1e6)
    for _ in range(40):
        queue.push("other", "other", share=1.0, cost=10.0, is_behind=False)
    assert {queue.pop(lambda _: True) for _ in range(40)} == {"other"}
    assert [queue.pop(lambda _: True) for _ in range(4)] == ["debtor"] * 3 + [None]


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["push", "pop", "charge", "remove"]), st.floats(0.1, 1e5)),
        max_size=60,
    )
)
def test_nobody_is_lost_and_each_line_keeps_its_order(steps: list[tuple[str, str, float]]) -> None:
    queue, lines, number = FairQueue[tuple[str, int]](), {name: list[int]() for name in "abc"}, itertools.count()
    for name, step, size in steps:
        if step == "push":
            item = next(number)
            lines[name].append(item)
            queue.push(name, (name, item), share=size, cost=size, is_behind=size > 1)
        elif step == "charge":
            queue.charge(name, size - 50)
        elif step == "remove" and lines[name]:
            queue.remove(name, (name, lines[name].pop()))
        elif step == "pop":
            found = queue.pop(lambda one, barred=name: one != barred)
            others = [one for one in "abc" if one != name and lines[one]]
            assert (found is None) is (not others)
            if found is not None:
                assert lines[found[0]].pop(0) == found[1]
        assert queue.num_waiting == sum(map(len, lines.values()))
