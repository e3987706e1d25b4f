"""Scores of given tokens: what they are does not depend on what runs beside them, and every request for tokens is
before them."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from standins.teacher_forcing import line_logprobs, log_softmax
from standins.tiny import llama as tiny
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.clock import SystemClock
from stenograph.core.types import Chunk, FinishReason, RequestId, SamplingParams
from stenograph.embedded.engine_core import EngineCore, EngineLimits
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.grammar.cache import GrammarCompiler
from stenograph.embedded.wire import Sampled, Times
from stenograph.model.tokenizer import Tokenizer

from .conftest import Bench, Loaded
from .ledger_forward import CONTEXT, VOCAB, LedgerForward, LedgerWeights, logits_of

Benches = Callable[..., Bench]
LINE = [1, 17, 240, 3, *range(60, 140), 9, 8]


def test_scores_are_those_of_a_pass_over_the_line(bench: Benches, loaded: Loaded) -> None:
    scorer, engine = NumpyForward(*loaded, num_kv_tokens=tiny.CONTEXT), bench(step_tokens=24)
    for start in (1, 2, 40, len(LINE) - 1):
        engine.add(f"from {start}", LINE, score_from=start, num_top_logprobs=3)
    engine.run()
    for start in (1, 2, 40, len(LINE) - 1):
        (chunk,) = engine.chunks[f"from {start}"]
        assert chunk.finish is not None
        assert chunk.finish.reason is FinishReason.LENGTH
        assert (list(chunk.ids), chunk.weight_version) == (LINE[start:], "v")
        assert list(chunk.logprobs) == pytest.approx(line_logprobs(scorer, LINE, start), abs=1e-4)
        assert chunk.top_logprobs is not None
        assert all(top[0].logprob >= lp for top, lp in zip(chunk.top_logprobs, chunk.logprobs, strict=True))
        assert {len(top) for top in chunk.top_logprobs} == {3}


def test_a_line_just_sampled_is_scored_from_its_cache(bench: Benches) -> None:
    engine = bench()
    engine.add("turn", LINE[:40], temperature=0.0)
    engine.run()
    line = [*LINE[:40], *engine.ids("turn")]
    engine.add("scores", line, score_from=40)
    engine.run()
    (chunk,) = engine.chunks["scores"]
    assert chunk.num_cached_tokens >= 38
    assert list(chunk.logprobs) == pytest.approx(engine.logprobs("turn"), abs=1e-4)


def test_requests_for_tokens_go_before_scores_that_came_first(bench: Benches) -> None:
    engine = bench(max_batch=4, step_tokens=8)
    engine.add("scores", LINE, score_from=1)
    engine.add("turn", [5] * 30, max_tokens=2)
    ends: list[str] = []
    while engine.core.has_requests:
        engine.step()
        ends += [name for name in ("turn", "scores") if name in engine.chunks and name not in ends]
    assert ends == ["turn", "scores"]


@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_request_for_tokens_does_not_wait_for_the_end_of_running_scores(bench: Benches, max_batch: int) -> None:
    engine = bench(max_batch=max_batch, step_tokens=8)
    engine.add("scores", LINE, score_from=1)
    engine.step()
    engine.add("turn", [5] * 6, max_tokens=1)
    engine.step()
    assert list(engine.chunks) == ["turn"]
    engine.run()
    assert len(engine.chunks["scores"][0].ids) == len(LINE) - 1


def test_scores_are_of_one_version_however_often_weights_come(loaded: Loaded) -> None:
    core = ledger_core(EngineLimits(max_batch=2, kv_tokens=128, step_tokens=8))
    line = [index % VOCAB for index in range(40)]
    assert add(core, "s", line, 1) is None
    for number in (1, 2):
        core.step()
        core.swap(LedgerWeights(number), str(number))
    (chunk,) = run(core)["s"]
    assert chunk.weight_version == "2"
    assert list(chunk.logprobs) == pytest.approx(expected(line, 1, weights=2), abs=1e-9)


@pytest.mark.parametrize(
    ("line", "start", "words"),
    [
        (LINE, 0, "those from 0 on cannot be scored"),
        (LINE, len(LINE), "cannot be scored"),
        ([1, 10_000], 1, "each a token id"),
        ([1] * (tiny.CONTEXT + 1), 1, "exceed the engine's"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_a_full_context_can(
    bench: Benches, line: list[int], start: int, words: str
) -> None:
    engine = bench()
    engine.add("bad", line, score_from=start)
    assert words in engine.failures["bad"].message
    engine.add("full", [1] * tiny.CONTEXT, score_from=tiny.CONTEXT - 2)
    engine.run()
    assert len(engine.chunks["full"][0].ids) == 2


def test_aborted_scores_are_none(bench: Benches) -> None:
    engine = bench(step_tokens=17)
    engine.add("scores", LINE, score_from=1)
    engine.step()
    event = engine.core.abort(RequestId("scores"))
    assert event is not None
    assert event.chunk.ids == ()
    engine.core.check()
    assert not engine.core.has_requests


def ledger_core(limits: EngineLimits) -> EngineCore:
    tokenizer = Tokenizer(tiny_tokenizer_json())
    return EngineCore(
        LedgerForward(limits.num_kv_rows),
        lambda: tokenizer,
        GrammarCompiler(lambda: tokenizer, vocab_size=VOCAB, eos_ids=(2,)),
        eos_ids=(2,),
        limits=limits,
        clock=SystemClock(),
        wake=lambda: None,
        weight_version="0",
    )


def add(core: EngineCore, name: str, line: list[int], start: int | None, arrival: int = 1) -> object:
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=arrival)
    return core.add(RequestId(name), array("i", line), params, Times(submitted=1.0), arrival, score_from=start)


def run(core: EngineCore) -> dict[str, list[Chunk]]:
    chunks: dict[str, list[Chunk]] = {}
    while core.has_requests:
        for event in core.step():
            assert isinstance(event, Sampled), event
            chunks.setdefault(event.request_id, []).append(event.chunk)
        core.check()
    return chunks


def expected(line: list[int], start: int, *, weights: int = 0) -> list[float]:
    rows = [(line[at], logits_of(line[:at], weights).astype(float)) for at in range(start, len(line))]
    return [float(log_softmax(row)[id_]) for id_, row in rows]


LINES = st.lists(st.integers(0, 5), min_size=2, max_size=CONTEXT - 8)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    lines=st.lists(st.tuples(LINES, st.booleans(), st.integers(1, 100)), min_size=1, max_size=6),
    blocks=st.integers(1, 6),
    step_tokens=st.integers(5, 40),
)
def test_scores_beside_turns_in_too_little_room_are_those_of_the_line(
    lines: list[tuple[list[int], bool, int]], blocks: int, step_tokens: int
) -> None:
    limits = EngineLimits(max_batch=4, kv_tokens=CONTEXT + 16 * blocks, step_tokens=step_tokens)
    core = ledger_core(limits)
    for number, (line, is_turn, start) in enumerate(lines):
        assert add(core, str(number), line, None if is_turn else 1 + start % (len(line) - 1), number + 1) is None
    chunks = run(core)
    for number, (line, is_turn, start) in enumerate(lines):
        if not is_turn:
            (chunk,) = chunks[str(number)]
            assert list(chunk.logprobs) == pytest.approx(expected(line, 1 + start % (len(line) - 1)), abs=1e-9)
