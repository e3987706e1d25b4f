"""A real SGLang keeps the laws of engines in both modes, and what trains on it is what it sampled.

Run by scripts/test-sglang. What was sampled is held to a teacher-forced pass of the embedded engine, same weights.
"""

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from scripts.agent_session import TOOLS, check_exact, play
from scripts.distribution import Figures, recompute
from scripts.engine_table import serving
from scripts.real_engine import apart_by_rule, ask
from scripts.real_forks import check_forks
from standins.teacher_forcing import line_logprobs, log_softmax
from stenograph.conformance.check import check_engine
from stenograph.conformance.lab import EngineUnderTest
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

from .conftest import CONTEXT, RealSGLang

TOLERANCE_NATS = 2e-3
"""Of float32 on a CPU, where the same tokens are computed in batches of other shapes."""
MODES = pytest.mark.parametrize("mode", ["sglang", "sglang-generate"])
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
LONG = 40
KEPT_BACK = 6
"""Tokens of the context that no request gets: SGLang's longest prompt is seven shorter."""
say = sys.stdout.write


class Forward:
    """Teacher-forced passes over one folder's weights."""

    def __init__(self, model: Path) -> None:
        self._config, self._weights = load_weights(model)
        self.model = NumpyForward(self._config, self._weights, num_kv_tokens=CONTEXT)

    def __call__(self, ids: Sequence[int], num_given: int, temperature: float = 1.0) -> list[float]:
        return line_logprobs(self.model, ids, num_given, temperature)

    def going_on(self, other: "Forward", ids: Sequence[int], num_given: int, change: int) -> list[float]:
        """The same, where the other's weights go on with these keys and values from token `change` on."""
        logprobs = line_logprobs(self.model, ids[:change], num_given)
        held = self.model.swap(self.model.prepare(other._config, other._weights))
        tail, whole = np.array(ids[change - 1 :], np.intc), (RowSpan(0, len(ids)),)
        segment = Segment(ids=tail, start=change - 1, spans=whole, logits_for=LogitsFor.ALL)
        rows = self.model.forward([segment]).astype(np.float64)[:-1]
        self.model.swap(held)
        return logprobs + [float(log_softmax(row)[id_]) for row, id_ in zip(rows, ids[change:], strict=True)]


@pytest.fixture(scope="session")
def forward(models: Path) -> dict[str, Forward]:
    return {name: Forward(models / name) for name in ("first", "second")}


@contextmanager
def stenograph(sglang: RealSGLang, mode: str, *flags: str) -> Generator[str]:
    """The address of a server before it, which may load weights from where its models are."""
    given = ("--engine", mode, "--engine-url", sglang.url, "--weights-dir", str(sglang.model.parent), *flags)
    with serving(sglang.model, *given) as url:
        yield url


@contextmanager
def first_weights(sglang: RealSGLang) -> Generator[None]:
    """Whatever happens, SGLang has its first weights afterwards, and goes on."""
    try:
        yield
    finally:
        ask(sglang.url, "/continue_generation", {})
        told = {"model_path": str(sglang.model), "weight_version": "default", "flush_cache": True}
        ask(sglang.url, "/update_weights_from_disk", told)


def chat(url: str, session: dict[str, Any], text: str, **fields: Any) -> Any:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": LONG, "ignore_eos": True}
    return ask(session["base_url"].removesuffix("/v1"), "/v1/chat/completions", {**body, **fields})


def apart(sample: dict[str, Any], by_version: dict[str, Forward], *, goes_on: bool = False) -> list[float]:
    """For each trained token, how far its log-probability is from that under the weights that its span names.

    `goes_on`: weights that come within the sample go on with the keys and values of those before.
    """
    tokens, start = sample["tokens"], len(sample["tokens"]) - sample["response_length"]
    mask, spans = sample["loss_mask"], sample["weight_spans"]
    told: list[float] = sample["rollout_log_probs"]
    forced: dict[str, list[float]] = {name: one(tokens, start) for name, one in by_version.items()}
    if goes_on and len(spans) == 2:
        old, new = (by_version[span["version"]] for span in spans)
        forced[spans[1]["version"]] = old.going_on(new, tokens, start, spans[1]["start"])
    found: list[float] = []
    for span in spans:
        under = forced[span["version"]]
        for at in range(max(span["start"], start) - start, span["end"] - start):
            if mask[at]:
                found.append(abs(told[at] - under[at]))
    return found


