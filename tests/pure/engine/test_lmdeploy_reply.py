"""What LMDeploy says, on either route, is believed only where it keeps every law; what it would ignore is refused."""

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins.lmdeploy_server import CHAT_FIELDS, GENERATE_FIELDS
from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    StenographError,
    UpstreamInvalid,
    UpstreamRefused,
)
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    RequestId,
    SampledTurn,
    SamplingParams,
    token_ids,
)
from stenograph.dialects.openai.spelling import OpenAISpelling
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.transport import HttpReply
from stenograph.engine.lmdeploy.reply import LMDeployReading
from stenograph.engine.lmdeploy.request import (
    NEEDED,
    OLDEST,
    LMDeployRoute,
    Wanted,
    encode_request,
    fields_by_route,
    grammars_of,
    served_model,
    session_of,
)
from stenograph.engine.validate import TurnCollector

VOCAB = 1000
NUM_PROMPT = 4
IDS = (5, 6, 7)
EXPERTS = [[[number, 1], [2, 3]] for number in range(NUM_PROMPT + len(IDS) - 1)]
ROUTES = list(LMDeployRoute)


def ok(value: Any) -> HttpReply:
    return HttpReply(status=200, content_type="application/json", headers=(), body=dumped(value))


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def rows(ids: Sequence[int], first: int = 0) -> list[list[Any]]:
    return [[-(first + at + 1) / 2, id_] for at, id_ in enumerate(ids)]


def generated(ids: Sequence[int] = IDS, *, first: int = 0, finish: str | None = "stop", **changes: Any) -> Any:
    meta = {
        "prompt_tokens": NUM_PROMPT,
        "completion_tokens": first + len(ids),
        "finish_reason": None if finish is None else {"type": finish},
        "output_token_logprobs": rows(ids, first) or None,
        "routed_experts": None,
        **changes,
    }
    return {"text": "Grüße", "output_ids": list(ids), "meta_info": meta}


def choice(ids: Sequence[int] = IDS, *, first: int = 0, finish: str | None = "stop", **changes: Any) -> Any:
    told = {"index": 0, "output_ids": list(ids), "output_token_logprobs": rows(ids, first) or None}
    return {**told, "message": {"role": "assistant", "content": "Grüße"}, "finish_reason": finish, **changes}


def chat(*choices: Any, completion_tokens: int = len(IDS)) -> Any:
    usage = {"prompt_tokens": NUM_PROMPT, "completion_tokens": completion_tokens, "total_tokens": 0}
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    return {"id": "c", "choices": list(choices) or [choice()], "usage": {**usage, **details}}


def whole(route: LMDeployRoute) -> Any:
    return generated() if route is LMDeployRoute.GENERATE else chat()


def reading(route: LMDeployRoute, **options: Any) -> LMDeployReading:
    return LMDeployReading(route=route, vocab_size=VOCAB, num_prompt=NUM_PROMPT, stop_ids=(7,), **options)


def read(route: LMDeployRoute, *parts: Any, **options: Any) -> list[Chunk]:
    reader, chunks = reading(route, **options), list[Chunk]()
    for one in parts:
        chunks += reader.event(one if isinstance(one, bytes) else dumped(one))
    return [*chunks, *reader.end()]


def turn(chunks: Sequence[Chunk]) -> SampledTurn:
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=None)
    for one in chunks:
        collector.add(one)
    return collector.result()


def law_of(route: LMDeployRoute, *parts: Any) -> str:
    with pytest.raises(UpstreamInvalid) as caught:
        read(route, *parts)
    return caught.value.law


def changed(of: Any, path: str, value: Any) -> Any:
    """A copy with the value at `path` replaced; deleted if it is `...`."""
    copied = copy.deepcopy(of)
    parent: Any = copied
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        parent = parent[step]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return copied


