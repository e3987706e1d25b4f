"""What measurements of `stenograph bench engine` come to, what llama.cpp says to it, and what is shown."""

import json

import pytest

from benchmarks.engine.figures import (
    OVER,
    decode_figures,
    middle_of,
    over,
    prefill_figures,
    session_figures,
    session_raw,
)
from benchmarks.engine.llamacpp import CompletionReader
from benchmarks.engine.load import Prefilled, SessionTurn
from benchmarks.engine.report import ENGINE, REUSE_OFF, REUSE_ON, engine_table, notes_of, reuse_table
from benchmarks.engine.window import Window
from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.client import RequestFailed
from benchmarks.kit.figures import LABELS, Better, Figures, better


def turn(number: int, *, num_cached: int = 0, drawn: tuple[int, ...] = (7, 8)) -> SessionTurn:
    return SessionTurn(
        num_prompt=100 * number, num_cached=num_cached, ttft_s=0.1 * number, cpu_s=1.0, wall_s=2.0, drawn=drawn
    )


def result(
    name: str, figures: dict[str, list[Figures]], *turns: list[SessionTurn], sessions: int = 1
) -> ScenarioResult:
    raw = {ENGINE: [session_raw(one) for one in turns]}
    return ScenarioResult(
        name=name, title="", sessions=sessions, turns=3, message_bytes=0, goals=[], figures=figures, raw=raw
    )


def artifact(*results: ScenarioResult, load: float = 0.1) -> Artifact:
    return Artifact(bench="engine", machine={"load_average": load, "cores": 2}, scenarios=list(results))


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_rates_are_tokens_by_cpu_time_and_by_the_clock() -> None:
    figures = decode_figures(Window(num_tokens=120, cpu_s=2.0, wall_s=3.0), 5.0)
    assert (figures["decode_tokens_per_cpu_s"], figures["decode_tokens_per_s"]) == (60, 40)
    prefilled = [
        Prefilled(num_prompt=100, num_cached=0, cpu_s=1.0, wall_s=1.0),
        Prefilled(num_prompt=100, num_cached=40, cpu_s=1.0, wall_s=3.0),
    ]
    figures = prefill_figures(prefilled, 5.0)
    assert (figures["prefill_tokens_per_cpu_s"], figures["prefill_tokens_per_s"]) == (80, 40)  # cached is not computed
    assert figures["ttft_p50_ms"] == 2000


def test_a_session_has_its_first_middle_and_last_turn() -> None:
    figures = session_figures([turn(number, num_cached=50) for number in range(1, 21)], 5.0)
    assert figures["ttft_first_turn_ms"] == pytest.approx(100)
    assert figures["ttft_middle_turn_ms"] == pytest.approx(1000)
    assert figures["ttft_last_turn_ms"] == pytest.approx(2000)
    assert (figures["session_cpu_s"], figures["session_s"], figures["cached_last_turn_tokens"]) == (20, 40, 50)
    assert figures["cached_share"] == pytest.approx(1000 / 21000)
    assert (middle_of(1), middle_of(2), middle_of(20)) == (1, 1, 10)


def test_ratios_are_of_what_both_sides_have() -> None:
    assert over({"session_cpu_s": 1.0, "ttft_last_turn_ms": 3.0}, {"session_cpu_s": 4.0}) == {
        "session_cpu_over_cold": 0.25
    }
    assert over({"decode_tokens_per_cpu_s": 1.0}, {"decode_tokens_per_cpu_s": 0.0}) == {}


def test_every_figure_has_a_label_and_is_better_the_right_way() -> None:
    shown = {*decode_figures(Window(num_tokens=1, cpu_s=1, wall_s=1), 1.0), *session_figures([turn(1)], 1.0), *OVER}
    assert shown <= set(LABELS)
    higher = {name for name in shown if better(name) is Better.HIGHER}
    assert higher == {
        *("decode_tokens_per_cpu_s", "decode_tokens_per_s", "decode_over_llamacpp", "prefill_over_llamacpp"),
        *("cached_share", "cached_last_turn_tokens"),
    }


def test_a_table_has_the_ratio_of_each_round_and_says_where_we_lose() -> None:
    mine: list[Figures] = [{"decode_tokens_per_cpu_s": value} for value in (10.0, 20.0, 30.0)]
    other: list[Figures] = [{"decode_tokens_per_cpu_s": value} for value in (40.0, 50.0, 60.0)]
    both = artifact(result("decode", {ENGINE: mine, "llamacpp": other}), result("decode", {ENGINE: mine}, sessions=4))
    row, alone = engine_table(both).splitlines()[2:]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        *("decode@1", "decode tokens per CPU-second", "20.0 (10.0 … 30.0)", "50.0 (40.0 … 60.0)"),
        *("0.400 (0.250 … 0.500)", "yes, worse"),
    ]
    assert "decode@4" in alone
    assert "llama.cpp" not in engine_table(artifact(result("decode", {ENGINE: mine})))
    assert reuse_table(both) == ""


def test_notes_say_whether_reuse_changed_a_reply_and_whether_the_machine_was_busy() -> None:
    on = result(REUSE_ON, {ENGINE: [{"session_cpu_s": 1.0}]}, [turn(1), turn(2)])
    off = result(REUSE_OFF, {ENGINE: [{"session_cpu_s": 2.0}]}, [turn(1), turn(2, drawn=(7, 9))])
    lines = list(notes_of(artifact(on, off)))
    assert lines == [
        "the turn in the middle is number 2 of 3",
        "replies that have the same ids with reuse and without: 1 of 2",
    ]
    assert "NOTE the machine had other work (load average 3.00 on 2 cores" in next(notes_of(artifact(load=3.0)))
    assert "0.500" in reuse_table(artifact(on, off))


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
def test_llamacpps_tokens_are_counted_by_its_own_count_however_the_bytes_come(piece_bytes: int) -> None:
    body = (
        event({"tokens": [5], "tokens_predicted": 1, "stop": False})
        + event({"tokens": [9], "tokens_predicted": 4, "stop": False})
        + event({"tokens": [], "tokens_predicted": 4, "stop": True, "timings": {"cache_n": 3}})
    )
    drawn: list[int] = []
    reader = CompletionReader(drawn.append)
    for start in range(0, len(body), piece_bytes):
        assert not reader.is_ended
        reader.feed(body[start : start + piece_bytes], 0.0)
    assert drawn == [1, 3]
    assert (reader.num_drawn, reader.num_cached, reader.is_ended) == (4, 3, True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'error: {"error": {"code": 500, "message": "no room"}}\n\n', "no room"),
        (event({"error": {"message": "no room"}}), "no room"),
        (b"data: {\n\n", "not a completion"),
    ],
)
def test_what_is_no_reply_of_llamacpps_is_said(body: bytes, said: str) -> None:
    with pytest.raises(RequestFailed, match=said):
        CompletionReader(lambda _: None).feed(body, 0.0)
