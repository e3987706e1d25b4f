"""What SGLang's own route says is believed only where it keeps every law, in one piece or as either kind of stream."""

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from standins.sglang_parts import SampledReply, finish_reason, generate_part
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    StenographError,
    UpstreamInvalid,
    UpstreamRefused,
)
from stenograph.core.replay import PackedInts
from stenograph.core.routing import Routing
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    MixedWeights,
    Prompt,
    RequestId,
    SampledTurn,
    SamplingParams,
    TopLogprob,
    WeightSpan,
    token_ids,
)
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.rows import LARGE_PAYLOAD_BYTES
from stenograph.engine.settings import ReplayKind
from stenograph.engine.sglang.chat_wire import encode_request
from stenograph.engine.sglang.generate_wire import (
    SGLangGenerateReading,
    context_exceeded,
    context_of_models,
    encode_generate,
    facts_of,
)
from stenograph.engine.validate import TurnCollector

VOCAB = 1000
EXPERTS = base64.b64encode(bytes(24)).decode()
STOP = {"type": "stop", "matched": 7}


def ok(value: Any) -> HttpReply:
    return HttpReply(status=200, content_type="application/json", headers=(), body=dumped(value))


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def part(ids: Sequence[int] = (5, 6, 7), **changes: Any) -> dict[str, Any]:
    """A valid whole reply; `changes` are members of its meta_info."""
    meta = {
        "id": "r",
        "finish_reason": STOP,
        "prompt_tokens": 4,
        "completion_tokens": len(ids),
        "cached_tokens": 2,
        "weight_version": "v1",
        "output_token_logprobs": [[-(at + 1) / 2, id_, None] for at, id_ in enumerate(ids)],
        **changes,
    }
    return {"text": "Grüße", "output_ids": list(ids), "meta_info": meta}


def reading() -> SGLangGenerateReading:
    return SGLangGenerateReading(request_id="r", vocab_size=VOCAB, num_prompt=4, replay=ReplayKind.ALL)


def read(*parts: Any) -> list[Chunk]:
    """The chunks of a stream of these parts, or, of one, of the whole reply; both are the same there."""
    reader, chunks = reading(), list[Chunk]()
    for one in parts:
        chunks += reader.event(one if isinstance(one, bytes) else dumped(one))
    return [*chunks, *reader.end()]


def turn(chunks: Sequence[Chunk]) -> SampledTurn:
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=None)
    for chunk in chunks:
        collector.add(chunk)
    return collector.result()


def law_of(*parts: Any) -> str:
    with pytest.raises(UpstreamInvalid) as caught:
        read(*parts)
    assert str(caught.value).startswith(f"{caught.value.law}: ")
    return caught.value.law


def changed(path: str, value: Any) -> dict[str, Any]:
    """A valid reply with the value at `path` replaced; deleted if it is `...`."""
    whole = part()
    parent: Any = whole
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        parent = parent[step]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return whole


# -- one reply


def test_a_whole_reply_is_one_chunk() -> None:
    (chunk,) = reading().whole(ok(part(routed_experts=EXPERTS, output_top_logprobs=[[[-0.5, 5]], None, []])))
    assert (list(chunk.ids), list(chunk.logprobs)) == ([5, 6, 7], [-0.5, -1.0, -1.5])
    assert chunk.finish == Finish(reason=FinishReason.STOP, matched=7)
    assert (chunk.num_cached_tokens, chunk.weight_version, chunk.reply) == (2, "v1", None)
    assert chunk.top_logprobs == ((TopLogprob(id=5, logprob=-0.5),), (), ())
    assert chunk.replay is not None
    assert chunk.replay.routed_experts == PackedInts(bytes(6), 1)


def test_a_large_payload_is_read_as_a_small_one() -> None:
    large = base64.b64encode(bytes(4 * LARGE_PAYLOAD_BYTES)).decode()
    (chunk,) = reading().whole(ok(part(routed_experts=large)))
    assert chunk.replay is not None
    assert chunk.replay.routed_experts == PackedInts(bytes(LARGE_PAYLOAD_BYTES), 1)


