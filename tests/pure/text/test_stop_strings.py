"""Stop strings, as the text comes, against a search of all the text so far: the naive reference."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.types import Finish, FinishReason
from stenograph.text.reply_text import StopStrings, len_of_overlap

STOPS = st.lists(st.text("ab", min_size=1, max_size=9), max_size=4).map(tuple)
PIECES = st.lists(st.text("ab𝄞", max_size=8), max_size=12)


class Naive:
    """Searches all the text again with every piece."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._text = ""
        self.num_passed = 0

    def push(self, text: str) -> str:
        self._text += text
        found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
        held = max((len_of_overlap(self._text, stop) for stop in self._stop), default=0)
        end = min(found) if found else len(self._text) - held
        passed = self._text[self.num_passed : end]
        self.num_passed += len(passed)
        return passed


@given(stop=STOPS, pieces=PIECES)
def test_what_is_passed_on_is_what_no_stop_string_can_reach(stop: tuple[str, ...], pieces: list[str]) -> None:
    stops, naive = StopStrings(stop), Naive(stop)
    for piece in pieces:
        assert stops.push(piece) == naive.push(piece)
    rest = stops.finish(Finish(reason=FinishReason.STOP))
    assert rest == "".join(pieces)[naive.num_passed :]


@given(stop=STOPS.filter(bool), pieces=PIECES, keeps_last=st.booleans(), data=st.data())
def test_the_stop_string_that_ended_the_turn_ends_the_text(
    stop: tuple[str, ...], pieces: list[str], keeps_last: bool, data: st.DataObject
) -> None:
    """An engine ends a turn with the token that makes one whole: the first that ends, not the first that begins."""
    text = "".join(pieces)
    prefixes = ("".join(pieces[:num]) for num in range(1, len(pieces) + 1))
    whole = next((found for prefix in prefixes if (found := [one for one in stop if one in prefix])), None)
    if whole is None:
        return
    matched = data.draw(st.sampled_from(whole))
    stops = StopStrings(stop, keeps_last=keeps_last)
    passed = "".join(map(stops.push, pieces)) + stops.finish(Finish(reason=FinishReason.STOP, matched=matched))
    assert passed == text[: text.find(matched) + (len(matched) if keeps_last else 0)]


@pytest.mark.timed
def test_stop_strings_of_any_length_cost_the_same_for_each_character() -> None:
    """CPU time of this thread, not wall time: 0.3 s here; a search with each piece from the start takes minutes."""
    stops = StopStrings(tuple("ab" * 15_000 + str(number) for number in range(64)))
    began = time.thread_time()
    for _ in range(200):
        stops.push("abab" * 25 + "c")
    for _ in range(200):
        stops.push("abab" * 25)
    assert time.thread_time() - began < 3.0
