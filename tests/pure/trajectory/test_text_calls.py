"""Replies that come back as smolagents writes them are known again, and nothing else is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stenograph.core.messages import Message, Role, ToolCall
from stenograph.trajectory.matching import MATCHERS, MatcherName, num_compared
from stenograph.trajectory.text_calls import CALLS_END, MessageRewrite, rewrites_of

HARNESS = MATCHERS[MatcherName.HARNESS]

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["[1]", '{"a": "[]"}', "[x]"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=3).map(json.dumps) | st.sampled_from(["", "{broken", '"ls"'])
CALLS = st.lists(
    st.builds(ToolCall, id=st.text(), name=st.text(), arguments=ARGUMENTS),
    min_size=1,
    max_size=3,
    unique_by=lambda call: call.id,
).map(tuple)
TEXTS = st.none() | st.text() | st.sampled_from(["I look.", " padded \n", "Calling tools:\n[]", "</code>"])


def reply(text: str | None, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role=Role.ASSISTANT, content=text, tool_calls=calls, reasoning=reasoning)


def call(id_: str, name: str = "bash", arguments: str = '{"command":  "ls -a"}') -> ToolCall:
    return ToolCall(id=id_, name=name, arguments=arguments)


def serializable(value: Any) -> Any:
    """smolagents 1.26.0, utils.make_json_serializable, for values that come from JSON."""
    if isinstance(value, str):
        if (value.startswith("{") and value.endswith("}")) or (value.startswith("[") and value.endswith("]")):
            try:
                return serializable(json.loads(value))
            except json.JSONDecodeError:
                pass
        return value
    if isinstance(value, list):
        return [serializable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): serializable(item) for key, item in value.items()}
    return value


def written(stored: Message, *, by_id: bool = True) -> Message:
    """A reply as smolagents replays it."""

    def shown(call: ToolCall) -> dict[str, Any]:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments
        return {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": serializable(arguments)},
        }

    calls = sorted(stored.tool_calls, key=lambda call: call.id) if by_id else stored.tool_calls
    parts = [] if stored.content is None else [stored.content.strip()]
    return reply("\n".join([*parts, "Calling tools:\n" + str([shown(call) for call in calls])]))


RECORDED = reply("Step 1: I will run it.", call("call_smol0010"), reasoning="Thinking about step 1.")
RECORDED_TEXT = (
    "Step 1: I will run it.\nCalling tools:\n[{'id': 'call_smol0010', 'type': 'function', 'function':"
    " {'name': 'bash', 'arguments': {'command': 'ls -a'}}}]"
)


def test_a_recorded_reply_comes_back_as_text() -> None:
    assert written(RECORDED).content == RECORDED_TEXT
    assert HARNESS.matches(RECORDED, reply(RECORDED_TEXT))
    assert HARNESS.matches(RECORDED, reply(f" {RECORDED_TEXT}\n"))


def test_a_reply_without_text_comes_back_as_its_calls_alone() -> None:
    assert HARNESS.matches(reply(None, call("a")), written(reply(None, call("a"))))
    assert HARNESS.matches(reply("", call("a")), written(reply(None, call("a"))))


@pytest.mark.parametrize("name", [name for name in MATCHERS if name != MatcherName.HARNESS])
def test_the_other_matchers_take_no_text_for_calls(name: str) -> None:
    assert not MATCHERS[name].matches(RECORDED, reply(RECORDED_TEXT))


@given(text=TEXTS, calls=CALLS, by_id=st.booleans())
def test_calls_written_as_text_are_the_stored_ones(text: str | None, calls: tuple[ToolCall, ...], by_id: bool) -> None:
    stored = reply(text, *calls)
    given_message = written(stored, by_id=by_id)
    assert HARNESS.matches(stored, given_message)
    (rewrite,) = rewrites_of(stored, given_message)
    assert (text or "").strip() + "\n" + rewrite.from_text == (given_message.content or "").strip() or (
        rewrite.from_text == (given_message.content or "").strip()
    )
    assert [row["id"] for row in json.loads(rewrite.to_text)] == [call.id for call in calls]


@given(
    calls=CALLS,
    field=st.sampled_from(["id", "name", "arguments"]),
    place=st.integers(0, 2),
    value=st.text(min_size=1),
)
def test_another_id_name_or_argument_is_another_reply(
    calls: tuple[ToolCall, ...], field: str, place: int, value: str
) -> None:
    at = place % len(calls)
    before = calls[at]
    after = json.dumps({"other": value, "was": before.arguments}) if field == "arguments" else value
    if (field == "id" and value in {call.id for call in calls}) or getattr(before, field) == after:
        return
    others = (*calls[:at], replace(before, **{field: after}), *calls[at + 1 :])
    assert not HARNESS.matches(reply("I look.", *calls), written(reply("I look.", *others)))


@given(calls=CALLS.filter(lambda calls: len(calls) == 3))
def test_another_order_or_number_of_calls_is_another_reply(calls: tuple[ToolCall, ...]) -> None:
    stored = reply("I look.", *calls)
    by_id = sorted(calls, key=lambda call: call.id)
    turned = next(order for order in ([2, 1, 0], [1, 0, 2], [0, 2, 1]) if [calls[at] for at in order] != by_id)
    assert not HARNESS.matches(stored, written(reply("I look.", *(calls[at] for at in turned)), by_id=False))
    assert not HARNESS.matches(stored, written(reply("I look.", *calls[1:])))
    assert not HARNESS.matches(reply("I look.", *calls[1:]), written(stored))
    assert not HARNESS.matches(stored, reply("I look."))


@pytest.mark.parametrize(
    "text",
    [
        RECORDED_TEXT.replace("Step 1", "Step 2"),
        RECORDED_TEXT.replace("'function',", "'other',"),
        RECORDED_TEXT.replace("'ls -a'", "'ls -A'"),
        RECORDED_TEXT.replace("'ls -a'", "b'ls -a'"),
        RECORDED_TEXT.replace("'ls -a'", "'ls' ' -a'"),
        RECORDED_TEXT.replace("'ls -a'", r"'\q'"),
        RECORDED_TEXT.replace("'ls -a'", "'ls -a"),
        RECORDED_TEXT.replace("'arguments'", "'parameters'"),
        RECORDED_TEXT + "\nand more",
        RECORDED_TEXT.replace("\nCalling", "</code>\nCalling"),
        "\n".join(RECORDED_TEXT.split("\n")[:2]),
    ],
)
def test_text_that_is_nearly_the_calls_is_another_reply(text: str) -> None:
    assert not HARNESS.matches(RECORDED, reply(text))


def test_reasoning_is_compared_where_it_is_sent_back_beside_the_text() -> None:
    for reasoning, is_same in ((None, True), ("Thinking about step 1.", True), ("Thinking.", False)):
        assert HARNESS.matches(RECORDED, reply(RECORDED_TEXT, reasoning=reasoning)) is is_same


def test_only_an_assistant_s_message_is_a_reply_as_text() -> None:
    assert not HARNESS.matches(RECORDED, Message(role=Role.USER, content=RECORDED_TEXT))


@given(
    text=st.text() | st.text(alphabet="[]{}'\"\\,: xuTrueNonaif10-.\n"),
    end=st.sampled_from(["", "]", CALLS_END]),
)
def test_no_text_is_an_error(text: str, end: str) -> None:
    assert not HARNESS.matches(RECORDED, reply("Step 1: I will run it.\nCalling tools:\n" + text + end))


@pytest.mark.parametrize("piece", ["[", "{'a':", "'", "\\'", "-", "(", "'\\", "'\\ud83d", "[[]]", "1+", "None"])
def test_a_hostile_text_is_another_reply(piece: str) -> None:
    for text in (piece * 100_000, "[{'id': " + piece * 100_000 + CALLS_END):
        assert not HARNESS.matches(RECORDED, reply("Step 1: I will run it.\nCalling tools:\n" + text))


def test_stored_arguments_nested_too_deeply_to_be_written_are_another_reply() -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert not HARNESS.matches(reply("I look.", call("a", arguments=deep)), written(reply("I look.", call("a"))))


CODE = "Thought: list.\n<code>\nprint(bash('ls'))\n"
CODE_CALL = (
    "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'python_interpreter',"
    " 'arguments': \"print(bash('ls'))\"}}]"
)


@pytest.mark.parametrize("stored", [CODE, CODE + "</code>"])
@pytest.mark.parametrize("added", ["", "\n" + CODE_CALL])
def test_a_code_agent_s_reply_comes_back_closed_and_with_the_call_that_was_made_of_it(stored: str, added: str) -> None:
    given_message = reply(CODE + "</code>" + added)
    assert HARNESS.matches(reply(stored), given_message)
    assert [(rewrite.rule, rewrite.to_text) for rewrite in rewrites_of(reply(stored), given_message)] == (
        [] if stored == given_message.content else [("text-calls", "")]
    )


def test_a_reply_without_calls_comes_back_with_one_at_most() -> None:
    two = CODE_CALL[:-1] + ", " + CODE_CALL.removeprefix("Calling tools:\n[")
    assert not HARNESS.matches(reply(CODE), reply(CODE + "</code>\n" + two))
    assert not HARNESS.matches(reply("other"), reply(CODE + "</code>\n" + CODE_CALL))
    assert not HARNESS.matches(reply(None), reply("</code>"))


def test_a_rewrite_says_what_was_sent_and_what_stands() -> None:
    assert rewrites_of(RECORDED, reply(RECORDED_TEXT)) == (
        MessageRewrite(
            rule="text-calls",
            from_text=RECORDED_TEXT.split("\n", 1)[1],
            to_text='[{"id": "call_smol0010", "name": "bash", "arguments": "{\\"command\\":  \\"ls -a\\"}"}]',
        ),
    )


def test_a_reply_replayed_as_it_was_has_no_rewrite() -> None:
    for same in (RECORDED, replace(RECORDED, reasoning=None), replace(RECORDED, content=" Step 1: I will run it.")):
        assert rewrites_of(RECORDED, same) == ()
    assert rewrites_of(RECORDED, reply(RECORDED.content)) == ()


def test_calls_as_text_are_counted_as_work_like_calls() -> None:
    long = written(reply("I look.", call("a", arguments=json.dumps({"code": "x = 1\n" * 1000}))))
    assert num_compared([long]) == len(long.content or "")
    assert num_compared([replace(RECORDED, content=RECORDED_TEXT)]) >= len(RECORDED_TEXT)
    assert num_compared([reply("I look."), Message(role=Role.USER, content=RECORDED_TEXT)]) == 0