# -- the laws


@MODES
async def test_sglang_keeps_the_laws_of_engines(sglang: RealSGLang, forward: dict[str, Forward], mode: str) -> None:
    files = load_model_files(sglang.model)
    tokenizer, first = Tokenizer(files.tokenizer_json), forward["first"]
    is_paused = False

    async def score(ids: Sequence[int], num_given: int) -> Sequence[float]:
        return await asyncio.to_thread(first, ids, num_given)

    async def score_at(ids: Sequence[int], num_given: int, temperature: float) -> Sequence[float]:
        return await asyncio.to_thread(first, ids, num_given, temperature)

    async def num_running() -> int:
        if is_paused:  # its figures stand still with it: what was sent to it, it will run
            return engine.num_running
        (load,) = (await asyncio.to_thread(ask, sglang.url, "/v1/loads"))["loads"]
        return int(load["num_running_reqs"] + load["num_waiting_reqs"])

    async def pause() -> None:
        nonlocal is_paused
        is_paused = True
        await asyncio.to_thread(ask, sglang.url, "/pause_generation", {"mode": "in_place"})

    async def resume() -> None:
        nonlocal is_paused
        await asyncio.to_thread(ask, sglang.url, "/continue_generation", {})
        is_paused = False

    async def set_weight_version(version: str) -> None:
        told = {"new_version": version, "abort_all_requests": False}
        await asyncio.to_thread(ask, sglang.url, "/update_weight_version", told)

    def new_engine() -> HttpEngine:
        made = SGLangChat if mode == "sglang" else SGLangGenerate
        adapter = made(AdapterOptions(model="smollm2", vocab_size=files.vocab_size))
        return HttpEngine(HttpEngineOptions(url=sglang.url, probe_pause_s=0.2), adapter)

    engine = new_engine()

    @asynccontextmanager
    async def make() -> AsyncGenerator[EngineUnderTest]:
        nonlocal engine
        engine = new_engine()
        await engine.start()
        try:
            yield EngineUnderTest(
                engine=engine,
                prompt=tokenizer.encode(PROMPT).tolist(),
                decode=lambda ids: tokenizer.decode(ids, skip_special=True),
                eos_ids=files.eos_token_ids,
                num_tokens=10,
                num_long_tokens=LONG,
                tolerance_nats=TOLERANCE_NATS,
                score=score,
                score_at=score_at,
                num_running=num_running,
                pause=pause,
                resume=resume,
                set_weight_version=set_weight_version,
                kill=lambda: asyncio.to_thread(sglang.kill),
                revive=lambda: asyncio.to_thread(sglang.start),
                max_sequence_tokens=CONTEXT - KEPT_BACK,
                stops_beside_ignore_eos=False,
                aborts_in_pause=False,
                not_offered=NOT_KEPT,
            )
        finally:
            await engine.aclose()

    report = await check_engine(make, deadline_s=600.0)
    say(f"\n{mode}\n{report}\n")
    chats = {"streams_tokens", "whole_equals_streamed", "two_weight_versions"}
    assert set(report.not_offered) <= {*NOT_KEPT, *(chats if mode == "sglang" else ())}


NOT_KEPT = {
    "refuses_garbage": "an id at or above the vocabulary ends the whole server; this one never sends it",
    "seeds_repeat": "a seed repeats a turn only with --enable-deterministic-inference, which needs a GPU",
}
"""Laws that SGLang 0.5.23 breaks, and how."""


# -- sessions


