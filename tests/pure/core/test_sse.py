"""Server-sent events are read the same however the network cuts them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.sse import EventReader, EventTooLarge, data_event

LINES = st.lists(
    st.one_of(
        st.binary(max_size=12).map(lambda text: b"data: " + text.replace(b"\r", b"").replace(b"\n", b"")),
        st.sampled_from([b"", b"", b": comment", b"event: x", b"data", b"data:", b"database: no", b"id: 7"]),
    ),
    max_size=20,
)


def expected(lines: list[bytes]) -> list[bytes]:
    """The specification, line by line, over a text that is whole."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines:
        name, _, value = line.partition(b":")
        if not line and data:
            events.append(b"\n".join(data))
            data = []
        elif name == b"data":
            data.append(value.removeprefix(b" "))
    return events


@given(
    lines=LINES,
    ends=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    bom=st.booleans(),
)
def test_where_the_stream_is_cut_changes_nothing(lines: list[bytes], ends: bytes, cuts: list[int], bom: bool) -> None:
    text = (b"\xef\xbb\xbf" if bom else b"") + b"".join(line + ends for line in lines)
    reader = EventReader(max_bytes=1000)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    found = [event for start, end in pairwise(places) for event in reader.feed(text[start:end])] + reader.end()
    assert found == expected(lines)


@given(st.binary(max_size=200), st.integers(1, 7))
def test_any_bytes_are_read(text: bytes, size: int) -> None:
    reader = EventReader(max_bytes=1000)
    for start in range(0, len(text), size):
        for event in reader.feed(text[start : start + size]):
            assert b"\r" not in event


def test_bare_carriage_returns_end_lines() -> None:
    reader = EventReader(max_bytes=100)
    assert reader.feed(b"data: a\r\rdata: b\r") == [b"a"]
    assert reader.feed(b"\ndata: c\r\n\r\n") == [b"b\nc"]


def test_what_we_write_is_read_back() -> None:
    assert EventReader(max_bytes=100).feed(data_event(b'{"a": 1}') + data_event(b"[DONE]")) == [b'{"a": 1}', b"[DONE]"]


def test_a_carriage_return_at_the_very_end_ends_its_line() -> None:
    reader = EventReader(max_bytes=100)
    assert reader.feed(b"data: a\r\r") == []
    assert reader.end() == [b"a"]
    assert EventReader(max_bytes=100).end() == []


def test_many_events_may_be_larger_than_one_may_be() -> None:
    reader = EventReader(max_bytes=100)
    assert sum(len(reader.feed(b"data: x\n\n" * 8)) for _ in range(20)) == 160


@pytest.mark.parametrize("text", [b"data: " + b"x" * 200, b"data: xxxx\n" * 50, b"data:\n" * 50, b"x" * 200])
def test_an_event_without_end_is_not_kept(text: bytes) -> None:
    reader = EventReader(max_bytes=100)

    def feed_all() -> None:
        for start in range(0, len(text), 7):
            reader.feed(text[start : start + 7])

    with pytest.raises(EventTooLarge, match="100 bytes"):
        feed_all()
