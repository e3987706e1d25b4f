"""What SGLang writes is believed only where it keeps every law; what we write is what it expects."""

import base64
import copy
import json
import math
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stenograph.core.chat import ChatRequest, ReplyOptions, TextView, ToolChoice, ToolMode
from stenograph.core.errors import InvalidRequest, StenographError, UpstreamInvalid
from stenograph.core.ids_json import encode_ids
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.replay import PackedInts, int32_of_base64
from stenograph.core.routing import Routing
from stenograph.core.types import (
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    RequestId,
    SamplingParams,
    TopLogprob,
    token_ids,
)
from stenograph.dialects.openai.spelling import OpenAISpelling
from stenograph.engine import rows
from stenograph.engine.base import GenerateRequest
from stenograph.engine.reported import STAND_IN_TEXT, payload_apart
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang import chat_wire
from stenograph.engine.sglang.chat_wire import SGLangReply, decode_reply, encode_request
from stenograph.engine.sglang.lean_copy import cut_replay

VOCAB = 1000
EXPERTS = base64.b64encode(bytes(24)).decode()


def reply(**changes: Any) -> dict[str, Any]:
    """A valid reply; `changes` are members of its meta_info."""
    meta = {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 7},
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "weight_version": "v1",
        "output_token_logprobs": [[-0.5, 5, None], [-1, 6, "x"], [-2.25, 7]],
        **changes,
    }
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "Grüße",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c0", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{ }"}}],
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "matched_stop": None, "meta_info": meta}
    return {"id": "r", "object": "chat.completion", "created": 1.0, "model": "m", "choices": [choice], "usage": {}}


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def decoded(value: Any) -> SGLangReply:
    body = value if isinstance(value, bytes) else dumped(value)
    return decode_reply(body, vocab_size=VOCAB, request_id="r", replay=ReplayKind.ALL)


def law_of(value: Any) -> str:
    with pytest.raises(UpstreamInvalid) as caught:
        decoded(value)
    assert str(caught.value).startswith(f"{caught.value.law}: ")
    return caught.value.law


def changed(path: str, value: Any) -> dict[str, Any]:
    """A valid reply with the value at `path` (dots, numbers for indexes) replaced; deleted if it is `...`."""
    whole = reply()
    parent: Any = whole
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        parent = parent[step]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return whole


@pytest.mark.parametrize("payload", [b'"\\u00e9\\u00e9\\u00e9\\u00e9"', b"7", b"[]", b'{"a":"b"}', b"true"])
def test_a_payload_that_is_kept_is_base64_and_nothing_else_of_json(payload: bytes) -> None:
    body = dumped(reply(routed_experts="X")).replace(b'"X"', payload)
    assert law_of(body) == "replay_is_base64"


def test_a_payload_that_nobody_asked_for_is_a_string_too() -> None:
    for payload in (b"7", b"[]", b'{"a":"b"}', b"true"):
        body = dumped(reply(routed_experts="X")).replace(b'"X"', payload)
        with pytest.raises(UpstreamInvalid) as caught:
            decode_reply(body, vocab_size=VOCAB, request_id="r")
        assert caught.value.law == "replay_is_base64"


@given(st.lists(st.sampled_from(["a", "\\\\", "\\u", "00e9", "\\ud83d", "\\ude00", "\\n", "\t", "é", "/"]), max_size=6))
def test_whatever_stands_in_the_place_of_a_payload_is_one_or_breaks_a_law(parts: list[str]) -> None:
    body = dumped(reply(routed_experts="X")).replace(b'"X"', f'"{"".join(parts)}"'.encode())
    law = ""
    try:
        replay = decoded(body).replay
    except UpstreamInvalid as error:
        replay, law = None, error.law
    assert replay is not None or law in ("replay_is_base64", "json")


LARGE_REPLY = msgspec.json.encode(reply(routed_experts="@@", after="x")).split(b"@@")
LARGE_PAYLOAD = b"A" * rows.LARGE_PAYLOAD_BYTES


