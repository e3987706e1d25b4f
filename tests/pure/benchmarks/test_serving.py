"""`bench serving`: the mix, the clock of its loops, a reply read as it comes, and what its figures are made of."""

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.client import RequestFailed
from benchmarks.kit.figures import LABELS, Better, better
from benchmarks.kit.requests import TimedReply
from benchmarks.serving.figures import kept_columns, serving_figures, serving_table
from benchmarks.serving.load import ServingLoad, ServingPlan
from benchmarks.serving.mix import MIXES, ChatHistory, Mix, SessionPlan, TurnPlan, arrivals_s, sample_sessions
from benchmarks.serving.reply import StreamedReply
from stenograph.dialects.openai.chat import decode_chat

CHAT = MIXES["chat"]

# -- the mix


@pytest.mark.parametrize("mix", MIXES.values(), ids=str)
def test_the_same_seed_says_the_same_and_more_sessions_change_none_before(mix: Mix) -> None:
    few, many = (sample_sessions(mix, num=num, seed=7) for num in (3, 12))
    assert many[:3] == few
    assert sample_sessions(mix, num=3, seed=8) != few


@pytest.mark.parametrize("mix", MIXES.values(), ids=str)
def test_what_is_drawn_keeps_to_what_is_declared(mix: Mix) -> None:
    sessions = sample_sessions(mix, num=200, seed=0)
    turns = [turn for session in sessions for turn in session.turns]
    later = [turn for session in sessions for turn in session.turns[1:]]
    assert len({session.system for session in sessions}) == 1
    assert statistics.median(len(session.turns) for session in sessions) == pytest.approx(mix.turns.median, rel=0.35)
    assert statistics.median(turn.max_tokens for turn in turns) == pytest.approx(mix.max_tokens.median, rel=0.2)
    assert sum(turn.is_tool for turn in later) / len(later) == pytest.approx(mix.tool_share, abs=0.1)
    assert not any(session.turns[0].is_tool for session in sessions)
    assert all(mix.turns.least <= len(session.turns) <= mix.turns.most for session in sessions)
    assert all(turn.max_tokens <= 20 for s in sample_sessions(mix, num=9, seed=0, max_tokens=20) for turn in s.turns)


def test_arrivals_are_a_poisson_process_that_a_seed_repeats() -> None:
    due = arrivals_s(4.0, num=4000, seed=3)
    assert due == arrivals_s(4.0, num=4000, seed=3)
    assert due[0] == 0.0
    pauses = [after - before for before, after in itertools.pairwise(due)]
    assert min(pauses) >= 0
    assert statistics.fmean(pauses) == pytest.approx(0.25, rel=0.1)
    assert statistics.pstdev(pauses) == pytest.approx(0.25, rel=0.1)  # as long as the mean: exponential


def test_a_turn_that_was_cut_is_taken_back_and_the_next_stands_in_its_place() -> None:
    plan = next(session for session in sample_sessions(CHAT, num=20, seed=0) if len(session.turns) > 3)
    line = ChatHistory(CHAT, plan)
    first, second, third, *_ = plan.turns

    def contents(turn: TurnPlan) -> list[str | None]:
        return [message.content for message in decode_chat(line.body(turn)).messages]

    assert contents(first) == [plan.system, first.text]
    assert contents(second) == [plan.system, second.text]  # the first was cut: nothing of it is kept
    line.answered(second, 'it says "yes"')
    assert contents(third) == [plan.system, second.text, 'it says "yes"', third.text]
    request = decode_chat(line.body(third, only_new=True))
    assert [message.content for message in request.messages] == [third.text]
    assert (request.params.max_tokens, request.params.seed) == (third.max_tokens, third.seed)
    assert request.reply.stream
    assert request.reply.include_usage


# -- a reply as it comes


def event(delta: dict[str, object], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"choices": [choice]}) + b"\n\n"


USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":'
    b'{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
STREAM = [
    event({"role": "assistant", "content": ""}),
    event({"content": "Grüße"}),
    event({"content": " an data: alle"}),
    event({}, "stop"),
    USAGE,
    DONE,
]


