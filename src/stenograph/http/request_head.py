"""The head of a request, collected from its bytes as they come, within limits. Pure; knows no parser and no socket.

A verdict depends on the bytes alone, however they are cut, and all of them cost time linear in the bytes: the parser,
which appends what it has of a field to what comes of it, sees a head only when it is whole.
"""

import re

from stenograph.core.errors import HeadersTooLarge, InvalidRequest, UriTooLong

MAX_HEAD_BYTES = 64 * 1024
"""Request line, header lines and the blank line."""
MAX_HEADERS = 100
MAX_URL_BYTES = 8 * 1024
"""The target of the request line: path and query."""

_START_BYTES = 64
"""The target begins within so many bytes, or these are not HTTP."""
_START = re.compile(rb"[A-Z-]{1,31} {1,31}(?=[^ \r\n])")
_TARGET_END = re.compile(rb"[ \n]")
_FIRST_LINE = re.compile(rb"%b[^ \n]{0,%d}[ \n]" % (_START.pattern, MAX_URL_BYTES))
"""A method and a whole target that is not too long."""
_HEAD_END = re.compile(rb"\n\r?\n")


class RequestHead:
    """Collects one head after the other. After an error it takes nothing more."""

    __slots__ = ("_kept", "_num_lines", "_target_at", "_target_seen")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._reset()

    def _reset(self) -> None:
        self._kept = bytearray()
        self._num_lines = 0
        self._target_at: int | None = None
        self._target_seen: int | None = 0
        """So far the target has no end; None when its end was found."""

    def __repr__(self) -> str:
        return f"<RequestHead {len(self._kept)} bytes, {self._num_lines} lines>"

    @property
    def is_begun(self) -> bool:
        """True once some bytes of a head have come."""
        return bool(self._kept)

    def feed(self, data: bytes) -> tuple[bytes, memoryview] | None:
        """Take the next bytes: a whole head and a view of what follows it, or None while it is not whole.

        Blank lines before a head are dropped (RFC 9112, section 2.2). Raises UriTooLong, HeadersTooLarge, and
        InvalidRequest for bytes that cannot become a head.
        """
        num_seen = len(self._kept)
        if num_seen:
            self._kept += data
            text: bytes | bytearray = self._kept
        else:
            text = data.lstrip(b"\r\n")
            if not text:
                return None
        found = _HEAD_END.search(text, max(0, num_seen - 2))
        end = len(text) if found is None else found.end()
        if num_seen or _FIRST_LINE.match(text) is None:
            self._check_target(text, end)
        num_lines = self._num_lines + text.count(b"\n", num_seen, end) - (found is not None)
        if end > MAX_HEAD_BYTES or num_lines > MAX_HEADERS + 1:
            raise HeadersTooLarge(
                f"The request's head has more than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS} headers."
                " Send fewer or shorter headers."
            )
        if found is None:
            if not num_seen:
                self._kept += text
            self._num_lines = num_lines
            return None
        if num_seen:
            self._reset()
        return bytes(text[:end]), memoryview(text)[end:]

    def _check_target(self, text: bytes | bytearray, end: int) -> None:
        """Raise UriTooLong, or InvalidRequest for what has no target. Looks at no byte of a target twice."""
        if self._target_seen is None:
            return
        if self._target_at is None:
            start = _START.match(text)
            if start is None:
                if not b"A" <= text[:1] <= b"Z" or end >= _START_BYTES:
                    raise InvalidRequest("The request is not HTTP/1.1: it does not begin with a method and a target.")
                return
            self._target_at = self._target_seen = start.end()
        longest = self._target_at + MAX_URL_BYTES
        if _TARGET_END.search(text, self._target_seen, longest + 1) is not None:
            self._target_seen = None
        elif end > longest:
            raise UriTooLong(f"The request's path and query have more than {MAX_URL_BYTES} bytes.")
        else:
            self._target_seen = end
