"""What a real SGLang 0.5.23 answered, in both modes: read as what it is, or refused as what it is.

recordings/sglang/engine-0.5.23.json has one exchange a line: SmolLM2-135M in float32 on a CPU, its log-probabilities
raw (`SGLANG_RETURN_ORIGINAL_LOGPROB=1`), its streams incremental. Replies are the values that came, `/server_info` cut
to what tells a server from another, folders by their last name. images-0.5.23.json is the same of a Qwen2.5-VL of two
layers with random weights, its log-probabilities as they are by default.
"""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stenograph.core.base64_text import measured
from stenograph.core.chat import ChatRequest, TextView, ToolChoice, ToolMode
from stenograph.core.errors import ContextLengthExceeded, InvalidRequest, UpstreamInvalid, UpstreamRefused
from stenograph.core.media import new_expansions
from stenograph.core.messages import MediaItem, MediaKind, MediaRef, Message, Role, Tool
from stenograph.core.sse import EventReader
from stenograph.core.support import supports
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    Grammar,
    GrammarKind,
    Prompt,
    PromptMedia,
    RequestId,
    SampledTurn,
    SamplingParams,
    WeightSpan,
    token_ids,
)
from stenograph.core.weights import (
    ContinueGeneration,
    FlushCache,
    NameWeights,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
    WeightCommand,
)
from stenograph.engine.base import GenerateRequest
from stenograph.engine.http.adapter import AdapterOptions, ControlReply, EngineAdapter, EngineReading
from stenograph.engine.http.transport import Headers, HttpReply
from stenograph.engine.sglang.chat import CHAT_PATH, SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.validate import TurnCollector

FOLDER = Path(__file__).parents[2] / "service" / "recordings" / "sglang"
TEXTS = {name: (FOLDER / f"{name}-0.5.23.json").read_text(encoding="utf-8") for name in ("engine", "images")}
RECORDED, IMAGES = ({one["name"]: one for one in json.loads(text)} for text in TEXTS.values())
VOCAB, EOS = 49152, 2
PARIS = (504, 3575, 282, 4649, 314, 7042, 30, EOS)
ON = (*PARIS, 198, EOS, 1, 9690, 198, EOS, 198)
JSON = (107, 3805, 476, 20721, 1799, 476, 38634, 18, 198, 109, EOS)
LENGTH, ABORT = Finish(reason=FinishReason.LENGTH), Finish(reason=FinishReason.ABORT)


def stop(matched: int | str | None = EOS) -> Finish:
    return Finish(reason=FinishReason.STOP, matched=matched)


def adapter_of(recording: dict[str, Any]) -> EngineAdapter:
    made = SGLangChat if recording["path"] == CHAT_PATH else SGLangGenerate
    return made(AdapterOptions(model="smollm2-135m", vocab_size=VOCAB))


def reply_of(recording: dict[str, Any]) -> HttpReply:
    """The reply as SGLang spells it."""
    is_json = "reply" in recording
    text = json.dumps(recording["reply"], ensure_ascii=False, separators=(",", ":")) if is_json else recording["body"]
    kind = "application/json" if is_json else "text/event-stream"
    return HttpReply(status=recording["status"], content_type=kind, headers=(), body=text.encode())


def params_of(body: dict[str, Any]) -> SamplingParams:
    """The sampling that a recorded body asks for."""
    asked = {**body, **body.get("sampling_params", {})}
    names = ("temperature", "top_p", "min_p", "ignore_eos", "seed", "min_tokens")
    given = {name: asked[name] for name in names if name in asked}
    for name in ("stop", "stop_token_ids"):
        if asked.get(name):
            given[name] = tuple(asked[name])
    grammar = None
    if "regex" in asked:
        grammar = Grammar(kind=GrammarKind.REGEX, source=asked["regex"])
    elif "ebnf" in asked:
        grammar = Grammar(kind=GrammarKind.EBNF, source=asked["ebnf"])
    elif "json_schema" in asked:
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=asked["json_schema"])
    elif "response_format" in asked:
        schema = json.dumps(asked["response_format"]["json_schema"]["schema"])
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema)
    return SamplingParams(
        **given,
        top_k=max(asked.get("top_k", 0), 0),
        max_tokens=asked.get("max_tokens", asked.get("max_new_tokens")),
        num_top_logprobs=asked.get("top_logprobs", asked.get("top_logprobs_num", 0)),
        logit_bias=tuple((int(id_), bias) for id_, bias in asked.get("logit_bias", {}).items()),
        grammar=grammar,
        support=asked.get("return_sampling_mask", False),
    )