def read_or_law(body: bytes) -> object:
    """All that is read of a body but for the text of its payload; or the law that it breaks."""
    try:
        completion = rows.decoded(chat_wire._COMPLETION, body, chat_wire._LAWS)
    except UpstreamInvalid as error:
        return error.law
    for choice in completion.choices:
        choice.meta_info.routed_experts = msgspec.Raw(bytes(choice.meta_info.routed_experts)[:1])
    return completion


@given(
    st.sampled_from(
        [b"", b"\\n", b"\\", b'"', b"\n", b"\x00", b"\x7f", b"\xc3\xa9", b"\xff", b'","a":"', b'"}', b"\\u12"]
    ),
    st.lists(st.tuples(st.integers(min_value=0), st.sampled_from(b'"\\,:{}[]x0\xff\n')), max_size=3),
)
def test_a_large_payload_is_passed_over_as_the_decoder_passes_over_it(
    inside: bytes, flips: list[tuple[int, int]]
) -> None:
    around = bytearray(b"@".join(LARGE_REPLY))
    cut = len(LARGE_REPLY[0])
    for place, byte in flips:
        if place % len(around) != cut:
            around[place % len(around)] = byte
    body = b"".join((around[:cut], LARGE_PAYLOAD, inside, LARGE_PAYLOAD, around[cut + 1 :]))
    assert read_or_law(payload_apart(body)[0]) == read_or_law(body)


def test_a_large_payload_that_nobody_asked_for_is_not_decoded_and_one_that_was_asked_for_is_kept() -> None:
    body = LARGE_PAYLOAD.join(LARGE_REPLY)
    assert payload_apart(body) == (STAND_IN_TEXT.join(LARGE_REPLY), LARGE_PAYLOAD)
    unasked = decode_reply(body, vocab_size=VOCAB, request_id="r")
    assert (unasked.replay, unasked.unasked_replay) == (None, ("routed_experts",))
    asked = decoded(body).replay
    assert asked is not None
    assert asked.routed_experts == PackedInts.of(int32_of_base64(LARGE_PAYLOAD))


@pytest.mark.parametrize("where", ["meta_info", "sglext", "both", "choice", "reply"])
def test_a_large_payload_is_the_reports_and_no_others(where: str) -> None:
    whole: dict[str, Any] = reply(routed_experts=EXPERTS)
    large = LARGE_PAYLOAD.decode()
    if where in ("meta_info", "both"):
        whole["choices"][0]["meta_info"]["routed_experts"] = large
    if where in ("sglext", "both"):
        whole["sglext"] = {"routed_experts": large}
    if where == "choice":
        whole["choices"][0]["routed_experts"] = large
    if where == "reply":
        whole["routed_experts"] = large
    replay = decoded(dumped(whole)).replay
    assert replay is not None
    text = whole["choices"][0]["meta_info"]["routed_experts"]
    assert replay.routed_experts == PackedInts.of(int32_of_base64(text))
    assert json.loads(cut_replay(dumped(whole))) == without_replay(whole)


@pytest.mark.parametrize("damage", ["A", "!AAA", "é", "\n", "\x00", "\\"])
def test_a_large_payload_that_is_damaged_breaks_the_law_of_a_small_one(damage: str) -> None:
    for text in ("AAAA" + damage, LARGE_PAYLOAD.decode() + damage):
        assert law_of(reply(routed_experts=text)) == "replay_is_base64"


def test_a_valid_reply_is_read_whole() -> None:
    got = decoded(reply(routed_experts=EXPERTS))
    assert got.ids == token_ids((5, 6, 7))
    assert list(got.logprobs) == [-0.5, -1.0, -2.25]
    assert all(type(logprob) is float for logprob in got.logprobs)
    assert got.finish == Finish(reason=FinishReason.STOP, matched=7)
    assert got.message == Message(
        role=Role.ASSISTANT,
        content="Grüße",
        reasoning="hm",
        tool_calls=(ToolCall(id="c0", name="f", arguments="{ }"),),
    )
    assert (got.id, got.num_cached_tokens, got.weight_version, got.top_logprobs) == ("r", 2, "v1", None)
    assert got.replay is not None
    assert (got.replay.routed_experts, got.replay.indexer_topk) == (PackedInts(bytes(6), 1), None)


