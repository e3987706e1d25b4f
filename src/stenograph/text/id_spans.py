"""From a stretch of a reply's text to its ids: the one place where ids are cut by text. Pure."""

from array import array
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate

from stenograph.core.types import token_ids
from stenograph.model.tokenizer import Tokenizer


class IdSpans:
    """Finds the ids of a stretch of a reply's text. Decodes the reply once more, so only where somebody asks."""

    def __init__(
        self, tokenizer: Tokenizer, ids: Sequence[int], keep: Collection[int], *, skips_special: bool = True
    ) -> None:
        stream = tokenizer.text_stream(skip_special=skips_special, keep=keep)
        # Where the text ends after each id [T]; the last also has what is left of a broken character.
        self._ends: array[int] = token_ids(accumulate(len(stream.push(token_id)) for token_id in ids))
        if self._ends:
            self._ends[-1] += len(stream.flush())

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Ids [start, end) of the characters [start, end); those without text that come before are with them."""
        first = 0
        if start > 0:
            first = bisect_left(self._ends, start)
            first += first < len(self._ends) and self._ends[first] == start
        last = bisect_left(self._ends, end) + 1 if end > start else first
        return first, min(last, len(self._ends))
