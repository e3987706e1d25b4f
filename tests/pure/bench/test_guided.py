"""`bench guided`: prompts, grammars and their independent checks, figures, the table and the CSV row."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from stenograph.bench.artifact import Artifact, ScenarioResult
from stenograph.bench.figures import LABELS
from stenograph.bench.guided_figures import FREE, GUIDED, MAX_MESSAGES, Heard, Phase, guided_figures, over_free, raw_of
from stenograph.bench.guided_grammar import (
    PROFILE_SCHEMA,
    Constraint,
    of_choices,
    of_ebnf,
    of_json_object,
    of_regex,
    of_schema,
)
from stenograph.bench.guided_prompts import built_in, read_prompts
from stenograph.bench.guided_report import CSV_HEADER, append_csv, check_csv, guided_table, notes_of
from stenograph.core.messages import Role
from stenograph.core.types import EngineTimes, FinishReason, GrammarKind

PROFILE = {"name": "Ana", "age": 40, "city": "Lisbon", "is_remote": True, "level": "lead", "skills": ["care", "triage"]}

# -- prompts


def test_the_built_in_prompts_are_distinct_and_the_same_for_any_number() -> None:
    all_of_them = built_in(64)
    assert len(set(all_of_them.conversations)) == 64
    assert built_in(5).conversations == all_of_them.conversations[:5]
    assert all_of_them.shortage == ""


def test_fewer_prompts_than_asked_for_are_said(tmp_path: Path) -> None:
    assert built_in(100).shortage == "100 prompts were asked for, there are 64"
    (tmp_path / "few.txt").write_text("one\n\ntwo\n")
    few = read_prompts(tmp_path / "few.txt", 3)
    assert [conversation[0].content for conversation in few.conversations] == ["one", "two"]
    assert few.shortage == "3 prompts were asked for, there are 2"


def test_a_line_of_a_text_file_is_a_prompt_whatever_it_looks_like(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('{"prompt": "a"}\n')
    assert read_prompts(tmp_path / "p.txt", 1).conversations[0][0].content == '{"prompt": "a"}'


def test_json_lines_hold_texts_prompts_or_conversations(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = ["plain", {"prompt": "asked", "id": 7}, {"messages": turns}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plain, asked, talk = read_prompts(tmp_path / "p.jsonl", 9).conversations
    assert (plain[0].content, asked[0].content) == ("plain", "asked")
    assert [(message.role, message.content) for message in talk] == [(Role.SYSTEM, "s"), (Role.USER, "u")]


@pytest.mark.parametrize("line", ["{", "7", "{}", '{"prompt": 1}', '{"messages": []}', '{"messages": [{"role": "x"}]}'])
def test_a_line_that_is_no_prompt_names_itself(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'"fine"\n{line}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: "):
        read_prompts(tmp_path / "p.jsonl", 9)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(tmp_path / "p.txt", 1)


# -- grammars


def test_the_built_in_schema_is_one_and_bounds_all_that_it_allows() -> None:
    jsonschema.Draft202012Validator.check_schema(PROFILE_SCHEMA)
    assert set(PROFILE_SCHEMA["required"]) == set(PROFILE_SCHEMA["properties"])
    texts = [value for value in PROFILE_SCHEMA["properties"].values() if value.get("type") == "string"]
    assert all("maxLength" in value for value in texts)


@pytest.mark.parametrize(
    ("constraint", "kept", "broken"),
    [
        (of_schema(json.dumps(PROFILE_SCHEMA)), json.dumps(PROFILE), json.dumps({**PROFILE, "age": 7})),
        (of_schema(json.dumps(PROFILE_SCHEMA)), json.dumps(PROFILE), json.dumps(PROFILE)[:-1]),
        (of_schema('{"type": "number"}'), "1.5", "NaN"),
        (of_json_object(), '{"a": []}', "[]"),
        (of_json_object(), "{}", '{"a": Infinity}'),
        (of_regex("[a-z]{3}"), "abc", "abcd"),
        (of_regex("a|ab"), "ab", "b"),
        (of_choices(["yes", "no"]), "no", "no "),
    ],
)
def test_a_check_tells_what_keeps_to_a_grammar_from_what_does_not(
    constraint: Constraint, kept: str, broken: str
) -> None:
    assert constraint.is_kept is not None
    assert (constraint.is_kept(kept), constraint.is_kept(broken)) == (True, False)


def test_what_no_second_parser_reads_is_not_called_checked() -> None:
    for constraint in (of_ebnf('root ::= "a"'), of_regex(r"\p{L}+")):
        assert constraint.is_kept is None
        assert constraint.checked_by.startswith("nothing: ")
    assert of_ebnf('root ::= "a"').grammar.kind is GrammarKind.EBNF


@pytest.mark.parametrize(
    ("make", "source"),
    [(of_schema, "{"), (of_schema, "[]"), (of_schema, '{"type": "nothing"}')],
)
def test_what_is_no_schema_is_refused(make: Callable[[str], Constraint], source: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        make(source)


@pytest.mark.parametrize("choices", [[], ["a", ""]])
def test_an_empty_choice_is_refused(choices: list[str]) -> None:
    with pytest.raises(ValueError, match="none is empty"):
        of_choices(choices)


# -- figures


def heard(
    *, sent_s: float = 0.0, pieces_s: tuple[float, ...] = (1.0, 2.0, 4.0), text: str = "yes", **facts: object
) -> Heard:
    known = {
        "prompt": 0, "sent_s": sent_s, "pieces_s": pieces_s, "end_s": pieces_s[-1] if pieces_s else sent_s,
        "num_prompt": 10, "num_cached": 4, "num_completion": len(pieces_s), "finish": FinishReason.STOP, "text": text,
        "times": EngineTimes(submitted=sent_s, admitted=sent_s + 0.25, first_token=sent_s + 1.0, finished=4.0),
    }  # fmt: skip
    return Heard(**{**known, **facts})  # type: ignore[arg-type]


def phase(*replies: Heard, mode: str = GUIDED) -> Phase:
    found = Phase(mode=mode, num_asked=len(replies), heard=list(replies), num_drawn=20, seconds=4.0, engine_cpu_s=0.5)
    found.late_s = [0.001] * 99 + [0.05]
    return found


def test_a_token_is_timed_from_the_first_piece_to_the_last() -> None:
    figures = guided_figures(phase(heard(), heard(pieces_s=(1.0, 9.0))), None)
    assert (figures["tpot_p50_ms"], figures["tpot_p99_ms"]) == (1500.0, 8000.0)
    assert (figures["itl_p50_ms"], figures["itl_p99_ms"]) == (2000.0, 8000.0)
    assert figures["ttft_p50_ms"] == 1000.0
    assert (figures["ttft_queue_ms"], figures["ttft_prefill_ms"]) == (250.0, 750.0)
    assert figures["tokens_per_reply"] == 2.5
    assert set(figures) <= set(LABELS)


def test_replies_of_one_token_or_none_have_no_time_per_token() -> None:
    figures = guided_figures(phase(heard(pieces_s=(1.0,)), heard(pieces_s=())), None)
    assert figures["answered"] == 2
    assert not {"tpot_p50_ms", "itl_p50_ms"} & set(figures)


def test_cpu_counts_all_that_was_drawn_and_an_engine_that_died_has_none() -> None:
    whole = phase(heard())
    assert guided_figures(whole, None)["engine_cpu_ms_per_token"] == 25.0
    assert guided_figures(whole, None)["completion_tokens_per_s"] == 5.0
    whole.engine_cpu_s = None
    assert "engine_cpu_ms_per_token" not in guided_figures(whole, None)


def test_failures_are_in_no_average_and_are_counted_with_their_messages() -> None:
    clean, mixed = phase(heard()), phase(heard())
    for number in range(MAX_MESSAGES + 5):
        mixed.failed("400 invalid_request", f"too long: {number}")
    mixed.failed("400 invalid_request", "too long: 0")
    ours, theirs = guided_figures(mixed, None), guided_figures(clean, None)
    assert {name: value for name, value in ours.items() if name != "errors"} == {
        name: value for name, value in theirs.items() if name != "errors"
    }
    assert ours["errors"] == MAX_MESSAGES + 6
    run = raw_of(mixed, None)["run"]
    assert run["errors"] == {"400 invalid_request": MAX_MESSAGES + 6}
    assert len(run["messages"]) == MAX_MESSAGES
    assert run["messages"]["too long: 0"] == 2
    assert guided_figures(Phase(mode=FREE, num_asked=0), None) == {"answered": 0, "errors": 0}


def test_a_phase_is_over_when_every_prompt_was_answered_or_failed() -> None:
    found = Phase(mode=FREE, num_asked=2, heard=[heard()])
    assert not found.is_over
    found.failed("timeout", "late")
    assert found.is_over


def test_the_share_that_keeps_to_the_grammar_is_told_of_all_and_of_those_that_ended() -> None:
    replies = (heard(text="yes"), heard(text="maybe"), heard(text="y", finish=FinishReason.LENGTH))
    figures = guided_figures(phase(*replies), of_choices(["yes"]).is_kept)
    assert figures["satisfied_share"] == pytest.approx(1 / 3)
    assert figures["satisfied_ended_share"] == 0.5
    assert figures["cut_share"] == pytest.approx(1 / 3)
    assert raw_of(phase(*replies), of_choices(["yes"]).is_kept)["requests"]["satisfies"] == [True, False, False]
    assert "satisfied_share" not in guided_figures(phase(*replies), None)


def test_a_ratio_is_guided_over_free_and_of_nothing_there_is_none() -> None:
    assert over_free({"tpot_p50_ms": 3.0}, {"tpot_p50_ms": 2.0, "itl_p50_ms": 1.0}) == {"tpot_p50_over_free": 1.5}
    assert over_free({"tpot_p50_ms": 3.0}, {"tpot_p50_ms": 0.0}) == {}


# -- what is shown


def artifact(*tpots_ms: tuple[float, float]) -> Artifact:
    """A run of some rounds: TPOT guided and free."""
    found = Artifact(bench="guided", begun="2026-01-02T03:04:05+00:00", commit="c", dirty=False)
    names = ("model", "grammar", "concurrency", "num_prompts", "max_tokens", "ignore_eos", "temperature", "seed")
    found.arguments = {**dict.fromkeys((*names, "threads", "repeats"), 1), "grammar": 'regex a,"b"'}
    found.machine = {"idle_loop_late": {"p50_ms": 0.3, "p99_ms": 1.0, "max_ms": 2.0}}
    run = {"finish_reasons": {"stop": 2}, "messages": {"The grammar failed.": 1}}
    for index, mode in enumerate((GUIDED, FREE)):
        figures = [{"errors": 0.0, "tpot_p50_ms": pair[index]} for pair in tpots_ms]
        result = ScenarioResult(
            name=mode, title="", sessions=4, turns=8, message_bytes=0, goals=[], figures={"engine": figures}
        )
        result.raw = {"engine": [{"run": run if mode == GUIDED else {"finish_reasons": {}, "messages": {}}}]}
        found.scenarios.append(result)
    return found


def test_the_ratio_of_the_table_is_that_of_the_phases_of_one_round() -> None:
    rows = guided_table(artifact((2.0, 1.0), (30.0, 10.0), (4.0, 4.0))).splitlines()
    (row,) = [row for row in rows if "TPOT p50" in row]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[4] == "2.00 (1.00 … 3.00)"  # not 4 / 4, the ratio of the medians
    (errors,) = [row for row in rows if "errors" in row]
    assert errors.split("|")[4].strip() == ""


def test_failures_and_finish_reasons_are_said() -> None:
    assert list(notes_of(artifact((2.0, 1.0)))) == [
        "guided: replies ended by stop 2",
        "FAILED guided, 1 times: The grammar failed.",
        "free: replies ended by nothing",
        "the event loop's heartbeat without any load is late by p50 0.300, p99 1.00, max 2.00 ms",
    ]


def test_each_run_is_a_row_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    check_csv(path)
    for tpot in (2.0, 3.0):
        append_csv(path, artifact((tpot, 1.0)))
        check_csv(path)
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == CSV_HEADER
    assert (first["guided_tpot_p50_ms"], second["guided_tpot_p50_ms"]) == ("2", "3")
    assert first["grammar"] == 'regex a,"b"'
    assert first["num_prompts_there"] == "8"
    assert first["free_itl_p50_ms"] == ""


def test_a_file_with_other_columns_is_refused_and_an_empty_one_gets_the_header(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        check_csv(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("")
    check_csv(tmp_path / "empty.csv")
    append_csv(tmp_path / "empty.csv", artifact((2.0, 1.0)))
    assert (tmp_path / "empty.csv").read_text().startswith("begun,commit,")