META = "choices.0.meta_info"
ROWS = f"{META}.output_token_logprobs"
LIES: list[tuple[str, str, Any]] = [
    *[("id_in_vocab", f"{ROWS}.1.1", lie) for lie in (-1, VOCAB, 2**31, 2**64, 10**30, True, 1.0, "1", None, [1])],
    *[("logprob_is_finite", f"{ROWS}.1.0", lie) for lie in (True, False, None, "-1", [], {}, 10**400)],
    *[("row_shape", f"{ROWS}.1", lie) for lie in ([], [-1.0], [-1.0, 1, None, 4], {}, 1, "x", None, [-1.0, 1, 5])],
    *[("has_logprobs", ROWS, lie) for lie in (None, {}, "x", 3, ...)],
    *[("has_completion_tokens", f"{META}.completion_tokens", lie) for lie in (None, True, 3.0, "3", -1, ...)],
    *[("count_agrees", f"{META}.completion_tokens", lie) for lie in (0, 2, 4, 10**30)],
    *[("has_meta_info", META, lie) for lie in (None, [], "x", ...)],
    *[("one_choice", "choices", lie) for lie in ([], None, {}, "x", ...)],
    *[("content_is_text", "choices.0.message.content", lie) for lie in (None, 1, [], ["x"], {}, ...)],
    ("content_is_text", "choices.0.message", None),
    *[("shape", "choices.0.message", lie) for lie in ([], "x", ...)],
    *[("shape", "choices.0.message.reasoning_content", lie) for lie in (1, [], {})],
    *[("shape", "id", lie) for lie in (None, 1, ...)],
    *[("request_agrees", "id", lie) for lie in ("", "r2", "R", "xr", "r\n")],
    *[("request_agrees", f"{META}.id", lie) for lie in ("", "r2", "xr")],
    *[("shape", f"{META}.id", lie) for lie in (1, [], {})],
    *[("shape", f"{META}.cached_tokens", lie) for lie in (-1, "1", 1.5, True)],
    *[("shape", f"{META}.weight_version", lie) for lie in (True, 1.5, [], {})],
    *[("finish_reason", "choices.0.finish_reason", lie) for lie in ("content_filter", "", "STOP", 1, {}, "length")],
    *[("finish_reason", f"{META}.finish_reason", lie) for lie in ({"type": "x"}, {}, {"type": 1}, 1, "eos", "length")],
    *[("tool_calls_shape", "choices.0.message.tool_calls", lie) for lie in ({}, "x", 1, [1])],
    *[("tool_calls_shape", "choices.0.message.tool_calls.0.id", lie) for lie in (None, 1, ...)],
    *[("tool_calls_shape", "choices.0.message.tool_calls.0.function", lie) for lie in (None, [], ...)],
    *[("tool_calls_shape", "choices.0.message.tool_calls.0.function.name", lie) for lie in (None, 1, ...)],
    *[("tool_calls_shape", "choices.0.message.tool_calls.0.function.arguments", lie) for lie in (None, {}, ...)],
    *[("replay_is_base64", f"{META}.routed_experts", lie) for lie in (1, [], {}, "AAA", "AAAA", "AAAAAA==é")],
    *[("replay_is_base64", f"{META}.indexer_topk", lie) for lie in (True, "=", "AAAAAAA=")],
]


@pytest.mark.parametrize(("law", "path", "lie"), LIES, ids=lambda value: str(value)[-40:])
def test_a_lie_is_named_by_the_law_that_it_breaks(law: str, path: str, lie: Any) -> None:
    assert law_of(changed(path, lie)) == law


@pytest.mark.parametrize("spelled", ["NaN", "Infinity", "-Infinity", "-nan", "0x1", "01", ".5", "+1"])
def test_a_number_that_json_does_not_have_is_no_json(spelled: str) -> None:
    assert law_of(dumped(reply()).replace(b"-2.25", spelled.encode())) == "json"