def test_the_first_piece_is_the_first_that_says_something() -> None:
    reader = StreamedReply()
    for now, piece in enumerate(STREAM):
        reader.feed(piece, now)
    reader.end(9)
    assert reader.pieces_s == [1, 2]
    assert reader.text == "Grüße an data: alle"
    assert (reader.num_prompt, reader.num_completion, reader.num_cached) == (9, 3, 4)
    assert reader.finish_reason == "stop"


@given(cuts=st.sets(st.integers(0, 600)), newline=st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_reads_the_same_however_it_is_cut(cuts: set[int], newline: bytes) -> None:
    whole = b"".join(STREAM).replace(b"\n", newline)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    reader = StreamedReply()
    for now, (begin, end) in enumerate(itertools.pairwise(bounds)):
        reader.feed(whole[begin:end], now)
    reader.end(999)
    assert (reader.text, reader.finish_reason, reader.num_cached) == ("Grüße an data: alle", "stop", 4)
    assert len(reader.pieces_s) == 2
    assert reader.pieces_s == sorted(reader.pieces_s)


def test_reasoning_and_calls_are_something_to_read() -> None:
    reader = StreamedReply()
    reader.feed(event({"reasoning_content": "hm"}), 1)
    reader.feed(event({"tool_calls": [{"index": 0}]}), 2)
    reader.feed(event({}, "tool_calls") + DONE, 3)
    reader.end(4)
    assert reader.pieces_s == [1, 2]


def test_a_body_that_is_no_stream_is_one_piece_at_its_end() -> None:
    reader = StreamedReply()
    body = {"choices": [{"message": {"content": "yes"}, "finish_reason": "length"}], "usage": {"prompt_tokens": 5}}
    whole = msgspec.json.encode(body)
    reader.feed(whole[:10], 1)
    reader.feed(whole[10:], 2)
    reader.end(2.5)
    assert (reader.pieces_s, reader.text, reader.finish_reason, reader.num_prompt) == ([2.5], "yes", "length", 5)


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        (STREAM[:-1], "unfinished"),  # no [DONE]: it was not committed
        ([event({"content": "a"}), DONE], "unfinished"),
        ([], "unfinished"),
        ([*STREAM[:3], b'data: {"error":{"message":"gone","code":"upstream_invalid"}}\n\n'], "200 upstream_invalid"),
        ([b"data: {]\n\n"], "not a reply"),
        ([b'{"choices": 3}'], "not a reply"),
    ],
)
def test_a_reply_that_does_not_end_well_is_a_failure_with_a_name(pieces: list[bytes], kind: str) -> None:
    reader = StreamedReply()

    def read() -> None:
        for piece in pieces:
            reader.feed(piece, 1)
        reader.end(2)

    with pytest.raises(RequestFailed) as found:
        read()
    assert found.value.kind == kind


# -- the loops


@dataclass
class ScriptedTarget:
    """Answers once `num_gated` chats wait at the same time; fails those of the sessions in `failing`."""

    num_gated: int = 1
    failing: frozenset[int] = frozenset()
    num_waiting: int = 0
    most_at_once: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_closed: int = 0

    async def start(self) -> None:
        pass

    def talk(self, mix: Mix, plan: SessionPlan) -> "ScriptedTalk":
        del mix
        return ScriptedTalk(self, NUMBERS.get(plan.turns[0].seed, -1))

    async def collect(self, heard: list[TimedReply]) -> None:
        pass

    async def aclose(self) -> None:
        pass


@dataclass
class ScriptedTalk:
    target: ScriptedTarget
    number: int

    def prepare(self, turn: TurnPlan) -> None:
        pass

    async def ask(self, turn: TurnPlan) -> TimedReply:
        target, sent_s = self.target, time.monotonic()
        target.num_waiting += 1
        target.most_at_once = max(target.most_at_once, target.num_waiting)
        if target.num_waiting >= target.num_gated:
            target.gate.set()
        await target.gate.wait()
        await asyncio.sleep(0)
        target.num_waiting -= 1
        if self.number in target.failing:
            raise RequestFailed("503 draining", "no more")
        return TimedReply(
            sent_s=sent_s, pieces_s=[sent_s + 1, sent_s + 2], end_s=sent_s + 3, num_prompt=10, num_completion=2
        )

    def close(self) -> None:
        self.target.num_closed += 1


