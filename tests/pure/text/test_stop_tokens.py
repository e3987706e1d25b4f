"""The stop token that ended a reply is no text, but for one that the reply's parser reads."""

from collections.abc import Sequence

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.chat import TextView
from stenograph.core.types import Finish, FinishReason
from stenograph.families.minimax.family import MINIMAX_M2
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.conversations import WEATHER
from stenograph.text.reading import Reading
from stenograph.text.reply import ReplyParser
from stenograph.text.reply_syntax import ReplySyntax

TINY = Tokenizer(tiny_tokenizer_json(320))
TEXTS = st.text(st.sampled_from("aé n😀."), min_size=1, max_size=8)
LENGTH = Finish(reason=FinishReason.LENGTH)


def stopped(id_: int) -> Finish:
    return Finish(reason=FinishReason.STOP, matched=id_)


def content(ids: Sequence[int], cuts: Sequence[int], finish: Finish, **reading: object) -> tuple[str, str]:
    """A reply's content, as a whole and as what came bit by bit."""
    parser = ReplyParser(TINY, ReplySyntax(reasoning=None), Reading(**reading))  # type: ignore[arg-type]
    ends = [*sorted(cuts), len(ids)]
    pieces = [parser.feed(ids[start:end]).content for start, end in zip([0, *ends], ends, strict=False)]
    last, parsed = parser.finish(finish)
    return parsed.message.content or "", "".join(pieces) + last.content


@given(text=TEXTS, data=st.data())
def test_it_is_left_out_where_it_ended_the_reply_however_it_came(text: str, data: st.DataObject) -> None:
    """Whatever stops there are before it: an engine that goes on after one has not ended there."""
    ids = TINY.encode(text).tolist()
    stops = (ids[-1], *data.draw(st.lists(st.sampled_from(ids), max_size=2)))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    before = content(ids[:-1], (), LENGTH)
    assert content(ids, cuts, stopped(ids[-1]), stop_token_ids=stops) == before
    assert content(ids, cuts, LENGTH, stop_token_ids=stops) == content(ids, (), LENGTH)
    keeps = TextView(keeps_stop=True)
    assert content(ids, cuts, stopped(ids[-1]), stop_token_ids=stops, text=keeps) == content(ids, (), LENGTH)


def test_one_that_closes_a_call_is_read() -> None:
    made = tokenizers.Tokenizer.from_str(tiny_tokenizer_json(320))
    made.add_tokens(list(MINIMAX_M2.syntax.markers))
    tokenizer = Tokenizer(made.to_str())
    call = (
        f'<minimax:tool_call>\n<invoke name="{WEATHER.name}">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    )
    ids = tokenizer.encode(call).tolist()
    reading = Reading(tools=(WEATHER,), stop_token_ids=(ids[-1],))
    parser = ReplyParser(tokenizer, MINIMAX_M2.syntax, reading)
    parser.feed(ids)
    _, parsed = parser.finish(stopped(ids[-1]))
    assert [call.name for call in parsed.message.tool_calls] == [WEATHER.name]
    assert parsed.faults == ()
