"""Late system messages become reminders: where, what is recorded, and that no reply changes what stands before it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, KnownMessages, TextPrint
from stenograph.core.messages import MediaKind, MediaRef, Message, PlacedMedia, Role, ToolCall
from stenograph.dialects.openai.spelling import OpenAISpelling
from stenograph.trajectory.late_system import LATE_SYSTEM, with_reminders

INSTRUCTING = frozenset({Role.SYSTEM, Role.DEVELOPER})
CALL = ToolCall(id="c", name="f", arguments="{}")


def system(text: str) -> Message:
    return Message(role=Role.SYSTEM, content=text)


def developer(text: str) -> Message:
    return Message(role=Role.DEVELOPER, content=text)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def said(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def result(text: str) -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id="c")


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


CALLING = Message(role=Role.ASSISTANT, content=None, tool_calls=(CALL,))

TEXT = st.text("ab\n", max_size=3)
MESSAGE = st.one_of(*(st.builds(one, TEXT) for one in (system, developer, user, said, result)), st.just(CALLING))
CONVERSATION = st.lists(MESSAGE, min_size=1, max_size=12)
HIDDEN = st.sampled_from([INSTRUCTING, frozenset({Role.SYSTEM}), frozenset({Role.DEVELOPER})])


def request_of(messages: Sequence[Message], known: KnownMessages | None = None) -> ChatRequest:
    return ChatRequest(
        messages=tuple(messages),
        spelling=OpenAISpelling(),
        text_print=TextPrint().then(b"[1]"),
        known=known,
        gaps=() if known is None else known.gaps,
    )


def mapped(messages: Sequence[Message], hidden: frozenset[Role] = INSTRUCTING) -> tuple[Message, ...]:
    return with_reminders(request_of(messages), hidden).messages


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        pytest.param(
            [system("s"), user("a"), system("b")], [system("s"), user(f"a\n\n{reminder('b')}")], id="after a user"
        ),
        pytest.param(
            [user("a"), CALLING, result("1"), result("2"), system("b")],
            [user("a"), CALLING, result("1"), result(f"2\n\n{reminder('b')}")],
            id="after results, to the last one",
        ),
        pytest.param(
            [user("a"), said("r"), system("b"), user("c")],
            [user("a"), said("r"), user(f"{reminder('b')}\n\nc")],
            id="after a reply, in front of the next user's message",
        ),
        pytest.param(
            [user("a"), said("r"), system("b"), said("q"), user("c")],
            [user("a"), said("r"), user(reminder("b")), said("q"), user("c")],
            id="between two replies, a message of its own",
        ),
        pytest.param(
            [user("a"), said("r"), system("b")],
            [user("a"), said("r"), user(reminder("b"))],
            id="at the end, after a reply",
        ),
        pytest.param(
            [user("a"), CALLING, system("b"), result("1")],
            [user("a"), CALLING, result(f"1\n\n{reminder('b')}")],
            id="between a call and its result, behind the result",
        ),
        pytest.param(
            [user("a"), system("b"), developer("c"), user("d")],
            [user(f"a\n\n{reminder('b')}\n\n{reminder('c')}"), user("d")],
            id="several",
        ),
        pytest.param(
            [user("a"), said("r"), system("b"), system("c"), user("d"), system("e")],
            [user("a"), said("r"), user("\n\n".join([reminder("b"), reminder("c"), "d", reminder("e")]))],
            id="on both sides of a message",
        ),
        pytest.param(
            [system("s"), developer("t"), user("a")], [system("s"), developer("t"), user("a")], id="not the beginning"
        ),
    ],
)
def test_a_late_system_message_is_a_reminder(given_: list[Message], expected: list[Message]) -> None:
    assert mapped(given_) == tuple(expected)


def test_a_role_that_the_template_writes_stands_where_it_stood() -> None:
    messages = [user("a"), developer("b"), system("c")]
    assert mapped(messages, frozenset({Role.SYSTEM})) == (user("a"), developer("b"), user(reminder("c")))
    request = request_of(messages)
    assert with_reminders(request, frozenset()) is request


def test_a_request_without_a_late_one_is_the_same_object() -> None:
    request = request_of([system("s"), user("a"), said("r"), user("b")])
    assert with_reminders(request, INSTRUCTING) is request


@given(messages=CONVERSATION, hidden=HIDDEN)
def test_what_stands_before_a_reply_is_the_same_whatever_follows_it(
    messages: list[Message], hidden: frozenset[Role]
) -> None:
    whole = mapped(messages, hidden)
    for index, message in enumerate(messages):
        if index and message.role is Role.ASSISTANT:
            before = mapped(messages[:index], hidden)
            assert whole[: len(before)] == before
            assert whole[len(before)] == message


@given(messages=CONVERSATION, hidden=HIDDEN)
def test_no_text_is_lost_none_is_left_late_and_each_message_knows_its_place(
    messages: list[Message], hidden: frozenset[Role]
) -> None:
    request = with_reminders(request_of(messages), hidden)
    num_early = next((i for i, message in enumerate(messages) if message.role not in INSTRUCTING), len(messages))
    late = [index for index, message in enumerate(messages) if index >= num_early and message.role in hidden]
    assert all(message.role not in hidden for message in request.messages[num_early:])
    assert [one.message for one in request.rewrites] == late
    text = "\n\n".join(message.content or "" for message in request.messages)
    for one, index in zip(request.rewrites, late, strict=True):
        assert (one.rule, one.where) == (LATE_SYSTEM, f"/messages/{index}/content")
        assert (one.before, one.after) == (messages[index].content, reminder(messages[index].content or ""))
        assert one.after in text
    kept = [index for index in range(len(messages)) if index not in late]
    places = [request.place_of(index) for index in range(len(request.messages))]
    assert set(kept) <= set(places)
    for message, place in zip(request.messages, places, strict=True):
        own = place in late
        assert message.role is (Role.USER if own else messages[place].role)
        assert (messages[place].content or "") in (message.content or "")
        blame = request.blame_of_client(Blame(RequestPart.MESSAGES, places.index(place), ("role",)))
        assert blame == Blame(RequestPart.MESSAGES, place, ("role",))


@given(messages=CONVERSATION, num_known=st.integers(0, 12), hidden=HIDDEN)
def test_a_request_whose_beginning_is_known_becomes_what_all_of_it_would(
    messages: list[Message], num_known: int, hidden: frozenset[Role]
) -> None:
    num_known = min(num_known, len(messages) - 1)
    if num_known == 0:
        return
    first = with_reminders(request_of(messages[:num_known]), hidden)
    if first.text_print is None:  # it may not be known again
        return
    known = KnownMessages(
        dialect="chat",
        text_print=first.text_print,
        list_start=0,
        messages=first.messages,
        gaps=first.gaps,
    )
    quick = with_reminders(request_of([*first.messages, *messages[num_known:]], known), hidden)
    whole = with_reminders(request_of(messages), hidden)
    assert (quick.messages, quick.gaps) == (whole.messages, whole.gaps)
    assert (quick.text_print is None) is (whole.text_print is None)
    assert quick.rewrites == tuple(one for one in whole.rewrites if (one.message or 0) >= num_known)


def test_32768_late_messages_make_one_text_and_no_square_of_it() -> None:
    messages = [user("a"), *(system("x" * 64) for _ in range(32767))]
    (only,) = mapped(messages)
    assert only.content is not None
    assert only.content.count("</system-reminder>") == 32767


def test_an_image_keeps_its_place_in_the_text_behind_reminders() -> None:
    ref = MediaRef(sha256="0" * 64, kind=MediaKind.IMAGE, media_type="image/png", num_bytes=1)
    shown = Message(role=Role.USER, content="ab", media=(PlacedMedia(at=1, ref=ref), PlacedMedia(at=2, ref=ref)))
    late = [system("x"), system("yy")]
    before = "".join(f"{reminder(text)}\n\n" for text in ("x", "yy"))
    *_, last = mapped([user("q"), said("r"), *late, shown, system("z")])
    assert last.content == f"{before}ab\n\n{reminder('z')}"
    assert [one.at - len(before) for one in last.media] == [1, 2]
    *_, last = mapped([user("q"), said("r"), user("p"), shown, system("z")])
    assert [one.at for one in last.media] == [1, 2]
