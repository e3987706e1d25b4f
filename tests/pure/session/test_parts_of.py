"""A reply that comes whole is read in parts, and says the same."""

from hypothesis import given
from hypothesis import strategies as st

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.chat import TextView
from stenograph.core.types import Chunk, Finish, FinishReason, TopLogprob
from stenograph.model.tokenizer import Tokenizer
from stenograph.session.reply_buffer import READ_AT_ONCE, parts_of
from stenograph.text.reply_text import PlainParser

TOKENIZER = Tokenizer(tiny_tokenizer_json())
FINISH = Finish(reason=FinishReason.STOP)


def parser() -> PlainParser:
    return PlainParser(TOKENIZER, stop=("ab",), view=TextView())


@given(few=st.lists(st.integers(3, 200), min_size=1, max_size=9), times=st.integers(1, 400), tops=st.booleans())
def test_a_long_chunk_is_read_in_short_parts_that_are_it_and_say_what_it_says(
    few: list[int], times: int, tops: bool
) -> None:
    ids = tuple(few * times)
    rows = tuple((TopLogprob(id=id_, logprob=-0.5),) for id_ in ids) if tops else None
    chunk = Chunk(ids=ids, logprobs=tuple(-float(index) for index in range(len(ids))), top_logprobs=rows)
    whole, cut = parser(), parser()
    told = whole.feed(chunk.ids)
    parts = [(cut.feed(part.ids), part) for part in parts_of(chunk)]
    assert max(len(part.ids) for _, part in parts) <= READ_AT_ONCE
    assert sum((tuple(part.ids) for _, part in parts), ()) == ids
    assert sum((tuple(part.logprobs) for _, part in parts), ()) == chunk.logprobs
    assert sum((part.top_logprobs or () for _, part in parts), ()) == (rows or ())
    assert "".join(delta.content for delta, _ in parts) == told.content
    assert cut.finish(FINISH) == whole.finish(FINISH)
