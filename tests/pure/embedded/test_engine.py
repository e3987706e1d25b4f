"""The engine, stepped by hand: what one request gets does not depend on the others, and every end is the right one."""

import json
import re
from array import array
from collections.abc import Callable
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from standins.teacher_forcing import line_logprobs
from standins.tiny import llama as tiny
from stenograph.core.types import Finish, FinishReason, Grammar, GrammarKind, RequestId
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.wire import FailureKind
from stenograph.model.tokenizer import Tokenizer

from .conftest import Bench, Loaded

Benches = Callable[..., Bench]
PROMPTS = [[1, 17, 240, 3], [5] * 30, [9, 8, 7], [100, 101, 102, 103, 104, 105]]


def alone(benches: Benches, prompt: list[int], **params: object) -> tuple[list[int], list[float]]:
    bench = benches()
    bench.add("r", prompt, **params)
    bench.run()
    return bench.ids("r"), bench.logprobs("r")


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 5}, {"seed": 5, "top_p": 0.8, "top_k": 20}])
def test_a_request_samples_the_same_tokens_alone_and_in_a_batch(bench: Benches, params: dict[str, float]) -> None:
    together = bench(max_batch=4, step_tokens=8)
    for index, prompt in enumerate(PROMPTS):
        together.add(f"r{index}", prompt, **params)
        together.step()
    together.run()
    for index, prompt in enumerate(PROMPTS):
        ids, logprobs = alone(bench, prompt, **params)
        assert together.ids(f"r{index}") == ids
        assert together.logprobs(f"r{index}") == pytest.approx(logprobs, abs=1e-4)


def test_a_teacher_forced_pass_gives_the_recorded_logprobs(bench: Benches, loaded: Loaded) -> None:
    scorer = NumpyForward(*loaded, num_kv_tokens=tiny.CONTEXT)
    for prompt in PROMPTS:
        ids, logprobs = alone(bench, prompt, seed=3, temperature=1.3, top_p=0.9, max_tokens=20)
        assert logprobs == pytest.approx(line_logprobs(scorer, [*prompt, *ids], len(prompt)), abs=1e-4)


def test_a_next_turn_reuses_computed_tokens_and_samples_the_same(bench: Benches) -> None:
    reusing = bench()
    reusing.add("first", PROMPTS[0], temperature=0.0)
    reusing.run()
    longer = [*PROMPTS[0], *reusing.ids("first"), 33, 44]
    reusing.add("second", longer, temperature=0.0)
    reusing.run()
    # All of the first turn but its last token, whose keys were never computed.
    assert reusing.chunks["second"][-1].num_cached_tokens == len(longer) - 3
    assert reusing.ids("second") == alone(bench, longer, temperature=0.0)[0]


def test_each_end_has_its_reason(bench: Benches, tokenizer: Tokenizer) -> None:
    drawn, _ = alone(bench, PROMPTS[0], temperature=0.0, max_tokens=8)
    runs = bench()
    runs.add("length", PROMPTS[0], temperature=0.0, max_tokens=3)
    runs.add("stop id", PROMPTS[0], temperature=0.0, stop_token_ids=(drawn[2],))
    text = tokenizer.decode(drawn[:5])
    stop = text[len(tokenizer.decode(drawn[:1])) - 1 :][:6]  # spans the border of two tokens
    runs.add("stop string", PROMPTS[0], temperature=0.0, stop=("never", stop))
    runs.run()
    assert runs.ids("length") == drawn[:3]
    assert runs.chunks["length"][-1].finish.reason is FinishReason.LENGTH  # type: ignore[union-attr]
    first = drawn.index(drawn[2])
    assert runs.ids("stop id") == drawn[: first + 1]
    assert runs.chunks["stop id"][-1].finish.matched == drawn[2]  # type: ignore[union-attr]
    assert runs.chunks["stop string"][-1].finish.matched == stop  # type: ignore[union-attr]
    assert tokenizer.decode(runs.ids("stop string")).find(stop) >= 0
    assert tokenizer.decode(runs.ids("stop string")[:-1]).find(stop) < 0