@pytest.mark.parametrize("route", ROUTES)
def test_a_whole_reply_is_one_chunk(route: LMDeployRoute) -> None:
    (chunk,) = reading(route).whole(ok(whole(route)))
    assert (list(chunk.ids), list(chunk.logprobs)) == ([5, 6, 7], [-0.5, -1.0, -1.5])
    assert chunk.finish == Finish(reason=FinishReason.STOP, matched=7)
    assert chunk.num_cached_tokens == (2 if route is LMDeployRoute.CHAT else 0)
    assert (chunk.reply, chunk.weight_version, chunk.replay, chunk.top_logprobs) == (None,) * 4


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("told", "last", "finish"),
    [
        ("stop", 7, Finish(reason=FinishReason.STOP, matched=7)),
        ("stop", 8, Finish(reason=FinishReason.STOP)),  # a stop token that we were not told of
        ("length", 7, Finish(reason=FinishReason.LENGTH)),
        ("abort", 7, Finish(reason=FinishReason.ABORT)),
    ],
)
def test_the_finish_reason_is_told_in_our_words(route: LMDeployRoute, told: str, last: int, finish: Finish) -> None:
    ids = (5, 6, last)
    of = generated(ids, finish=told) if route is LMDeployRoute.GENERATE else chat(choice(ids, finish=told))
    assert turn(read(route, of)).finish == finish


ROW_LIES: list[tuple[str, str, Any]] = [
    *[("id_in_vocab", "1.1", lie) for lie in (-1, VOCAB, 2**31, 10**30, True, 1.0, "1", None)],
    *[("logprob_is_finite", "1.0", lie) for lie in (True, None, "-1", [], 10**400)],
    *[("row_shape", "1", lie) for lie in ([], [-1.0], {}, 1, None)],
    ("ids_agree", "1.1", 9),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("law", "path", "lie"), ROW_LIES, ids=lambda value: str(value)[-40:])
def test_a_lie_in_the_rows_is_named_by_the_law_that_it_breaks(
    route: LMDeployRoute, law: str, path: str, lie: Any
) -> None:
    where = "meta_info" if route is LMDeployRoute.GENERATE else "choices.0"
    assert law_of(route, changed(whole(route), f"{where}.output_token_logprobs.{path}", lie)) == law


GENERATE_LIES: list[tuple[str, str, Any]] = [
    *[("has_meta_info", "meta_info", lie) for lie in (None, ...)],
    *[("shape", "meta_info", lie) for lie in ([], "x", 1)],
    *[("has_completion_tokens", "meta_info.completion_tokens", lie) for lie in (None, True, 3.0, -1, ...)],
    *[("count_agrees", "meta_info.completion_tokens", lie) for lie in (0, 2, 4, 10**30)],
    *[("has_logprobs", "meta_info.output_token_logprobs", lie) for lie in (None, {}, "x", ...)],
    *[("ids_agree", "output_ids", lie) for lie in ([5], [5, 6, 7, 7], "x", [-1], [1.0])],
    *[("prompt_agrees", "meta_info.prompt_tokens", lie) for lie in (0, 3, 10**30)],
    *[("finish_reason", "meta_info.finish_reason", lie) for lie in ({"type": "x"}, {}, {"type": 1}, "stop")],
    *[("finish_reason", "meta_info.finish_reason", lie) for lie in ({"type": "parse_error"}, {"type": ""})],
    ("no_failure", "meta_info.finish_reason", {"type": "error"}),
    *[("replay_shape", "meta_info.routed_experts", lie) for lie in ("AAAA", [], EXPERTS[1:], [*EXPERTS, EXPERTS[0]])],
    *[
        ("replay_shape", "meta_info.routed_experts", [*EXPERTS[:-1], lie])
        for lie in ([[0, 1]], [[0], [1]], [[2**31] * 2] * 2)
    ],
    *[("replay_is_base64", "meta_info.routed_experts", lie) for lie in (1, {}, [1], [[1]], [[[-1]]], [[[True]]])],
    ("count_agrees", "meta_info.output_top_logprobs", [[[-1, 2]]]),
    ("id_in_vocab", "meta_info.output_top_logprobs", [[[-1, VOCAB]], [], []]),
]


@pytest.mark.parametrize(("law", "path", "lie"), GENERATE_LIES, ids=lambda value: str(value)[-40:])
def test_a_lie_of_the_generate_route_is_named(law: str, path: str, lie: Any) -> None:
    assert law_of(LMDeployRoute.GENERATE, changed(generated(), path, lie)) == law


