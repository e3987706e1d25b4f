"""What a real vLLM 0.32 answered, byte for byte: read as what it is, or refused by the law that it breaks.

recordings/vllm/engine-0.32.json has what was asked of it by hand, in many ways; dialect-….json what it answered to the
bodies that `vllm_request` writes, one file for each of its routes. Bodies of replies are as they came.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stenograph.core.errors import ContextLengthExceeded, UpstreamInvalid, UpstreamRefused
from stenograph.core.media import new_expansions
from stenograph.core.sse import EventReader
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Prompt,
    PromptMedia,
    SampledTurn,
    WeightSpan,
    token_ids,
)
from stenograph.engine.validate import TurnCollector
from stenograph.engine.vllm.reply import Expected, VLLMReader
from stenograph.engine.vllm.request import VLLMRoute
from stenograph.engine.vllm.scores import decode_scores
from stenograph.engine.vllm.wire import decode_models
from stenograph.offload.in_pieces import in_pieces
from tests.store_laws import medium

FOLDER = Path(__file__).parents[2] / "service" / "recordings" / "vllm"
VOCAB, EOS = 49152, 2


def recordings(name: str) -> dict[str, dict[str, Any]]:
    listed = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return {recording["name"]: recording for recording in listed}


BY_HAND = recordings("engine-0.32")
IMAGES = recordings("images")
DIALECT = {route: recordings(f"dialect-{route.name.lower()}") for route in VLLMRoute}


def chunks_of(
    recording: dict[str, Any], request_id: str, num_top: int = 0, *, vocab_size: int = VOCAB, has_media: bool = False
) -> list[Chunk]:
    """A recorded reply as the chunks that are read from it."""
    expected = Expected(
        request_id=request_id,
        route=VLLMRoute(recording["path"]),
        vocab_size=vocab_size,
        has_media=has_media,
        num_prompt=recording["num_prompt"] or 0,
        num_top_logprobs=num_top,
        eos_ids=frozenset({EOS}),
    )
    reader, body = VLLMReader(expected), recording["body"].encode()
    if not body.startswith(b"data: "):
        return [reader.whole(body)]
    events = [data for data in EventReader(max_bytes=2**20).feed(body) if data != b"[DONE]"]
    return [chunk for chunk in map(reader.event, events) if chunk is not None]


def turn_of(chunks: Sequence[Chunk]) -> SampledTurn:
    collector = TurnCollector(vocab_size=VOCAB, max_tokens=None)
    for chunk in chunks:
        collector.add(chunk)
    return collector.result()


# -- asked by hand

STOP, LENGTH = Finish(reason=FinishReason.STOP, matched=EOS), Finish(reason=FinishReason.LENGTH)
ABORT = Finish(reason=FinishReason.ABORT)
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, EOS]
READ: dict[str, tuple[list[int], Finish]] = {
    "abort_inflight_generate_nonstream": ([*PARIS, 198, 2, 1], ABORT),
    "generate_logprobs": (PARIS, STOP),
    "generate_sampling_mask_probe": (PARIS[:4], LENGTH),
    "generate_prompt_logprobs": ([11173], LENGTH),
    "generate_stop_string": (PARIS[:4], Finish(reason=FinishReason.STOP, matched="France")),
    "generate_stream": (PARIS, STOP),
    "completions_token_ids_logprobs2": (PARIS, STOP),
}
"""Whole replies with ids and logprobs."""
REFUSED: dict[str, str] = {
    **dict.fromkeys(("generate_after_weight_version", "generate_plain", "generate_structured_regex"), "has_logprobs"),
    **dict.fromkeys(("weight_version_span_inflight_generate", "completions_regex"), "has_logprobs"),
    **dict.fromkeys(("completions_min_tokens_ignore_eos", "completions_prompt_logprobs"), "has_logprobs"),
    **dict.fromkeys(("completions_truncate_prompt_tokens", "completions_truncate_right"), "has_logprobs"),
    **dict.fromkeys(("abort_inflight_completions_nonstream", "completions_skip_special_false"), "ids_agree"),
    **dict.fromkeys(("completions_stop_string", "completions_token_ids"), "ids_agree"),
    **dict.fromkeys(("completions_token_ids_stream", "pause_abort_inflight_completions"), "ids_agree"),
    **dict.fromkeys(("completions_list_of_lists", "completions_list_of_lists_n2", "generate_n2"), "one_choice"),
    "completions_two_prompts_stream": "ids_agree",
    **dict.fromkeys(("completions_echo_prompt_logprobs", "completions_max_tokens_0"), "logprob_is_finite"),
    **dict.fromkeys(("pause_keep_inflight_completions",), "has_logprobs"),
    "request_sent_while_paused": "has_ids",
    "generate_text_mode": "has_logprobs",
}
"""Replies to requests of other kinds than ours, in each of which something is missing or too much."""


def own_id(recording: dict[str, Any]) -> str:
    body = recording["body"].removeprefix("data: ").split("\n\n")[0]
    told = json.loads(body)
    return str(told.get("request_id") or told["id"])


@pytest.mark.parametrize("name", READ)
def test_what_was_recorded_is_read(name: str) -> None:
    recording = BY_HAND[name]
    ids, finish = READ[name]
    turn = turn_of(chunks_of(recording, own_id(recording)))
    assert (list(turn.ids), turn.finish) == (ids, finish)
    if ids == PARIS:
        assert list(turn.logprobs)[:2] == [-1.8826946020126343, -0.019658144563436508]
    told = () if name.startswith("completions") else (WeightSpan(version="default", start=0, end=len(ids)),)
    assert turn.weights == told


@pytest.mark.parametrize("name", REFUSED)
def test_what_was_asked_for_otherwise_is_refused_by_its_law(name: str) -> None:
    recording = BY_HAND[name]
    with pytest.raises(UpstreamInvalid) as caught:
        chunks_of(recording, own_id(recording))
    assert caught.value.law == REFUSED[name]


def test_a_turn_over_two_weight_versions_has_both() -> None:
    """As recorded, but for the logprobs, which nobody had asked for."""
    recording = dict(BY_HAND["weight_version_span_inflight_generate"])
    reply = json.loads(recording["body"])
    rows = [{"token_id": id_, "logprob": -1.0, "top_logprobs": []} for id_ in reply["choices"][0]["token_ids"]]
    reply["choices"][0]["logprobs"] = {"content": rows}
    turn = turn_of(chunks_of({**recording, "body": json.dumps(reply)}, reply["request_id"]))
    assert turn.weights == (
        WeightSpan(version="step-1", start=0, end=10),
        WeightSpan(version="step-2", start=10, end=40),
    )


def test_every_recording_of_a_generation_is_looked_at() -> None:
    generations = {name for name, recording in BY_HAND.items() if recording["status"] == 200 and name != "models"}
    assert generations - {"flow2_generate_rendered", "flow2b_generate_own_ids"} == {*READ, *REFUSED}


@pytest.mark.parametrize("name", ["flow2_generate_rendered", "flow2b_generate_own_ids"])
def test_a_rendered_prompt_and_our_own_ids_have_one_reply(name: str) -> None:
    recording = BY_HAND[name]
    turn = turn_of(chunks_of(recording, own_id(recording)))
    other = BY_HAND["flow2b_generate_own_ids"]
    assert turn.ids == turn_of(chunks_of(other, own_id(other))).ids
    assert turn.weights == (WeightSpan(version="step-2", start=0, end=31),)


def test_the_recorded_list_of_models_is_read() -> None:
    for recording in (BY_HAND["models"], *(listed["discover GET /v1/models"] for listed in DIALECT.values())):
        served = decode_models(recording["body"].encode(), wanted="ours")
        assert (served.name, served.max_context_tokens) == ("smollm2", 4096)


# -- asked by the dialect

GENERATIONS = [
    (route, name)
    for route, listed in DIALECT.items()
    for name, recording in listed.items()
    if name.endswith((" whole", " streamed")) and not name.startswith("refused")
]
ENDS = {
    "stop at eos": STOP,
    "length": LENGTH,
    "two alternatives, drawn at a high temperature": LENGTH,
    "stop string within a token": Finish(reason=FinishReason.STOP, matched="f Fra"),
    "stop token id": Finish(reason=FinishReason.STOP, matched=4649),
    "text that lags: emoji and stop held back": LENGTH,
    "aborted": ABORT,
    "aborted before its first token": ABORT,
}


def recorded_turn(route: VLLMRoute, name: str) -> SampledTurn:
    recording = DIALECT[route][name]
    return turn_of(chunks_of(recording, recording["request_id"], recording["num_top"]))


@pytest.mark.parametrize(("route", "name"), GENERATIONS, ids=str)
def test_a_reply_to_the_dialect_is_read(route: VLLMRoute, name: str) -> None:
    turn = recorded_turn(route, name)
    kind = name.rpartition(" ")[0]
    if not kind.startswith("guided"):
        assert turn.finish == ENDS[kind]
    assert bool(turn.ids) == (kind != "aborted before its first token")
    if route is VLLMRoute.GENERATE and turn.ids:
        assert turn.weights == (WeightSpan(version="default", start=0, end=len(turn.ids)),)


@pytest.mark.parametrize("route", VLLMRoute)
@pytest.mark.parametrize("kind", [kind for kind in ENDS if not kind.startswith("aborted")])
def test_a_turn_streamed_is_the_turn_at_once(route: VLLMRoute, kind: str) -> None:
    streamed, whole = recorded_turn(route, f"{kind} streamed"), recorded_turn(route, f"{kind} whole")
    assert (streamed.ids, streamed.finish, streamed.weights) == (whole.ids, whole.finish, whole.weights)
    assert list(streamed.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-4)
    assert [[top.id for top in row] for row in streamed.top_logprobs or ()] == [
        [top.id for top in row] for row in whole.top_logprobs or ()
    ]


def test_the_alternatives_of_an_unlikely_token_are_the_best_ones() -> None:
    for route in VLLMRoute:
        turn = recorded_turn(route, "two alternatives, drawn at a high temperature whole")
        assert turn.top_logprobs is not None
        assert [len(row) for row in turn.top_logprobs] == [2, 2, 2, 2]
        for logprob, row in zip(turn.logprobs, turn.top_logprobs, strict=True):
            assert row[0].logprob >= row[1].logprob >= logprob - 1e-9


@pytest.mark.parametrize(("route", "name"), [(r, n) for r, n in GENERATIONS if n.endswith("streamed")], ids=str)
def test_a_stream_that_is_cut_at_any_byte_has_no_end_and_nothing_that_is_wrong(route: VLLMRoute, name: str) -> None:
    """Fed byte by byte: what was read by then is what a stream that ends there would give."""
    recording = DIALECT[route][name]
    whole = chunks_of(recording, recording["request_id"], recording["num_top"])
    expected = Expected(
        request_id=recording["request_id"],
        route=route,
        vocab_size=VOCAB,
        num_prompt=recording["num_prompt"],
        num_top_logprobs=recording["num_top"],
        eos_ids=frozenset({EOS}),
    )
    reader, events, read = VLLMReader(expected), EventReader(max_bytes=2**20), list[Chunk]()
    body = recording["body"].encode()
    usage_at = body.rindex(b"data: {")
    for at in range(len(body)):
        for data in events.feed(body[at : at + 1]):
            if data != b"[DONE]":
                chunk = reader.event(data)
                read += [] if chunk is None else [chunk]
        assert read == whole[: len(read)]
        assert at > usage_at or all(chunk.finish is None for chunk in read)
    assert read == whole


@pytest.mark.parametrize("route", VLLMRoute)
def test_what_a_reply_at_once_begins_with_is_refused_at_every_byte(route: VLLMRoute) -> None:
    recording = DIALECT[route]["stop string within a token whole"]
    for end in range(len(recording["body"])):
        cut = {**recording, "body": recording["body"][:end]}
        with pytest.raises(UpstreamInvalid, match=r"json|utf8"):
            chunks_of(cut, recording["request_id"])


@pytest.mark.parametrize("route", VLLMRoute)
@pytest.mark.parametrize("kind", ["json_object", "json_schema", "regex", "choice", "lark", "ebnf"])
async def test_scores_of_what_a_grammar_forced_are_the_model_s(route: VLLMRoute, kind: str) -> None:
    drawn = recorded_turn(route, f"guided by {kind} whole")
    recording = DIALECT[route][f"scores of guided by {kind}"]
    assert recording["ids"] == list(drawn.ids)
    work = decode_scores(
        recording["body"].encode(),
        drawn.ids,
        request_id=json.loads(recording["request"])["request_id"],
        route=route,
        num_prompt=recording["num_prompt"],
        num_top=0,
    )
    scores = await in_pieces(work)
    assert len(scores.logprobs) == len(drawn.ids)
    assert sum(scores.logprobs) < sum(drawn.logprobs) - 1, "what the grammar rules out had a part of the whole"
    assert scores.version == ("default" if route is VLLMRoute.GENERATE else None)


@pytest.mark.parametrize(
    ("route", "name"),
    [(route, name) for route, listed in DIALECT.items() for name in listed if name.startswith("refused")],
    ids=str,
)
def test_a_refusal_is_one_with_its_own_status_also_in_a_stream(route: VLLMRoute, name: str) -> None:
    recording = DIALECT[route][name]
    if recording["status"] != 200:
        assert recording["status"] == json.loads(recording["body"])["error"]["code"] == 400
        return
    if "too long" in name:
        with pytest.raises(ContextLengthExceeded, match="4097 tokens"):
            chunks_of(recording, recording["request_id"])
        return
    with pytest.raises(UpstreamRefused) as caught:
        chunks_of(recording, recording["request_id"])
    assert caught.value.engine_status == 400
    assert json.loads(caught.value.body)["error"]["code"] == 400


@pytest.mark.parametrize("name", [name for name in IMAGES if name.split()[1].startswith("image")])
def test_the_images_of_a_prompt_are_where_vllm_put_them(name: str) -> None:
    """Two pictures of four tokens, by its own image processor."""
    recording = IMAGES[name]
    logical: list[int] = json.loads(recording["request"])["token_ids"]
    chunks = chunks_of(recording, recording["request_id"], vocab_size=151936, has_media=True)
    (effective,) = [chunk.effective for chunk in chunks if chunk.effective is not None]
    places = [at for at, id_ in enumerate(logical) if id_ == 151655]
    media = tuple(PromptMedia(position=at, item=medium(b"picture"), recorded=None) for at in places)
    found = new_expansions(Prompt(new_ids=token_ids(logical), media=media), effective)
    assert [list(one.ids) for one in found] == [[151655] * 4 for _ in places]
    assert sum(len(chunk.ids) for chunk in chunks) == 4


@pytest.mark.parametrize("kind", ["whole", "streamed"])
def test_a_refused_turn_loses_its_image_for_the_next_one_which_fails_before_its_first_token(kind: str) -> None:
    """As `sampled_again` knows it (engine/vllm/lost_media.py). Once more, the same request is sampled. These were asked
    by hand, without a usage at a stream's end."""
    lost, again = IMAGES[f"lost: after that {kind}"], IMAGES[f"asked again after that {kind}"]
    assert json.loads(lost["request"])["content_parts"] == json.loads(again["request"])["content_parts"]
    if kind == "streamed":
        with pytest.raises(UpstreamRefused) as caught:
            chunks_of(lost, lost["request_id"], vocab_size=151936, has_media=True)
        status, body = caught.value.engine_status, caught.value.body
    else:
        status, body = lost["status"], lost["body"].encode()
    assert (status, b'"Internal server error"' in body) == (500, True)
    first, *_ = chunks_of(again, again["request_id"], vocab_size=151936, has_media=True)
    assert (bool(first.ids), first.effective is not None) == (True, True)
