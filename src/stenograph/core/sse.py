"""Server-sent events: `data:` lines, and before them, where a protocol has names of events, `event:`. Pure.

Source: WHATWG HTML, section 9.2 (text/event-stream).
"""

from collections.abc import Iterable, Iterator

STILL_ALIVE = b": still generating\n\n"
"""A comment, ignored by a client's reader. Source: WHATWG HTML, section 9.2.6."""

EVENT_STREAM_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)
"""Headers of a stream of events: no proxy on its way is to cache or buffer it."""


def data_event(payload: bytes) -> bytes:
    """One event with one line of data. `payload` is JSON and so holds no line break."""
    return b"data: " + payload + b"\n\n"


def named_event(name: bytes, payload: bytes) -> bytes:
    """The same for a protocol with named events. Source: the same, `event:`."""
    return b"event: " + name + b"\ndata: " + payload + b"\n\n"


def named_event_pieces(name: bytes, payload: Iterable[bytes]) -> Iterator[bytes]:
    """The same for a payload in fragments."""
    yield b"event: " + name + b"\n"
    yield from data_event_pieces(payload)


def data_event_pieces(payload: Iterable[bytes]) -> Iterator[bytes]:
    """The same for a payload in fragments."""
    yield b"data: "
    yield from payload
    yield b"\n\n"


class EventReader:
    """The data of events, from bytes in pieces of any size.

    Lines end with LF, CR LF or CR; comments and fields other than `data` are skipped; several data lines of an event
    are joined by LF. An event without an empty line at its end is dropped. `feed` raises EventTooLarge for one of more
    than `max_bytes`.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line: list[bytes] = []
        self._num_line_bytes = 0
        self._data: list[bytes] = []
        self._num_data_bytes = 0
        self._is_first_line = True

    def __repr__(self) -> str:
        return f"<EventReader {self._num_line_bytes + self._num_data_bytes} bytes of an event>"

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events completed by this piece, in order."""
        self._line.append(piece)
        self._num_line_bytes += len(piece)
        events: list[bytes] = []
        if b"\n" in piece or b"\r" in piece or self._line[0].endswith(b"\r"):
            lines = _split_lines(b"".join(self._line))
            self._line = [lines.pop()]
            self._num_line_bytes = len(self._line[0])
            for line in lines:
                self._take(line, events)
        self._check_size()
        return events

    def end(self) -> list[bytes]:
        """The last event, where the stream ends with a CR, possibly half of a CR LF."""
        return self.feed(b"\n") if self._line and self._line[-1].endswith(b"\r") else []

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if self._is_first_line:
            line = line.removeprefix(_BOM)
            self._is_first_line = False
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._num_data_bytes += len(line) + 1  # an empty line of data is kept too
            self._check_size()
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data = []
            self._num_data_bytes = 0

    def _check_size(self) -> None:
        if self._num_line_bytes + self._num_data_bytes > self._max_bytes:
            raise EventTooLarge(f"an event of more than {self._max_bytes} bytes")


class EventTooLarge(ValueError):
    """An event too large to be kept in memory."""


_BOM = b"\xef\xbb\xbf"


def _split_lines(text: bytes) -> list[bytes]:
    """Lines of a text; the last has no line end yet.

    A CR at the very end stays with it: it may be half of a CR LF.
    """
    if b"\r" not in text:
        return text.split(b"\n")
    held = b"\r" if text.endswith(b"\r") else b""
    lines = text.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    lines[-1] += held
    return lines