CHAT_LIES: list[tuple[str, str, Any]] = [
    *[("one_choice", "choices", lie) for lie in ([choice(), choice()], "x", 1)],
    *[("has_usage", "usage", lie) for lie in (None, ..., "x")],
    *[("count_agrees", "usage.completion_tokens", lie) for lie in (0, 2, 4, 10**30)],
    *[("has_completion_tokens", "usage.completion_tokens", lie) for lie in (None, True, 3.0, -1, ...)],
    *[("prompt_agrees", "usage.prompt_tokens", lie) for lie in (0, 3, 10**30)],
    *[("has_usage", "usage.prompt_tokens", lie) for lie in (None, "x", ...)],
    *[("has_logprobs", "choices.0.output_token_logprobs", lie) for lie in (None, {}, ...)],
    *[("ids_agree", "choices.0.output_ids", lie) for lie in ([5], [5, 6, 8], "x")],
    *[("finish_reason", "choices.0.finish_reason", lie) for lie in ("x", 1, {}, "parse_error")],
    ("no_failure", "choices.0.finish_reason", "error"),
    ("replay_shape", "choices.0.routed_experts", [EXPERTS[0]]),
]


@pytest.mark.parametrize(("law", "path", "lie"), CHAT_LIES, ids=lambda value: str(value)[-40:])
def test_a_lie_of_the_chat_route_is_named(law: str, path: str, lie: Any) -> None:
    assert law_of(LMDeployRoute.CHAT, changed(chat(), path, lie)) == law


@pytest.mark.parametrize("route", ROUTES)
def test_a_whole_reply_has_a_finish_reason(route: LMDeployRoute) -> None:
    with pytest.raises(UpstreamInvalid) as caught:
        reading(route).whole(
            ok(generated(finish=None) if route is LMDeployRoute.GENERATE else chat(choice(finish=None)))
        )
    assert caught.value.law == "finish_reason"


@pytest.mark.parametrize("route", ROUTES)
def test_no_token_means_an_abort_or_a_prompt_that_is_too_long(route: LMDeployRoute) -> None:
    def empty(finish: str) -> Any:
        one = choice((), finish=finish)
        return generated((), finish=finish) if route is LMDeployRoute.GENERATE else chat(one, completion_tokens=0)

    assert turn(read(route, empty("abort"))).finish == Finish(reason=FinishReason.ABORT)
    assert law_of(route, empty("stop")) == "has_tokens"
    with pytest.raises(ContextLengthExceeded) as caught:
        read(route, empty("length"))
    assert (caught.value.num_prompt_tokens, caught.value.max_context_tokens) == (4, 4), "it has at most as many"
    assert caught.value.blame == Blame(RequestPart.PROMPT), "also where the request has a grammar"


@pytest.mark.parametrize("first_row", [0, 2])
def test_experts_of_new_rows_are_kept(first_row: int) -> None:
    (chunk,) = read(LMDeployRoute.GENERATE, generated(routed_experts=EXPERTS), first_row=first_row)
    assert chunk.replay is not None
    assert chunk.replay.routed_experts is not None
    assert chunk.replay.first_row == first_row
    assert chunk.replay.routed_experts.values.tolist() == np.array(EXPERTS[first_row:]).ravel().tolist()


# -- streams


