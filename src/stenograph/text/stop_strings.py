"""Keeps stop strings out of a reply's text while it streams."""

from stenograph.core.types import Finish


class StopStrings:
    """Passes text on, except what is or could still become a stop string. Owned by one parser.

    With `keeps_last` the stop string that ended the turn is passed on at the end; what comes after it never is. One
    that is whole in text that was passed over (`pass_over`: what the first tokens say, which cannot end the turn) ended
    nothing. Costs a constant for each character and stop string, however long they are.
    """

    def __init__(self, stop: tuple[str, ...], *, keeps_last: bool = False) -> None:
        self._searches = [_Search(one) for one in stop]
        self._keeps_last = keeps_last
        self._held: str = ""
        self._num_free = 0  # of the held characters, how many no stop string ends in
        self._after: list[str] = []

    def pass_over(self, text: str) -> str:
        """The same as `push`, for text in which nothing ends the turn; a stop string may begin in it."""
        if not self._searches:
            return text
        for search in self._searches:
            search.pass_over(text)
        return self._pass_on(self._held + text, num_free=len(self._held) + len(text))

    def push(self, text: str) -> str:
        """The text that no stop string can reach any more. After a whole stop string all is held."""
        if not self._searches:
            return text
        if self._after:
            self._after.append(text)
            return ""
        num_before = len(self._held)
        found = [num_before + at for search in self._searches if (at := search.push(text)) is not None]
        text = self._held + text
        if found:
            self._held, self._after = "", [text[min(found) :]]
            self._num_free = max(0, self._num_free - min(found))
            return text[: min(found)]
        return self._pass_on(text, num_free=self._num_free)

    def finish(self, finish: Finish) -> str:
        """The rest of the text: up to the stop string that ended the turn (or its end), or all of it."""
        rest, stop = "".join(self._after) or self._held, finish.matched
        if isinstance(stop, str) and (at := rest.find(stop, max(0, self._num_free - len(stop) + 1))) >= 0:
            return rest[: at + len(stop)] if self._keeps_last else rest[:at]
        return rest

    def _pass_on(self, text: str, *, num_free: int) -> str:
        """Return the part of `text` that cannot become a stop string; the rest is held."""
        at = len(text) - max(search.num_matched for search in self._searches)
        self._held, self._num_free = text[at:], max(0, num_free - at)
        return text[:at]


class _Search:
    """Looks for one string in a text that comes in pieces, each character once. Source: Knuth, Morris and Pratt, 1977.

    `num_matched` is how many characters at the text's end begin the string, the longest such end. The table of what
    is matched after a character that does not fit is made as far as the text has reached.
    """

    def __init__(self, wanted: str) -> None:
        self.num_matched = 0
        self._wanted = wanted
        self._fallbacks = [0, 0]
        """At n: how many characters begin the string that also end its first n, fewer than n."""

    def pass_over(self, text: str) -> None:
        """Look at text in which a whole string counts for nothing."""
        while (at := self.push(text)) is not None:
            text = text[at + len(self._wanted) :]
            self.num_matched = self._fallback(len(self._wanted))

    def push(self, text: str) -> int | None:
        """Start of the string's first occurrence, from the start of `text` on; None if it has not ended yet.

        Below 0 if it began before. There is no more to look for then.
        """
        wanted, matched, at = self._wanted, self.num_matched, 0
        while at < len(text):
            if not matched:
                at = text.find(wanted[0], at)
                if at < 0:
                    break
            if text[at] == wanted[matched]:
                matched, at = matched + 1, at + 1
                if matched == len(wanted):
                    return at - matched
            else:
                matched = self._fallback(matched)
        self.num_matched = matched
        return None

    def _fallback(self, num: int) -> int:
        table, wanted = self._fallbacks, self._wanted
        while len(table) <= num:
            size, char = table[-1], wanted[len(table) - 1]
            while size and wanted[size] != char:
                size = table[size]
            table.append(size + (wanted[size] == char))
        return table[num]


def len_of_overlap(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that begin `marker`, the whole of it excluded."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