def request_of(recording: dict[str, Any]) -> GenerateRequest:
    """The request by which this server would have sent the recorded body."""
    body, chat = recording["request"], None
    if recording["path"] == CHAT_PATH:
        choice = body.get("tool_choice", "auto")
        chat = ChatRequest(
            messages=(Message(role=Role.USER, content=body["messages"][0]["content"]),),
            messages_json=json.dumps(body["messages"]).encode(),
            tools=tuple(Tool(name=one["function"]["name"], json=json.dumps(one)) for one in body.get("tools", ())),
            tool_choice=ToolChoice(mode=ToolMode(choice)),
            text=TextView(skips_special=body.get("skip_special_tokens", True)),
        )
    ids = body["input_ids"]
    return GenerateRequest(
        request_id=RequestId(body["rid"]),
        prompt=Prompt(new_ids=token_ids([50] * ids if isinstance(ids, int) else ids)),
        params=params_of(body),
        chat=chat,
        affinity_key=body.get("session_id"),
        streams=body.get("stream", False),
    )


def chunks_of(recording: dict[str, Any], request: GenerateRequest | None = None) -> list[Chunk]:
    """A recorded reply as the chunks that are read from it."""
    _, reading = adapter_of(recording).call(request or request_of(recording))
    return read_by(reading, reply_of(recording))


def read_by(reading: EngineReading, reply: HttpReply) -> list[Chunk]:
    if not reply.body.startswith(b"data: "):
        return list(reading.whole(reply))
    events = [data for data in EventReader(max_bytes=2**20).feed(reply.body) if data != b"[DONE]"]
    return [*(chunk for data in events for chunk in reading.event(data)), *reading.end()]


def turn_of(chunks: Sequence[Chunk], *, vocab_size: int = VOCAB) -> SampledTurn:
    collector = TurnCollector(vocab_size=vocab_size, max_tokens=None)
    for chunk in chunks:
        collector.add(chunk)
    return collector.result()


# -- generations


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The turn that a reply is read as: its first ids and their number (None: these are all), the sum of its
    log-probabilities in nats, each version with its span's end, cached tokens, and of a chat its content and calls."""

    ids: Sequence[int]
    num: int | None = None
    nats: float
    finish: Finish = LENGTH
    weights: Sequence[tuple[str, int]] = ()
    cached: int = 15
    content: str | None = None
    calls: Sequence[tuple[str, str]] = ()


