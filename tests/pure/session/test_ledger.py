"""The ledger of a session: rows as they were told, overlaps, and what it costs."""

import tracemalloc
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.kinds import UNLABELLED, Label, StrandKind
from stenograph.session.ledger import (
    MAX_CLIENT_TEXTS,
    MAX_LISTED,
    MAX_ROWS,
    MAX_TEXT_CHARS,
    OTHER_TEXT,
    ROWS_AT_ONCE,
    LedgerRow,
    RequestLedger,
)

TITLE = Label(kind=StrandKind.TITLE, client="opencode", rule="oc-title")


def begin(ledger: RequestLedger, *, path: str = "/a", client: str = "b", received_s: float = 0.0) -> int:
    return ledger.begin(received_s=received_s, path=path, dialect="chat", client=client)


def overlaps(ledger: RequestLedger) -> list[tuple[int, ...]]:
    return [row.overlaps for row in ledger.rows(limit=MAX_ROWS)]


def test_a_row_has_what_was_noted() -> None:
    ledger = RequestLedger()
    first = ledger.begin(received_s=1.25, path="/sessions/a/v1/messages", dialect="messages", client="cli/2")
    second = ledger.begin(received_s=1.5, path="/sessions/a/v1/chat/completions", dialect="chat", client="cli/2")
    ledger.label(second, TITLE)
    running = LedgerRow(
        number=1,
        received_s=1.25,
        path="/sessions/a/v1/messages",
        dialect="messages",
        client="cli/2",
        label=UNLABELLED,
        overlaps=(2,),
    )
    assert ledger.rows(limit=1) == [running]
    ledger.end(
        second,
        ended_s=2.5,
        status=200,
        strand=0,
        turn=0,
        num_prompt_tokens=2**32 - 1,
        num_cached_tokens=7,
        num_sampled_tokens=8,
        rewrites=("drop-a", "late-system", "drop-a"),
    )
    ledger.end(first, ended_s=3.5, status=409, error="session_busy", strand=3, turn=70_000)
    assert ledger.rows(limit=9, after=1) == [
        LedgerRow(
            number=2,
            received_s=1.5,
            ended_s=2.5,
            path="/sessions/a/v1/chat/completions",
            dialect="chat",
            client="cli/2",
            label=TITLE,
            overlaps=(1,),
            status=200,
            strand=0,
            turn=0,
            num_prompt_tokens=2**32 - 1,
            num_cached_tokens=7,
            num_sampled_tokens=8,
            rewrites=("drop-a", "late-system"),
        )
    ]
    (row,) = ledger.rows(limit=1)
    assert (row.ended_s, row.status, row.error, row.strand, row.turn) == (3.5, 409, "session_busy", 3, 70_000)
    assert repr(ledger) == "<RequestLedger 2 requests, 0 running>"


def test_a_request_overlaps_those_that_ran_with_it() -> None:
    ledger = RequestLedger()
    begin(ledger)
    begin(ledger)
    ledger.end(1, ended_s=0.0)
    begin(ledger)
    ledger.end(2, ended_s=0.0)
    ledger.end(3, ended_s=0.0)
    begin(ledger)
    assert overlaps(ledger) == [(2,), (1, 3), (2,), ()]


def test_a_row_lists_the_first_overlaps_only() -> None:
    ledger = RequestLedger()
    for _ in range(MAX_LISTED + 3):
        begin(ledger)
    first, *_, last = overlaps(ledger)
    assert first == tuple(range(2, MAX_LISTED + 2))
    assert last == tuple(range(1, MAX_LISTED + 1))


def test_a_request_ends_once() -> None:
    ledger = RequestLedger()
    with pytest.raises(AssertionError, match="request 1 is not running"):
        ledger.end(1, ended_s=0.0)
    ledger.end(begin(ledger), ended_s=0.0)
    with pytest.raises(AssertionError, match="request 1 is not running"):
        ledger.end(1, ended_s=0.0)


def test_after_ten_thousand_requests_they_are_counted_only() -> None:
    ledger = RequestLedger()
    for number in range(1, MAX_ROWS + 11):
        assert begin(ledger) == number
        ledger.label(number, TITLE)
        ledger.end(number, ended_s=1.0, status=200)
    assert (ledger.num_requests, ledger.num_rows) == (MAX_ROWS + 10, MAX_ROWS)
    assert [row.number for row in ledger.rows(limit=5, after=MAX_ROWS - 2)] == [MAX_ROWS - 1, MAX_ROWS]


@pytest.mark.parametrize(
    ("limit", "after", "numbers"),
    [(2, 0, [1, 2]), (2, 2, [3]), (9, 0, [1, 2, 3]), (0, 0, []), (-1, 0, []), (2, 3, []), (2, 99, []), (2, -5, [1, 2])],
)
def test_rows_come_in_pages(limit: int, after: int, numbers: list[int]) -> None:
    ledger = RequestLedger()
    for _ in range(3):
        begin(ledger)
    assert [row.number for row in ledger.rows(limit, after)] == numbers