SESSIONS = sample_sessions(CHAT, num=6, seed=0)
NUMBERS = {session.turns[0].seed: number for number, session in enumerate(SESSIONS)}
NUM_TURNS = [len(session.turns) for session in SESSIONS]


def load_of(target: ScriptedTarget, **fields: Any) -> ServingLoad:
    plan = ServingPlan(**{"mix": "chat", "seed": 0, "sessions": 6, **fields})
    return ServingLoad(plan, target, note=lambda shown: None)


async def test_a_closed_loop_has_as_many_chats_under_way_as_it_has_clients() -> None:
    target = ScriptedTarget(num_gated=3)
    talked = await load_of(target, concurrency=3).run()
    assert target.most_at_once == 3
    assert len(talked.heard) == sum(NUM_TURNS)
    assert target.num_closed == 6


async def test_an_open_loop_begins_every_session_when_it_arrives_though_none_has_been_answered() -> None:
    target = ScriptedTarget(num_gated=6)  # nobody is answered before all six wait
    talked = await load_of(target, rate=1e6).run()
    assert len(talked.heard) == sum(NUM_TURNS)
    first = {one.session: one.due_s for one in talked.heard if one.turn == 0}
    offsets = [first[number] - first[0] for number in range(6)]
    assert offsets == pytest.approx(arrivals_s(1e6, num=6, seed=0), abs=1e-9)  # due is when it arrives, not when sent


async def test_failures_are_counted_by_kind_and_the_session_goes_on() -> None:
    target = ScriptedTarget(failing=frozenset({1, 4}))
    talked = await load_of(target, concurrency=2).run()
    report = talked.report("run")
    assert report["errors"] == {"503 draining": NUM_TURNS[1] + NUM_TURNS[4]}
    assert report["first_error"] == "503 draining: no more"
    assert set(talked.columns()["session"]) == {0, 2, 3, 5}


async def test_a_request_that_takes_too_long_is_a_failure() -> None:
    target = ScriptedTarget(num_gated=99)  # nobody is ever answered
    talked = await load_of(target, concurrency=1, sessions=1, limit_s=0.01).run()
    assert talked.failures.by_kind == {"timeout": NUM_TURNS[0]}


async def test_the_warm_up_says_other_things_and_is_in_no_figure() -> None:
    target = ScriptedTarget()
    noted: list[str] = []
    load = ServingLoad(ServingPlan(mix="chat", seed=0, sessions=2), target, note=noted.append)
    await load.warm_up()
    assert noted == []
    talked = await load.run()
    num = sum(NUM_TURNS[:2])
    assert noted[-1] == f"{num} of {num} chats"
    assert len(talked.columns()["e2e_ms"]) == num


# -- the figures


def columns(**fields: list[Any]) -> dict[str, list[Any]]:
    """Three requests: one with all stages, one cut, one whose reply said nothing."""
    return {
        "session": [0, 0, 1],
        "turn": [0, 1, 0],
        "due_ms": [0.0, 100.0, 100.0],
        "wait_ms": [1.0, 0.0, 0.0],
        "ttft_ms": [50.0, 30.0, None],
        "e2e_ms": [90.0, 100.0, 20.0],
        "num_prompt": [100, 140, 60],
        "num_completion": [5, 8, 1],
        "num_cached": [0, 90, 60],
        "is_cut": [False, True, False],
        "gaps_ms": [[10.0, 12.0, 18.0], [70.0], []],
        "stages_ms": [
            {"receive": 1.0, "admit": 0.5, "decode": 0.5, "render": 2.0, "queue": 5.0, "prefill": 36.0},
            {"receive": 99.0},
            {},
        ],
        **fields,
    }