SAID = "The capital of France is Paris"
ON_SAID = f"{SAID}.\nsystem\n\n"
LAUNCH = f"{SAID}.\nsystem\n\nuser\nI'm planning to launch a new product in the market."
SIX: dict[str, Any] = {"ids": PARIS[:6], "nats": -0.6499}
ENDED: dict[str, Any] = {"ids": PARIS, "nats": -1.1921, "finish": stop()}
AT_STRING: dict[str, Any] = {"ids": PARIS[:4], "nats": -0.607, "finish": stop("of Fr")}
AT_TOKEN: dict[str, Any] = {"ids": PARIS[:5], "nats": -0.6203, "finish": stop(314)}
AS_JSON: dict[str, Any] = {"ids": JSON, "nats": -1.7683, "finish": stop()}
THIRTY: dict[str, Any] = {"ids": ON, "num": 30}
OTHER: dict[str, Any] = {
    "ids": (7042, 30, 198, 198, 504, 1797),
    "nats": -9.2102,
    "cached": 4,
    "weights": [("step-5", 6)],
}
CALL = (44, 100, 568, 92, 79, 83, 449, 46)
OTHER_CALL = (44, 19324, 79, 4350, 46)
STORY = (2122, 436, 253, 4626, 338, 655, 6745, 288, 1481, 1361, 30, 657)
SHORT_STORY = (34056, 28, 339, 5248, 1048, 1535, 30, 365, 4607, 2426, 28, 915, 4318, 5387, 2677)
BY_RETRACT = [("inplace_noflush_running", 20), ("retract_flush_running", 30)]
BY_IN_PLACE = [("rec-3", 14), ("inplace_flush_running", 30)]
TOLD = "There was a river that time seemed to stand still. It"
CAPITAL = "The capital of France, also known as the capital of the French Republic,"
PRODUCT = "12 * 7 = 78\n\nThis is the result of the multiplication of 12 and "
READ: dict[str, Read] = {
    "generate": Read(**SIX),
    "generate_stream": Read(**SIX),
    "generate_top_logprobs": Read(**SIX),
    "generate_sampling_mask": Read(**SIX),
    "generate_sampling_mask_greedy": Read(**SIX),
    "generate_eos": Read(**ENDED),
    "generate_stop_string": Read(**AT_STRING),
    "generate_stop_token_id": Read(**AT_TOKEN),
    "generate_json_schema": Read(**AS_JSON),
    "generate_one_alternative": Read(**OTHER),
    "generate_stream_cumulative": Read(**OTHER),
    "generate_aborted": Read(ids=SHORT_STORY, nats=-50.8618, finish=ABORT, cached=38, weights=[("step-5", 15)]),
    "abort_in_pause_turn": Read(**THIRTY, nats=-15.4329, weights=[("abort_running", 30)]),
    "retract_flush_running_turn": Read(**THIRTY, nats=-15.598, weights=BY_RETRACT),
    "chat": Read(**SIX, content=SAID),
    "chat_top_logprobs": Read(**SIX, content=SAID),
    "chat_sampling_mask": Read(**SIX, content=SAID),
    "chat_return_token_ids": Read(**SIX, content=SAID),
    "chat_sglext_ids": Read(**SIX, content=SAID),
    "chat_eos": Read(**ENDED, content=f"{SAID}."),
    "chat_special_tokens_shown": Read(ids=PARIS, nats=-2.8369, finish=stop(), cached=36, content=f"{SAID}."),
    "chat_stop_string": Read(**AT_STRING, content="The capital "),
    "chat_stop_token_id": Read(**AT_TOKEN, content="The capital of France"),
    "chat_min_tokens": Read(ids=PARIS[:4], num=16, nats=-8.7012, finish=stop(314), cached=36, content=CAPITAL),
    "chat_json_schema": Read(**AS_JSON, content='{\n  "city": "Paris"\n}'),
    "chat_ebnf": Read(ids=(50, 85, 98, 1418, 94, EOS), nats=-1.5143, finish=stop(), cached=36, content="Berlin"),
    "chat_top_logprobs_tempered": Read(ids=PARIS[:3], nats=-1.402, cached=36, content="The capital of"),
    "chat_support_top_p_and_top_k": Read(
        ids=(39832, 282, 4649, 314, 7042, 28, 4649, 30, EOS),
        nats=-6.1171,
        finish=stop(),
        cached=36,
        content="Capital of France is Paris, France.",
    ),
    "chat_tools_auto": Read(ids=(33, 34, 1672, 216, 39), num=24, nats=-12.6417, cached=20, content=PRODUCT),
    "chat_tools_required": Read(ids=CALL, num=48, nats=-25.7463, cached=5, content="", calls=[("multiply", "[12, 7]")]),
    "chat_with_tools_forced": Read(
        ids=OTHER_CALL,
        num=44,
        nats=-27.1455,
        finish=stop(None),
        cached=202,
        weights=[("step-5", 44)],
        content="",
        calls=[("multiply", '{"value": 12}')],
    ),
    "chat_aborted": Read(
        ids=ON, nats=-1.8988, finish=ABORT, cached=0, weights=[("abort_running", 15)], content=ON_SAID
    ),
    "chat_aborted_by_pause": Read(
        ids=STORY, nats=-20.9794, finish=ABORT, cached=38, weights=[("step-3", 12)], content=TOLD
    ),
    "abort_running_turn": Read(**THIRTY, nats=-15.4329, weights=[("retract_flush_running", 30)], content=LAUNCH),
    "inplace_flush_running_turn": Read(**THIRTY, nats=-15.1553, weights=BY_IN_PLACE, cached=0, content=LAUNCH),
}
"""Without weights: `default` sampled all."""
NOT_ASKED = {
    "generate_stop_token_id_ignore_eos": "stop tokens that SGLang does not look at are refused before it",
    "generate_input_logprobs": "log-probabilities of the prompt are not asked for",
    "generate_sampling_mask_top_p_alone": "a top_k is granted with it",
    "chat_meta_info_stream_refused": "streams are asked for without it",
    "chat_stream_sglext_ids": "below, with the names of the weights",
}
"""Generations that were asked for by hand, as this server does not ask."""