@pytest.mark.parametrize("spelled", ["1e999", "-1e999", "9" * 400])
def test_a_number_beyond_any_float_is_no_logprob(spelled: str) -> None:
    assert law_of(dumped(reply()).replace(b"-2.25", spelled.encode())) == "logprob_is_finite"


@pytest.mark.parametrize("spelled", ["9" * 5000, "6e0", "6.0", "-0.0"])
def test_a_number_that_is_spelled_as_no_integer_is_no_id(spelled: str) -> None:
    assert law_of(dumped(reply()).replace(b'6, "x"', spelled.encode() + b', "x"')) == "id_in_vocab"


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"{", b"nothing", b"\xef\xbb\xbf{}", b"<html></html>", b"{'a': 1}", b'{"a": 1,}'],
)
def test_what_is_no_json_is_named_so(body: bytes) -> None:
    assert law_of(body) == "json"


@pytest.mark.parametrize("body", [b"null", b"[]", b"1", b'"x"', b"{}", b'{"id": "x"}'])
def test_json_of_another_shape_is_refused(body: bytes) -> None:
    assert law_of(body) in ("shape", "one_choice")


def test_a_reply_that_is_of_another_request_is_never_taken() -> None:
    body = dumped(reply())
    with pytest.raises(UpstreamInvalid) as caught:
        decode_reply(body, vocab_size=VOCAB, request_id="q")
    assert caught.value.law == "request_agrees"
    without = reply()
    del without["choices"][0]["meta_info"]["id"]
    assert decoded(without).id == "r", "one of the two ids is enough"


@pytest.mark.parametrize("asked", ReplayKind)
def test_only_what_was_asked_for_is_kept_and_looked_at(asked: ReplayKind) -> None:
    """What was not is no base64 either."""
    told = {"routed_experts": EXPERTS, "indexer_topk": EXPERTS}
    wanted = {name for name in told if asked in (name, ReplayKind.ALL)}
    body = dumped(reply(**{name: value if name in wanted else "=" for name, value in told.items()}))
    got = decode_reply(body, vocab_size=VOCAB, request_id="r", replay=asked)
    kept = {} if got.replay is None else {name: getattr(got.replay, name) for name in told}
    assert {name for name, value in kept.items() if value is not None} == wanted
    assert set(got.unasked_replay) == set(told) - wanted


def test_bytes_after_the_reply_are_refused() -> None:
    whole = dumped(reply())
    assert decoded(whole + b" \r\n").ids
    for tail in (b"x", b"{}", b"\0", whole):
        assert law_of(whole + tail) == "json"


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"])
@pytest.mark.parametrize("near", [b'"model": "', b'"content": "', b'"role": "', b'"object": "'])
def test_invalid_utf8_is_refused_also_where_nobody_reads_it(near: bytes, bad: bytes) -> None:
    whole = dumped(reply())
    at = whole.index(near) + len(near)
    assert law_of(whole[:at] + bad + whole[at:]) == "utf8"


@pytest.mark.parametrize("opener", [b"[", b'{"a":'])
def test_deep_nesting_is_an_answer_not_a_crash(opener: bytes) -> None:
    assert law_of(b'{"x":' + opener * 200_000) in ("shape", "json")


def test_two_choices_are_refused() -> None:
    whole = reply()
    whole["choices"] *= 2
    assert law_of(whole) == "one_choice"


@pytest.mark.parametrize("field", ["choice", "meta", "both"])
def test_an_aborted_reply_may_have_no_token(field: str) -> None:
    whole = reply(output_token_logprobs=[], completion_tokens=0)
    choice = whole["choices"][0]
    choice["message"] = {"role": "assistant", "content": ""}
    choice["finish_reason"] = None if field == "meta" else "abort"
    choice["meta_info"]["finish_reason"] = None if field == "choice" else {"type": "abort", "message": "x"}
    got = decoded(whole)
    assert (list(got.ids), got.finish) == ([], Finish(reason=FinishReason.ABORT))
    del choice["meta_info"]["output_token_logprobs"]  # aborted before it ran: SGLang leaves them out
    assert decoded(whole).ids == token_ids(())
    choice["meta_info"]["completion_tokens"] = 1
    assert law_of(whole) == "has_logprobs"