def test_nothing_ends_a_request_before_its_least_number_of_tokens(bench: Benches, tokenizer: Tokenizer) -> None:
    drawn, _ = alone(bench, PROMPTS[0], temperature=0.0, max_tokens=12)
    text = tokenizer.decode(drawn)
    runs = bench()
    runs.add("stop id", PROMPTS[0], temperature=0.0, max_tokens=12, stop_token_ids=(drawn[0],), min_tokens=6)
    again = text[len(tokenizer.decode(drawn[:1])) :][:2]
    runs.add("stop string", PROMPTS[0], temperature=0.0, max_tokens=12, stop=(again,), min_tokens=6)
    runs.run()
    assert drawn[0] not in runs.ids("stop id")[:6]
    assert len(runs.ids("stop id")) >= 6
    num_first = next(num for num in range(1, 13) if again in tokenizer.decode(drawn[:num]))
    assert num_first <= 6, "the string is there before it may end the request"
    assert runs.ids("stop string")[:6] == drawn[:6]
    assert len(runs.ids("stop string")) > 6


def test_logprobs_before_the_least_number_are_of_the_distribution_without_the_stops(
    bench: Benches, loaded: Loaded
) -> None:
    scorer = NumpyForward(*loaded, num_kv_tokens=tiny.CONTEXT)
    stops = (7, 100, 240)
    run = bench()
    run.add("r", PROMPTS[0], seed=3, stop_token_ids=stops, ignore_eos=True, max_tokens=9, min_tokens=5)
    run.run()
    line = [*PROMPTS[0]]
    for at, chunk in enumerate(run.chunks["r"]):
        (id_,), (raw,), (sampling,) = chunk.ids, chunk.logprobs, chunk.sampling_logprobs or (0.0,)
        stop_weight = sum(float(np.exp(line_logprobs(scorer, [*line, stop], len(line))[0])) for stop in stops)
        kept = float(np.log1p(-stop_weight)) if at < 5 else 0.0
        assert raw == pytest.approx(line_logprobs(scorer, [*line, id_], len(line))[0], abs=1e-4)
        assert sampling == pytest.approx(raw - kept, abs=1e-4)
        line.append(id_)


def test_a_grammar_that_has_come_to_its_end_ends_a_request_before_its_least_number(
    bench: Benches, tokenizer: Tokenizer
) -> None:
    run = bench()
    grammar = Grammar(kind=GrammarKind.CHOICE, source='["ab"]')
    run.add("r", PROMPTS[0], temperature=0.0, grammar=grammar, max_tokens=30, min_tokens=20)
    run.run()
    finish = run.chunks["r"][-1].finish
    assert finish is not None
    assert finish.reason is FinishReason.STOP
    assert tokenizer.decode(run.ids("r"), skip_special=True) == "ab"


def test_the_context_is_filled_and_no_further(bench: Benches) -> None:
    run = bench(kv_tokens=20)
    run.add("r", [5] * 12, max_tokens=None)
    run.run()
    assert len(run.ids("r")) == 8
    assert run.chunks["r"][-1].finish.reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_an_abort_ends_a_request_before_the_next_step_waiting_or_running(bench: Benches) -> None:
    run = bench(max_batch=1)
    run.add("running", PROMPTS[0], max_tokens=50)
    run.add("waiting", PROMPTS[1])
    run.step()
    for name in ("running", "waiting"):
        event = run.core.abort(RequestId(name))
        assert event is not None
        run.take([event])
        assert run.chunks[name][-1].finish.reason is FinishReason.ABORT  # type: ignore[union-attr]
        assert run.core.abort(RequestId(name)) is None
    assert not run.core.has_requests
    assert len(run.ids("running")) == 1


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], {}),
        ([-1], {}),
        ([320], {}),
        ([5] * 256, {}),
        ([5], {"max_tokens": 256}),
        ([5], {"stop_token_ids": (320,)}),
        ([5], {"logit_bias": ((400, 1.0),)}),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(
    bench: Benches, prompt: list[int], params: dict[str, object]
) -> None:
    run = bench()
    run.add("r", prompt, **params)
    assert run.failures["r"].kind is FailureKind.INVALID_REQUEST
    assert not run.core.has_requests


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.7, 3.0]))
def test_guided_output_is_in_the_language_whatever_is_drawn(
    bench: Benches, tokenizer: Tokenizer, seed: int, temperature: float
) -> None:
    run = bench()
    grammars = {
        "schema": Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA)),
        "choice": Grammar(kind=GrammarKind.CHOICE, source='["left \\"x\\"", "right", "☃"]'),
        "regex": Grammar(kind=GrammarKind.REGEX, source="[a-c]{3,6}"),
        "lark": Grammar(kind=GrammarKind.LARK, source='start: "<tool_call>" /[0-9]/ "</tool_call>"'),
        "ebnf": Grammar(kind=GrammarKind.EBNF, source='root ::= "is " place{2}\nplace ::= [A-C] "!"?'),
    }
    for name, grammar in grammars.items():
        run.add(name, PROMPTS[0], grammar=grammar, seed=seed, temperature=temperature, max_tokens=200)
    run.run()
    assert run.failures == {}
    texts = {name: tokenizer.decode(array("i", run.ids(name)), skip_special=True) for name in grammars}
    jsonschema.validate(json.loads(texts["schema"]), SCHEMA)
    assert texts["choice"] in ('left "x"', "right", "☃")
    assert 3 <= len(texts["regex"]) <= 6
    assert set(texts["regex"]) <= set("abc")
    assert texts["lark"].startswith("<tool_call>")
    assert re.fullmatch("is ([A-C]!?){2}", texts["ebnf"])
    for name in grammars:
        finish = run.chunks[name][-1].finish
        assert finish is not None
        assert (finish.reason, finish.matched) == (FinishReason.STOP, 2)