@pytest.mark.parametrize("name", READ)
def test_a_recorded_reply_is_read_as_what_it_is(name: str) -> None:
    recording, expected = RECORDED[name], READ[name]
    chunks = chunks_of(recording)
    turn, reply = turn_of(chunks), chunks[-1].reply
    num = len(expected.ids) if expected.num is None else expected.num
    assert (tuple(turn.ids)[: len(expected.ids)], len(turn.ids)) == (tuple(expected.ids), num)
    assert sum(turn.logprobs) == pytest.approx(expected.nats, abs=1e-4)
    assert (turn.finish, turn.num_cached_tokens) == (expected.finish, expected.cached)
    spans = [*expected.weights] or [("default", num)]
    starts = [0, *(end for _, end in spans)]
    assert turn.weights == tuple(
        WeightSpan(version=version, start=start, end=end) for (version, end), start in zip(spans, starts, strict=False)
    )
    assert (reply is None) == (expected.content is None)
    if reply is not None:
        assert reply.body == reply_of(recording).body
        assert reply.message.content == expected.content
        assert [(call.name, call.arguments) for call in reply.message.tool_calls] == list(expected.calls)


EXTRA = {"return_token_ids", "return_prompt_token_ids", "return_input_ids_in_sglext", "return_output_ids_in_sglext"}
"""Asked for by hand beside what this server asks."""


@pytest.mark.parametrize("name", [*READ, "generate_bad_regex", "generate_too_long", "chat_bad_schema", "chat_too_long"])
def test_this_server_asks_for_what_was_recorded(name: str) -> None:
    """Each field of the recorded body is in ours, with its value."""
    recording = RECORDED[name]
    call, _ = adapter_of(recording).call(request_of(recording))
    ours = json.loads(call.body)
    asked = {key: copy.deepcopy(value) for key, value in recording["request"].items() if key not in EXTRA}
    assert call.path == recording["path"]
    assert asked.pop("sampling_params", {}).items() <= ours.get("sampling_params", {}).items()
    if call.path == CHAT_PATH:
        assert not asked.pop("stream")  # its default
        asked.get("response_format", {}).get("json_schema", {})["name"] = "schema"
    if name == "generate_sampling_mask_greedy":
        del asked["return_sampling_mask"]  # nothing but a greedy turn's own tokens can be sampled
    assert asked == {key: value for key, value in ours.items() if key in asked}


@pytest.mark.parametrize("name", ["chat_sampling_mask", "chat_support_top_p_and_top_k", "generate_sampling_mask"])
def test_a_recorded_support_is_kept_as_it_is(name: str) -> None:
    recording = RECORDED[name]
    turn, reply = turn_of(chunks_of(recording)), recording["reply"]
    told = (reply if "meta_info" in reply else reply["choices"][0])["meta_info"]
    assert turn.support is not None
    kept = [None if ids is None else ids.tolist() for ids in supports(turn.support, turn.ids)]
    assert kept == [sorted(row) for row in told["output_token_sampling_mask"]]
    assert turn.sampling_logprobs is not None
    assert list(turn.sampling_logprobs) == told["output_token_sampling_logprobs"]