def test_an_abort_before_the_first_token_may_have_null_content() -> None:
    whole = reply(output_token_logprobs=[], completion_tokens=0)
    whole["choices"][0] |= {"message": {"role": "assistant", "content": None}, "finish_reason": "abort"}
    assert decoded(whole).message == Message(role=Role.ASSISTANT, content="")


@pytest.mark.parametrize(("told", "law"), [(4, None), (None, None), (3, "prompt_agrees"), (10**30, "prompt_agrees")])
def test_an_engine_that_made_a_prompt_of_its_own_is_found_out(told: int | None, law: str | None) -> None:
    body = dumped(reply(prompt_tokens=told))
    if law is None:
        assert decode_reply(body, vocab_size=VOCAB, num_prompt=4).ids == token_ids((5, 6, 7))
        return
    with pytest.raises(UpstreamInvalid) as caught:
        decode_reply(body, vocab_size=VOCAB, num_prompt=4)
    assert caught.value.law == law


def test_no_token_without_an_abort_is_refused() -> None:
    assert law_of(reply(output_token_logprobs=[], completion_tokens=0)) == "has_tokens"


@pytest.mark.parametrize(
    ("told", "meta", "matched_stop", "finish"),
    [
        ("stop", {"type": "stop", "matched": 7}, 7, Finish(reason=FinishReason.STOP, matched=7)),
        ("stop", {"type": "stop", "matched": "END"}, None, Finish(reason=FinishReason.STOP, matched="END")),
        ("stop", None, "END", Finish(reason=FinishReason.STOP, matched="END")),
        ("tool_calls", {"type": "stop", "matched": 7}, None, Finish(reason=FinishReason.STOP, matched=7)),
        ("tool_calls", {"type": "tool_calls", "matched": None}, None, Finish(reason=FinishReason.STOP)),
        ("length", {"type": "length", "length": 3}, None, Finish(reason=FinishReason.LENGTH)),
        ("length", None, None, Finish(reason=FinishReason.LENGTH)),
        (None, "stop", None, Finish(reason=FinishReason.STOP)),
        ("abort", {"type": "abort", "message": "m"}, None, Finish(reason=FinishReason.ABORT)),
        ("stop", {"type": "abort"}, 7, Finish(reason=FinishReason.ABORT)),
    ],
)
def test_the_finish_reason_is_told_in_our_words(told: Any, meta: Any, matched_stop: Any, finish: Finish) -> None:
    whole = reply(finish_reason=meta)
    whole["choices"][0].update(finish_reason=told, matched_stop=matched_stop)
    assert decoded(whole).finish == finish


def test_a_reply_without_any_finish_reason_is_refused() -> None:
    whole = reply(finish_reason=None)
    whole["choices"][0]["finish_reason"] = None
    assert law_of(whole) == "finish_reason"


@pytest.mark.parametrize(("version", "expected"), [("v1", "v1"), (7, "7"), (0, "0"), ("", ""), (None, "outer")])
def test_a_weight_version_may_be_a_number_and_stand_outside(version: Any, expected: str) -> None:
    assert (
        decoded({**reply(weight_version=version), "metadata": {"weight_version": "outer"}}).weight_version == expected
    )


def test_alternatives_are_read_where_they_are_and_a_ruled_out_one_is_left_out() -> None:
    top = [[[-0.5, 5, None], [None, 9, None]], None, [[-1, 7]]]
    got = decoded(reply(output_top_logprobs=top)).top_logprobs
    assert got == ((TopLogprob(id=5, logprob=-0.5),), (), (TopLogprob(id=7, logprob=-1.0),))
    assert law_of(reply(output_top_logprobs=top[:2])) == "count_agrees"
    assert law_of(reply(output_top_logprobs=[[[-1, VOCAB]], [], []])) == "id_in_vocab"


# -- for any bytes at all