def stream(route: LMDeployRoute, ids: Sequence[int], cuts: Sequence[int]) -> list[Any]:
    """The parts of a stream cut so; the last is a part of its own, as LMDeploy sends it."""
    parts: list[Any] = []
    for before, now in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        if route is LMDeployRoute.GENERATE:
            parts.append(generated(ids[before:now], first=before, finish=None))
        else:
            parts.append({"choices": [choice(ids[before:now], first=before, finish=None)], "usage": None})
    if route is LMDeployRoute.GENERATE:
        return [*parts, generated((), first=len(ids), finish="length")]
    usage = {**chat(completion_tokens=len(ids)), "choices": []}
    return [*parts, {"choices": [choice((), finish="length")]}, usage]


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data())
def test_a_stream_is_the_same_turn_as_the_whole_reply(route: LMDeployRoute, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    one = choice(ids, finish="length")
    of = generated(ids, finish="length") if route is LMDeployRoute.GENERATE else chat(one, completion_tokens=len(ids))
    chunks = read(route, *stream(route, ids, cuts))
    assert turn(chunks) == turn(read(route, of))
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("lost", range(3))
def test_a_stream_that_lost_or_doubled_an_event_is_found_out(route: LMDeployRoute, lost: int) -> None:
    parts = stream(route, (1, 2, 3, 4, 5, 6), (2, 4))
    assert law_of(route, *parts[:lost], *parts[lost + 1 :]) == "count_agrees"
    assert law_of(route, *parts[: lost + 1], *parts[lost:]) == "count_agrees"


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_but_the_usage_follows_the_part_that_ends(route: LMDeployRoute) -> None:
    end = generated() if route is LMDeployRoute.GENERATE else {"choices": [choice()]}
    assert law_of(route, end, end) == "finish_is_last"


def test_an_event_without_ids_of_its_own_brings_text_alone() -> None:
    # The parsers of the chat route may split one step into several events; the last one has its ids.
    text_alone = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    parts = stream(LMDeployRoute.CHAT, (1, 2), (1,))
    assert list(turn(read(LMDeployRoute.CHAT, text_alone, *parts)).ids) == [1, 2]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("error", "status"),
    [({"message": "no", "code": 503}, 503), ({"message": "no"}, 400), ("no", 400), ({"code": "x"}, 400)],
)
def test_an_error_as_an_event_is_the_refusal_that_it_would_be_outside(
    route: LMDeployRoute, error: Any, status: int
) -> None:
    body = dumped({"error": error})
    with pytest.raises(UpstreamRefused) as caught:
        read(route, body)
    assert (caught.value.engine_status, caught.value.body) == (status, body)
    assert law_of(route, {"error": {"message": "no", "code": 200}}) == "error_status"


# -- for any bytes at all


def check_any(route: LMDeployRoute, *bodies: bytes) -> None:
    try:
        chunks = read(route, *bodies)
        if not chunks or chunks[-1].finish is None:
            return
        got = turn(chunks)
    except StenographError as error:
        assert isinstance(error, UpstreamInvalid | UpstreamRefused | InvalidRequest)  # noqa: PT017
        return
    said = [json.loads(body) for body in bodies]
    parts = [one.get("meta_info") or next(iter(one.get("choices") or [{}])) for one in said]
    told = [row for part in parts for row in part.get("output_token_logprobs") or []]
    assert [row[1] for row in told] == list(got.ids)
    assert [min(row[0], 0.0) for row in told] == list(got.logprobs)
    assert all(map(math.isfinite, got.logprobs))


@pytest.mark.parametrize("route", ROUTES)
def test_a_reply_that_is_cut_anywhere_is_refused(route: LMDeployRoute) -> None:
    body = dumped(whole(route))
    for end in range(len(body)):
        assert law_of(route, body[:end]) in ("json", "utf8")


@given(st.sampled_from(ROUTES), st.binary(max_size=60))
def test_any_bytes_are_refused_or_read_as_they_are(route: LMDeployRoute, body: bytes) -> None:
    check_any(route, body)