@pytest.mark.parametrize("name", ["chat_top_logprobs", "generate_top_logprobs", "chat_top_logprobs_tempered"])
def test_recorded_alternatives_are_the_best_ones_in_order(name: str) -> None:
    turn = turn_of(chunks_of(RECORDED[name]))
    assert turn.top_logprobs is not None
    assert [len(row) for row in turn.top_logprobs] == [3] * len(turn.ids)
    for id_, row in zip(turn.ids, turn.top_logprobs, strict=True):
        assert [top.logprob for top in row] == sorted((top.logprob for top in row), reverse=True)
        assert row[0].id == id_ or row[0].logprob > -1.5


def test_a_recorded_stream_cut_at_any_byte_has_no_end_and_nothing_that_is_wrong() -> None:
    recording = RECORDED["generate_stream"]
    whole, body = chunks_of(recording), reply_of(recording).body
    _, reading = SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB)).call(request_of(recording))
    events, read = EventReader(max_bytes=2**20), list[Chunk]()
    for at in range(len(body)):
        for data in events.feed(body[at : at + 1]):
            read += () if data == b"[DONE]" else reading.event(data)
        assert read == whole[: len(read)]
        assert all(chunk.finish is None for chunk in read)
    assert [*read, *reading.end()] == whole


def test_a_recorded_stream_that_was_hung_up_on_has_no_end() -> None:
    chunks = chunks_of(RECORDED["generate_stream_aborted"])
    assert sum(len(chunk.ids) for chunk in chunks) == 9
    with pytest.raises(UpstreamInvalid, match="has_finish"):
        turn_of(chunks)


