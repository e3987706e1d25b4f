"""What is dropped from a request's system text: the blocks that a rule matches there, and nothing else."""

import re

from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, KnownMessages, SystemBlocks, TextPrint
from stenograph.core.messages import Message, Role
from stenograph.dialects.openai.spelling import OpenAISpelling
from stenograph.trajectory.canonical import DropRule, rewritten

RULE = DropRule(name="own", block=re.compile("bill:"), num_blocks=3)
USER = Message(role=Role.USER, content="a")
LATE = frozenset({Role.SYSTEM, Role.DEVELOPER})

BLOCKS = st.lists(st.sampled_from(["bill: 1", "bill:", "x bill:", "", "b"]), min_size=1, max_size=6).map(tuple)


def request_of(texts: tuple[str, ...], *others: Message, separator: str = "\n\n") -> ChatRequest:
    blocks = SystemBlocks(texts=texts, separator=separator)
    first = Message(role=Role.SYSTEM, content=blocks.joined)
    return ChatRequest(
        messages=(first, *others), spelling=OpenAISpelling(), system_blocks=blocks, text_print=TextPrint()
    )


@given(texts=BLOCKS, has_more=st.booleans(), separator=st.sampled_from(["", "\n\n"]))
def test_matching_blocks_among_the_first_go_and_no_others(
    texts: tuple[str, ...], has_more: bool, separator: str
) -> None:
    request = request_of(texts, *[USER][:has_more], separator=separator)
    result = rewritten(request, (RULE,), frozenset())
    dropped = [index for index, text in enumerate(texts) if index < 3 and text.startswith("bill:")]
    kept = [text for index, text in enumerate(texts) if index not in dropped]
    assert [one.where for one in result.rewrites] == [f"/messages/0/content/{index}" for index in dropped]
    assert [(one.rule, one.before, one.after) for one in result.rewrites] == [("own", texts[i], "") for i in dropped]
    expected = [Message(role=Role.SYSTEM, content=separator.join(kept))] if kept or not has_more else []
    assert result.messages == (*expected, *[USER][:has_more])
    if has_more:
        assert result.blame_of_client(Blame(RequestPart.MESSAGES, len(result.messages) - 1)) == Blame(
            RequestPart.MESSAGES, 1
        )
    if not dropped:
        assert result is request


@given(texts=BLOCKS)
def test_a_request_whose_beginning_is_known_records_what_was_dropped_and_is_not_changed_twice(
    texts: tuple[str, ...],
) -> None:
    first = rewritten(request_of(texts, USER), (RULE,), LATE)
    known = KnownMessages(
        dialect="chat",
        text_print=TextPrint(),
        list_start=0,
        messages=first.messages,
        gaps=first.gaps,
        system_blocks=first.system_blocks,
    )
    more = (Message(role=Role.ASSISTANT, content="r"), Message(role=Role.SYSTEM, content="late"), USER)
    again = ChatRequest(
        messages=(*first.messages, *more),
        spelling=OpenAISpelling(),
        known=known,
        system_blocks=known.system_blocks,
        text_print=TextPrint(),
    )
    quick = rewritten(again, (RULE,), LATE)
    whole = rewritten(request_of(texts, USER, *more), (RULE,), LATE)
    assert (quick.messages, quick.gaps, quick.rewrites) == (whole.messages, whole.gaps, whole.rewrites)


def test_a_system_text_that_came_as_one_is_left_as_it_is() -> None:
    request = ChatRequest(messages=(Message(role=Role.SYSTEM, content="bill: 1"), USER))
    assert rewritten(request, (RULE,), frozenset()) is request
    in_blocks = request_of(("bill: 1", "b"), USER)
    assert rewritten(in_blocks, (), frozenset()) is in_blocks