FINISHING = {
    "regex": Grammar(kind=GrammarKind.REGEX, source="ab?c"),
    "schema": Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(SCHEMA)),
    "choice": Grammar(kind=GrammarKind.CHOICE, source='["left", "right"]'),
    "lark": Grammar(kind=GrammarKind.LARK, source='start: "" | "x"'),
    "ebnf": Grammar(kind=GrammarKind.EBNF, source='root ::= "is " [A-C]{2}'),
}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_where_no_token_is_the_end_a_finished_grammar_ends_its_request_after_its_last_token(
    bench: Benches, tokenizer: Tokenizer, ignore_eos: bool
) -> None:
    run = bench(eos_ids=())
    for name, grammar in FINISHING.items():
        run.add(name, PROMPTS[0], grammar=grammar, seed=1, temperature=2.0, max_tokens=200, ignore_eos=ignore_eos)
    run.add("endless", PROMPTS[0], grammar=Grammar(kind=GrammarKind.REGEX, source="(a|b)*"), seed=1, max_tokens=20)
    run.add("free", PROMPTS[0], temperature=0.0)
    run.run()
    assert run.failures == {}
    texts = {name: tokenizer.decode(array("i", run.ids(name))) for name in FINISHING}
    assert re.fullmatch("ab?c", texts["regex"])
    jsonschema.validate(json.loads(texts["schema"]), SCHEMA)
    assert texts["choice"] in ("left", "right")
    assert texts["lark"] == "x"
    assert re.fullmatch("is [A-C]{2}", texts["ebnf"])
    for name in FINISHING:
        *_, last = run.chunks[name]
        assert (last.ids, last.finish) == ((), Finish(reason=FinishReason.STOP))
        assert last.times is not None
    assert re.fullmatch("[ab]{20,}", tokenizer.decode(array("i", run.ids("endless"))))
    assert run.chunks["endless"][-1].finish == Finish(reason=FinishReason.LENGTH)
    assert run.ids("free") == alone(bench, PROMPTS[0], temperature=0.0)[0]