@given(
    st.sampled_from(ROUTES),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_flipped_bytes_in_a_stream_are_refused_or_read_as_they_are(
    route: LMDeployRoute, which: int, flips: list[tuple[int, int]]
) -> None:
    bodies = [dumped(one) for one in stream(route, (1, 2, 3, 4, 5), (2, 4))]
    body = bytearray(bodies[which])
    for at, byte in flips:
        body[at % len(body)] = byte
    bodies[which] = bytes(body)
    check_any(route, *bodies)


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


FULL = {
    LMDeployRoute.GENERATE: generated(routed_experts=EXPERTS, output_top_logprobs=[[[-1, 2]], [], []]),
    LMDeployRoute.CHAT: chat(choice(routed_experts=EXPERTS)),
}


@pytest.mark.parametrize("route", ROUTES)
@given(data=st.data(), value=JSON)
def test_any_value_anywhere_is_refused_or_read_as_it_is(route: LMDeployRoute, data: st.DataObject, value: Any) -> None:
    path = data.draw(st.sampled_from(paths(FULL[route])[1:]))
    of = copy.deepcopy(FULL[route])
    parent = of
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    check_any(route, json.dumps(of).encode())


# -- what a server has


def openapi(**fields: Sequence[str]) -> bytes:
    paths = {"generate": "/generate", "chat": "/v1/chat/completions"}
    return dumped(
        {
            "paths": {
                paths[name]: {
                    "post": {
                        "requestBody": {
                            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
                        }
                    }
                }
                for name in fields
            }
            | {"/health": {"get": {}}},
            "components": {"schemas": {name: {"properties": {f: {} for f in known}} for name, known in fields.items()}},
        }
    )


def test_the_routes_that_take_ids_are_read_from_the_document() -> None:
    found = fields_by_route(openapi(generate=GENERATE_FIELDS, chat=CHAT_FIELDS))
    assert found == {LMDeployRoute.GENERATE: frozenset(GENERATE_FIELDS), LMDeployRoute.CHAT: frozenset(CHAT_FIELDS)}
    assert fields_by_route(openapi(generate=("prompt",), chat=CHAT_FIELDS)).keys() == {LMDeployRoute.CHAT}
    assert fields_by_route(b'{"paths": {}}') == {}
    assert fields_by_route(b'{"paths": {"/generate": {"post": {}}}}') == {}
    for route in LMDeployRoute:
        assert NEEDED[route] <= OLDEST[route]
        for field in NEEDED[route]:
            known = [
                one for one in (GENERATE_FIELDS if route is LMDeployRoute.GENERATE else CHAT_FIELDS) if one != field
            ]
            name = "generate" if route is LMDeployRoute.GENERATE else "chat"
            assert route not in fields_by_route(openapi(**{name: known}))


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_document_is_refused_or_read(body: bytes) -> None:
    for read_one in (fields_by_route, lambda told: served_model(told, wanted="m")):
        try:
            read_one(body)
        except UpstreamInvalid:
            continue


def test_the_model_is_ours_or_the_first() -> None:
    models = b'{"data": [{"id": "a"}, {"id": "b"}]}'
    assert (served_model(models, wanted="b"), served_model(models, wanted="c")) == ("b", "a")
    with pytest.raises(UpstreamInvalid):
        served_model(b'{"data": []}', wanted="a")


# -- the request


def pointer_of(error: StenographError) -> str | None:
    """What the error blames, as OpenAI's chats point at it."""
    return None if error.blame is None else OpenAISpelling(prompt="messages").pointer(error.blame)


def request(*, json_fragments: tuple[bytes, ...] | None = None, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("r-1"),
        prompt=Prompt(new_ids=token_ids((1, 2, 3)), json_fragments=json_fragments),
        params=SamplingParams(**params),
    )


def sent(
    of: GenerateRequest,
    route: LMDeployRoute = LMDeployRoute.GENERATE,
    fields: Sequence[str] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    known = frozenset(
        (GENERATE_FIELDS if route is LMDeployRoute.GENERATE else CHAT_FIELDS) if fields is None else fields
    )
    asked = {"route": route, "fields": known, "model": "m", "eos_ids": (7,), "streams": False, "replays": False}
    parsed: dict[str, Any] = json.loads(encode_request(of, Wanted(**{**asked, **changes})))
    return parsed


ALWAYS = {
    "session_id": session_of(RequestId("r-1")),
    "stream": False,
    "return_logprob": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "max_tokens": None,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "input_ids": [1, 2, 3],
}
CHAT_ALWAYS = {**ALWAYS, "model": "m", "messages": [], "return_token_ids": True}


def test_a_plain_request_has_these_fields_and_no_other() -> None:
    assert sent(request()) == ALWAYS
    assert sent(request(), streams=True) == {**ALWAYS, "stream": True}
    assert sent(request(), LMDeployRoute.CHAT) == CHAT_ALWAYS
    usage = {"stream_options": {"include_usage": True}}
    assert sent(request(), LMDeployRoute.CHAT, streams=True) == {**CHAT_ALWAYS, "stream": True, **usage}
    assert sent(request(), replays=True) == {**ALWAYS, "return_routed_experts": True}


def test_nothing_is_sent_that_a_server_of_today_does_not_read() -> None:
    assert sent(request(stop_token_ids=(5,), num_top_logprobs=2), replays=True).keys() <= set(GENERATE_FIELDS)
    assert sent(request(seed=1), LMDeployRoute.CHAT, streams=True, replays=True).keys() <= set(CHAT_FIELDS)


def test_ids_that_are_at_hand_as_text_are_sent_as_they_are() -> None:
    wanted = Wanted(
        route=LMDeployRoute.GENERATE, fields=frozenset(), model="m", eos_ids=(), streams=False, replays=False
    )
    assert encode_request(request(json_fragments=(b"1 ,2", b"  3")), wanted).endswith(b'"input_ids":[1 ,2,  3]}')


def test_every_parameter_is_sent_by_the_name_that_lmdeploy_has_for_it() -> None:
    got = sent(
        request(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            max_tokens=16,
            stop_token_ids=(5,),
            repetition_penalty=1.5,
            num_top_logprobs=3,
        )
    )
    assert got == {
        **ALWAYS,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "max_tokens": 16,
        "stop_token_ids": [5, 7],
        "repetition_penalty": 1.5,
        "top_logprobs_num": 3,
    }
    assert sent(request(temperature=0.0, top_k=9)) == {**ALWAYS, "top_k": 1}
    assert sent(request(ignore_eos=True)) == {**ALWAYS, "ignore_eos": True}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"stop": ("END",)}, "/stop"),
        ({"presence_penalty": 0.1}, "/presence_penalty"),
        ({"frequency_penalty": -0.1}, "/frequency_penalty"),
        ({"logit_bias": ((1, 1.0),)}, "/logit_bias"),
        ({"temperature": 2.5}, "/temperature"),
        ({"min_tokens": 2}, "/min_tokens"),
        ({"ignore_eos": True, "stop_token_ids": (5,)}, "/ignore_eos"),
        ({"seed": 1}, "/seed"),
        ({"grammar": Grammar(kind=GrammarKind.JSON_OBJECT)}, None),
    ],
)
def test_what_it_would_ignore_is_refused(params: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match="LMDeploy") as caught:
        sent(request(**params))
    assert pointer_of(caught.value) == param


