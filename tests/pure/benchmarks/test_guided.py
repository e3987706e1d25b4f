"""`bench guided`: prompts, grammars and their independent checks, figures, the table and the CSV row."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import pytest

from benchmarks.guided.figures import (
    CSV_ARGUMENTS,
    CSV_HEADER,
    FREE,
    GUIDED,
    MAX_MESSAGES,
    OVER_FREE,
    Phase,
    append_csv,
    check_csv,
    guided_figures,
    guided_table,
    notes_of,
    raw_of,
)
from benchmarks.guided.grammar import (
    PROFILE_SCHEMA,
    CheckedGrammar,
    of_choices,
    of_ebnf,
    of_json_object,
    of_regex,
    of_schema,
)
from benchmarks.guided.prompts import built_in, random_prompts, read_prompts, sharegpt_prompts
from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.datasets import read_sharegpt
from benchmarks.kit.figures import LABELS, ratios_between
from benchmarks.kit.requests import GeneratedReply
from standins.tiny.llama import write_tiny_folder
from stenograph.core.messages import Role
from stenograph.core.stages import Stage
from stenograph.core.types import FinishReason, GrammarKind
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files
from stenograph.text.renderer import Renderer

PROFILE = {"name": "Ana", "age": 40, "city": "Lisbon", "is_remote": True, "level": "lead", "skills": ["care", "triage"]}

# -- prompts


def test_the_built_in_prompts_are_distinct_and_the_same_for_any_number() -> None:
    all_of_them = built_in(64)
    assert len(set(all_of_them)) == len(built_in(100)) == 64
    assert built_in(5) == all_of_them[:5]


def test_a_file_may_have_fewer_prompts_than_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("one\n\ntwo\n")
    few = read_prompts(tmp_path / "few.txt", 3)
    assert [conversation[0].content for conversation in few] == ["one", "two"]


def test_a_line_of_a_text_file_is_a_prompt_whatever_it_looks_like(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text('{"prompt": "a"}\n')
    assert read_prompts(tmp_path / "p.txt", 1)[0][0].content == '{"prompt": "a"}'


def test_json_lines_hold_texts_prompts_or_conversations(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = ["plain", {"prompt": "asked", "id": 7}, {"messages": turns}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plain, asked, talk = read_prompts(tmp_path / "p.jsonl", 9)
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
    constraint: CheckedGrammar, kept: str, broken: str
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
def test_what_is_no_schema_is_refused(make: Callable[[str], CheckedGrammar], source: str) -> None:
    with pytest.raises(ValueError, match="JSON"):
        make(source)


@pytest.mark.parametrize("choices", [[], ["a", ""]])
def test_an_empty_choice_is_refused(choices: list[str]) -> None:
    with pytest.raises(ValueError, match="none is empty"):
        of_choices(choices)


# -- data sets


def sharegpt(path: Path, *talks: list[tuple[str, str]]) -> Path:
    rows = [{"id": "x", "conversations": [{"from": who, "value": text} for who, text in talk]} for talk in talks]
    text = "\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows)
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["talks.json", "talks.jsonl"])
def test_sharegpt_is_read_as_questions_and_their_answers(tmp_path: Path, name: str) -> None:
    talks = (
        [("system", "s"), ("human", "a "), ("gpt", "b"), ("user", "c"), ("human", "d"), ("gpt", "e")],
        [("gpt", "nobody asked")],
        [("human", "f")],
    )
    found = read_sharegpt(sharegpt(tmp_path / name, *talks))
    assert [[(one.asked, one.answered) for one in exchanges] for exchanges in found] == [
        [("a", "b"), ("c", ""), ("d", "e")],
        [("f", "")],
    ]


@pytest.mark.parametrize("text", ["[]", "{", '[{"a": 1}]', '[{"conversations": [{"from": "gpt", "value": "b"}]}]'])
def test_a_file_that_is_not_sharegpts_names_itself(tmp_path: Path, text: str) -> None:
    path = tmp_path / "talks.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"talks\.json"):
        read_sharegpt(path)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make_renderer(load_model_files(write_tiny_folder(tmp_path_factory.mktemp("tiny"))), "auto")


def test_prompts_of_sharegpt_are_first_questions_that_fit(tmp_path: Path, renderer: Renderer) -> None:
    path = sharegpt(tmp_path / "t.json", [("human", "long " * 300)], [("human", "it"), ("gpt", "is")], [("human", "I")])
    prompts = sharegpt_prompts(read_sharegpt(path), renderer, num=9, most_tokens=60)
    assert [messages[0].content for messages in prompts] == ["it", "I"]
    with pytest.raises(ValueError, match="at most 3 tokens"):
        sharegpt_prompts(read_sharegpt(path), renderer, num=9, most_tokens=3)


def test_random_prompts_have_the_length_asked_for(renderer: Renderer) -> None:
    prompts = random_prompts(renderer.tokenizer, num=5, num_tokens=30)
    texts = [messages[0].content or "" for messages in prompts]
    assert len(set(texts)) == 5
    assert all(abs(len(renderer.tokenizer.encode(text)) - 30) <= 1 for text in texts)


# -- figures


def heard(
    *, pieces_s: Sequence[float] = (1.0, 2.0, 4.0), text: str = "yes", finish: FinishReason = FinishReason.STOP
) -> GeneratedReply:
    return GeneratedReply(
        pieces_s=list(pieces_s),
        end_s=pieces_s[-1] if pieces_s else 0.0,
        num_prompt=10,
        num_completion=len(pieces_s),
        num_cached=4,
        finish_reason=finish,
        stages_s={Stage.QUEUE: 0.25, Stage.PREFILL: 0.75, Stage.DECODE_TOKENS: 3.0},
        text=text,
    )


def phase(*replies: GeneratedReply, mode: str = GUIDED) -> Phase:
    found = Phase(mode=mode, num_asked=len(replies), num_sampled=20, seconds=4.0, engine_cpu_s=0.5)
    found.heard = dict(enumerate(replies))
    found.late_s = [0.001] * 99 + [0.05]
    return found


def test_a_phase_has_its_time_its_token_totals_and_its_throughput() -> None:
    figures = guided_figures(phase(heard(), heard(pieces_s=(1.0, 9.0))), None)
    assert (figures["elapsed_s"], figures["prompt_tokens"], figures["completion_tokens"]) == (4.0, 20, 5)
    assert figures["requests_per_s"] == 0.5


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
    found = Phase(mode=FREE, num_asked=2, heard={0: heard()})
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
    assert ratios_between(OVER_FREE, {"tpot_p50_ms": 3.0}, {"tpot_p50_ms": 2.0, "itl_p50_ms": 1.0}) == {
        "tpot_p50_over_free": 1.5
    }
    assert ratios_between(OVER_FREE, {"tpot_p50_ms": 3.0}, {"tpot_p50_ms": 0.0}) == {}


# -- what is shown


def artifact(*tpots_ms: tuple[float, float]) -> Artifact:
    """A run of some rounds: TPOT guided and free."""
    found = Artifact(bench="guided", begun="2026-01-02T03:04:05+00:00", commit="c", dirty=False)
    found.arguments = {**dict.fromkeys(CSV_ARGUMENTS, 1), "grammar": 'regex a,"b"'}
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


def test_each_mode_of_each_run_is_a_row_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    check_csv(path)
    for tpot in (2.0, 3.0):
        append_csv(path, artifact((tpot, 1.0)))
        check_csv(path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == CSV_HEADER
    assert [(row["mode"], row["round"], row["tpot_p50_ms"]) for row in rows] == [
        (GUIDED, "median", "2"),
        (FREE, "median", "1"),
        (GUIDED, "median", "3"),
        (FREE, "median", "1"),
    ]
    assert rows[0]["grammar"] == 'regex a,"b"'
    assert rows[0]["num_prompts_there"] == "8"
    assert rows[0]["itl_p50_ms"] == ""
    means = {f"{latency}_{of}_ms" for latency in ("e2e", "ttft", "tpot", "itl") for of in ("mean", "p50", "p99")}
    totals = {
        "elapsed_s",
        "prompt_tokens",
        "completion_tokens",
        "answered",
        "requests_per_s",
        "completion_tokens_per_s",
    }
    assert means | totals <= set(CSV_HEADER)


def test_a_file_with_other_columns_is_refused_and_an_empty_one_gets_the_header(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        check_csv(tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("")
    check_csv(tmp_path / "empty.csv")
    append_csv(tmp_path / "empty.csv", artifact((2.0, 1.0)))
    assert (tmp_path / "empty.csv").read_text().startswith("begun,commit,")
