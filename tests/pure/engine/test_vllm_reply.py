"""What vLLM says is believed only where it keeps every law, on either of its routes, in one piece or as a stream."""

import base64
import contextlib
import copy
import io
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from stenograph.core.errors import InvalidRequest, UpstreamInvalid, UpstreamRefused
from stenograph.core.replay import PackedInts
from stenograph.core.routing import Routing
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    RequestId,
    SamplingParams,
    TopLogprob,
    WeightSpan,
    token_ids,
)
from stenograph.engine.base import GenerateRequest
from stenograph.engine.vllm.reply import Expected, VLLMReader, experts_of_npy
from stenograph.engine.vllm.request import VLLMRoute, abort_ids, encode_abort, encode_request
from stenograph.engine.vllm.scores import decode_scores, encode_scoring
from stenograph.engine.vllm.wire import decode_models
from stenograph.offload.in_pieces import in_pieces

VOCAB = 1000
EXPECTED = Expected(
    request_id="r-1",
    route=VLLMRoute.GENERATE,
    vocab_size=VOCAB,
    num_prompt=4,
    eos_ids=frozenset({7}),
    num_top_logprobs=0,
)
COMPLETION = replace(EXPECTED, route=VLLMRoute.COMPLETIONS)
USAGE = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def generated(ids: Sequence[int] = (5, 6, 7), **changes: Any) -> dict[str, Any]:
    """A valid whole reply of the generate route; `changes` are members of its choice."""
    rows = [
        {"token_id": id_, "logprob": -(at + 1) / 2, "rank": 1, "top_logprobs": [{"token_id": id_, "logprob": -1.0}]}
        for at, id_ in enumerate(ids)
    ]
    choice = {
        "index": 0,
        "token_ids": list(ids),
        "logprobs": {"content": rows},
        "finish_reason": "stop",
        "stop_reason": None,
        "weight_versions": [{"version": "v1", "start": 0, "end": len(ids)}],
        "routed_experts": None,
        **changes,
    }
    return {"request_id": "generate-tokens-r-1", "choices": [choice], "usage": {**USAGE, "completion_tokens": len(ids)}}


def completed(ids: Sequence[int] = (5, 6, 7), **changes: Any) -> dict[str, Any]:
    """The same of the completions route."""
    logprobs = {
        "tokens": [f"token_id:{id_}" for id_ in ids],
        "token_logprobs": [-(at + 1) / 2 for at, _ in enumerate(ids)],
        "top_logprobs": [{f"token_id:{id_}": -1.0} for id_ in ids],
    }
    choice = {"index": 0, "text": "Grüße", "token_ids": list(ids), "logprobs": logprobs, "finish_reason": "stop"}
    usage = {**USAGE, "completion_tokens": len(ids)}
    return {"id": "cmpl-r-1", "choices": [{**choice, "stop_reason": None, **changes}], "usage": usage}


BOTH = pytest.mark.parametrize(("whole", "expected"), [(generated, EXPECTED), (completed, COMPLETION)])
Whole = Callable[..., dict[str, Any]]


def read(body: Any, expected: Expected = EXPECTED) -> Chunk:
    return VLLMReader(expected).whole(body if isinstance(body, bytes) else dumped(body))


def streamed(events: Sequence[Any], expected: Expected = EXPECTED) -> list[Chunk]:
    reader = VLLMReader(expected)
    chunks = (reader.event(event if isinstance(event, bytes) else dumped(event)) for event in events)
    return [chunk for chunk in chunks if chunk is not None]


def law_of(*bodies: Any, expected: Expected = EXPECTED) -> str:
    with pytest.raises(UpstreamInvalid) as caught:
        read(bodies[0], expected) if len(bodies) == 1 else streamed(bodies, expected)
    assert str(caught.value).startswith(f"{caught.value.law}: ")
    return caught.value.law


