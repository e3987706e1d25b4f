"""`bench streaming`: its prompts, the clock of its submissions, and what its figures are made of."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.artifact import Artifact, ScenarioResult
from benchmarks.kit.figures import LABELS, Better, better
from benchmarks.streaming import command as streaming
from benchmarks.streaming.figures import raw_of, streaming_figures, streaming_table
from benchmarks.streaming.load import StreamingLoad, StreamingPlan, Variant
from benchmarks.streaming.prompts import PromptKind, make_prompts, prompts_of
from standins.tiny.llama import write_tiny_folder
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.embedded.options import EmbeddedOptions
from stenograph.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer_json())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny-llama"))


def plan(model: Path, **fields: Any) -> StreamingPlan:
    whole: dict[str, Any] = {
        "model": str(model),
        "prompts": PromptKind.UNIQUE,
        "prompt_tokens": 40,
        "num_requests": 5,
        "submit_interval_ms": 0.0,
        "max_tokens": 3,
        "warm_up": 1,
        "engine": EmbeddedOptions(max_batch=2, kv_tokens=4096),
    }
    return StreamingPlan(**{**whole, **fields})


ONE_AT_A_TIME = EmbeddedOptions(max_batch=1, kv_tokens=4096)


# -- the prompts


@pytest.mark.parametrize("num_tokens", [1, 7, 40, 300])
def test_prompts_have_the_length_that_is_asked_for_and_their_ids_are_those_of_their_text(
    tokenizer: Tokenizer, num_tokens: int
) -> None:
    prompts = make_prompts(tokenizer, PromptKind.UNIQUE, num=20, num_tokens=num_tokens)
    assert all(abs(len(prompt.ids) - num_tokens) <= 1 for prompt in prompts)
    assert all(prompt.ids == tokenizer.encode(prompt.text) for prompt in prompts)


def test_unique_prompts_are_all_different_and_those_of_the_warm_up_too(tokenizer: Tokenizer) -> None:
    prompts = make_prompts(tokenizer, PromptKind.UNIQUE, num=600, num_tokens=40)
    others = make_prompts(tokenizer, PromptKind.UNIQUE, num=10, num_tokens=40, skip=600)
    assert len({prompt.text for prompt in (*prompts, *others)}) == 610


def test_shared_prompts_are_all_one_and_not_the_warm_ups(tokenizer: Tokenizer) -> None:
    prompts = make_prompts(tokenizer, PromptKind.SHARED, num=10, num_tokens=40)
    others = make_prompts(tokenizer, PromptKind.UNIQUE, num=3, num_tokens=40, skip=10)
    assert len({prompt.text for prompt in prompts}) == 1
    assert prompts[0].text not in {prompt.text for prompt in others}


# -- a measurement


@pytest.mark.parametrize("variant", [Variant(num_workers=0), Variant(num_workers=2), Variant(is_pretok=True)])
def test_every_way_to_tokenize_gives_the_same_requests(model: Path, variant: Variant) -> None:
    load = StreamingLoad(plan(model))
    run: dict[str, Any] = load.measure(variant)
    assert (run["num_ok"], run["errors"]) == (5, {})
    requests = run["requests"]
    assert requests["num_prompt"] == [40] * 5
    assert requests["num_completion"] == [3] * 5
    assert [len(gaps) for gaps in requests["gaps_ms"]] == [2] * 5
    assert len(run["add_ms"]) == 5
    assert run["late_ms"] == []
    parts = [requests[name] for name in ("tokenize_ms", "queue_ms", "prefill_ms")]
    assert [sum(of_one) for of_one in zip(*parts, strict=True)] == pytest.approx(requests["ttft_ms"], abs=0.01)
    if variant.is_pretok:
        assert requests["tokenize_ms"] == [0.0] * 5


def test_a_load_can_be_measured_again_and_finds_nothing_of_the_run_before(model: Path) -> None:
    load = StreamingLoad(plan(model, prompts=PromptKind.SHARED, engine=ONE_AT_A_TIME))
    first, second = (load.measure(Variant(num_workers=1)) for _ in range(2))
    cached: list[list[int]] = [run["requests"]["num_cached"] for run in (first, second)]  # type: ignore[index]
    assert cached[0] == cached[1]
    assert cached[0][1:] == [39] * 4
    assert cached[0][0] < 39


def test_arrivals_are_fixed_and_how_late_they_were_is_told(model: Path) -> None:
    run: dict[str, Any] = StreamingLoad(plan(model, submit_interval_ms=5.0)).measure(Variant())
    submitted = run["requests"]["submitted_ms"]
    assert all(at >= 5.0 * number - 0.1 for number, at in enumerate(submitted))
    assert len(run["late_ms"]) == 5
    assert min(run["late_ms"]) >= 0


def test_requests_that_fail_are_counted_and_the_first_failure_is_told(model: Path) -> None:
    run: dict[str, Any] = StreamingLoad(plan(model, prompt_tokens=300)).measure(Variant())  # the context has 256
    assert (run["num_ok"], run["errors"], run["requests"]) == (0, {"invalid_request": 5}, {})
    assert "exceed the engine's 256 tokens" in run["first_error"]
    assert len(run["add_ms"]) == 5


def test_without_a_prefix_cache_nothing_is_found_again(model: Path) -> None:
    engine = replace(ONE_AT_A_TIME, reuses_prefixes=False)
    load = StreamingLoad(plan(model, prompts=PromptKind.SHARED, engine=engine))
    run: dict[str, Any] = load.measure(Variant())
    assert run["requests"]["num_cached"] == [0] * 5


def test_prompts_of_one_text_are_that_text_and_unique_ones_have_their_number_before_it(
    model: Path, tokenizer: Tokenizer
) -> None:
    shared = prompts_of("the user asks", tokenizer, PromptKind.SHARED, num=3)
    unique = prompts_of("the user asks", tokenizer, PromptKind.UNIQUE, num=3)
    assert [prompt.text for prompt in shared] == ["the user asks"] * 3
    assert [prompt.text for prompt in unique] == [f"{number}. the user asks" for number in (1, 2, 3)]
    assert all(prompt.ids == tokenizer.encode(prompt.text) for prompt in (*shared, *unique))
    run: dict[str, Any] = StreamingLoad(plan(model, prompt="the user asks", max_prefills=1)).measure(Variant())
    assert run["num_ok"] == 5


def test_a_reply_may_end_at_the_eos_or_go_on(model: Path) -> None:
    ignoring = StreamingLoad(plan(model, max_tokens=150))
    stopping = StreamingLoad(plan(model, max_tokens=150, ignore_eos=False))
    runs: list[dict[str, Any]] = [load.measure(Variant(is_pretok=True)) for load in (ignoring, stopping)]
    assert runs[0]["requests"]["num_completion"] == [150] * 5
    assert all(num <= 150 for num in runs[1]["requests"]["num_completion"])


# -- the figures


def report(**fields: Any) -> dict[str, Any]:
    requests = {
        "tokenize_ms": [1.0, 3.0], "queue_ms": [10.0, 30.0], "prefill_ms": [100.0, 300.0], "ttft_ms": [111.0, 333.0],
        "tpot_ms": [5.0, None], "e2e_ms": [121.0, 333.0], "gaps_ms": [[4.0, 6.0], []],
        "num_prompt": [100, 300], "num_cached": [0, 200], "num_completion": [3, 1],
    }  # fmt: skip
    whole = {
        "step": "run", "num_ok": 2, "seconds": 2.0, "cpu_s": 4.0, "submit_wall_ms": 1.5, "add_ms": [0.1, 0.2, 0.9],
        "late_ms": [], "errors": {"unavailable": 1}, "first_error": "full", "requests": requests,
    }  # fmt: skip
    return {**whole, **fields}


def test_the_parts_of_ttft_are_means_that_add_up() -> None:
    figures = streaming_figures(report())
    parts = [figures[f"ttft_{part}_ms"] for part in ("tokenize", "queue", "prefill")]
    assert parts == [2.0, 20.0, 200.0]
    assert sum(parts) == figures["ttft_mean_ms"]


def test_each_part_of_ttft_has_percentiles_and_token_totals_are_sums() -> None:
    figures = streaming_figures(report())
    assert [figures[f"ttft_queue_{q}_ms"] for q in ("p50", "p95", "p99")] == [10.0, 30.0, 30.0]
    assert {f"ttft_{part}_{q}_ms" for part in ("tokenize", "prefill") for q in ("p50", "p95", "p99")} <= set(figures)
    assert (figures["prompt_tokens"], figures["completion_tokens"]) == (400, 4)


def test_throughput_counts_what_was_computed_by_wall_and_by_cpu() -> None:
    figures = streaming_figures(report())
    assert figures["prompt_tokens_per_s"] == 200.0
    assert figures["completion_tokens_per_s"] == 2.0
    assert figures["completion_tokens_per_cpu_s"] == 1.0
    assert figures["computed_tokens_per_cpu_s"] == (400 - 200 + 4) / 4.0
    assert figures["cached_share"] == 0.5


def test_submission_counts_every_call_and_the_rest_only_what_was_answered() -> None:
    figures = streaming_figures(report(late_ms=[0.0, 0.1, 2.0]))
    assert (figures["answered"], figures["errors"]) == (2, 1)
    assert (figures["add_p50_ms"], figures["add_p99_ms"]) == (pytest.approx(0.2), pytest.approx(0.9))
    assert (figures["submit_wall_ms"], figures["late_p99_ms"]) == (1.5, 2.0)
    assert figures["itl_mean_ms"] == 5.0
    assert figures["tpot_p50_ms"] == 5.0
    assert set(figures) <= set(LABELS)


def test_of_nothing_answered_there_are_no_latencies() -> None:
    figures = streaming_figures(report(num_ok=0, requests={}))
    assert set(figures) == {
        "answered",
        "errors",
        "submit_wall_ms",
        *(f"add_{q}_ms" for q in ("p50", "p95", "p99", "max")),
    }


def test_more_tokens_for_a_second_of_cpu_are_better() -> None:
    assert better("completion_tokens_per_cpu_s") is better("computed_tokens_per_cpu_s") is Better.HIGHER
    assert better("add_p99_ms") is better("submit_wall_ms") is Better.LOWER


def test_an_artifact_keeps_of_the_gaps_the_longest() -> None:
    raw = raw_of(report())
    assert raw["requests"]["longest_gap_ms"] == [6.0, None]
    assert "gaps_ms" not in raw["requests"]
    assert "requests" not in raw["run"]


def test_the_table_says_whether_ways_can_be_told_apart() -> None:
    walls = {"0 workers": [10.0, 11.0, 12.0], "4 workers": [1.0, 2.0, 1.5], "pretok": [10.0, 11.0, 12.0]}
    results = [
        ScenarioResult(
            name=f"burst, {name}",
            title="",
            sessions=1,
            turns=1,
            message_bytes=1,
            goals=[],
            figures={"engine": [{"submit_wall_ms": wall} for wall in values]},
        )
        for name, values in walls.items()
    ]
    text = streaming_table(Artifact(bench="streaming", scenarios=results), list(walls))
    row = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    assert row[1:3] == ["11.0 (10.0 … 12.0)", "1.50 (1.00 … 2.00)"]
    assert row[4:] == ["-86.4% better", ""]


# -- the options


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    streaming.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (("--tokenize-workers", "0,x"), "'x'"),
        (("--tokenize-workers", "-1"), "'-1'"),
        (("--tokenize-workers", "65"), "'65'"),
        (("--tokenize-workers", "4,0,4"), "twice"),
        (("--tokenize-workers", ""), "nothing to measure"),
        (("--prompt-tokens", "250", "--max-tokens", "7"), "257 tokens"),
        (("--prompt-repeats", "2"), "--prompt-repeats"),
        (("--prompt-tokens", "9", "--prompt", "it"), "as it is"),
        (("--torch-device", "cpu"), "--forward torch"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    model: Path, tmp_path: Path, given: tuple[str, ...], wrong: str
) -> None:
    out = tmp_path / "run.json"
    sizes = () if "--prompt-tokens" in given else ("--prompt-tokens", "20")
    arguments = [f"{given[0]}={given[1]}", *given[2:]]
    with pytest.raises(ValueError, match=re.escape(wrong)):
        streaming.run(options("--model", str(model), "--out", str(out), *sizes, *arguments))
    assert not out.exists()
