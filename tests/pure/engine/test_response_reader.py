"""The reader of engines' replies agrees with the standard library's on what is well-formed, however it is cut, and
neither hangs nor breaks on what is not."""

import http.client
import io
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.engine.http.exchange import MAX_LINE_BYTES
from stenograph.engine.http.response import MAX_HEAD_BYTES, NotHttp, ReplyCut, ResponseReader

TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).map(lambda text: f"x-{text}")
VALUES = st.text("abcXYZ019 ;=,/\"'", max_size=30).map(str.strip)
FINAL = (200, 201, 400, 404, 500, 503, 204, 304)


@dataclass(frozen=True)
class Reply:
    """Bytes of a reply, and whether its end is that of its connection."""

    sent: bytes
    is_head: bool
    ends_with_connection: bool


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    interim = draw(st.lists(st.sampled_from([b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nx: y\r\n\r\n"])))
    status, is_head = draw(st.sampled_from(FINAL)), draw(st.booleans())
    lines = [f"{name}: {value}" for name, value in draw(st.lists(st.tuples(TOKENS, VALUES), max_size=6))]
    body = draw(st.binary(max_size=300))
    framing = "none" if status in (204, 304) else draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        lines.append(f"Content-Length: {len(body)}")
    elif framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
        body = _chunked(draw, body)
    elif framing == "none":
        body = b""
    head = "\r\n".join([f"HTTP/1.1 {status} Some Reason", *lines]).encode()
    sent = b"".join(interim) + head + b"\r\n\r\n" + (b"" if is_head else body)
    return Reply(sent, is_head, ends_with_connection=framing == "close" and not is_head)


def _chunked(draw: st.DrawFn, body: bytes) -> bytes:
    sizes = draw(st.lists(st.integers(1, 100), max_size=8))
    parts: list[bytes] = []
    for size in sizes:
        part, body = body[:size], body[size:]
        parts += [b"%x\r\n%b\r\n" % (len(part), part)] if part else []
    parts += [b"%X;ext=1\r\n%b\r\n" % (len(body), body)] if body else []
    return b"".join(parts) + draw(st.sampled_from([b"0\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n"]))


class _Socket:
    """A socket from which a reply is read."""

    def __init__(self, sent: bytes) -> None:
        self._file = io.BytesIO(sent)

    def makefile(self, _mode: str) -> io.BytesIO:
        return self._file


def by_the_library(reply: Reply) -> tuple[int, list[tuple[str, str]], bytes]:
    response = http.client.HTTPResponse(_Socket(reply.sent), method="HEAD" if reply.is_head else "GET")  # type: ignore[arg-type]
    response.begin()
    if response.status == 103:  # unlike 100 it ends here for the library
        rest = reply.sent.partition(b"HTTP/1.1 103 Early\r\nx: y\r\n\r\n")[2]
        return by_the_library(Reply(rest, reply.is_head, reply.ends_with_connection))
    return response.status, [(name.lower(), value) for name, value in response.getheaders()], response.read()


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[begin:end] for begin, end in itertools.pairwise(at)]


def read(reader: ResponseReader, data: Iterable[bytes]) -> bytes:
    """All that comes of a body."""
    body = b""
    for piece in data:
        reader.feed(memoryview(piece))
        body += b"".join(reader.take())
    return body


@given(reply=replies(), cuts=st.lists(st.integers(0), max_size=12))
def test_a_well_formed_reply_is_read_as_the_library_reads_it(reply: Reply, cuts: list[int]) -> None:
    reader = ResponseReader()
    reader.begin(is_head=reply.is_head)
    body = read(reader, pieces(reply.sent, cuts))
    assert reader.is_whole is not reply.ends_with_connection
    if reply.ends_with_connection:
        reader.end()
    assert reader.is_whole
    assert not reader.has_more
    assert (reader.status, list(reader.headers), body) == by_the_library(reply)


@given(reply=replies(), length=st.integers(0), cuts=st.lists(st.integers(0), max_size=4))
def test_a_reply_that_is_cut_anywhere_is_never_whole(reply: Reply, length: int, cuts: list[int]) -> None:
    reader = ResponseReader()
    reader.begin(is_head=reply.is_head)
    sent = reply.sent[: length % max(1, len(reply.sent))]
    read(reader, pieces(sent, cuts))
    if not (reply.ends_with_connection and reader.has_head):
        with pytest.raises(ReplyCut):
            reader.end()


@given(first=replies(), second=replies(), cuts=st.lists(st.integers(0), max_size=6))
def test_a_connection_that_is_kept_reads_the_next_reply(first: Reply, second: Reply, cuts: list[int]) -> None:
    reader = ResponseReader()
    reader.begin(is_head=first.is_head)
    read(reader, pieces(first.sent, cuts))
    if reader.is_whole and reader.keeps_connection:
        reader.begin(is_head=second.is_head)
        body = read(reader, pieces(second.sent, cuts))
        if second.ends_with_connection:
            reader.end()
        assert (reader.status, list(reader.headers), body) == by_the_library(second)


@given(reply=replies(), more=st.binary(min_size=1, max_size=20), at=st.integers(0))
def test_bytes_after_a_reply_leave_it_as_it_is_and_end_its_connection(reply: Reply, more: bytes, at: int) -> None:
    if reply.ends_with_connection:
        return
    for cuts in ([], [len(reply.sent)], [at]):
        reader = ResponseReader()
        reader.begin(is_head=reply.is_head)
        body = read(reader, pieces(reply.sent + more, cuts))
        assert (reader.status, list(reader.headers), body) == by_the_library(reply)
        assert reader.is_whole
        # Line breaks are no reply: nothing that follows can be taken for one because of them.
        assert not reader.keeps_connection or not more.strip(b"\r\n")


@given(
    reply=replies(),
    at=st.integers(0),
    num_removed=st.integers(0, 5),
    inserted=st.binary(max_size=8),
    cuts=st.lists(st.integers(0), max_size=6),
)
def test_what_is_malformed_ends_in_an_error_or_in_a_reply(
    reply: Reply, at: int, num_removed: int, inserted: bytes, cuts: list[int]
) -> None:
    at %= len(reply.sent) + 1
    reader = ResponseReader()
    reader.begin(is_head=reply.is_head)
    try:
        read(reader, pieces(reply.sent[:at] + inserted + reply.sent[at + num_removed :], cuts))
        reader.end()
    except (NotHttp, ReplyCut):
        pass
    else:
        assert reader.is_whole
        assert reader.status >= 100


@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0), max_size=6))
def test_any_bytes_end_in_an_error_or_in_a_reply(data: bytes, cuts: list[int]) -> None:
    reader = ResponseReader()
    try:
        read(reader, pieces(data, cuts))
        reader.end()
    except (NotHttp, ReplyCut):
        return
    assert reader.is_whole