@MODES
def test_a_scripted_agent_s_session_is_exact(sglang: RealSGLang, forward: dict[str, Forward], mode: str) -> None:
    began = time.monotonic()
    with stenograph(sglang, mode) as url:
        turns = play(url)
    assert len(turns) >= 4
    found: list[float] = []
    check_exact(turns)
    for turn in turns:
        forced = forward["first"]([*turn.prompt_ids, *turn.ids], len(turn.prompt_ids))
        if turn is not turns[2]:  # a grammar held it: its log-probabilities are of what that left
            found += [abs(one - other) for one, other in zip(forced, turn.logprobs, strict=True)]
    say(
        f"\n{mode}: {len(turns)} turns, {sum(len(turn.ids) for turn in turns)} tokens in {time.monotonic() - began:.0f}"
        f" s, cached {[turn.num_cached for turn in turns]}, apart at most {max(found):.1e} nats\n"
    )
    assert max(found) < TOLERANCE_NATS


@MODES
def test_a_tool_session_with_the_openai_sdk_is_exact_streamed_or_not(
    sglang: RealSGLang, forward: dict[str, Forward], mode: str
) -> None:
    with stenograph(sglang, mode) as url:
        session = ask(url, "/sessions", {})
        with openai.OpenAI(base_url=session["base_url"], api_key="none") as client:
            messages: list[Any] = [{"role": "user", "content": "Where is Paris?"}]
            for text in ("And Rome?", "And Oslo?"):
                asked: dict[str, Any] = {"model": "m", "tools": TOOLS, "temperature": 1.0, "max_tokens": 24}
                with client.chat.completions.create(messages=messages, stream=True, **asked) as chunks:
                    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": text}]
        path = f"/sessions/{session['session_id']}"
        (sample,) = ask(url, f"{path}/samples", {"format": "json"})["samples"]
        ledger = ask(url, f"{path}/ledger")["requests"]
    assert [row["status"] for row in ledger] == [200, 200]
    found = apart({**sample, "weight_spans": sample["weight_spans"]}, {"default": forward["first"]})
    say(f"\n{mode}, tools: {sum(sample['loss_mask'])} tokens trained, apart at most {max(found):.1e} nats\n")
    assert len(found) == sum(sample["loss_mask"])
    assert max(found) < TOLERANCE_NATS


