"""One HTTP/1.1 reply after the other from the bytes of a connection. Pure; knows no socket and no engine.

httptools parses; here are the rules it lacks: limits of a head and of a body's framing, interim replies,
replies without a body, the end of a body with its connection, and bytes after the reply.
Source: RFC 9112, sections 6.3 (length of a body) and 9.6 (the end of a connection).
"""

import httptools

from stenograph.engine.http.exchange import MAX_LINE_BYTES, Pairs

MAX_HEAD_BYTES = 4 * MAX_LINE_BYTES
"""A reply's head, or the bytes between two pieces of a chunked body."""


MANY_PIECES = 64
"""More pieces than this at once become one: an engine may send each byte as a chunk."""


class NotHttp(Exception):
    """The bytes received are no reply; the text says why."""


class ReplyCut(Exception):
    """The connection ended before the reply did; the text says where."""


class ResponseReader:
    """Reads replies. After an error, and after a reply without keep-alive, it reads nothing more."""

    __slots__ = (
        "_has_no_body",
        "_is_chunked",
        "_is_interim",
        "_num_unframed",
        "_parser",
        "_pieces",
        "_raw",
        "has_begun",
        "has_head",
        "has_more",
        "headers",
        "is_whole",
        "keeps_connection",
        "num_expected",
        "num_fed",
        "num_pending",
        "status",
    )

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        # What other clients accept as well (aiohttp's own set); none of it moves the end of a reply.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self.begin()

    def begin(self, *, is_head: bool = False) -> None:
        """Make ready for the next reply; it has no body if it is one to a HEAD request."""
        self._raw: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._has_no_body = is_head
        self._is_interim = False
        """Within an interim reply: 100 to 199."""
        self._is_chunked = False
        self._num_unframed = 0
        self.has_begun = False
        """Whether a byte of the reply has come."""
        self.has_head = False
        """Whether the reply's head is whole."""
        self.is_whole = False
        """Whether all of the reply has come."""
        self.has_more = False
        """Whether bytes came after the reply."""
        self.keeps_connection = False
        """Whether another request may follow the reply: it is whole, and nothing came after it."""
        self.num_pending = 0
        """Bytes of the body not taken yet."""
        self.num_fed = 0
        """Pieces of the body in the latest bytes."""
        self.num_expected: int | None = None
        self.status = 0
        self.headers: Pairs = ()
        """Names in lower case."""

    def __repr__(self) -> str:
        stage = "whole" if self.is_whole else "body" if self.has_head else "head"
        return f"<ResponseReader {stage} {self.status} {self.num_pending} bytes pending>"

    def take(self) -> list[bytes]:
        """The body's pieces received and not taken."""
        taken, self._pieces = self._pieces, []
        self.num_pending = 0
        return taken

    def close(self) -> None:
        """Nothing more comes. Earlier pieces can still be taken."""
        del self._parser  # it has bound methods of the reader: without a cycle both go at once

    def feed(self, data: bytes | memoryview) -> None:
        """Take the next bytes. Raises NotHttp; bytes after a whole reply set `has_more` instead."""
        if self.is_whole:
            if data:
                self._more_came()
            return
        self.has_begun = True
        self._num_unframed += len(data)
        num_before = len(self._pieces)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._more_came()
            if not self.is_whole:
                raise NotHttp(str(error.__context__ or error)) from error
        self.num_fed = len(self._pieces) - num_before
        if self.num_fed > MANY_PIECES:
            self._pieces[num_before:] = [b"".join(self._pieces[num_before:])]
        if self._num_unframed > MAX_HEAD_BYTES and not self.is_whole:
            if not self.has_head:
                raise NotHttp(f"its head has more than {MAX_HEAD_BYTES} bytes")
            if self._is_chunked:
                raise NotHttp(f"{MAX_HEAD_BYTES} bytes came between two pieces of its body")

    def end(self) -> None:
        """The connection was closed in order. Raises ReplyCut if that is not the reply's end."""
        if self.has_head and self.num_expected is None and not self._is_chunked:
            self.is_whole = True
        if not self.is_whole:
            raise ReplyCut("the connection was closed" + (" within its body" if self.has_head else ""))

    def _more_came(self) -> None:
        self.has_more, self.keeps_connection = True, False

    # -- called by the parser

    def on_message_begin(self) -> None:
        if self.is_whole:
            self._more_came()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # trailers are dropped
            self._raw.append((name, value))

    def on_headers_complete(self) -> None:
        if self.has_head:
            return
        self.status = status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._is_interim = True
            return
        headers: list[tuple[str, str]] = []
        self.headers = headers
        num_head = 0
        for raw_name, raw_value in self._raw:
            num_bytes = len(raw_name) + len(raw_value)
            num_head += num_bytes
            if num_bytes > MAX_LINE_BYTES or num_head > MAX_HEAD_BYTES:
                raise NotHttp("a header has too many bytes")
            name = raw_name.decode("latin-1").lower()
            value = raw_value.rstrip(b" \t").decode("utf-8", "surrogateescape")
            headers.append((name, value))
            if name == "content-length":
                self.num_expected = int(value)
            elif name == "transfer-encoding":
                self._settle_coding(value)
        if self._is_chunked:
            self.num_expected = None
        if self._has_no_body or status in (101, 204, 304):
            self.num_expected = 0
            self.is_whole = True
        self.has_head = True
        self._num_unframed = 0

    def on_body(self, body: bytes) -> None:
        if self.is_whole:
            self._more_came()
        elif self.has_head:
            self._pieces.append(body)
            self.num_pending += len(body)
            self._num_unframed = 0

    def on_message_complete(self) -> None:
        if self._is_interim:
            self._is_interim = False
            self._raw.clear()
        elif not self.has_more:
            # A reply without a body was whole at its head; only if the parser agrees, it can read another one.
            self.is_whole = True
            self.keeps_connection = self.status != 101 and self._parser.should_keep_alive()

    def _settle_coding(self, value: str) -> None:
        coding = value.strip().lower()
        if coding not in ("chunked", "identity") or (self._is_chunked and coding == "chunked"):
            raise NotHttp(f"its transfer-encoding is {coding[:40]!r}")
        self._is_chunked |= coding == "chunked"
