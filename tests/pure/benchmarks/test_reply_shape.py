"""The stand-in's replies are what an SGLang server would send: our own decoder takes them, for each scenario."""

import json
from array import array

import msgspec
import pytest

from benchmarks.kit.conversation import Conversation, Messages, completion_parts
from benchmarks.kit.reply_shape import (
    RID,
    STOP_ID,
    ReplyShape,
    assistant_fragment,
    native_reply,
    reply_body,
    reply_content,
)
from benchmarks.kit.standin import CHAT_PATH, Answers, num_input_ids
from benchmarks.responsiveness.scenarios import SCENARIOS, Scenario, scenarios_named
from stenograph.core.ids_json import encode_ids
from stenograph.core.types import FinishReason
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat_wire import decode_reply
from stenograph.engine.sglang.generate_wire import SGLangGenerateReading


def named(scenario: Scenario) -> str:
    return scenario.name


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
def test_a_scenarios_reply_keeps_every_law_of_the_wire(scenario: Scenario) -> None:
    reply = decode_reply(reply_body(scenario.shape), vocab_size=scenario.shape.vocab_size, replay=ReplayKind.ALL)
    assert len(reply.ids) == len(reply.logprobs) == scenario.shape.num_tokens
    assert reply.ids[-1] == STOP_ID
    assert reply.finish.reason is FinishReason.STOP
    assert reply.message.content == reply_content(scenario.shape)
    assert (reply.replay is not None) == (scenario.shape.base64_bytes > 0)


def test_the_native_reply_keeps_every_law_and_has_the_same_tokens() -> None:
    shape = ReplyShape(num_tokens=30)
    reading = SGLangGenerateReading(request_id="bench-stand-in", vocab_size=shape.vocab_size, num_prompt=7)
    body = b"".join(native_reply(shape).filled(RID, 7))
    chunks = reading.whole(HttpReply(status=200, content_type="application/json", headers=(), body=body))
    chat = decode_reply(reply_body(shape), vocab_size=shape.vocab_size)
    assert [id_ for chunk in chunks for id_ in chunk.ids] == list(chat.ids)
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == list(chat.logprobs)


def test_a_completion_s_body_is_a_text_or_a_list_of_texts() -> None:
    messages = Messages(num_bytes=40, num_messages=3)
    one = json.loads(b"".join(completion_parts([messages.text(0)])))
    two = json.loads(b"".join(completion_parts([messages.text(0), messages.text(1)])))
    assert one["prompt"] == two["prompt"][0]
    assert [len(prompt) for prompt in two["prompt"]] == [40, 40]


def test_ids_stay_in_a_small_vocabulary() -> None:
    shape = ReplyShape(num_tokens=500, vocab_size=300)
    assert max(decode_reply(reply_body(shape), vocab_size=300).ids) < 300


def test_the_sizes_are_those_that_the_scenarios_say() -> None:
    sizes = {scenario.name: len(reply_body(scenario.shape)) for scenario in SCENARIOS}
    assert sizes["B"] == pytest.approx(4096, rel=0.03)
    assert sizes["A"] == pytest.approx(1.3 * 2**20, rel=0.03)
    assert sizes["At"] == pytest.approx(1.2e6, rel=0.05)


def test_replies_to_all_prompts_have_one_length_and_tell_the_prompts() -> None:
    shape = ReplyShape(num_tokens=5)
    bodies = {num: reply_body(shape, num) for num in (1, 300_000)}
    assert len({len(body) for body in bodies.values()}) == 1
    for num, body in bodies.items():
        told = msgspec.json.decode(body)
        assert told["choices"][0]["meta_info"]["prompt_tokens"] == num
        assert told["usage"] == {"prompt_tokens": num, "completion_tokens": 5, "total_tokens": num + 5}


@pytest.mark.parametrize("num", [1, 2, 5000])
def test_the_stand_in_counts_the_ids_of_a_request_wherever_they_stand(num: int) -> None:
    ids = encode_ids(array("i", range(num)))
    text = b'"a, \\"input_ids\\":[1,2,3]"'  # within a message the quotes are escaped
    assert num_input_ids(b'{"messages":[' + text + b'],"input_ids":[' + ids + b"]}") == num
    assert num_input_ids(b'{"input_ids":[' + ids + b'],"messages":[' + text + b"]}") == num
    assert num_input_ids(b'{"messages":[' + text + b"]}") == 1
    assert num_input_ids(b"") == 1


def test_the_stand_in_answers_chat_with_its_reply_and_unknown_paths_with_404() -> None:
    answers = Answers(ReplyShape(num_tokens=3))
    whole = b"".join(answers.answer(CHAT_PATH, b'{"input_ids":[7,8]}'))
    head, _, body = whole.partition(b"\r\n\r\n")
    assert body == reply_body(ReplyShape(num_tokens=3), 2)
    assert b"content-length: %d" % len(body) in head
    assert b"".join(answers.answer(b"/health", b"")).startswith(b"HTTP/1.1 200")
    assert b"".join(answers.answer(b"/nowhere", b"")).startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("path", [CHAT_PATH, b"/generate"])
def test_the_stand_in_answers_under_the_id_of_the_request(path: bytes) -> None:
    asked = b'{"messages":[{"content":"\\"rid\\":\\"x\\""}],"rid":"mine-1","stream":false,"input_ids":[7,8]}'
    head, _, body = b"".join(Answers(ReplyShape(num_tokens=3)).answer(path, asked)).partition(b"\r\n\r\n")
    told = msgspec.json.decode(body)
    assert b"content-length: %d" % len(body) in head
    if path == CHAT_PATH:
        assert (told["id"], told["choices"][0]["meta_info"]["id"]) == ("mine-1", "mine-1")
    else:
        assert told["meta_info"]["id"] == "mine-1"


def test_a_clients_body_is_json_with_everything_so_far_and_a_new_message() -> None:
    messages, conversation, shape = Messages(num_bytes=50, num_messages=3), Conversation(), ReplyShape()
    for turn in range(3):
        parts = conversation.request_parts(messages.fragment(turn))
        sent = msgspec.json.decode(b"".join(parts))["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant"] * turn + ["user"]
        assert len(sent[-1]["content"]) == 50
        conversation.add_turn(messages.fragment(turn), assistant_fragment(shape))
    assert len({messages.fragment(index) for index in range(3)}) == 3


def test_messages_larger_than_the_text_they_are_cut_from_have_their_size() -> None:
    (text,) = Messages(num_bytes=3_000_000, num_messages=1).texts(1)
    assert len(text) == 3_000_000


def test_a_scale_takes_turns_first_and_sessions_only_when_no_turns_are_left() -> None:
    (load,) = scenarios_named("A")
    assert (load.scaled(1).sessions, load.scaled(1).turns) == (64, 5)
    assert (load.scaled(0.4).sessions, load.scaled(0.4).turns) == (64, 2)
    assert (load.scaled(0.1).sessions, load.scaled(0.1).turns) == (32, 1)
    assert (load.scaled(0.0001).sessions, load.scaled(0.0001).turns) == (1, 1)


def test_a_scenario_that_there_is_not_is_named() -> None:
    assert scenarios_named("all") == SCENARIOS
    assert [scenario.name for scenario in scenarios_named("B, A")] == ["B", "A"]
    with pytest.raises(ValueError, match="'Z'"):
        scenarios_named("A,Z")