STREAMS: dict[str, dict[str, Any]] = {
    "ends by its end token": {"content": "What is the capital of France?", "ignore_eos": False, "max_tokens": 24},
    "characters of several tokens": {"content": "Draw.", "regex": "\u2603\u00ef\U0001f643{3}", "ignore_eos": False},
    "a forced call": {"content": "Where is Paris?", "tools": TOOLS, "tool_choice": "required", "ignore_eos": False},
    "as long as it may": {"content": "Count to a hundred.", "temperature": 1.0},
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_chat_is_streamed_as_it_is_sampled_and_its_turn_is_exact(
    sglang: RealSGLang, forward: dict[str, Forward], kind: str
) -> None:
    asked = {"model": "m", "stream": True, "max_tokens": LONG, "ignore_eos": True, "temperature": 0.0, **STREAMS[kind]}
    asked["messages"] = [{"role": "user", "content": asked.pop("content")}]
    with stenograph(sglang, "sglang") as url:
        session = ask(url, "/sessions", {})
        came: list[tuple[float, Any]] = []
        body = json.dumps(asked).encode()
        request = urllib.request.Request(f"{session['base_url']}/chat/completions", body)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    came.append((time.monotonic(), json.loads(line[6:])))
        (sample,) = of_session(url, session)
        (record,) = ask(url, f"/sessions/{session['session_id']}")["records"]
    deltas = [(at, event["choices"][0]["delta"]) for at, event in came if event["choices"]]
    written = [at for at, delta in deltas if delta.get("content") or delta.get("tool_calls")]
    message = record["response"]["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for _, delta in deltas) == (message["content"] or "")
    assert record["mixed_version"] is False
    found = apart(sample, {"default": forward["first"]})
    say(
        f"\n{kind}: {len(found)} tokens in {len(written)} events over {written[-1] - written[0]:.1f} s,"
        f" {record['status']}, {message}, apart at most {max(found):.1e} nats\n"
    )
    assert len(written) > 2
    assert len(found) == sum(sample["loss_mask"]) > 0
    if not {"tools", "regex"} & set(asked):  # under a grammar its log-probabilities are of what that left
        assert max(found) < TOLERANCE_NATS


@pytest.mark.parametrize("name", [None, "price"])
def test_a_forced_call_by_ids_is_of_a_tool_and_valid(sglang: RealSGLang, name: str | None) -> None:
    properties = {
        "item": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 1, "maximum": 12},
        "unit": {"enum": ["piece", "kg"]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["item"], "additionalProperties": False}
    named = {"type": "function", "function": {"name": name}}
    tools = [{"type": "function", "function": {"name": each, "parameters": parameters}} for each in ("price", "stock")]
    with stenograph(sglang, "sglang-generate") as url:
        session = ask(url, "/sessions", {})
        asked: dict[str, Any] = {"tools": tools, "tool_choice": named if name else "required", "temperature": 1.0}
        asked |= {"parallel_tool_calls": False, "ignore_eos": False, "max_tokens": 96}
        reply = chat(url, session, "What do two apples cost?", **asked)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in ([name] if name else ["price", "stock"])
    jsonschema.validate(json.loads(call["function"]["arguments"]), parameters)
    say(f"\nforced: {call['function']}\n")


@MODES
@pytest.mark.parametrize("asked", [{"top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 20}])
def test_supports_are_those_of_the_weights(
    sglang: RealSGLang, forward: dict[str, Forward], mode: str, asked: dict[str, Any]
) -> None:
    with stenograph(sglang, mode) as url:
        session = ask(url, "/sessions", {"support": True})
        chat(url, session, "Tell me a story.", temperature=0.7, max_tokens=12, **asked)
        (sample,) = ask(url, f"/sessions/{session['session_id']}/samples", {"format": "json"})["samples"]
    (row,) = sample["turns"]
    assert row["top_k"] == asked.get("top_k", 4096)
    figures = Figures()
    recompute(sample, forward["first"].model, figures)
    say(f"\n{mode}, {asked}: {figures}\n")
    assert min(figures.num_ids) >= 1
    assert max(figures.apart) < TOLERANCE_NATS


# -- weights


@MODES
@pytest.mark.parametrize("pause", ["abort", "retract", "in_place", "none"])
def test_each_token_is_of_the_weights_that_its_span_names(
    sglang: RealSGLang, forward: dict[str, Forward], mode: str, pause: str
) -> None:
    with first_weights(sglang), stenograph(sglang, mode) as url, ThreadPoolExecutor() as threads:
        sessions = [ask(url, "/sessions", {}) for _ in range(2)]
        turns = [threads.submit(chat, url, one, f"Count to {n}.") for n, one in enumerate(sessions, start=50)]
        until_running(sglang, len(turns))
        if pause != "none":
            ask(url, "/pause_generation", {"mode": pause})
        told = ask(url, "/update_weights_from_disk", {"model_path": "second", "weight_version": "v2"})
        assert told["success"], told
        assert ask(sglang.url, "/model_info")["weight_version"] == "v2"
        if pause != "none":
            ask(url, "/continue_generation", {})
        replies = [turn.result() for turn in turns]
        if pause == "in_place":
            assert "/flush_cache once they have ended" in told["message"]
            ask(url, "/flush_cache", {})
        for session, text in zip(sessions, ("Again.", "Once more."), strict=True):
            chat(url, session, text, max_tokens=8)
        samples = [of_session(url, session) for session in sessions]
    versions = [[span["version"] for span in sample["weight_spans"]] for of in samples for sample in of]
    by_version = {"default": forward["first"], "v2": forward["second"]}
    goes_on = pause == "in_place"
    found = [one for of in samples for sample in of for one in apart(sample, by_version, goes_on=goes_on)]
    if goes_on:
        plain = max(one for of in samples for sample in of for one in apart(sample, by_version))
        say(f"\n{mode}: from a pass of the new weights alone, {plain:.1e} nats\n")
    say(
        f"\n{mode}, {pause}: {[reply['choices'][0]['finish_reason'] for reply in replies]}, versions {versions},"
        f" {told['message']!r}, {len(found)} tokens apart at most {max(found):.1e} nats\n"
    )
    assert max(found) < TOLERANCE_NATS
    if pause in ("retract", "in_place"):
        assert any(len(one) > 1 for one in versions)


@MODES
def test_weights_that_a_trainer_changes_at_sglang_itself_are_seen(
    sglang: RealSGLang, forward: dict[str, Forward], mode: str
) -> None:
    with first_weights(sglang), stenograph(sglang, mode) as url, ThreadPoolExecutor() as threads:
        session = ask(url, "/sessions", {})
        turn = threads.submit(chat, url, session, "Count to a hundred.")
        until_running(sglang, 1)
        ask(sglang.url, "/pause_generation", {"mode": "retract"})
        update = {"model_path": str(sglang.model.parent / "second"), "weight_version": "v2", "flush_cache": True}
        assert ask(sglang.url, "/update_weights_from_disk", update)["success"]
        ask(sglang.url, "/continue_generation", {})
        turn.result()
        (sample,) = of_session(url, session)
    found = apart(sample, {"default": forward["first"], "v2": forward["second"]})
    say(f"\n{mode}, by the trainer: {sample['weight_spans']}, apart at most {max(found):.1e} nats\n")
    assert [span["version"] for span in sample["weight_spans"]] == ["default", "v2"]
    assert max(found) < TOLERANCE_NATS


def of_session(url: str, session: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {"format": "json", "kinds": ["main", "unknown", "agent"]}
    return list(ask(url, f"/sessions/{session['session_id']}/samples", asked)["samples"])


def until_running(sglang: RealSGLang, num: int) -> None:
    """Wait until so many turns run in it, each with some tokens."""
    deadline = time.monotonic() + 120
    while True:
        (load,) = ask(sglang.url, "/v1/loads")["loads"]
        if load["num_running_reqs"] >= num:
            break
        assert time.monotonic() < deadline, f"{num} turns do not begin to run"
        time.sleep(0.05)
    time.sleep(2.0)  # some tokens: nothing tells of them


# -- aborts, pauses, death


@MODES
@pytest.mark.parametrize("pause", [None, "retract", "in_place"])
def test_an_abort_ends_a_turn_within_a_bound(sglang: RealSGLang, mode: str, pause: str | None) -> None:
    with first_weights(sglang), stenograph(sglang, mode, "--abort-grace", "3") as url, ThreadPoolExecutor() as threads:
        session = ask(url, "/sessions", {})
        turn: Future[Any] = threads.submit(chat, url, session, "Count to a thousand.", max_tokens=400)
        until_running(sglang, 1)
        if pause is not None:
            ask(sglang.url, "/pause_generation", {"mode": pause})
        began = time.monotonic()
        ask(url, f"/sessions/{session['session_id']}/abort", {})
        try:
            ended = turn.result()["choices"][0]["finish_reason"]
        except urllib.error.HTTPError as error:
            ended = f"{error.code} {json.loads(error.read())['error']['code']}"
        took = time.monotonic() - began
        ask(sglang.url, "/continue_generation", {})
        deadline = time.monotonic() + 60
        while ask(sglang.url, "/v1/loads")["loads"][0]["num_running_reqs"]:
            assert time.monotonic() < deadline, "SGLang goes on with a turn that was aborted"
            time.sleep(0.2)
    say(f"\n{mode}, paused {pause}: ended by {ended} within {took:.1f} s\n")
    assert took < 8.0
    assert ended in ("abort", "504 upstream_timeout")


@MODES
def test_a_paused_sglang_is_not_down_and_a_dead_one_is_within_ten_seconds(sglang: RealSGLang, mode: str) -> None:
    with stenograph(sglang, mode) as url, ThreadPoolExecutor() as threads:
        session = ask(url, "/sessions", {})
        ask(url, "/pause_generation", {"mode": "in_place"})
        held = threads.submit(chat, url, session, "Hello.", max_tokens=4)
        for _ in range(20):
            assert state(url) == "ready"
            time.sleep(0.5)
        ask(url, "/continue_generation", {})
        assert held.result()["choices"][0]["finish_reason"] == "length"
        sglang.kill()
        began = time.monotonic()
        while state(url) != "down":
            assert time.monotonic() - began < 10.0, "a dead engine is ready"
            time.sleep(0.1)
        took = time.monotonic() - began
        sglang.start()
        began = time.monotonic()
        while state(url) != "ready":
            assert time.monotonic() - began < 10.0, "an engine that is back is down"
            time.sleep(0.1)
        chat(url, session, "Hello.", max_tokens=4)
    say(f"\n{mode}: found down after {took:.1f} s\n")


def state(url: str) -> str:
    try:
        ready = ask(url, "/ready")
    except urllib.error.HTTPError as error:
        ready = json.loads(error.read())
    return str(ready["engines"][0]["state"])


# -- penalties


@MODES
def test_a_repetition_penalty_counts_the_turn_s_own_tokens(
    sglang: RealSGLang, forward: dict[str, Forward], mode: str
) -> None:
    with stenograph(sglang, mode) as url:
        session = ask(url, "/sessions", {})
        chat(url, session, "Say red red red blue blue.", temperature=1.0, repetition_penalty=1.3, max_tokens=16)
        (sample,) = of_session(url, session)
    worst = apart_by_rule(sample, forward["first"].model)
    say(f"\n{mode}, a repetition penalty: apart at most, by what it counts: {worst}\n")
    assert sample["turns"][0]["repetition_over"] == "turn"
    assert worst["turn"] < TOLERANCE_NATS < worst["line"]


# -- routing hints


@MODES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_data_parallel_rank_is_taken_and_one_that_is_not_there_is_refused(
    sglang: RealSGLang, mode: str, stream: bool
) -> None:
    with stenograph(sglang, mode) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for hints in (
            {"extra_body": {"routed_dp_rank": 0, "bootstrap_host": "127.0.0.1", "bootstrap_room": 7}},
            {"extra_headers": {"X-data-parallel-rank": "0"}},
        ):
            asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **hints}
            reply = client.chat.completions.create(stream=stream, **asked)
            assert list(reply) if isinstance(reply, openai.Stream) else reply.choices
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "extra_body": {"routed_dp_rank": 1}}
        with pytest.raises(openai.BadRequestError, match=r"routed_dp_rank=1 out of range \[0, 1\)"):
            list(client.chat.completions.create(stream=stream, **asked))


# -- a fleet


@MODES
def test_a_fleet_of_two_shares_sessions_and_survives_one(sglang: RealSGLang, mode: str, tmp_path: Path) -> None:
    other = RealSGLang(sglang.model, log=tmp_path / "other.log")
    other.start()
    try:
        with first_weights(sglang), stenograph(sglang, mode, "--engine-url", other.url) as url:
            sessions: list[Any] = [ask(url, "/sessions", {}) for _ in range(6)]
            with ThreadPoolExecutor() as threads:
                turns = [threads.submit(chat, url, one, "Where is Paris?", max_tokens=8) for one in sessions]
            assert all(turn.result()["choices"] for turn in turns)
            ran = {
                ask(one.url, "/v1/loads")["loads"][0]["total_prefill_uncached_tokens"] > 0 for one in (sglang, other)
            }
            assert ran == {True}
            rows = ask(url, "/ready")["engines"]
            assert [(0 <= row["kv_usage"] < 1, row["num_waiting"]) for row in rows] == [(True, 0)] * 2
            told = ask(url, "/update_weights_from_disk", {"model_path": "second", "weight_version": "v2"})
            assert told["success"], told
            assert {ask(one.url, "/model_info")["weight_version"] for one in (sglang, other)} == {"v2"}
            other.kill()
            for session in sessions:
                assert chat(url, session, "And Rome?", max_tokens=4)["choices"]
    finally:
        other.kill()


@MODES
def test_forks_continue_behind_their_exact_ids(sglang: RealSGLang, mode: str) -> None:
    with serving(sglang.model, "--engine", mode, "--engine-url", sglang.url) as url:
        check_forks(url, sglang.model)