META = "meta_info"
ROWS = f"{META}.output_token_logprobs"
LIES: list[tuple[str, str, Any]] = [
    *[("id_in_vocab", f"{ROWS}.1.1", lie) for lie in (-1, VOCAB, 2**31, 10**30, True, 1.0, "1", None, [1])],
    *[("logprob_is_finite", f"{ROWS}.1.0", lie) for lie in (True, None, "-1", [], {}, 10**400)],
    *[("row_shape", f"{ROWS}.1", lie) for lie in ([], [-1.0], [-1.0, 1, None, 4], {}, 1, None, [-1.0, 1, 5])],
    *[("has_logprobs", ROWS, lie) for lie in (None, {}, "x", 3, ...)],
    *[("has_completion_tokens", f"{META}.completion_tokens", lie) for lie in (None, True, 3.0, "3", -1, ...)],
    *[("count_agrees", f"{META}.completion_tokens", lie) for lie in (0, 2, 4, 10**30)],
    *[("has_meta_info", META, lie) for lie in (None, ...)],
    *[("shape", META, lie) for lie in ([], "x", 1)],
    *[("ids_agree", "output_ids", lie) for lie in ([], [5], [5, 6], [5, 6, 8], [5, 6, 7, 7], "x", [-1], [1.0], {})],
    *[("shape", f"{META}.cached_tokens", lie) for lie in (-1, "1", 1.5, True)],
    *[("request_agrees", f"{META}.id", lie) for lie in (None, ..., "", "r2", "xr", "R")],
    *[("shape", f"{META}.id", lie) for lie in (1, [], {})],
    *[("shape", f"{META}.weight_version", lie) for lie in (True, 1.5, [], {})],
    *[("finish_reason", f"{META}.finish_reason", lie) for lie in ({"type": "x"}, {}, {"type": 1}, 1, "eos", [])],
    *[("prompt_agrees", f"{META}.prompt_tokens", lie) for lie in (0, 3, 10**30)],
    *[("replay_is_base64", f"{META}.routed_experts", lie) for lie in (1, [], {}, "AAA", "AAAA", "AAAAAA==é")],
    *[("replay_is_base64", f"{META}.indexer_topk", lie) for lie in (True, "=", "AAAAAAA=")],
    *[("count_agrees", f"{META}.output_top_logprobs", lie) for lie in ([[]], [[], []], [[], [], [], []])],
    *[("id_in_vocab", f"{META}.output_top_logprobs", [[[-1, VOCAB]], [], []]) for _ in range(1)],
    *[
        ("versions_agree", f"{META}.weight_versions", lie)
        for lie in (
            [],
            [{"version": "a", "start": 0, "end": 2}],
            [{"version": "a", "start": 0, "end": 4}],
            [{"version": "a", "start": 1, "end": 3}],
            [{"version": "a", "start": 0, "end": 0}, {"version": "b", "start": 0, "end": 3}],
            [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 1, "end": 3}],
            [{"version": "a"}],
            "x",
            [1],
        )
    ],
]


@pytest.mark.parametrize(("law", "path", "lie"), LIES, ids=lambda value: str(value)[-40:])
def test_a_lie_is_named_by_the_law_that_it_breaks(law: str, path: str, lie: Any) -> None:
    assert law_of(changed(path, lie)) == law


@pytest.mark.parametrize("spelled", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400])
def test_a_logprob_is_a_finite_number(spelled: str) -> None:
    assert law_of(dumped(part()).replace(b"-1.5", spelled.encode())) in ("json", "logprob_is_finite")


@pytest.mark.parametrize("body", [b"", b" ", b"{", b"nothing", b"\xef\xbb\xbf{}", b"<html>", b"{}x", b"\xff"])
def test_what_is_no_json_is_named_so(body: bytes) -> None:
    assert law_of(body) in ("json", "utf8")


@pytest.mark.parametrize("body", [b"null", b"[]", b"1", b'"x"', b"{}", b'{"text": "x"}', b"[{}]"])
def test_json_of_another_shape_is_refused(body: bytes) -> None:
    assert law_of(body) in ("shape", "has_meta_info")


@pytest.mark.parametrize("opener", [b"[", b'{"a":'])
def test_deep_nesting_is_an_answer_not_a_crash(opener: bytes) -> None:
    assert law_of(b'{"x":' + opener * 200_000) in ("shape", "json")


