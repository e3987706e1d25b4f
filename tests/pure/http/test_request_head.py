"""The limits of a request's head: what is refused depends on the bytes, and not on how they are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import HeadersTooLarge, InvalidRequest, StenographError, UriTooLong
from stenograph.http.served_request import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES, RequestHead

LINE = b"GET /health HTTP/1.1\r\n"


def fed(pieces: list[bytes]) -> tuple[bytes, bytes] | type[StenographError] | None:
    """What becomes of bytes that come in these pieces: a head and all that follows it, an error, or nothing yet."""
    head = RequestHead()
    for index, piece in enumerate(pieces):
        try:
            taken = head.feed(piece)
        except StenographError as error:
            return type(error)
        if taken is not None:
            return taken[0], bytes(taken[1]) + b"".join(pieces[index + 1 :])
    return None


def headers(num: int, *, num_bytes: int = 1) -> bytes:
    return b"".join(b"h%d: %b\r\n" % (index, b"v" * num_bytes) for index in range(num))


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (LINE + headers(MAX_HEADERS) + b"\r\n", None),
        (LINE + headers(MAX_HEADERS + 1) + b"\r\n", HeadersTooLarge),
        (LINE + headers(MAX_HEADERS + 1), HeadersTooLarge),
        (LINE + b"a: " + b"x" * (MAX_HEAD_BYTES - len(LINE) - 7) + b"\r\n\r\n", None),
        (LINE + b"a: " + b"x" * (MAX_HEAD_BYTES - len(LINE) - 6) + b"\r\n\r\n", HeadersTooLarge),
        (LINE + b"x" * MAX_HEAD_BYTES, HeadersTooLarge),
        (b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * (MAX_URL_BYTES - 1)), None),
        (b"GET /%b HTTP/1.1\r\n\r\n" % (b"x" * MAX_URL_BYTES), UriTooLong),
        (b"GET   /%b" % (b"x" * MAX_URL_BYTES), UriTooLong),
        (b"\x16\x03\x01", InvalidRequest),
        (b"GET" + b" " * 100, InvalidRequest),
        (b"A" * 100, InvalidRequest),
    ],
)
def test_a_head_at_its_limits_is_taken_and_one_beyond_them_is_refused_before_it_is_whole(
    data: bytes, verdict: type[StenographError] | None
) -> None:
    for pieces in ([data], [data[index : index + 1] for index in range(len(data))]):
        assert fed(pieces) == ((data, b"") if verdict is None else verdict)


lines = st.one_of(
    st.sampled_from([b"GET /health HTTP/1.1", b"host: x", b"", b"\r", b"\n", b" ", b"\x16", b"get / HTTP/1.1"]),
    st.builds(lambda num: b"x" * num, st.sampled_from([1, 63, 64, MAX_URL_BYTES, MAX_HEAD_BYTES - 30])),
    st.builds(lambda num: b"GET /" + b"x" * num, st.integers(MAX_URL_BYTES - 3, MAX_URL_BYTES + 3)),
    st.builds(lambda num: headers(num)[:-2], st.integers(MAX_HEADERS - 3, MAX_HEADERS + 3)),
)
heads = st.lists(lines, min_size=1, max_size=6).map(b"\r\n".join) | st.binary(max_size=200)


@given(data=st.data(), start=st.sampled_from([b"", LINE, b"\r\n" + LINE]), tail=st.sampled_from([b"", b"\r\n\r\nbody"]))
def test_however_a_head_is_cut_the_verdict_is_the_same(data: st.DataObject, start: bytes, tail: bytes) -> None:
    head = start + data.draw(heads) + tail
    cuts = sorted(data.draw(st.lists(st.integers(0, len(head)), max_size=12)))
    pieces = [head[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(head)])]
    assert fed(pieces) == fed([head])
