"""Reports the progress of long work: a protocol, and its form in a terminal or a log."""

from typing import Protocol, TextIO


class Progress(Protocol):
    """Called with the finished part of the work."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`what` is a few words, the same while the work goes on; `done` of `total`, in any unit."""
        ...


class StreamProgress:
    """One rewritten line on a terminal; elsewhere a line at the start, about every 20 %, and at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._said: tuple[str, int] = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        percent = min(100, 100 * done // max(1, total))
        said_what, said_percent = self._said
        if self._is_terminal:
            if said_what and said_what != what and said_percent < 100:
                self._stream.write("\n")
            if (what, percent) != self._said:
                self._stream.write(f"\r{what}: {percent:3d} %" + ("\n" if percent == 100 else ""))
        else:
            percent -= percent % 20
            if said_what != what or percent > said_percent:
                self._stream.write(f"{what}: {percent} %\n")
            percent = max(percent, said_percent) if said_what == what else percent
        self._said = (what, percent)
        self._stream.flush()