def test_a_whole_reply_has_a_finish_reason_and_a_token() -> None:
    for lie in (None, ...):
        with pytest.raises(UpstreamInvalid) as caught:
            reading().whole(ok(changed(f"{META}.finish_reason", lie)))
        assert caught.value.law == "finish_reason"
    assert law_of(part(())) == "has_tokens"


@pytest.mark.parametrize("rows", [[], None, ...])
def test_an_aborted_reply_may_have_no_token_and_no_list(rows: Any) -> None:
    whole = part((), finish_reason={"type": "abort", "message": "Aborted"}, output_token_logprobs=rows)
    if rows is ...:
        del whole["meta_info"]["output_token_logprobs"]
    (chunk,) = reading().whole(ok(whole))
    assert (list(chunk.ids), chunk.finish) == ([], Finish(reason=FinishReason.ABORT))


@pytest.mark.parametrize(
    ("told", "finish"),
    [
        (STOP, Finish(reason=FinishReason.STOP, matched=7)),
        ({"type": "stop", "matched": "END"}, Finish(reason=FinishReason.STOP, matched="END")),
        ("stop", Finish(reason=FinishReason.STOP)),
        ({"type": "length", "length": 3}, Finish(reason=FinishReason.LENGTH)),
        ({"type": "abort", "message": "m", "status_code": None}, Finish(reason=FinishReason.ABORT)),
    ],
)
def test_the_finish_reason_is_told_in_our_words(told: Any, finish: Finish) -> None:
    assert read(part(finish_reason=told))[-1].finish == finish


def test_output_ids_may_be_left_out() -> None:
    assert list(turn(read(changed("output_ids", ...))).ids) == [5, 6, 7]


# -- which weights


