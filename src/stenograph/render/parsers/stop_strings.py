"""Keeps stop strings out of a reply's text while it streams."""

from stenograph.core.types import Finish


class StopStrings:
    """Passes text on, except what is or could still become a stop string. Owned by one parser.

    With `keeps_last` the stop string that ended the turn is passed on at the end; what comes after it never is.
    """

    def __init__(self, stop: tuple[str, ...], *, keeps_last: bool = False) -> None:
        self._stop = stop
        self._keeps_last = keeps_last
        self._held: str = ""
        self._after: list[str] = []

    def push(self, text: str) -> str:
        """The text that no stop string can reach any more. After a whole stop string all is held."""
        if not self._stop:
            return text
        if self._after:
            self._after.append(text)
            return ""
        text = self._held + text
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self._held, self._after = "", [text[min(found) :]]
            return text[: min(found)]
        keep = max(len_of_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self, finish: Finish) -> str:
        """The rest of the text: up to the stop string that ended the turn (or its end), or all of it."""
        rest = "".join(self._after) or self._held
        if isinstance(finish.matched, str) and (at := rest.find(finish.matched)) >= 0:
            return rest[: at + len(finish.matched)] if self._keeps_last else rest[:at]
        return rest


def len_of_overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` begin `marker`, the whole of it excluded."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