ENDLESS = {
    "reason": (b"HTTP/1.1 200 ", b"a"),
    "name": (b"HTTP/1.1 200 OK\r\n", b"a"),
    "value": (b"HTTP/1.1 200 OK\r\na: ", b"a"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "extension": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;", b"a"),
    "trailer": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: ", b"a"),
    "trailers": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n"),
}


@pytest.mark.parametrize("step", [1000, 2**18])
@pytest.mark.parametrize("name", ENDLESS)
def test_what_does_not_end_is_refused_at_a_limit(name: str, step: int) -> None:
    begin, more = ENDLESS[name]
    reader = ResponseReader()
    reader.feed(begin)
    with pytest.raises(NotHttp):
        read(reader, itertools.repeat(more * (step // len(more)), 2 * MAX_HEAD_BYTES // step + 1))


@pytest.mark.parametrize("num_bytes", [MAX_LINE_BYTES - 1, MAX_LINE_BYTES])
def test_a_header_line_has_a_limit(num_bytes: int) -> None:
    reader = ResponseReader()
    sent = b"HTTP/1.1 204 OK\r\na: %b\r\n\r\n" % (b"b" * num_bytes)
    if num_bytes < MAX_LINE_BYTES:
        reader.feed(sent)
        assert reader.is_whole
    else:
        with pytest.raises(NotHttp, match="header"):
            reader.feed(sent)


@pytest.mark.parametrize("interims", [b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"])
def test_all_header_lines_together_have_a_limit_also_where_they_come_at_once(interims: bytes) -> None:
    line = b"a: %b\r\n" % (b"b" * 1000)
    for num, is_refused in ((MAX_HEAD_BYTES // 1001, False), (MAX_HEAD_BYTES // 1001 + 1, True)):
        reader, sent = ResponseReader(), b"%bHTTP/1.1 204 OK\r\n%b\r\n" % (interims, line * num)
        if is_refused:
            with pytest.raises(NotHttp, match="header"):
                reader.feed(sent)
        else:
            reader.feed(sent)
            assert reader.is_whole


@pytest.mark.parametrize(
    "head",
    [
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 3",
        "Content-Length: 3\r\nContent-Length: 4",
        "Content-Length: -1",
        "Content-Length: 99999999999999999999999",
    ],
)
def test_a_body_whose_length_is_not_certain_is_refused(head: str) -> None:
    reader = ResponseReader()
    with pytest.raises(NotHttp):
        reader.feed(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\nabc".encode())


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
)
def test_some_replies_are_a_connection_s_last(sent: bytes) -> None:
    reader = ResponseReader()
    reader.feed(sent)
    assert reader.is_whole
    assert not reader.keeps_connection


def test_doubled_headers_are_both_there() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nServer: a\r\nserver: b\r\nDate: c\r\ndate: d\r\nContent-Length: 0\r\n\r\n")
    assert list(reader.headers)[:4] == [("server", "a"), ("server", "b"), ("date", "c"), ("date", "d")]
    assert reader.keeps_connection


def test_pieces_that_come_at_once_are_few_whatever_the_chunks() -> None:
    """An engine may send each byte as a chunk: whoever takes them would go through each."""
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    text = bytes(range(32, 127)) * 50
    reader.feed(b"".join(b"1\r\n%c\r\n" % byte for byte in text))
    assert (reader.num_fed, reader.num_pending) == (len(text), len(text))
    assert reader.take() == [text]
    reader.feed(b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
    assert (reader.take(), reader.num_fed, reader.is_whole) == ([b"ab", b"c"], 2, True)