def changed(whole: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """`whole` with the value at `path` replaced; deleted if it is `...`."""
    parent: Any = (whole := copy.deepcopy(whole))
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        parent = parent[step]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return whole


# -- one reply


@BOTH
def test_a_whole_reply_is_one_chunk(whole: Whole, expected: Expected) -> None:
    chunk = read(whole(), expected)
    assert (chunk.ids, chunk.logprobs) == (token_ids([5, 6, 7]), array("d", [-0.5, -1.0, -1.5]))
    assert chunk.finish == Finish(reason=FinishReason.STOP, matched=7), "vLLM does not say that an eos ended it"
    assert chunk.num_cached_tokens == 2
    told = (WeightSpan(version="v1", start=0, end=3),) if expected is EXPECTED else None
    assert chunk.weights == told
    assert (chunk.top_logprobs, chunk.replay) == (None, None)


@BOTH
@pytest.mark.parametrize(
    ("reason", "told", "finish"),
    [
        ("stop", "end", Finish(reason=FinishReason.STOP, matched="end")),
        ("stop", 6, Finish(reason=FinishReason.STOP, matched=6)),
        ("length", None, Finish(reason=FinishReason.LENGTH)),
        ("abort", None, Finish(reason=FinishReason.ABORT)),
    ],
)
def test_why_it_ended_and_on_what_is_told(
    whole: Whole, expected: Expected, reason: str, told: int | str | None, finish: Finish
) -> None:
    assert read(whole(finish_reason=reason, stop_reason=told), expected).finish == finish


def test_an_end_on_no_token_that_ends_turns_names_none() -> None:
    assert read(generated((5, 6))).finish == Finish(reason=FinishReason.STOP)


@BOTH
def test_an_aborted_reply_may_have_no_token(whole: Whole, expected: Expected) -> None:
    chunk = read(whole((), finish_reason="abort"), expected)
    assert (len(chunk.ids), chunk.finish) == (0, Finish(reason=FinishReason.ABORT))


def test_the_best_alternatives_are_kept_and_the_sampled_token_is_one_only_if_it_is_among_them() -> None:
    tops = [{"token_id": 9, "logprob": -8.0}, {"token_id": 1, "logprob": -0.5}, {"token_id": 2, "logprob": -1.0}]
    rows = [{"token_id": 9, "logprob": -8.0, "top_logprobs": tops}]
    reply = generated((9,), logprobs={"content": rows}, finish_reason="length")
    best = (TopLogprob(id=1, logprob=-0.5), TopLogprob(id=2, logprob=-1.0))
    assert read(reply, replace(EXPECTED, num_top_logprobs=2)).top_logprobs == (best,)
    names = {f"token_id:{top['token_id']}": top["logprob"] for top in tops}
    logprobs = {"tokens": ["token_id:9"], "token_logprobs": [-8.0], "top_logprobs": [names]}
    completion = completed((9,), logprobs=logprobs, finish_reason="length")
    assert read(completion, replace(COMPLETION, num_top_logprobs=2)).top_logprobs == (best,)


def test_spans_of_weight_versions_without_tokens_are_left_out() -> None:
    spans = [("a", 0, 2), ("b", 2, 2), ("c", 2, 3)]
    told = [{"version": version, "start": start, "end": end} for version, start, end in spans]
    kept = (WeightSpan(version="a", start=0, end=2), WeightSpan(version="c", start=2, end=3))
    assert read(generated(weight_versions=told)).weights == kept


CHOICE = "choices.0"
ROW = f"{CHOICE}.logprobs.content.1"
COMMON: list[tuple[str, str, Any]] = [
    *[("id_in_vocab", f"{CHOICE}.token_ids.1", lie) for lie in (-1, True, 1.0, "1", None, [1], 10**30)],
    *[("has_ids", f"{CHOICE}.token_ids", lie) for lie in (None, ...)],
    *[("count_agrees", f"{CHOICE}.token_ids", lie) for lie in ([], [5], [5, 6, 7, 7])],
    *[("has_logprobs", f"{CHOICE}.logprobs", lie) for lie in (None, ...)],
    *[("finish_reason", f"{CHOICE}.finish_reason", lie) for lie in ("", "error", "tool_calls", 1, [])],
    *[("has_finish", f"{CHOICE}.finish_reason", lie) for lie in (None, ...)],
    *[("one_choice", f"{CHOICE}.index", 1), ("one_choice", "choices", []), ("one_choice", "choices", ...)],
    *[("one_choice", "choices", None), ("one_choice", "choices", {})],
    *[("shape", "usage", lie) for lie in (None, ..., [], {})],
    *[("shape", "usage.completion_tokens", lie) for lie in (-1, True, 3.0, "3", None)],
    *[("count_agrees", "usage.completion_tokens", lie) for lie in (0, 2, 4, 10**30)],
    *[("prompt_agrees", "usage.prompt_tokens", lie) for lie in (0, 3, 5, 10**30)],
    *[("shape", "usage.prompt_tokens_details", lie) for lie in ([], {"cached_tokens": -1}, {"cached_tokens": "1"})],
    *[("shape", f"{CHOICE}.stop_reason", lie) for lie in ([], 1.5, True)],
    *[("shape", "error", lie) for lie in ({"code": 200}, {"code": 10**30}, {"code": "400"}, [], {})],
]
GENERATE_LIES: list[tuple[str, str, Any]] = [
    *[("id_in_vocab", f"{ROW}.token_id", lie) for lie in (10**30, -1, True, 1.0, "1", None)],
    *[("ids_agree", f"{ROW}.token_id", lie) for lie in (0, 5, VOCAB)],
    *[("logprob_is_finite", f"{ROW}.logprob", lie) for lie in (True, None, "-1", [], {}, 10**400)],
    ("logprob_is_told", f"{ROW}.logprob", -9999.0),
    *[("has_logprobs", f"{CHOICE}.logprobs.content", lie) for lie in (None, ..., "x")],
    ("count_agrees", f"{CHOICE}.logprobs.content", []),
    *[("request_agrees", "request_id", lie) for lie in (None, ..., "", "generate-tokens-r-2", "x-r-1", "1r-1")],
    *[
        ("weight_spans", f"{CHOICE}.weight_versions", [{"version": "a", "start": start, "end": end}])
        for start, end in ((0, 2), (1, 3), (0, 4), (0, 10**30), (-1, 3))
    ],
    ("weight_spans", f"{CHOICE}.weight_versions", []),
    ("weight_spans", f"{CHOICE}.weight_versions", [{"version": "a", "start": 0, "end": 3}] * 2),
    ("weight_spans", f"{CHOICE}.weight_versions.0.version", 3),
]
COMPLETION_LIES: list[tuple[str, str, Any]] = [
    *[("ids_agree", f"{CHOICE}.logprobs.tokens.1", lie) for lie in ("x", "token_id:7", "token_id:06", "6")],
    *[("logprob_is_finite", f"{CHOICE}.logprobs.token_logprobs.1", lie) for lie in (True, None, "1", 10**400)],
    ("logprob_is_told", f"{CHOICE}.logprobs.token_logprobs.1", -9999.0),
    *[("count_agrees", f"{CHOICE}.logprobs.{name}", []) for name in ("tokens", "token_logprobs")],
    *[("request_agrees", "id", lie) for lie in (None, ..., "cmpl-r-2", "x-r-1", "generate-tokens-r-1")],
]


@pytest.mark.parametrize(("law", "path", "lie"), [*COMMON, *GENERATE_LIES], ids=str)
def test_a_lie_of_the_generate_route_is_refused_by_its_law(law: str, path: str, lie: Any) -> None:
    assert law_of(changed(generated(), path, lie)) == law


@pytest.mark.parametrize(("law", "path", "lie"), [*COMMON, *COMPLETION_LIES], ids=str)
def test_a_lie_of_the_completions_route_is_refused_by_its_law(law: str, path: str, lie: Any) -> None:
    assert law_of(changed(completed(), path, lie), expected=COMPLETION) == law


@BOTH
def test_an_id_beyond_the_vocabulary_is_refused_also_where_it_is_no_int32(whole: Whole, expected: Expected) -> None:
    for id_ in (VOCAB, 2**31, 10**30):
        assert law_of(whole((5, id_, 7)), expected=expected) == "id_in_vocab"


@BOTH
def test_no_token_is_valid_only_for_an_abort(whole: Whole, expected: Expected) -> None:
    assert law_of(whole(()), expected=expected) == "has_tokens"


def test_alternatives_are_held_to_the_vocabulary_and_counted() -> None:
    asked = replace(EXPECTED, num_top_logprobs=1)
    top = f"{ROW}.top_logprobs"
    assert law_of(changed(generated(), f"{top}.0.token_id", VOCAB), expected=asked) == "id_in_vocab"
    asked = replace(COMPLETION, num_top_logprobs=1)
    tops = f"{CHOICE}.logprobs.top_logprobs"
    for lie in ({"6": -1.0}, {"token_id:x": -1.0}):
        assert law_of(changed(completed(), f"{tops}.1", lie), expected=asked) == "ids_agree"
    assert law_of(changed(completed(), f"{tops}.1", {f"token_id:{VOCAB}": -1.0}), expected=asked) == "id_in_vocab"
    assert law_of(changed(completed(), tops, []), expected=asked) == "count_agrees"
    assert law_of(changed(completed(), tops, None), expected=asked) == "count_agrees"


@BOTH
def test_what_is_no_json_or_no_utf8_is_refused(whole: Whole, expected: Expected) -> None:
    body = dumped(whole())
    assert law_of(body + b" x", expected=expected) == "json"
    assert law_of(body.replace(b'"index"', b'"\xff": "", "index"'), expected=expected) == "utf8"
    assert law_of(b"", expected=expected) == "json"
    assert law_of(b"[" * 100_000, expected=expected) in ("shape", "json")
    for logprob in (b"NaN", b"-Infinity", b"1e999"):
        assert law_of(body.replace(b"-1.0", logprob), expected=expected) in ("json", "logprob_is_finite")


@BOTH
def test_every_beginning_of_a_reply_is_refused(whole: Whole, expected: Expected) -> None:
    body = dumped(whole())
    for end in range(len(body)):
        assert law_of(body[:end], expected=expected) in ("json", "utf8")


@BOTH
@given(body=st.one_of(st.binary(), st.recursive(st.none() | st.text(), st.lists).map(dumped)))
def test_any_bytes_are_a_reply_or_refused(whole: Whole, expected: Expected, body: bytes) -> None:
    for read_it in (VLLMReader(expected).whole, VLLMReader(expected).event):
        with contextlib.suppress(UpstreamInvalid, UpstreamRefused):
            read_it(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def paths_of(value: Any, prefix: tuple[str, ...] = ()) -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield ".".join((*prefix, str(key)))
        yield from paths_of(inner, (*prefix, str(key)))


@pytest.mark.parametrize(("whole", "expected"), [(generated, EXPECTED), (completed, COMPLETION)])
@pytest.mark.parametrize("num_top", [0, 2])
@given(data=st.data())
def test_a_reply_with_anything_changed_is_true_or_refused(
    whole: Whole, expected: Expected, num_top: int, data: st.DataObject
) -> None:
    reply = whole()
    path = data.draw(st.sampled_from(sorted(paths_of(reply))))
    body = dumped(changed(reply, path, data.draw(JSON | st.just(...))))
    try:
        chunk = read(body, replace(expected, num_top_logprobs=num_top))
    except UpstreamInvalid:
        return
    assert all(0 <= id_ < VOCAB for id_ in chunk.ids)
    assert len(chunk.ids) == len(chunk.logprobs) == 3
    assert np.isfinite(chunk.logprobs).all()


# -- a stream


def events(whole: Whole) -> list[dict[str, Any]]:
    """The reply of `whole` as a stream: a token an event, then the usage."""
    parts = []
    for at, id_ in enumerate((5, 6, 7)):
        one = whole((id_,), finish_reason="stop" if at == 2 else None)
        choice = one["choices"][0]
        if whole is generated:
            choice["logprobs"]["content"][0]["logprob"] = -(at + 1) / 2
            choice["weight_versions"] = [{"version": "v1", "start": 0, "end": 3}] if at == 2 else None
        else:
            choice["logprobs"]["token_logprobs"] = [-(at + 1) / 2]
        parts.append({**one, "usage": None})
    return [*parts, {**whole(), "choices": []}]


@BOTH
def test_a_stream_says_what_the_whole_reply_says(whole: Whole, expected: Expected) -> None:
    chunks, at_once = streamed(events(whole), expected), read(whole(), expected)
    assert [list(chunk.ids) for chunk in chunks] == [[5], [6], [7]]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == list(at_once.logprobs)
    last = chunks[-1]
    assert (last.finish, last.weights, last.num_cached_tokens) == (at_once.finish, at_once.weights, 2)
    assert [chunk.finish for chunk in chunks[:-1]] == [None, None]


@BOTH
def test_the_end_waits_for_the_usage(whole: Whole, expected: Expected) -> None:
    assert [list(chunk.ids) for chunk in streamed(events(whole)[:-1], expected)] == [[5], [6]]


@BOTH
def test_events_without_ids_or_news_are_passed_over(whole: Whole, expected: Expected) -> None:
    first, *rest = events(whole)
    empty = {**first, "choices": [{**whole(())["choices"][0], "finish_reason": None}]}
    nothing = {**first, "choices": []}
    assert streamed([empty, first, nothing, empty, *rest], expected) == streamed([first, *rest], expected)


@BOTH
def test_a_stream_may_end_with_an_event_without_ids(whole: Whole, expected: Expected) -> None:
    *parts, usage = events(whole)
    end = {**parts[-1], "choices": [{**whole(())["choices"][0], "finish_reason": "abort", "weight_versions": None}]}
    parts[-1]["choices"][0].update(finish_reason=None, weight_versions=None)
    *_, last = streamed([*parts, end, usage], expected)
    assert (last.ids, last.finish) == ((), Finish(reason=FinishReason.ABORT))


@BOTH
def test_a_stream_that_goes_on_after_its_end_is_refused(whole: Whole, expected: Expected) -> None:
    first, second, third, usage = events(whole)
    assert law_of(first, second, third, third, expected=expected) == "finish_is_last"
    assert law_of(first, second, third, usage, first, expected=expected) == "finish_is_last"
    assert law_of(first, second, third, usage, usage, expected=expected) == "finish_is_last"
    assert law_of(first, second, usage, expected=expected) == "has_finish"


def test_a_completion_that_says_nothing_but_that_it_drew_nothing_was_aborted() -> None:
    nothing = {"id": "cmpl-r-1", "choices": [], "usage": {**USAGE, "completion_tokens": 0}}
    (chunk,) = streamed([nothing], COMPLETION)
    assert (chunk.ids, chunk.finish) == ((), Finish(reason=FinishReason.ABORT))
    assert law_of({**nothing, "usage": USAGE}, nothing, expected=COMPLETION) == "has_finish"


@BOTH
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_in_a_stream_is_a_refusal_with_its_own_status(whole: Whole, expected: Expected, at: int) -> None:
    body = dumped({"error": {"message": "no", "type": "InternalServerError", "param": None, "code": 500}})
    with pytest.raises(UpstreamRefused) as caught:
        streamed([*events(whole)[:at], body], expected)
    assert (caught.value.engine_status, caught.value.body) == (500, body)


@BOTH
def test_every_beginning_of_an_event_is_refused(whole: Whole, expected: Expected) -> None:
    body = dumped(events(whole)[0])
    for end in range(len(body)):
        assert law_of(body[:end], body, expected=expected) in ("json", "utf8")


# -- experts


def npy(values: Any) -> str:
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", "i1"])
def test_routed_experts_of_any_type_are_read(dtype: str) -> None:
    values = np.arange(6 * 2 * 3).reshape(6, 2, 3)
    told = {"version": "v1", "start": 0, "end": 3}
    reply = generated(routed_experts=npy(values.astype(dtype)), weight_versions=[told])
    chunk = read(reply, replace(EXPECTED, wants_experts=True))
    assert chunk.replay is not None
    assert chunk.replay.routed_experts is not None
    found = chunk.replay.routed_experts.values.reshape(6, 2, 3)
    assert (found == values).all()
    assert read(reply).replay is None, "nobody asked"


def test_routed_experts_that_are_missing_are_missed_unless_nothing_was_computed() -> None:
    wants = replace(EXPECTED, wants_experts=True)
    assert law_of(generated(), expected=wants) == "has_routed_experts"
    assert read(generated((), finish_reason="abort"), wants).replay is None


@pytest.mark.parametrize("is_full", [True, False])
def test_of_routed_experts_the_new_rows_come_or_all(is_full: bool) -> None:
    values = np.arange(6 * 2 * 3, dtype=np.uint8).reshape(6, 2, 3)
    sent = values if is_full else values[2:]
    told = {"version": "v1", "start": 0, "end": 3}
    expected = replace(EXPECTED, wants_experts=True, first_row=2)
    replay = read(generated(routed_experts=npy(sent), weight_versions=[told]), expected).replay
    assert replay is not None
    assert replay.first_row == 2
    assert replay.routed_experts == PackedInts.of(values[2:])
    with pytest.raises(UpstreamInvalid, match=r"\[3, 2, 3\] in 18 bytes for 6 tokens, from 2 on"):
        experts_of_npy(npy(values[3:]), num_rows=6, first_row=2)


@pytest.mark.parametrize("route", list(VLLMRoute))
def test_new_rows_of_routed_experts_are_asked_for_where_there_are_older_ones(route: VLLMRoute) -> None:
    for num_kept, wants, first_row in ((0, True, None), (1, True, None), (2, True, 1), (3, True, 2), (3, False, None)):
        prompt = Prompt.of(token_ids([1, 2, 3, 4]), num_kept=num_kept)
        of = GenerateRequest(request_id=RequestId("r"), prompt=prompt, params=SamplingParams())
        asked = json.loads(encode_request(of, route=route, model="m", streams=False, wants_experts=wants))
        sampling = asked["sampling_params"] if route is VLLMRoute.GENERATE else asked
        assert sampling.get("routed_experts_prompt_start") == first_row


ROUTED = np.zeros((6, 2, 3), np.int32)


@pytest.mark.parametrize(
    "lie",
    [
        *("x", "é", "", "AAAA", npy(ROUTED)[:-8], base64.b64encode(base64.b64decode(npy(ROUTED)) + b"\0").decode()),
        *(npy(ROUTED[:5]), npy(ROUTED[0]), npy(ROUTED.astype("f4")), npy(ROUTED.astype("<i8")), npy(ROUTED.T)),
    ],
    ids=range(11),
)
def test_routed_experts_of_another_shape_are_refused(lie: str) -> None:
    with pytest.raises(UpstreamInvalid, match="routed_experts_shape"):
        experts_of_npy(lie, num_rows=6)


# -- scores


def scored(rows: Sequence[Any], **choice: Any) -> dict[str, Any]:
    spans = [{"version": "v1", "start": 0, "end": 1}]
    return {
        "request_id": "r-scores",
        "choices": [{"index": 0, "weight_versions": spans, **choice}],
        "prompt_logprobs": rows,
    }


ASKED: dict[str, Any] = {"request_id": "r-scores", "route": VLLMRoute.GENERATE, "num_prompt": 2}
ROWS = [None, {"2": {"logprob": -1.0}}, {"5": {"logprob": -0.25}}, {"6": {"logprob": -3.0}, "1": {"logprob": -0.1}}]


async def test_scores_are_those_of_the_sampled_tokens_and_the_best_beside_them() -> None:
    scores = await in_pieces(decode_scores(dumped(scored(ROWS)), [5, 6], **ASKED, num_top=1))
    assert (list(scores.logprobs), scores.version) == ([-0.25, -3.0], "v1")
    assert scores.top.rows(1) == ((TopLogprob(id=5, logprob=-0.25),), (TopLogprob(id=1, logprob=-0.1),))
    in_choice = {"request_id": "generate-tokens-r-scores", "choices": [{"index": 0, "prompt_logprobs": ROWS}]}
    scores = await in_pieces(decode_scores(dumped(in_choice), [5, 6], **ASKED, num_top=0))
    assert (list(scores.logprobs), scores.version, scores.top.rows(0)) == ([-0.25, -3.0], None, None)


@pytest.mark.parametrize(
    ("law", "body"),
    [
        *[("has_logprobs", scored(rows)) for rows in (None, [], ROWS[1:], [*ROWS, None], [*ROWS[:3], None])],
        ("has_logprobs", scored([*ROWS[:3], {"7": {"logprob": -1.0}}])),
        ("logprob_is_told", scored([*ROWS[:3], {"6": {"logprob": -9999.0}}])),
        ("id_in_vocab", scored([*ROWS[:3], {"6": {"logprob": -1.0}, "x": {"logprob": -1.0}}])),
        *[("logprob_is_finite", scored([*ROWS[:3], {"6": {"logprob": lie}}])) for lie in (None, "x", True)],
        ("one_choice", {"choices": []}),
        ("shape", {}),
        *[("request_agrees", {**scored(ROWS), "request_id": lie}) for lie in (None, "", "r", "x-r-scores")],
    ],
)
async def test_scores_that_lie_are_refused_by_their_law(law: str, body: Any) -> None:
    with pytest.raises(UpstreamInvalid) as caught:
        await in_pieces(decode_scores(dumped(body), [5, 6], **ASKED, num_top=1))
    assert caught.value.law == law


# -- requests


def request(**params: Any) -> GenerateRequest:
    prompt = Prompt(new_ids=token_ids([1, 2, 3]), json_fragments=(b"1, 2,3",))
    return GenerateRequest(request_id=RequestId("r-1"), prompt=prompt, params=SamplingParams(**params))


def encoded(of: GenerateRequest, route: VLLMRoute = VLLMRoute.GENERATE, *, streams: bool = False) -> dict[str, Any]:
    body = encode_request(of, route=route, model="m", streams=streams)
    assert b"[1, 2,3]" in body, "the ids are as they were given"
    decoded: dict[str, Any] = json.loads(body)
    return decoded


NAMED = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.5,
    "ignore_eos": True,
    "seed": 3,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["x"],
    "stop_token_ids": [4],
}


def test_every_parameter_is_sent_by_name_on_both_routes() -> None:
    params = {**NAMED, "stop": ("x",), "stop_token_ids": (4,), "logit_bias": ((5, 2.0),)}
    asked = encoded(request(**params))
    sampling = {**NAMED, "logprobs": 0, "logit_bias": {"5": 2.0}}
    assert asked == {"model": "m", "request_id": "r-1", "token_ids": [1, 2, 3], "sampling_params": sampling}
    asked = encoded(request(**params), VLLMRoute.COMPLETIONS)
    flags = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    assert asked == {"model": "m", "request_id": "r-1", "prompt": [1, 2, 3], **flags, **sampling}


@pytest.mark.parametrize("route", VLLMRoute)
def test_a_priority_is_sent(route: VLLMRoute) -> None:
    assert encoded(structs.replace(request(), routing=Routing(priority=-3)), route)["priority"] == -3
    assert "priority" not in encoded(request(), route)


@pytest.mark.parametrize("route", VLLMRoute)
def test_a_stream_is_asked_for_with_its_usage(route: VLLMRoute) -> None:
    asked = encoded(request(), route, streams=True)
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})


