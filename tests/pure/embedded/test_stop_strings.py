"""Stop strings are found wherever tokens cut them."""

from hypothesis import given
from hypothesis import strategies as st

from stenograph.embedded.sequence import StopWatcher
from stenograph.model.tokenizer import Tokenizer

TEXT = st.text(alphabet="abc", min_size=1, max_size=30)


@given(TEXT, st.lists(st.text(alphabet="abc", min_size=1, max_size=12), min_size=1, max_size=3))
def test_a_stop_string_is_found_with_the_token_that_completes_it(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    watcher = StopWatcher(tuple(stops), tokenizer.text_stream(skip_special=True))
    ids = tokenizer.encode(text)
    found_at, seen = None, ""
    for at, id_ in enumerate(ids):
        seen += tokenizer.decode([id_])
        found = watcher.push(id_)
        assert (found is not None) == any(stop in seen for stop in stops)
        if found is not None:
            assert found in seen
            found_at = at
            break
    assert (found_at is not None) == any(stop in text for stop in stops)


WIDE = st.text(alphabet="aé☃😀", min_size=1, max_size=12)


@given(WIDE, st.lists(WIDE, min_size=1, max_size=3))
def test_a_character_that_is_several_tokens_is_found_when_its_last_one_is_there(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    watcher = StopWatcher(tuple(stops), tokenizer.text_stream(skip_special=True))
    seen = b""
    for id_ in tokenizer.encode(text):
        seen += tokenizer.bytes_of(id_)
        is_there = any(stop.encode() in seen for stop in stops)
        assert (watcher.push(id_) is not None) == is_there
        if is_there:
            return


@given(TEXT, st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=3), st.integers(0, 12))
def test_a_stop_string_counts_only_with_a_token_after_the_least_number(
    tokenizer: Tokenizer, text: str, stops: list[str], min_tokens: int
) -> None:
    watcher = StopWatcher(tuple(stops), tokenizer.text_stream(skip_special=True), min_tokens=min_tokens)
    seen = ""
    for num, id_ in enumerate(tokenizer.encode(text), start=1):
        before, seen = seen, seen + tokenizer.decode([id_])
        is_new = any(seen.find(stop, max(0, len(before) - len(stop) + 1)) >= 0 for stop in stops)
        found = watcher.push(id_)
        assert (found is not None) == (is_new and num > min_tokens)
        if found is not None:
            return