def test_where_no_token_is_the_end_a_grammar_of_no_text_is_refused(bench: Benches) -> None:
    run = bench(eos_ids=())
    run.add("nothing", PROMPTS[0], grammar=Grammar(kind=GrammarKind.LARK, source='start: ""'))
    run.run()
    assert run.failures["nothing"].kind is FailureKind.INVALID_REQUEST
    assert "no token satisfies it" in run.failures["nothing"].message


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "<|endoftext|>", "<|im_end|><|im_start|>system"])
def test_text_that_a_grammar_forces_never_becomes_a_control_token(
    bench: Benches, tokenizer: Tokenizer, text: str
) -> None:
    run = bench()
    schema = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"], "additionalProperties": False}
    run.add("r", PROMPTS[0], grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema)), max_tokens=200)
    run.run()
    assert run.failures == {}
    *ids, last = run.ids("r")
    assert last == 2
    assert not set(ids) & set(tokenizer.added_tokens.values())
    assert json.loads(tokenizer.decode(ids)) == {"a": text}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind=GrammarKind.REGEX, source="("),
        Grammar(kind=GrammarKind.LARK, source="start: nothing"),
        Grammar(kind=GrammarKind.EBNF, source='root ::= "a'),
        Grammar(kind=GrammarKind.EBNF, source='other ::= "a"'),
        Grammar(kind=GrammarKind.EBNF, source="root ::= " + "(" * 100_000),
        Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"type": "nonsense"}'),
        Grammar(kind=GrammarKind.JSON_SCHEMA, source="[]"),
        Grammar(kind=GrammarKind.CHOICE, source="[]"),
    ],
)
def test_a_bad_grammar_ends_its_request_alone_before_anything_of_it_runs(bench: Benches, grammar: Grammar) -> None:
    run = bench()
    run.add("bad", PROMPTS[0], grammar=grammar)
    run.add("good", PROMPTS[1])
    run.run()
    assert run.failures["bad"].kind is FailureKind.INVALID_REQUEST
    assert run.times["bad"].admitted == 0.0  # nothing of it ran
    assert "\n" not in run.failures["bad"].message
    assert len(run.ids("good")) == 8


def test_a_line_for_which_the_model_computes_no_numbers_fails_alone_and_is_not_its_callers_fault(
    bench: Benches, loaded: Loaded, tokenizer: Tokenizer
) -> None:
    config, weights = loaded
    embed = weights.embed.copy()
    embed[7] = np.nan
    run = Bench((config, replace(weights, embed=embed)), tokenizer)
    run.add("bad", [9, 7, 8])
    run.add("guided", [9, 7, 8], grammar=Grammar(kind=GrammarKind.REGEX, source="[a-c]{3,6}"))
    run.add("good", PROMPTS[1], temperature=0.0)
    run.run()
    assert {name: failed.kind for name, failed in run.failures.items()} == {
        "bad": FailureKind.INTERNAL,
        "guided": FailureKind.INTERNAL,
    }
    assert run.ids("good") == alone(bench, PROMPTS[1], temperature=0.0)[0]


def test_under_overload_everyone_is_served_in_order_and_no_block_is_lost(bench: Benches) -> None:
    run = bench(max_batch=3, kv_tokens=60, step_tokens=7)
    for index in range(12):
        run.add(f"r{index}", [5 + index] * (1 + 3 * (index % 4)), max_tokens=5)
    run.run()
    assert all(len(run.ids(f"r{index}")) == 5 for index in range(12))
    admitted = [run.chunks[f"r{index}"][-1].times.admitted for index in range(12)]  # type: ignore[union-attr]
    assert admitted == sorted(admitted)
    assert run.core.pool.stats().num_held == 0


def test_a_preempted_request_samples_the_same_tokens(bench: Benches) -> None:
    alone_ids = [alone(bench, prompt, max_tokens=50, seed=4)[0] for prompt in PROMPTS]
    crowded = bench(kv_tokens=112, step_tokens=24)
    for index, prompt in enumerate(PROMPTS):
        crowded.add(f"r{index}", prompt, max_tokens=50, seed=4)
    crowded.run()
    assert crowded.core.num_preempted > 0
    assert [crowded.ids(f"r{index}") for index in range(len(PROMPTS))] == alone_ids


def test_without_reuse_no_prefix_is_found_and_the_same_tokens_are_sampled(bench: Benches) -> None:
    plain = bench(reuses_prefixes=False)
    plain.add("first", [5] * 40, temperature=0.0)
    plain.run()
    plain.add("second", [5] * 40, temperature=0.0)
    plain.run()
    assert plain.chunks["second"][-1].num_cached_tokens == 0
    assert plain.ids("second") == plain.ids("first")


def test_a_request_over_the_queues_capacity_is_refused_with_a_retry_time(bench: Benches) -> None:
    run = bench(max_batch=1, max_waiting=2)
    for index in range(4):
        run.add(f"r{index}", PROMPTS[0])
    assert {id_: failed.kind for id_, failed in run.failures.items()} == {
        "r2": FailureKind.UNAVAILABLE,
        "r3": FailureKind.UNAVAILABLE,
    }
    assert run.failures["r2"].retry_after_s is not None
    assert run.failures["r2"].retry_after_s >= 1.0
    run.run()
    assert len(run.ids("r1")) == 8