def check_any(body: bytes) -> None:
    """`body` is refused, or says what a plain JSON parser says that it says."""
    try:
        got = decoded(body)
    except UpstreamInvalid as error:
        assert error.law  # noqa: PT017 - both outcomes are right, and nothing else is
        return
    choice = json.loads(body)["choices"][0]
    rows = choice["meta_info"].get("output_token_logprobs") or []
    assert list(got.ids) == [row[1] for row in rows]
    assert all(type(row[1]) is int and 0 <= row[1] < VOCAB for row in rows)
    assert list(got.logprobs) == [row[0] for row in rows]  # one above 0 is engine/validate.py's to refuse
    assert all(map(math.isfinite, got.logprobs))
    assert len(got.ids) == choice["meta_info"]["completion_tokens"]
    assert got.message.content == choice["message"]["content"]
    lean = json.loads(cut_replay(body))
    assert without_replay(json.loads(body)) == lean


def without_replay(whole: dict[str, Any]) -> dict[str, Any]:
    lean = copy.deepcopy(whole)
    for parent in (lean.get("sglext"), *(choice["meta_info"] for choice in lean["choices"])):
        if isinstance(parent, dict):
            parent.pop("routed_experts", None)
            parent.pop("indexer_topk", None)
    return lean


VALID = dumped(reply(routed_experts=EXPERTS))


def test_a_reply_that_is_cut_anywhere_is_refused() -> None:
    for end in range(len(VALID)):
        assert law_of(VALID[:end]) in ("json", "utf8")


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_flipped_bytes_are_refused_or_read_as_they_are(flips: list[tuple[int, int]]) -> None:
    body = bytearray(VALID)
    for at, byte in flips:
        body[at] = byte
    check_any(bytes(body))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_they_are(body: bytes) -> None:
    check_any(body)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [at, *(path for key, child in children for path in paths(child, (*at, key)))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5) | st.just("abort"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(paths(reply(routed_experts=EXPERTS))[1:]), JSON)
def test_any_value_anywhere_is_refused_or_read_as_it_is(path: tuple[Any, ...], value: Any) -> None:
    whole: Any = reply(routed_experts=EXPERTS)
    parent = whole
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    check_any(json.dumps(whole).encode())  # NaN and infinities as Python spells them, too


@given(
    st.lists(st.tuples(st.floats(-1e6, 0), st.integers(-3, VOCAB + 3), st.none() | st.text(max_size=3)), max_size=8),
    st.integers(0, 8),
)
def test_ids_and_logprobs_are_the_rows(rows: list[tuple[float, int, str | None]], count: int) -> None:
    check_any(dumped(reply(output_token_logprobs=rows, completion_tokens=count)))


# -- the client's copy


def test_a_body_without_replay_payload_is_the_same_object() -> None:
    body = dumped(reply())
    assert cut_replay(body) is body
    other = dumped({**reply(), "sglext": None})
    assert cut_replay(other) is other


def test_a_cut_reply_keeps_every_spelling_and_order() -> None:
    body = (
        b'{"z": 1.0, "created": 1e5, "id":"\\u00e9", "choices": [ {"b": 1E5, "meta_info":'
        b' {"k": -0.0, "routed_experts": "AAAA", "l": [ 1.50 ], "indexer_topk": null, "m": 10000000000000000000000}} ],'
        b' "sglext": {"routed_experts": "AAAA", "n": 2.0}, "a": [1 , 2]}'
    )
    assert cut_replay(body) == (
        b'{"z":1.0,"created":1e5,"id":"\\u00e9","choices":[{"b":1E5,"meta_info":'
        b'{"k":-0.0,"l":[ 1.50 ],"m":10000000000000000000000}}],"sglext":{"n":2.0},"a":[1 , 2]}'
    )