@pytest.mark.parametrize(
    ("params", "param"), [({"stop_token_ids": (5,)}, "/stop_token_ids"), ({"num_top_logprobs": 1}, "/top_logprobs")]
)
def test_the_chat_route_is_sent_only_what_it_reads(params: Any, param: str) -> None:
    with pytest.raises(InvalidRequest, match="chat/completions") as caught:
        sent(request(**params), LMDeployRoute.CHAT)
    assert pointer_of(caught.value) == param


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        (GrammarKind.JSON_OBJECT, "", {"type": "json_object"}),
        (
            GrammarKind.JSON_SCHEMA,
            '{"type": "array"}',
            {"type": "json_schema", "json_schema": {"name": "schema", "strict": True, "schema": {"type": "array"}}},
        ),
        (GrammarKind.REGEX, "a+", {"type": "regex_schema", "regex_schema": "a+"}),
    ],
)
def test_a_grammar_is_sent_in_lmdeploy_s_words(kind: GrammarKind, source: str, expected: Any) -> None:
    got = sent(request(grammar=Grammar(kind=kind, source=source)), LMDeployRoute.CHAT)
    assert got == {**CHAT_ALWAYS, "response_format": expected}
    assert kind in grammars_of(CHAT_FIELDS)
    assert not grammars_of(GENERATE_FIELDS)


@pytest.mark.parametrize("kind", [GrammarKind.CHOICE, GrammarKind.EBNF, GrammarKind.LARK])
def test_a_grammar_of_another_dialect_is_refused(kind: GrammarKind) -> None:
    with pytest.raises(InvalidRequest, match=kind.value):
        sent(request(grammar=Grammar(kind=kind, source="x")), LMDeployRoute.CHAT)


@given(st.lists(st.text(), unique=True, max_size=50))
def test_sessions_are_numbers_that_a_server_never_gives_itself(rids: list[str]) -> None:
    numbers = [session_of(RequestId(rid)) for rid in rids]
    assert len(set(numbers)) == len(rids)
    assert all(2**52 <= number < 2**53 for number in numbers)
