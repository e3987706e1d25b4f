"""Inflates an engine's encoded reply in pieces, and never to more than a limit. Pure.

A megabyte can inflate to a gigabyte. No piece is larger than `PIECE_BYTES`, so that a reader
can serve others in between, and keeps only its share. Laws: `content_encoding`, `reply_size`.
"""

import zlib
from collections.abc import Iterator
from typing import Protocol

from stenograph.core.errors import UpstreamInvalid

PIECE_BYTES = 2**18
"""Largest piece of output at once: under a millisecond's work."""
MAX_GZIP_MEMBERS = 64
MAX_ENCODINGS = 4
"""One over the other; each costs its own pass."""
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def too_large(max_bytes: int, what: str = "sent a reply") -> UpstreamInvalid:
    """The error of a reply beyond the size limit."""
    return UpstreamInvalid("reply_size", f"the engine {what} of more than {max_bytes} bytes (--max-reply-bytes)")


class Inflater:
    """Undoes the `Content-Encoding` of one body. Methods raise UpstreamInvalid."""

    def __init__(self, encodings: str, *, max_bytes: int) -> None:
        """`encodings` is the header's value, several joined by commas. Each may bring forth `max_bytes`."""
        names = [name for name in encodings.lower().replace(" ", "").split(",") if name not in ("", "identity")]
        if len(names) > MAX_ENCODINGS:
            raise UpstreamInvalid("content_encoding", f"the engine encoded its reply {len(names)} times")
        self._codings = [_Coding(name, max_bytes) for name in reversed(names)]

    def __repr__(self) -> str:
        return f"<Inflater {self._codings}>"

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Inflate the next bytes of the body."""
        yield from self._through(0, data)

    def end(self) -> None:
        """The body is whole."""
        for coding in self._codings:
            coding.end()

    def _through(self, depth: int, data: bytes) -> Iterator[bytes]:
        if depth == len(self._codings):
            yield data
            return
        for piece in self._codings[depth].feed(data):
            yield from self._through(depth + 1, piece)


class _Member(Protocol):
    """The object from `zlib.decompressobj`; its class has no public name."""

    @property
    def eof(self) -> bool: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Coding:
    """One encoding: gzip with all its members, or deflate with or without its zlib header."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_members = 0
        self._held = b""
        self._member: _Member | None = None

    def __repr__(self) -> str:
        return f"<_Coding {self._name} {self._num_bytes} bytes>"

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._name not in _WBITS:
            detail = f"the engine encoded its reply as {self._name[:40]!r}, unasked"
            raise UpstreamInvalid("content_encoding", detail)
        data, self._held = self._held + data, b""
        has_more = False
        while data or has_more:
            member = self._member or self._begun(data)
            if member is None:
                return
            piece = self._inflated(member, data)
            data, has_more = member.unconsumed_tail, len(piece) == PIECE_BYTES
            if member.eof:
                data, has_more, self._member = member.unused_data, False, None
            if piece:
                yield piece

    def end(self) -> None:
        if self._member is not None or self._held:
            raise UpstreamInvalid("content_encoding", f"the reply says {self._name}, and is not: it is cut")

    def _begun(self, data: bytes) -> _Member | None:
        """The next member; None if there are too few bytes to know its kind."""
        wbits = _WBITS[self._name]
        if wbits == 15:
            if len(data) < 2:
                self._held = data
                return None
            if data[0] & 0x0F != 8 or int.from_bytes(data[:2], "big") % 31:
                wbits = -15  # "deflate" without the header that RFC 9110 asks for; common all the same
        self._num_members += 1
        if self._num_members > MAX_GZIP_MEMBERS:
            raise UpstreamInvalid("content_encoding", f"the reply has more than {MAX_GZIP_MEMBERS} gzip members")
        self._member = zlib.decompressobj(wbits)
        return self._member

    def _inflated(self, member: _Member, data: bytes) -> bytes:
        try:
            piece = member.decompress(data, PIECE_BYTES)
        except zlib.error as error:
            raise UpstreamInvalid("content_encoding", f"the reply says {self._name}, and is not: {error}") from error
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise too_large(self._max_bytes, "encoded a reply")
        return piece
