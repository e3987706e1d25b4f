"""An encoded reply is what was encoded, in pieces, or is refused; nothing inflates beyond its limit."""

import collections
import gzip
import itertools
import tracemalloc
import zlib
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import UpstreamInvalid
from stenograph.engine.http.inflate import MAX_ENCODINGS, MAX_GZIP_MEMBERS, PIECE_BYTES, Inflater

ENCODE = {
    "gzip": lambda body: gzip.compress(body, mtime=0),
    "x-gzip": lambda body: gzip.compress(body[:3], mtime=0) + gzip.compress(body[3:], mtime=0),
    "deflate": zlib.compress,
    "Deflate": lambda body: zlib.compress(body, wbits=-15),
}


def inflated(pieces: Iterable[bytes], encodings: str, max_bytes: int = 2**20) -> bytes:
    inflater = Inflater(encodings, max_bytes=max_bytes)
    out = [made for piece in pieces for made in inflater.feed(piece)]
    inflater.end()
    assert all(0 < len(made) <= PIECE_BYTES for made in out if encodings not in ("", "identity"))
    return b"".join(out)


def cut(body: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(body) + 1) for place in places} | {0, len(body)})
    return [body[start:end] for start, end in itertools.pairwise(ends)]


def law_of(pieces: Iterable[bytes], encodings: str, max_bytes: int = 2**20) -> str:
    with pytest.raises(UpstreamInvalid) as caught:
        inflated(pieces, encodings, max_bytes)
    return caught.value.law


@given(
    st.binary(max_size=400) | st.builds(lambda byte, num: byte * num, st.binary(max_size=3), st.integers(0, 300_000)),
    st.lists(st.sampled_from(sorted(ENCODE)), max_size=MAX_ENCODINGS),
    st.lists(st.integers(0, 10**6), max_size=20),
)
def test_what_was_encoded_comes_back_however_it_is_cut(body: bytes, names: list[str], places: list[int]) -> None:
    encoded = body
    for name in names:
        encoded = ENCODE[name](encoded)
    assert inflated(cut(encoded, places), ", ".join(names)) == body


@pytest.mark.parametrize("name", sorted(ENCODE))
def test_a_body_that_is_cut_anywhere_is_refused(name: str) -> None:
    encoded = ENCODE[name](b"a reply" * 9)
    for end in range(1, len(encoded)):
        if name == "x-gzip" and end == len(gzip.compress(b"a r", mtime=0)):
            continue  # a member that is whole
        assert law_of([encoded[:end]], name) == "content_encoding"


@given(st.sampled_from(sorted(ENCODE)), st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_any_bytes_are_refused_or_inflated(name: str, body: bytes, places: list[int]) -> None:
    try:
        inflated(cut(body, places), name)
    except UpstreamInvalid as error:
        assert error.law == "content_encoding"  # noqa: PT017 - both outcomes are right, and nothing else is


def test_an_empty_body_is_in_any_encoding() -> None:
    for name in ("gzip", "deflate", "br", "gzip, br"):
        assert inflated([], name) == b""


@pytest.mark.parametrize(
    ("pieces", "encodings"),
    [
        ([b"x"], "br"),
        ([b"x"], "gzip, zstd"),
        ([gzip.compress(b"")] * (MAX_GZIP_MEMBERS + 1), "gzip"),
        ([gzip.compress(b"") * (MAX_GZIP_MEMBERS + 1)], "gzip"),
        ([b"x"], ",".join(["gzip"] * (MAX_ENCODINGS + 1))),
        ([gzip.compress(b"x") + b"more"], "gzip"),
    ],
)
def test_an_encoding_that_is_not_known_or_has_no_end_is_refused(pieces: list[bytes], encodings: str) -> None:
    assert law_of(pieces, encodings) == "content_encoding"


@pytest.mark.parametrize("names", [["gzip"], ["deflate"], ["gzip", "gzip"]])
def test_a_bomb_is_refused_at_the_limit_and_takes_a_few_pieces_of_memory(names: list[str]) -> None:
    limit, encoded = 4 * 2**20, bytes(2**26)
    for name in names:
        encoded = ENCODE[name](encoded)
    inflater = Inflater(",".join(names), max_bytes=limit)
    tracemalloc.start()
    try:
        with pytest.raises(UpstreamInvalid, match=rf"{limit} bytes \(--max-reply-bytes\)") as caught:
            collections.deque(inflater.feed(encoded), maxlen=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.law == "reply_size"
    assert peak < 8 * PIECE_BYTES
