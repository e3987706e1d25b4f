"""Large bodies: what is decoded in pieces is read, and blamed, as if it were decoded at once; too much is 400."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import CallerError, InvalidJson, InvalidRequest, UnrenderableMessage
from stenograph.dialects.common.json_bodies import MAX_ARGUMENTS_CHARS, MAX_MESSAGES, MAX_PARTS, MAX_REST_BYTES
from stenograph.dialects.openai.chat import decode_chat
from stenograph.dialects.sessions import decode_detokenize

NUM = 3000
"""Of messages: more than are decoded at once, in a body that is not small."""


def body(messages: list[Any], **rest: Any) -> bytes:
    return json.dumps({"messages": messages, **rest}).encode()


def talk(num: int = NUM) -> list[Any]:
    return [{"role": "user", "content": f"message number {index} says {'é' * (index % 7)}"} for index in range(num)]


def test_a_long_conversation_is_read_whole_and_in_order() -> None:
    messages = talk()
    request = decode_chat(body(messages))
    assert [message.content for message in request.messages] == [message["content"] for message in messages]


@pytest.mark.parametrize("at", [0, 1023, 1024, 2047, 2048, NUM - 1])
@pytest.mark.parametrize(
    ("wrong", "error", "param"),
    [
        ({"role": "user", "content": 7}, InvalidRequest, "content"),
        ({"role": "user", "content": "x", "wat": 1}, InvalidRequest, "wat"),
        ({"role": "wizard", "content": "x"}, InvalidRequest, "role"),
        ({"role": "user", "content": [{"type": "text"}]}, InvalidRequest, "content/0/text"),
        ({"role": "user", "content": [{"type": "image", "wat": 1}]}, UnrenderableMessage, "content/0/type"),
    ],
)
def test_what_is_wrong_in_a_long_conversation_is_found_at_its_place(
    at: int, wrong: Any, error: type[Exception], param: str
) -> None:
    messages = talk()
    messages[at] = wrong
    with pytest.raises(CallerError) as caught:
        decode_chat(body(messages))
    assert (type(caught.value), caught.value.param) == (error, f"/messages/{at}/{param}")


def test_a_conversation_has_at_most_so_many_messages() -> None:
    messages = [{"role": "user", "content": "x"}] * MAX_MESSAGES
    assert len(decode_chat(body(messages)).messages) == MAX_MESSAGES
    with pytest.raises(InvalidRequest, match=f"at most {MAX_MESSAGES} messages, this one {MAX_MESSAGES + 1}") as caught:
        decode_chat(body([*messages, messages[0]]))
    assert caught.value.param == "/messages"


def called(num: int, arguments: str = "{}") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call] * num}


@pytest.mark.parametrize(
    ("make", "param", "what"),
    [
        (lambda num: {"role": "user", "content": [{"type": "text", "text": "a"}] * num}, "content", "content parts"),
        (called, "tool_calls", "tool calls"),
    ],
)
def test_a_message_has_at_most_so_many_parts_and_calls(make: Any, param: str, what: str) -> None:
    user = {"role": "user", "content": "x"}
    assert len(decode_chat(body([user, make(MAX_PARTS)])).messages) == 2
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PARTS} {what}, this one {MAX_PARTS + 1}") as caught:
        decode_chat(body([user, make(MAX_PARTS + 1)]))
    assert caught.value.param == f"/messages/1/{param}"


def test_a_text_of_braces_is_no_list_of_parts() -> None:
    text = "{" * (2 * MAX_PARTS) + "é" * 10
    assert decode_chat(body([{"role": "user", "content": text}])).messages[0].content == text


def test_a_calls_arguments_have_at_most_so_many_characters() -> None:
    user, most = {"role": "user", "content": "x"}, "a" * MAX_ARGUMENTS_CHARS
    assert decode_chat(body([user, called(1, most)])).messages[1].tool_calls[0].arguments == most
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ARGUMENTS_CHARS} characters") as caught:
        decode_chat(body([user, called(1, most + "a")]))
    assert caught.value.param == "/messages/1/tool_calls/0/function/arguments"


@pytest.mark.parametrize(
    "rest",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [1] * MAX_REST_BYTES}}}]},
        {"metadata": {"a": "x" * MAX_REST_BYTES}},
        {"unheard": ["x" * MAX_REST_BYTES]},
    ],
)
def test_beside_its_messages_a_request_has_at_most_so_many_bytes(rest: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"Beside its messages, .* at most {MAX_REST_BYTES}"):
        decode_chat(body([{"role": "user", "content": "x"}], **rest))
    assert decode_chat(body([{"role": "user", "content": "x" * MAX_REST_BYTES}])).messages[0].content


@pytest.mark.parametrize("times", [1, 3 * 2**20])
@pytest.mark.parametrize(
    ("text", "error"), [(b"[%s", InvalidRequest), (b'{"messages":"%s"}', InvalidRequest), (b'"\xff%s"', InvalidJson)]
)
def test_a_large_body_of_another_shape_is_refused_as_a_small_one(
    text: bytes, error: type[Exception], times: int
) -> None:
    with pytest.raises(error):
        decode_chat(text % (b"[" * times))


VOCAB = 50_000
BLANK = st.sampled_from([b"", b" ", b"\n\t ", b" " * 70_000])


@given(st.lists(st.integers(0, VOCAB - 1), max_size=50), st.sampled_from([1, 7, 4000]), BLANK)
def test_ids_read_in_pieces_are_the_ids_of_the_list(ids: list[int], times: int, blank: bytes) -> None:
    text = (b"," + blank).join(str(id_).encode() for id_ in ids * (times if len(blank) < 10 else 1))
    made = decode_detokenize(b'{"tokens":' + blank + b"[" + blank + text + blank + b"]}", vocab_size=VOCAB)
    assert made.tolist() == json.loads(b"[" + text + b"]")


@pytest.mark.parametrize("wrong", ["x", 1.5, -1, 2**31, True, None, [1], {"a": 1}, "1,2,3", VOCAB], ids=json.dumps)
@pytest.mark.parametrize("at", [0, 20_000, 99_999])
def test_an_id_that_is_none_is_found_wherever_it_stands(wrong: object, at: int) -> None:
    ids: list[object] = [7] * 100_000
    ids[at] = wrong
    with pytest.raises(InvalidRequest) as caught:
        decode_detokenize(msgspec.json.encode({"tokens": ids}), vocab_size=VOCAB)
    assert caught.value.param == ("/tokens" if wrong == VOCAB else f"/tokens/{at}")


@pytest.mark.parametrize("tokens", [None, "1," * 100_000, {"a": [1] * 100_000}, 7, "x"])
def test_tokens_that_are_no_list_are_400_and_so_named(tokens: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_detokenize(msgspec.json.encode({"tokens": tokens}), vocab_size=VOCAB)
    assert caught.value.param == "/tokens"