def test_spans_of_versions_come_with_the_end_and_are_true_of_the_parts_before() -> None:
    """Recorded of 0.5.23: no part but the last has them."""
    spans = [{"version": 1, "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 3}]
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=None)
    for chunk in read(part((5, 6), finish_reason=None, weight_version="a"), part(weight_versions=spans)):
        collector.add(chunk)
    got = collector.result(MixedWeights(oldest="a"))
    assert got.weights == (WeightSpan(version="1", start=0, end=1), WeightSpan(version="b", start=1, end=3))
    assert got.mixed is None


def test_without_spans_each_part_of_a_stream_has_the_version_of_its_time() -> None:
    first = part((5, 6), finish_reason=None, weight_version="a")
    got = turn(read(first, part(weight_version="b")))
    assert [(span.version, span.start, span.end) for span in got.weights] == [("a", 0, 2), ("b", 2, 3)]


# -- streams


def sampled(ids: Sequence[int], versions: Sequence[str] = (), num_top: int = 0) -> SampledReply:
    return SampledReply(
        rid="r",
        ids=ids,
        logprobs=[-(at % 7) / 8 for at in range(len(ids))],
        tops=[[(other, -1.0) for other in range(num_top)] for _ in ids] if num_top else [],
        versions=list(versions) or ["v1"] * len(ids),
        num_prompt=4,
        num_cached=2,
        routed_experts=bytes(8),
        indexer_topk=None,
        rows_have_text=True,
    )


def stream(
    of: SampledReply, cuts: Sequence[int], *, incremental: bool, has_spans: bool = False
) -> list[dict[str, Any]]:
    """The parts of a stream that has sent so many tokens at each cut."""
    parts: list[dict[str, Any]] = []
    for before, now in zip((0, *cuts), (*cuts, len(of.ids)), strict=True):
        is_last = len(parts) == len(cuts)
        told = finish_reason("stop", 7, now) if is_last else None
        first = before if incremental else 0
        parts.append(generate_part(of, now, told, lambda ids: str(list(ids)), first=first, has_spans=has_spans))
    return parts


@given(st.data())
def test_both_kinds_of_stream_are_the_same_turn_as_the_whole_reply(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    versions = sorted(data.draw(st.lists(st.sampled_from("ab"), min_size=len(ids), max_size=len(ids))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    of = sampled(ids, versions, num_top=data.draw(st.integers(0, 2)))
    whole = turn(read(stream(of, (), incremental=False, has_spans=True)[0]))
    for incremental in (True, False):
        chunks = read(*stream(of, cuts, incremental=incremental, has_spans=True))
        assert turn(chunks) == whole
        assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("lost", range(3))
def test_a_stream_that_lost_an_event_is_found_out(lost: int, incremental: bool) -> None:
    parts = stream(sampled((1, 2, 3, 4, 5, 6, 7, 8)), (2, 4, 6), incremental=incremental)
    del parts[lost]
    if incremental:
        assert law_of(*parts) == "count_agrees"
    else:  # a later event has everything that the lost one had
        assert list(turn(read(*parts)).ids) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("doubled", range(3))
def test_a_stream_that_says_an_event_twice_doubles_nothing(doubled: int, incremental: bool) -> None:
    parts = stream(sampled((1, 2, 3, 4, 5, 6, 7, 8)), (2, 4, 6), incremental=incremental)
    parts.insert(doubled, parts[doubled])
    if incremental and doubled:
        assert law_of(*parts) in ("count_agrees", "ids_agree")
    else:  # all tokens again, and none of them new
        assert list(turn(read(*parts)).ids) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("path", "lie"), [("0.1", 9), ("0.0", -0.625), ("1.1", 9), ("1.0", -3.0)], ids=str)
def test_a_list_of_all_tokens_begins_with_those_that_came_before(path: str, lie: Any) -> None:
    parts = stream(sampled((1, 2, 3, 4)), (2,), incremental=False)
    row, column = map(int, path.split("."))
    parts[1]["meta_info"]["output_token_logprobs"][row][column] = lie
    del parts[1]["output_ids"]
    assert law_of(*parts) == "stream_extends"


def test_a_list_of_all_tokens_never_grows_shorter() -> None:
    parts = stream(sampled((1, 2, 3, 4)), (3, 2), incremental=False)
    assert law_of(*parts) in ("stream_extends", "count_agrees")


@pytest.mark.parametrize("again", [part(), part(finish_reason=None), part((), finish_reason=None)])
def test_nothing_follows_the_part_that_ends(again: dict[str, Any]) -> None:
    assert law_of(part(), again) == "finish_is_last"


def test_the_chunk_that_ends_is_held_until_the_stream_does() -> None:
    reader = reading()
    assert not reader.event(dumped(part()))
    (last,) = reader.end()
    assert last.finish is not None


def test_a_stream_without_an_end_has_no_last_chunk() -> None:
    assert [chunk.finish for chunk in read(part(finish_reason=None))] == [None]
    assert not read(part((), finish_reason=None))


@pytest.mark.parametrize("incremental", [True, False])
def test_an_abort_of_a_waiting_request_repeats_all_rows_and_the_last_id(incremental: bool) -> None:
    # SGLang's `_handle_abort_req`: the lists of meta_info are whole, whatever the kind of stream.
    parts = stream(sampled((1, 2, 3)), (2,), incremental=incremental)[:1]
    abort = generate_part(sampled((1, 2)), 2, {"type": "abort", "message": "Abort in waiting queue"}, lambda _: "")
    del abort["meta_info"]["prompt_tokens"]
    got = turn(read(*parts, {**abort, "output_ids": [2]}))
    assert (list(got.ids), got.finish) == ([1, 2], Finish(reason=FinishReason.ABORT))


# -- errors within a reply

TOO_LONG = (
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000"
    " tokens: 4000 tokens from the input messages and 1000 tokens for the completion. Please reduce the number."
)
LONG_INPUT = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
LONG_PROMPT = (
    "Input length (5000 tokens) exceeds the maximum allowed length (4096 tokens). Use a shorter input or enable"
    " --allow-auto-truncate."
)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"error": {"message": "no"}}, 400),
        ({"error": {"message": "no", "code": 503, "type": "x"}}, 503),
        ({"error": {"message": "no", "code": "bad"}}, 400),
        ({"error": "no"}, 400),
        (part((), finish_reason={"type": "abort", "message": "no", "status_code": 500}), 500),
    ],
)
def test_an_error_as_an_event_is_the_refusal_that_it_would_be_outside(event: Any, status: int) -> None:
    with pytest.raises(UpstreamRefused) as caught:
        read(event)
    assert (caught.value.engine_status, caught.value.content_type) == (status, "application/json")
    error = json.loads(caught.value.body)["error"]
    assert (error if isinstance(error, str) else error["message"]) == "no"