@pytest.mark.parametrize("lost", [0, 700, 1_500])
def test_all_rows_come_some_at_a_time(lost: int) -> None:
    ledger = RequestLedger()
    for number in (*range(1, 900 + 1), *range(901 + lost, 3_000 + 1)):
        row = LedgerRow(
            number=number,
            received_s=0.0,
            path="/a",
            dialect="chat",
            client="b",
            label=UNLABELLED,
            overlaps=(),
            ended_s=1.0,
        )
        ledger.restore(row)
    chunks = list(ledger.chunks())
    assert max(map(len, chunks)) == ROWS_AT_ONCE
    assert [row for chunk in chunks for row in chunk] == ledger.rows(MAX_ROWS)
    assert len(ledger.rows(MAX_ROWS)) == 3_000 - lost


def test_clients_cannot_fill_it_with_texts() -> None:
    ledger = RequestLedger()
    begin(ledger, path="é" * 10_000, client="x")
    for index in range(MAX_CLIENT_TEXTS):
        begin(ledger, path=f"/{index}", client="x")
    first, *_, last = ledger.rows(limit=MAX_ROWS)
    assert first.path == "é" * MAX_TEXT_CHARS
    assert (last.path, last.client) == (OTHER_TEXT, "x")


# A ledger beside a plain list of rows.


@dataclass(slots=True)
class PlainRow:
    """The model of a row."""

    client: str
    label: Label = UNLABELLED
    ended_s: float | None = None
    overlaps: list[int] = field(default_factory=list)
    rewrites: tuple[str, ...] = ()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from("abc")),
        st.tuples(st.just("label"), st.integers(0, 30)),
        st.tuples(st.just("end"), st.integers(0, 30), st.sets(st.sampled_from("xyz"))),
    ),
    max_size=60,
)


@given(steps=steps)
def test_a_ledger_has_the_rows_that_a_plain_list_has(steps: list[tuple[object, ...]]) -> None:
    ledger, plain, running = RequestLedger(), list[PlainRow](), list[int]()
    for step in steps:
        match step:
            case ("begin", str(client)):
                number = begin(ledger, client=client)
                plain.append(PlainRow(client=client, overlaps=running[:]))
                for other in running:
                    plain[other - 1].overlaps.append(number)
                running.append(number)
            case ("label", int(number)) if 1 <= number <= len(plain):
                ledger.label(number, TITLE)
                plain[number - 1].label = TITLE
            case ("end", int(number), set(rewrites)) if number in running:
                ledger.end(number, ended_s=float(number), rewrites=map(str, rewrites))
                running.remove(number)
                plain[number - 1].ended_s = float(number)
                plain[number - 1].rewrites = tuple(map(str, rewrites))
            case _:
                pass
    rows = ledger.rows(limit=100)
    assert [row.number for row in rows] == list(range(1, len(plain) + 1))
    assert plain == [
        PlainRow(
            client=row.client,
            label=row.label,
            ended_s=row.ended_s,
            overlaps=[*row.overlaps, *plain[row.number - 1].overlaps[MAX_LISTED:]],
            rewrites=row.rewrites,
        )
        for row in rows
    ]


# Its memory.


def quiet(ledger: RequestLedger, index: int) -> None:
    """A request of a usual agent: one rewrite, no overlap."""
    number = begin(ledger, path="/sessions/a/v1/messages", client="claude-cli/2.1.330 (external, sdk-cli)")
    ledger.label(number, TITLE)
    ledger.end(number, ended_s=1.0, status=200, turn=index, rewrites=("drop-billing",))


def crowd(ledger: RequestLedger, index: int) -> None:
    """A request of the worst client: 16 others at any time, always other texts, all rewrites."""
    number = begin(ledger, path=f"/{index}" + "\U0001f600" * 1000, client=f"{index}" + "\U0001f600" * 1000)
    ledger.label(number, TITLE)
    if index >= MAX_LISTED:
        rewrites = [f"rewrite {name}" for name in range(20)]
        ledger.end(number - MAX_LISTED, ended_s=1.0, status=400, error="invalid_request", rewrites=rewrites)


def bytes_of(num_requests: int, *, worst: bool) -> float:
    """Bytes that a request takes on average in a ledger of so many."""
    ask = crowd if worst else quiet
    ask(RequestLedger(), 0)  # what is made once, in the interpreter
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        ledger = RequestLedger()
        for index in range(num_requests):
            ask(ledger, index)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ledger.num_rows == num_requests
    return (after - before) / num_requests


@pytest.mark.parametrize("num_requests", [100, 1_000, MAX_ROWS])
def test_a_request_takes_at_most_200_bytes(num_requests: int) -> None:
    assert bytes_of(num_requests, worst=False) <= 200


def test_the_worst_request_takes_at_most_200_bytes() -> None:
    assert bytes_of(MAX_ROWS, worst=True) <= 200