async def recorded_answers(method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply:
    """The recorded server's answers to what is asked beside generations."""
    assert method == "GET"
    found = {"/v1/models": "models", "/model_info": "model_info", "/server_info": "server_info"}.get(target)
    if found is None:
        return HttpReply(status=404, content_type="application/json", headers=(), body=b'{"detail":"Not Found"}')
    return reply_of(RECORDED[found])


async def test_the_recorded_server_s_chats_are_streamed_and_read_as_what_they_are() -> None:
    recording = RECORDED["chat_stream_sglext_ids"]
    adapter = adapter_of(recording)
    await adapter.discover(recorded_answers)
    call, reading = adapter.call(request_of(recording))
    asked = recording["request"]
    del asked["return_input_ids_in_sglext"], asked["return_meta_info"]
    assert call.streams
    assert asked.items() <= json.loads(call.body).items()
    await reading.begin(recorded_answers)
    events = [data for data in EventReader(max_bytes=2**20).feed(reply_of(recording).body) if data != b"[DONE]"]
    chunks = [chunk for data in events for chunk in reading.event(data)]
    assert [chunk.num_sampled for chunk in chunks] == [1] * 6
    chunks += [*(await reading.settle(recorded_answers)), *reading.end()]
    turn = turn_of(chunks)
    assert tuple(turn.ids) == PARIS[:6]
    assert sum(turn.logprobs) == pytest.approx(-0.649882, abs=1e-6)
    assert (turn.finish, turn.num_cached_tokens) == (LENGTH, 15)
    assert turn.weights == (WeightSpan(version="default", start=0, end=6),)
    assert "".join(chunk.written.delta.content for chunk in chunks if chunk.written) == "The capital of France is Paris"


# -- refusals

NOT_CLOSED = "Regex parsing error at position 3: The parenthesis is not closed."
REFUSED = {
    "generate_bad_regex": NOT_CLOSED,
    "generate_bad_regex_stream": NOT_CLOSED,
    "generate_bias_out_of_vocab": "logit_bias must has keys in [0, 49151], got 60000.",
    "generate_sampling_mask_top_p_alone": "return_sampling_mask requires top_k=1",
    "chat_meta_info_stream_refused": "return_meta_info is not supported with streaming.",
    "chat_bad_schema": 'Unsupported type "nonsense"',
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_recorded_refusal_has_its_words_and_a_code(name: str) -> None:
    recording = RECORDED[name]
    if recording["status"] == 200:  # an event of its stream, with a token that was never sampled
        with pytest.raises(UpstreamRefused) as caught:
            chunks_of(recording)
        error = caught.value
    else:
        refusal = adapter_of(recording).refusal(reply_of(recording), request_of(recording))
        assert isinstance(refusal, UpstreamRefused)
        error = refusal
    body = json.loads(error.body)
    told = body.get("error", body)
    assert error.engine_status == 400
    assert REFUSED[name] in told["message"]
    assert REFUSED[name] in str(error)
    assert told["code"] == (400 if recording["path"] == CHAT_PATH or recording["status"] == 200 else "upstream_refused")


@pytest.mark.parametrize(
    ("name", "num_prompt", "max_tokens"),
    [("generate_too_long", 16, 9000), ("generate_too_long_prompt", 9600, None), ("chat_too_long", 16, 9000)],
)
def test_what_sglang_finds_too_long_is_too_long_here(name: str, num_prompt: int, max_tokens: int | None) -> None:
    recording = RECORDED[name]
    error = adapter_of(recording).refusal(reply_of(recording), request_of(recording))
    assert isinstance(error, ContextLengthExceeded)
    told = (error.num_prompt_tokens, error.max_tokens, error.max_context_tokens)
    assert told == (num_prompt, max_tokens, 8192)


def test_stop_tokens_that_were_not_looked_at_are_not_sent() -> None:
    recording = RECORDED["generate_stop_token_id_ignore_eos"]
    assert recording["request"]["sampling_params"]["stop_token_ids"] == [314]
    assert 314 in recording["reply"]["output_ids"][:-1]
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        adapter_of(recording).call(request_of(recording))


# -- weights, pauses, aborts

UNFLUSHED = "its cache still has keys and values of the weights before"
ABORTS = ("abort_unknown", "abort_running_rid", "abort_in_pause_abort", "abort_in_pause_abort_again")
COMMANDS: dict[str, tuple[WeightCommand, str]] = {
    "update_weights": (UpdateWeights(path="smollm2-135m", version="rec-3"), ""),
    "update_weights_missing_folder": (UpdateWeights(path="nowhere", version="rec-2"), "400: Failed to get weights"),
    "retract_flush_running_update": (UpdateWeights(path="smollm2-v2", version="retract_flush_running"), ""),
    "abort_running_update": (UpdateWeights(path="smollm2-v2", version="abort_running"), ""),
    "inplace_flush_running_update": (UpdateWeights(path="smollm2-v2", version="inplace_flush_running"), UNFLUSHED),
    "inplace_noflush_running_update": (
        UpdateWeights(path="smollm2-v2", version="inplace_noflush_running", stands_in_place=True),
        "",
    ),
    "update_weight_version": (NameWeights(version="rec-1"), ""),
    "flush_cache": (FlushCache(), ""),
    "abort_running_pause": (PauseGeneration(mode=PauseMode.ABORT), ""),
    "retract_flush_running_pause": (PauseGeneration(mode=PauseMode.RETRACT), ""),
    "inplace_flush_running_pause": (PauseGeneration(mode=PauseMode.IN_PLACE), ""),
    "abort_in_pause_pause": (PauseGeneration(mode=PauseMode.IN_PLACE), ""),
    "abort_in_pause_continue": (ContinueGeneration(), ""),
    "abort_running_continue": (ContinueGeneration(), ""),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_the_one_that_was_recorded_and_its_answer_is_understood(name: str) -> None:
    recording, (command, said) = RECORDED[name], COMMANDS[name]
    adapter = SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB))
    call = adapter.control_calls(command)[0]
    assert (call.path, json.loads(call.body)) == (recording["path"], recording["request"])
    answer = adapter.control_reply(command, call, reply_of(recording))
    if said == UNFLUSHED:  # taken, under its old name
        (naming,) = adapter.control_calls(NameWeights(version="inplace_flush_running"))
        assert answer == ControlReply(then=(naming, answer.then[1]))
        assert answer.then[1].path == "/flush_cache"
        assert said in answer.then[1].note_if_refused
    else:
        assert answer == ControlReply(problem=answer.problem)
        assert said in answer.problem
        assert bool(said) == bool(answer.problem)


OF_ITSELF = {"models", "server_info", "model_info"}


@pytest.mark.parametrize("made", [SGLangChat, SGLangGenerate])
async def test_what_a_server_says_of_itself_is_found(made: type[SGLangChat] | type[SGLangGenerate]) -> None:
    adapter = made(AdapterOptions(model="m", vocab_size=VOCAB))
    await adapter.discover(recorded_answers)
    assert adapter.capabilities.max_context_tokens == 8186
    assert await adapter.find_version(recorded_answers) == "default"
    assert adapter.probe_paths[0] in {RECORDED[name]["path"] for name in OF_ITSELF}
    close, recording = adapter.close_call("nobody"), RECORDED["close_session_unknown"]
    assert close is not None  # of --enable-session-radix-cache
    assert (close.path, json.loads(close.body)) == (recording["path"], recording["request"])


@pytest.mark.parametrize("name", ABORTS)
def test_an_abort_is_the_one_that_was_recorded(name: str) -> None:
    recording = RECORDED[name]
    call = SGLangGenerate(AdapterOptions(model="m", vocab_size=VOCAB)).abort_call(
        RequestId(recording["request"]["rid"])
    )
    assert (call.path, json.loads(call.body)) == (recording["path"], recording["request"])
    assert (recording["status"], recording["body"]) == (200, "")


def test_after_an_update_in_place_model_info_has_the_old_name_and_the_turn_the_new() -> None:
    told = RECORDED["inplace_flush_running_model_info"]["reply"]["weight_version"]
    assert told == READ["inplace_flush_running_turn"].weights[0][0] != READ["inplace_flush_running_turn"].weights[1][0]


# -- images

IMAGE_PAD, VISION_VOCAB = 151655, 151936
SEEN = {
    "images_one": (15, (140623, 144966, 28492, 93660)),
    "images_two": (21, (2766, 145763, 93852, 81989)),
    "images_twice": (21, (140623, 144966, 43508, 102824)),
    "images_top_logprobs": (15, (140623, 144966, 28492, 93660)),
}
"""The number of effective ids, and the sampled ones."""


def request_with_images(recording: dict[str, Any]) -> GenerateRequest:
    """The request by which this server would have sent the recorded body."""
    body = recording["request"]
    items: list[MediaItem] = []
    for uri in body["image_data"]:
        media_type, _, data = uri.removeprefix("data:").partition(";base64,")
        sha256, num_bytes = measured(data.encode())
        ref = MediaRef(sha256=sha256, kind=MediaKind.IMAGE, media_type=media_type, num_bytes=num_bytes)
        items.append(MediaItem(ref=ref, base64=data.encode()))
    places = [at for at, id_ in enumerate(body["input_ids"]) if id_ == IMAGE_PAD]
    media = tuple(PromptMedia(position=at, item=item, recorded=None) for at, item in zip(places, items, strict=True))
    sampling = body["sampling_params"]
    params = SamplingParams(
        max_tokens=sampling["max_new_tokens"],
        temperature=sampling["temperature"],
        seed=sampling["sampling_seed"],
        num_top_logprobs=body.get("top_logprobs_num", 0),
    )
    return GenerateRequest(
        request_id=RequestId(body["rid"]),
        prompt=Prompt(new_ids=token_ids(body["input_ids"]), media=media),
        params=params,
        streams=body["stream"],
    )


def seen(name: str) -> list[Chunk]:
    """A recorded reply to a request with images as the chunks that are read from it."""
    recording = IMAGES[name]
    adapter = SGLangGenerate(AdapterOptions(model="m", vocab_size=VISION_VOCAB))
    call, reading = adapter.call(request_with_images(recording))
    assert (call.path, json.loads(call.body)) == (recording["path"], recording["request"])
    return read_by(reading, reply_of(recording))


@pytest.mark.parametrize("name", [f"{name}{kind}" for name in SEEN for kind in ("", "_stream")])
def test_the_images_of_a_prompt_are_where_sglang_put_them(name: str) -> None:
    """Two pictures of four tokens, by its own image processor; reported with each event, taken once."""
    num_effective, ids = SEEN[name.removesuffix("_stream")]
    chunks = seen(name)
    (effective,) = [chunk.effective for chunk in chunks if chunk.effective is not None]
    found = new_expansions(request_with_images(IMAGES[name]).prompt, effective)
    assert [list(one.ids) for one in found] == [[IMAGE_PAD] * 4 for _ in IMAGES[name]["request"]["image_data"]]
    assert len(effective.ids) == num_effective
    turn = turn_of(chunks, vocab_size=VISION_VOCAB)
    assert (tuple(turn.ids), turn.finish) == (ids, LENGTH)


@pytest.mark.parametrize("kind", ["", "_stream"])
def test_an_aborted_turn_with_images_has_its_effective_ids_and_one_that_waited_no_tokens(kind: str) -> None:
    for name, is_begun in (("images_aborted", True), ("images_aborted_waiting", False)):
        chunks = seen(f"{name}{kind}")
        (effective,) = [chunk.effective for chunk in chunks if chunk.effective is not None]
        turn = turn_of(chunks, vocab_size=VISION_VOCAB)
        assert (len(effective.ids), bool(turn.ids), turn.finish) == (15, is_begun, ABORT)


def test_refusals_of_images_are_what_they_are() -> None:
    words = {
        "images_no_picture": "Could not decode image: cannot identify image file",
        "images_a_place_without_an_image": "Prompt has 2 image placeholders but 1 image inputs were provided",
    }
    adapter = SGLangGenerate(AdapterOptions(model="m", vocab_size=VISION_VOCAB))
    anything = request_with_images(IMAGES["images_one"])
    for name, said in words.items():
        refusal = adapter.refusal(reply_of(IMAGES[name]), anything)
        assert isinstance(refusal, UpstreamRefused)
        assert refusal.engine_status == 400
        assert said in str(refusal)
    with pytest.raises(UpstreamRefused, match=words["images_no_picture"]) as caught:
        seen("images_no_picture_stream")
    assert caught.value.engine_status == 400
    too_long = adapter.refusal(reply_of(IMAGES["images_too_long"]), anything)
    assert isinstance(too_long, ContextLengthExceeded)
    assert (too_long.num_prompt_tokens, too_long.max_tokens, too_long.max_context_tokens) == (15, 8000, 4096)


def test_an_image_that_sglang_left_out_breaks_a_law() -> None:
    """It answers 200, where it has more images than places."""
    recording = copy.deepcopy(IMAGES["images_an_image_without_a_place"])
    recording["request"]["input_ids"][-1:] = [IMAGE_PAD]
    request = request_with_images(recording)
    _, reading = SGLangGenerate(AdapterOptions(model="m", vocab_size=VISION_VOCAB)).call(request)
    (chunk,) = read_by(reading, reply_of(recording))
    assert chunk.effective is not None
    with pytest.raises(UpstreamInvalid, match="prompt_agrees"):
        new_expansions(request.prompt, chunk.effective)


async def test_a_model_that_sees_says_so() -> None:
    adapter = SGLangGenerate(AdapterOptions(model="m", vocab_size=VISION_VOCAB))

    async def answers(method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply:
        return (
            reply_of(IMAGES["images_model_info"]) if target == "/model_info" else await recorded_answers(method, target)
        )

    await adapter.discover(recorded_answers)
    assert not adapter.capabilities.media
    await adapter.discover(answers)
    assert adapter.capabilities.media == {MediaKind.IMAGE}


def test_every_recording_is_looked_at() -> None:
    others = {*OF_ITSELF, "health", "close_session_unknown", "inplace_flush_running_model_info"}
    others |= {"generate_stream_aborted", "generate_too_long", "generate_too_long_prompt", "chat_too_long"}
    assert {*READ, *REFUSED, *COMMANDS, *NOT_ASKED, *others, *ABORTS} == set(RECORDED)


def test_no_recording_names_a_machine_or_a_folder() -> None:
    for text in TEXTS.values():
        assert not re.search(r"\d+\.\d+\.\d+\.\d+|/(?:home|root|tmp|usr|work|var|project)/", text)