@pytest.mark.parametrize("status", [0, 200, 302, 600, 10**30])
def test_an_error_with_a_status_that_is_none_breaks_a_law(status: int) -> None:
    assert law_of({"error": {"message": "no", "code": status}}) == "error_status"


@pytest.mark.parametrize(("message", "prompt"), [(TOO_LONG, 4000), (LONG_INPUT, 5000), (LONG_PROMPT, 5000)])
def test_a_request_that_is_too_long_is_told_so(message: str, prompt: int) -> None:
    for event in (
        {"error": {"message": message}},
        part((), finish_reason={"type": "abort", "message": message, "status_code": 400}),
    ):
        with pytest.raises(ContextLengthExceeded) as caught:
            read(event)
        assert (caught.value.num_prompt_tokens, caught.value.max_context_tokens) == (prompt, 4096)
    assert context_exceeded(dumped({"error": {"message": message}})) is not None
    assert context_exceeded(b'{"error": {"message": "no"}}') is None


def test_how_long_the_context_is_is_read_where_it_is_told() -> None:
    assert context_of_models(b'{"data": [{"id": "a", "max_model_len": 4096}, {"max_model_len": 100}]}') == 99
    assert facts_of(b'{"context_length": 4096, "tp": 1}').max_context_tokens == 4095
    assert facts_of(b'{"context_length": 4096, "max_req_input_len": 4090}').max_context_tokens == 4090
    for body in (b"", b"{}", b"[]", b'{"data": [{}]}', b'{"data": [{"max_model_len": null}]}', b"[" * 100_000):
        assert context_of_models(body) is None
        assert facts_of(body).max_context_tokens is None


# -- for any bytes at all


def check_any(*bodies: bytes) -> None:
    """A stream is refused, or says what a plain JSON parser says that it says."""
    try:
        chunks = read(*bodies)
        if not chunks or chunks[-1].finish is None:
            return
        got = turn(chunks)
    except StenographError as error:
        assert isinstance(error, UpstreamInvalid | UpstreamRefused | ContextLengthExceeded)  # noqa: PT017
        return
    last = json.loads(bodies[-1])["meta_info"]
    assert len(got.ids) == last["completion_tokens"]
    assert all(map(math.isfinite, got.logprobs))
    rows = last.get("output_token_logprobs") or []
    assert [row[1] for row in rows] == list(got.ids)[len(got.ids) - len(rows) :]
    assert [min(row[0], 0.0) for row in rows] == list(got.logprobs)[len(got.ids) - len(rows) :]


VALID = dumped(part(routed_experts=EXPERTS))


def test_a_reply_that_is_cut_anywhere_is_refused() -> None:
    for end in range(len(VALID)):
        assert law_of(VALID[:end]) in ("json", "utf8")


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_they_are(body: bytes) -> None:
    check_any(body)