def test_latencies_are_of_what_was_answered_and_said_something() -> None:
    figures = serving_figures({"seconds": 2.0}, columns(), 4)
    assert figures["errors"] == 4
    assert figures["chats_per_s"] == 1.5
    assert figures["prompt_tokens_per_s"] == 150
    assert figures["completion_tokens_per_s"] == 7
    assert figures["cached_share"] == 0.5
    assert figures["cut_share"] == pytest.approx(1 / 3)
    assert (figures["ttft_p50_ms"], figures["ttft_p99_ms"], figures["ttft_mean_ms"]) == (30, 50, 40)
    assert (figures["tpot_p50_ms"], figures["tpot_p90_ms"]) == (10, 10)  # (90 - 50) / 4 and (100 - 30) / 7
    assert (figures["itl_p50_ms"], figures["itl_mean_ms"]) == (12, 27.5)
    assert (figures["e2e_p50_ms"], figures["e2e_p99_ms"]) == (90, 100)


def test_the_parts_of_ttft_add_up_to_it_over_the_requests_that_have_them() -> None:
    figures = serving_figures({"seconds": 2.0}, columns(), 0)
    parts = {name: figures[f"ttft_{name}_ms"] for name in ("wait", "read", "render", "queue", "prefill", "rest")}
    assert parts == {"wait": 1, "read": 2, "render": 2, "queue": 5, "prefill": 36, "rest": 4}
    assert sum(parts.values()) == 50
    assert figures["ttft_outside_ms"] == 9


def test_an_engine_that_gives_its_whole_reply_at_once_is_one_part() -> None:
    stages = {"receive": 1.0, "render": 2.0, "decode_tokens": 30.0, "validate": 1.0}
    figures = serving_figures({"seconds": 2.0}, columns(stages_ms=[stages, {}, {}]), 0)
    assert figures["ttft_engine_ms"] == 30
    assert figures["ttft_rest_ms"] == 50 - 1 - 1 - 2 - 30
    assert "ttft_prefill_ms" not in figures


def test_where_nothing_was_answered_there_are_errors_and_no_averages() -> None:
    assert serving_figures({"seconds": 0.0}, {}, 7) == {"errors": 7}
    assert kept_columns({}) == {}


def test_an_artifact_keeps_each_request_but_not_each_gap() -> None:
    kept = kept_columns(columns())
    assert kept["longest_gap_ms"] == [18, 70, None]
    assert kept["tpot_ms"] == [10, 10, None]
    assert "gaps_ms" not in kept
    assert kept["e2e_ms"] == [90, 100, 20]


def test_every_figure_can_be_shown_and_compared() -> None:
    figures = serving_figures({"seconds": 2.0}, columns(), 4)
    assert set(figures) <= set(LABELS)
    rising = {name for name in figures if better(name) is Better.HIGHER}
    assert rising == {
        "chats_per_s",
        "prompt_tokens",
        "completion_tokens",
        "prompt_tokens_per_s",
        "completion_tokens_per_s",
        "cached_share",
    }


def result(name: str, at_once: int, *, rate: float | None = None) -> ScenarioResult:
    figures = {
        "server": [{"ttft_p50_ms": 12.0 * at_once + i, "ttft_p99_ms": 50.0} for i in range(3)],
        "direct": [{"ttft_p50_ms": 10.0 * at_once + i / 10} for i in range(3)],
    }
    raw: dict[str, list[dict[str, Any]]] = {
        target: [{"load": {"rate": rate, "concurrency": at_once}}] for target in figures
    }
    return ScenarioResult(
        name=name, title="", sessions=at_once, turns=9, message_bytes=100, goals=[], figures=figures, raw=raw
    )


def test_the_table_has_what_lies_between_the_server_and_the_engine() -> None:
    text = serving_table(Artifact(bench="serving", scenarios=[result("closed", 1), result("closed", 4)]))
    row = next(line for line in text.splitlines() if line.startswith("| closed@1 "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["closed@1", "TTFT p50, ms", "13.0 (12.0 … 14.0)", "10.1 (10.0 … 10.2)", "+2.90 (+28.7%)", "yes"]
    assert "| closed@4 " in text