def test_a_seed_is_one_for_vllm_too() -> None:
    sent = [encoded(request(seed=seed))["sampling_params"]["seed"] for seed in (-1, 0, 2**64 - 1, -(2**63))]
    assert all(0 <= seed < 2**63 for seed in sent)
    assert "seed" not in encoded(request())["sampling_params"]


def test_one_alternative_more_than_wanted_is_asked_for_as_far_as_vllm_gives_them() -> None:
    assert [encoded(request(num_top_logprobs=num))["sampling_params"]["logprobs"] for num in (0, 1, 19, 20)] == [
        *(0, 2, 20, 20)
    ]


@pytest.mark.parametrize("route", VLLMRoute)
@pytest.mark.parametrize(
    ("kind", "source", "member"),
    [
        (GrammarKind.JSON_OBJECT, "", {"json_object": True}),
        (GrammarKind.JSON_SCHEMA, ' {"type": "object"}', {"json": {"type": "object"}}),
        (GrammarKind.REGEX, 'a"+', {"regex": 'a"+'}),
        (GrammarKind.CHOICE, '["a", "b"]', {"choice": ["a", "b"]}),
        (GrammarKind.EBNF, 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        (GrammarKind.LARK, 'start: "a"\n', {"grammar": 'start: "a"\n'}),
    ],
)
def test_a_grammar_is_sent_under_the_name_that_vllm_reads(
    route: VLLMRoute, kind: GrammarKind, source: str, member: dict[str, Any]
) -> None:
    asked = encoded(request(grammar=Grammar(kind=kind, source=source)), route)
    sampling = asked["sampling_params"] if route is VLLMRoute.GENERATE else asked
    assert sampling["structured_outputs"] == member
    assert asked.get("reasoning_ended") is (True if route is VLLMRoute.GENERATE else None)


@pytest.mark.parametrize(
    ("kind", "source"), [(GrammarKind.LARK, 'start: "::="'), (GrammarKind.JSON_SCHEMA, "true")], ids=str
)
def test_a_grammar_that_vllm_would_take_for_another_is_refused(kind: GrammarKind, source: str) -> None:
    with pytest.raises(InvalidRequest):
        encoded(request(grammar=Grammar(kind=kind, source=source)))


def test_an_abort_names_the_request_as_vllm_does() -> None:
    assert json.loads(encode_abort("r", VLLMRoute.GENERATE)) == {"request_ids": ["generate-tokens-r"]}
    assert abort_ids("r", VLLMRoute.COMPLETIONS) == ("cmpl-r-0", "cmpl-r")


@pytest.mark.parametrize("route", VLLMRoute)
def test_scores_are_asked_for_with_the_sampled_ids_at_the_prompt_s_end(route: VLLMRoute) -> None:
    asked = json.loads(encode_scoring(request(num_top_logprobs=2), token_ids([8, 9]), route=route, model="m"))
    own = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 2}
    both = {"model": "m", "request_id": "r-1-scores"}
    if route is VLLMRoute.GENERATE:
        assert asked == {**both, "sampling_params": own, "token_ids": [1, 2, 3, 8, 9]}
    else:
        assert asked == {**both, **own, "prompt": [1, 2, 3, 8, 9]}


def test_the_model_is_found_by_its_name_or_is_the_first() -> None:
    body = dumped({"data": [{"id": "a", "max_model_len": 5}, {"id": "b"}]})
    assert (decode_models(body, wanted="b").name, decode_models(body, wanted="b").max_context_tokens) == ("b", None)
    assert (decode_models(body, wanted="x").name, decode_models(body, wanted="x").max_context_tokens) == ("a", 5)
    for lie in ({"data": []}, {}, [], {"data": [{"id": 1}]}, {"data": [{"id": "a", "max_model_len": 0}]}):
        with pytest.raises(UpstreamInvalid):
            decode_models(dumped(lie), wanted="a")