@given(
    st.booleans(),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_flipped_bytes_in_a_stream_are_refused_or_read_as_they_are(
    incremental: bool, which: int, flips: list[tuple[int, int]]
) -> None:
    bodies = [dumped(one) for one in stream(sampled((1, 2, 3, 4, 5)), (2, 4), incremental=incremental)]
    body = bytearray(bodies[which])
    for at, byte in flips:
        body[at % len(body)] = byte
    bodies[which] = bytes(body)
    check_any(*bodies)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5) | st.just("abort"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    return [at, *(path for key, child in children for path in paths(child, (*at, key)))]


@given(st.sampled_from(paths(part(routed_experts=EXPERTS, output_top_logprobs=[[[-1, 2]], [], []]))[1:]), JSON)
def test_any_value_anywhere_is_refused_or_read_as_it_is(path: tuple[Any, ...], value: Any) -> None:
    whole: Any = part(routed_experts=EXPERTS, output_top_logprobs=[[[-1, 2]], [], []])
    parent = whole
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    check_any(json.dumps(whole).encode())


# -- the request


def request(
    *, streams: bool = False, json_fragments: tuple[bytes, ...] | None = None, **params: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r-1"),
        prompt=Prompt(new_ids=token_ids((1, 2, 3)), json_fragments=json_fragments),
        params=SamplingParams(**params),
        streams=streams,
    )


def sent(of: GenerateRequest, *, replay: ReplayKind = ReplayKind.NONE) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(encode_generate(of, replay=replay))
    return parsed


SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "max_new_tokens": None,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
ALWAYS = {
    "rid": "r-1",
    "stream": False,
    "return_logprob": True,
    "logprob_start_len": -1,
    "return_text_in_logprobs": False,
    "sampling_params": SAMPLING,
    "input_ids": [1, 2, 3],
}


def test_a_plain_request_has_these_fields_and_no_other() -> None:
    assert sent(request()) == ALWAYS
    assert sent(request(streams=True)) == {**ALWAYS, "stream": True}


def test_a_least_number_of_tokens_and_a_priority_are_sent() -> None:
    sampling = {**SAMPLING, "min_new_tokens": 4}
    assert sent(replace(request(min_tokens=4), routing=Routing(priority=0))) == {
        **ALWAYS,
        "priority": 0,
        "sampling_params": sampling,
    }
    with pytest.raises(InvalidRequest) as caught:
        sent(request(min_tokens=4, stop=("x",)))
    assert caught.value.blame == Blame(RequestPart.SAMPLING, path=("min_tokens",))


def test_ids_that_are_at_hand_as_text_are_sent_as_they_are() -> None:
    assert b'"input_ids":[1 ,2,  3]' in encode_generate(
        request(json_fragments=(b"1 ,2", b"  3")), replay=ReplayKind.NONE
    )


def test_every_parameter_is_sent_by_the_name_that_sglang_has_for_it() -> None:
    got = sent(
        request(
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
        "top_logprobs_num": 3,
        "sampling_params": {
            **SAMPLING,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "sampling_seed": 7,
            "max_new_tokens": 16,
            "stop": ["END", 'a"b'],
            "stop_token_ids": [5],
            "ignore_eos": False,
            "presence_penalty": 0.25,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.5,
            "logit_bias": {"9": -1.5},
        },
    }


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        (GrammarKind.JSON_OBJECT, "", {"json_schema": '{"type":"object"}'}),
        (GrammarKind.JSON_SCHEMA, '{"type": "array"}', {"json_schema": '{"type": "array"}'}),
        (GrammarKind.REGEX, "a+", {"regex": "a+"}),
        (GrammarKind.EBNF, 'root ::= "a"', {"ebnf": 'root ::= "a"'}),
        (GrammarKind.CHOICE, '["a", "b"]', {"ebnf": 'root ::= "a" | "b"'}),
    ],
)
def test_a_grammar_is_sent_in_sglang_s_words(kind: GrammarKind, source: str, expected: dict[str, str]) -> None:
    got = sent(request(grammar=Grammar(kind=kind, source=source)))
    assert got["sampling_params"] == {**SAMPLING, **expected}


def test_a_lark_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lark"):
        sent(request(grammar=Grammar(kind=GrammarKind.LARK, source="start: x")))


def test_replay_payloads_are_asked_for_when_told_to() -> None:
    got = sent(request(), replay=ReplayKind.ALL)
    assert got == {**ALWAYS, "return_routed_experts": True, "return_indexer_topk": True}


def test_of_routed_experts_the_rows_that_the_line_does_not_have_are_asked_for_on_both_routes() -> None:
    for num_kept, first_row in ((0, None), (1, None), (2, 1), (3, 2)):
        prompt = Prompt.of(token_ids((1, 2, 3)), num_kept=num_kept)
        of = GenerateRequest(request_id=RequestId("r"), prompt=prompt, params=SamplingParams())
        for body in (
            encode_generate(of, replay=ReplayKind.ALL),
            encode_request(of, model="m", replay=ReplayKind.ROUTED_EXPERTS),
        ):
            assert json.loads(body).get("routed_experts_start_len") == first_row
        assert b"start_len" not in encode_request(of, model="m", replay=ReplayKind.INDEXER_TOPK)


def test_the_models_end_can_be_ignored_where_no_stop_tokens_are_given() -> None:
    assert sent(request(ignore_eos=True))["sampling_params"]["ignore_eos"] is True
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        sent(request(ignore_eos=True, stop_token_ids=(5,)))
