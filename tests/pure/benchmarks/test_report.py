"""Tables, the one JSON line, and artifacts that are read back as they were written."""

import json
from pathlib import Path

import pytest

from benchmarks.kit.artifact import Artifact, BadArtifact, ScenarioResult, read_artifact, write_artifact
from benchmarks.kit.figures import LABELS, NO_WORSE, Goal, better, spread
from benchmarks.kit.report import errors_of, json_line, number
from benchmarks.responsiveness.report import responsiveness_table
from benchmarks.responsiveness.scenarios import SCENARIOS


def result(*cpu: float, sessions: int = 64, **fields: object) -> ScenarioResult:
    server = [{"cpu_ms_per_chat": value, "chats_per_s": 100.0} for value in cpu]
    return ScenarioResult(
        name="B",
        title="small replies",
        sessions=sessions,
        turns=20,
        message_bytes=200,
        goals=[("cpu_ms_per_chat", 0.8), ("chat_p99_over_p50", 3.0)],
        figures={"server": server, "direct": [{"chats_per_s": 9000.0}]},
        **fields,  # type: ignore[arg-type]
    )


def row_of(text: str, label: str) -> list[str]:
    line = next(line for line in text.splitlines() if f"| {label} " in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_figure_stands_beside_its_goal_its_spread_and_the_ceiling() -> None:
    text = responsiveness_table(Artifact(bench="responsiveness", scenarios=[result(0.7, 0.6, 0.9)]))
    assert row_of(text, LABELS["cpu_ms_per_chat"])[1:] == [
        LABELS["cpu_ms_per_chat"],
        "0.700 (0.600 … 0.900)",
        "≤ 0.8",
        "yes",
        "",
    ]
    assert row_of(text, LABELS["chats_per_s"])[2:] == ["100", "", "", "9,000"]


def test_a_missed_goal_and_one_that_was_not_measured_are_said() -> None:
    text = responsiveness_table(Artifact(bench="responsiveness", scenarios=[result(2.0)]))
    assert row_of(text, LABELS["cpu_ms_per_chat"])[4] == "NO"
    assert row_of(text, LABELS["chat_p99_over_p50"])[4] == "not measured"


def test_the_json_line_names_what_was_missed_and_tells_levels_apart() -> None:
    alone = json.loads(json_line(Artifact(bench="responsiveness", scenarios=[result(0.7, 0.6, 0.9)])))
    assert alone["missed"] == ["B.chat_p99_over_p50"]
    assert alone["figures"]["B"]["server"] == {"chats_per_s": 100, "cpu_ms_per_chat": 0.7}
    levels = Artifact(bench="responsiveness", scenarios=[result(2.0, sessions=1), result(0.5)])
    line = json.loads(json_line(levels))
    assert set(line["figures"]) == {"B@1", "B@64"}
    assert line["missed"] == ["B@1.cpu_ms_per_chat", "B@1.chat_p99_over_p50", "B@64.chat_p99_over_p50"]


def test_a_goal_against_a_server_before_is_a_ratio_of_rounds_and_is_shown_only_with_one() -> None:
    alone = result(0.7, 0.6, 0.9)
    assert "before" not in responsiveness_table(Artifact(bench="responsiveness", scenarios=[alone]))
    both = result(0.5, 1.0, 0.75, before_goals=[("cpu_ms_per_chat", 0.53), ("chats_per_s", NO_WORSE)])
    both.figures["before"] = [{"cpu_ms_per_chat": 2 * cpu, "chats_per_s": 101.0} for cpu in (0.5, 1.0, 0.9)]
    artifact = Artifact(bench="responsiveness", scenarios=[both])
    text = responsiveness_table(artifact)
    assert row_of(text, LABELS["cpu_ms_per_chat"])[7:10] == ["0.500 (0.417 … 0.500)", "≤ 0.53 ×", "yes"]
    assert row_of(text, LABELS["chats_per_s"])[7:10] == ["0.990", "no worse", "yes"]  # 1 % cannot be told from noise
    line = json.loads(json_line(artifact))
    assert line["over_before"]["B"]["cpu_ms_per_chat"] == [0.5, 0.4167, 0.5]
    assert line["missed"] == ["B.chat_p99_over_p50"]


def test_a_missed_ratio_and_a_figure_that_is_told_to_be_worse_are_said() -> None:
    slow = result(1.0, 1.0, 1.0, before_goals=[("cpu_ms_per_chat", 0.53), ("chats_per_s", NO_WORSE)])
    slow.figures["before"] = [{"cpu_ms_per_chat": 1.0, "chats_per_s": 120.0 + number} for number in range(3)]
    artifact = Artifact(bench="responsiveness", scenarios=[slow])
    assert row_of(responsiveness_table(artifact), LABELS["chats_per_s"])[8:10] == ["no worse", "NO"]
    assert {"B.cpu_ms_per_chat/before", "B.chats_per_s/before"} <= set(json.loads(json_line(artifact))["missed"])


def test_errors_are_told_with_the_first_body() -> None:
    run = {"step": "run", "errors": {"502 upstream_invalid": 7}, "first_error": "502 upstream_invalid: {…}"}
    artifact = Artifact(
        bench="responsiveness", scenarios=[result(1.0, raw={"server": [{"run": run, "stages_ms": {}}]})]
    )
    (line,) = errors_of(artifact)
    assert line == "ERRORS B server, run: {'502 upstream_invalid': 7}; the first: 502 upstream_invalid: {…}"


def test_an_artifact_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    artifact = Artifact(bench="responsiveness", commit="c0ffee", scenarios=[result(0.7, 0.6)])
    write_artifact(tmp_path / "run.json", artifact)
    assert read_artifact(tmp_path / "run.json") == artifact
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"bench": 1}', '{"bench": "responsiveness", "format": 99}'])
def test_what_is_no_artifact_is_refused_in_a_line_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(BadArtifact, match=r"run\.json"):
        read_artifact(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (0.0123, "0.012"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_goal_is_reached_from_its_own_side() -> None:
    assert Goal(figure="chats_per_s", value=100).is_reached(100)
    assert not Goal(figure="chats_per_s", value=100).is_reached(99)
    assert Goal(figure="health_p99_ms", value=25).is_reached(25)
    assert not Goal(figure="health_p99_ms", value=25).is_reached(26)


def test_every_goal_is_a_figure_that_is_shown() -> None:
    for scenario in SCENARIOS:
        for goal in (*scenario.goals, *scenario.before_goals):
            assert goal.figure in LABELS
            assert better(goal.figure).value[0] == ("h" if goal.shown.startswith("≥") else "l")


def test_a_spread_is_median_least_and_most() -> None:
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.least, found.most) == (2.0, 1.0, 3.0)