@given(st.sampled_from(["routed_experts", "indexer_topk", "both"]), st.booleans(), JSON)
def test_only_the_replay_payload_is_cut(which: str, is_outside: bool, value: Any) -> None:
    names = ("routed_experts", "indexer_topk") if which == "both" else (which,)
    whole = reply(**dict.fromkeys(names, EXPERTS), other=value)
    whole["sglext"] = dict.fromkeys(names, EXPERTS) if is_outside else None
    body = json.dumps(whole, allow_nan=True).encode()
    if b"NaN" not in body and b"Infinity" not in body and b"\\ud" not in body:
        cut = cut_replay(body)
        assert EXPERTS.encode() not in cut
        # Compared as text: 1.0 and 1 are equal as values.
        assert json.dumps(json.loads(cut)) == json.dumps(without_replay(whole))


# -- the request


def pointer_of(error: StenographError) -> str | None:
    """What the error blames, as OpenAI's chats point at it."""
    return None if error.blame is None else OpenAISpelling(prompt="messages").pointer(error.blame)


def request(chat: ChatRequest | None = None, ids: tuple[int, ...] = (1, 2, 3), **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r-1"),
        prompt=Prompt(new_ids=token_ids(ids)),
        params=SamplingParams(**params),
        chat=chat,
    )


def sent(of: GenerateRequest, *, replay: ReplayKind = ReplayKind.NONE) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(encode_request(of, model="m", replay=replay))
    return parsed


ALWAYS = {
    "model": "m",
    "rid": "r-1",
    "logprobs": True,
    "return_meta_info": True,
    "no_stop_trim": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "input_ids": [1, 2, 3],
}
CHAT = ChatRequest(messages=(Message(role=Role.USER, content="hi"),), messages_json=b'[ {"role":"user"} ]')


NO_MESSAGES = [{"role": "user", "content": ""}]


def test_a_plain_request_has_these_fields_and_no_other() -> None:
    assert sent(request(CHAT)) == {**ALWAYS, "messages": NO_MESSAGES}


def test_how_the_text_is_shown_is_asked_for_where_the_engine_writes_it() -> None:
    view = TextView(skips_special=False, separates_reasoning=False)
    fields = ("skip_special_tokens", "spaces_between_special_tokens", "separate_reasoning")
    asked = {**ALWAYS, "messages": NO_MESSAGES, **dict.fromkeys(fields, False)}
    assert sent(request(structs.replace(CHAT, text=view))) == asked


def test_a_least_number_of_tokens_and_a_priority_are_sent() -> None:
    of = structs.replace(request(CHAT, min_tokens=4), routing=Routing(priority=-2))
    assert sent(of) == {**ALWAYS, "messages": NO_MESSAGES, "min_tokens": 4, "priority": -2}


@pytest.mark.parametrize(
    ("change", "params", "param"),
    [
        ({"text": TextView(keeps_stop=True)}, {}, "/include_stop_str_in_output"),
        ({"reply": ReplyOptions(logprobs=True, tokens_as_ids=True)}, {}, "/return_tokens_as_token_ids"),
        ({}, {"min_tokens": 2, "stop": ("x",)}, "/min_tokens"),
    ],
)
def test_what_a_reply_that_goes_out_unchanged_cannot_show_is_refused(
    change: dict[str, Any], params: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest, match="SGLang") as caught:
        sent(request(structs.replace(CHAT, **change), **params))
    assert pointer_of(caught.value) == param
    streamed = ReplyOptions(logprobs=True, tokens_as_ids=True, stream=True)  # which we write
    assert sent(request(structs.replace(CHAT, reply=streamed))) == {**ALWAYS, "messages": NO_MESSAGES}


def test_messages_go_along_with_tools_alone_and_as_they_were_spelled() -> None:
    with_tools = structs.replace(CHAT, tools=(Tool(name="f", json="{}"),))
    assert bytes(CHAT.messages_json) in encode_request(request(with_tools), model="m", replay=ReplayKind.NONE)
    for chat in (None, CHAT):
        assert sent(request(chat))["messages"] == NO_MESSAGES


def test_every_parameter_is_sent_by_the_name_that_sglang_has_for_it() -> None:
    got = sent(
        request(
            CHAT,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=7,
            max_tokens=16,
            stop=("END", 'a"b'),
            stop_token_ids=(5,),
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            repetition_penalty=1.5,
            logit_bias=((9, -1.5),),
            num_top_logprobs=3,
        )
    )
    assert got == {
        **ALWAYS,
        "messages": NO_MESSAGES,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 7,
        "max_tokens": 16,
        "stop": ["END", 'a"b'],
        "stop_token_ids": [5],
        "ignore_eos": False,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"9": -1.5},
        "top_logprobs": 3,
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ToolChoice(), "auto"),
        (ToolChoice(mode=ToolMode.NONE), "none"),
        (ToolChoice(mode=ToolMode.REQUIRED), "required"),
        (ToolChoice(mode=ToolMode.NAMED, name="f"), {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_tools_and_template_arguments_go_along_for_parsing(choice: ToolChoice, expected: Any) -> None:
    chat = ChatRequest(
        messages=CHAT.messages,
        messages_json=CHAT.messages_json,
        tools=(Tool(name="f", json='{"a": 1.0}'), Tool(name="g", json='{"b": 1e5}')),
        tool_choice=choice,
        parallel_tool_calls=False,
        template_kwargs={"enable_thinking": False},
    )
    body = encode_request(request(chat), model="m", replay=ReplayKind.NONE)
    assert b'"tools":[{"a": 1.0},{"b": 1e5}]' in body
    assert json.loads(body) == {
        **ALWAYS,
        "messages": [{"role": "user"}],
        "tools": [{"a": 1.0}, {"b": 1e5}],
        "tool_choice": expected,
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar(kind=GrammarKind.JSON_OBJECT), {"response_format": {"type": "json_object"}}),
        (
            Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "object"}'),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "schema", "strict": True, "schema": {"type": "object"}},
                }
            },
        ),
        (Grammar(kind=GrammarKind.REGEX, source='a"\\d+'), {"regex": 'a"\\d+'}),
        (Grammar(kind=GrammarKind.EBNF, source='root ::= "a"'), {"ebnf": 'root ::= "a"'}),
        (Grammar(kind=GrammarKind.CHOICE, source='["yes", "n\\"\\\\o"]'), {"ebnf": 'root ::= "yes" | "n\\"\\\\o"'}),
        (
            Grammar(kind=GrammarKind.CHOICE, source='["", "\\n\\u0000\\u007f", "Grüße"]'),
            {"ebnf": 'root ::= "" | "\\x0a\\x00\\x7f" | "Grüße"'},
        ),
    ],
)
def test_a_grammar_is_sent_in_sglang_s_words(grammar: Grammar, expected: dict[str, Any]) -> None:
    assert sent(request(CHAT, grammar=grammar)) == {**ALWAYS, "messages": NO_MESSAGES, **expected}


def test_a_grammar_of_another_dialect_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lark"):
        sent(request(CHAT, grammar=Grammar(kind=GrammarKind.LARK, source="x")))


@pytest.mark.parametrize("source", ["[]", "x", "[1]", '{"a": "b"}', "[" * 100_000])
def test_a_choice_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="choice"):
        sent(request(CHAT, grammar=Grammar(kind=GrammarKind.CHOICE, source=source)))


@pytest.mark.parametrize(
    ("replay", "asked"),
    [
        (ReplayKind.NONE, {}),
        (ReplayKind.ROUTED_EXPERTS, {"return_routed_experts": True}),
        (ReplayKind.INDEXER_TOPK, {"return_indexer_topk": True}),
        (ReplayKind.ALL, {"return_routed_experts": True, "return_indexer_topk": True}),
    ],
)
def test_replay_payloads_are_asked_for_when_told_to(replay: ReplayKind, asked: dict[str, bool]) -> None:
    assert sent(request(CHAT), replay=replay) == {**ALWAYS, "messages": NO_MESSAGES, **asked}


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_fragments_of_ids_join_to_the_fragment_of_the_whole(left: list[int], right: list[int]) -> None:
    whole = encode_ids(array("i", left + right))
    assert whole == encode_ids(array("i", left)) + b"," + encode_ids(array("i", right))
    assert json.loads(b"[" + whole + b"]") == left + right
    assert sent(request(ids=tuple(left)))["input_ids"] == left
