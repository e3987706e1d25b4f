"""The names of log-probabilities, against the distributions themselves."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins.teacher_forcing import log_softmax
from stenograph.core.chat import ToolChoice, ToolMode
from stenograph.core.logprobs import is_held_by_engine, known_logprobs, reported_kind
from stenograph.core.messages import Tool
from stenograph.core.types import (
    Finish,
    FinishReason,
    LogprobsKind,
    LogprobsReport,
    SampledTurn,
    SamplingParams,
    token_ids,
)
from stenograph.embedded.sampler import TokenSampler

RAW, TEMPERED, SAMPLING, OTHER = LogprobsKind
VOCAB = 6
PROMPT = (0, 1)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.6]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
    repetition_penalty=st.sampled_from([1.0, 2.0]),
    logit_bias=st.sampled_from([(), ((2, 3.0),)]),
)


def reported_logprob(
    report: LogprobsReport, logits: np.ndarray, params: SamplingParams, id_: int, drawn: float
) -> float:
    """What an engine of that kind says of a token, by the steps of its sampler. `drawn` is what was sampled from."""
    if report.kind is SAMPLING:
        return drawn
    scores = logits.copy()
    if report.after_constraints:
        seen = list(PROMPT)
        factor = params.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
        for biased, bias in params.logit_bias:
            scores[biased] += bias
    if report.kind is TEMPERED and params.temperature:
        scores = scores / params.temperature
    return float(log_softmax(scores)[id_])


@given(
    logits=st.lists(st.floats(-4, 4), min_size=VOCAB, max_size=VOCAB),
    params=PARAMS,
    kind=st.sampled_from([RAW, TEMPERED, SAMPLING]),
    after_constraints=st.booleans(),
)
def test_each_known_logprob_is_that_of_the_distribution_it_is_named_for(
    logits: list[float], params: SamplingParams, kind: LogprobsKind, after_constraints: bool
) -> None:
    exact = np.array(logits, np.float32).astype(np.float64)
    drawn = TokenSampler(params, PROMPT).sample(exact.astype(np.float32), None)
    truth = {RAW: float(log_softmax(exact)[drawn.id]), SAMPLING: drawn.sampling_logprob}
    if params.temperature:
        truth[TEMPERED] = float(log_softmax(exact / params.temperature)[drawn.id])
    report = LogprobsReport(kind=kind, after_constraints=after_constraints)
    turns = [
        # an engine that reports one kind, and the embedded one, which reports all
        turn(reported_kind(report, params), reported_logprob(report, exact, params, drawn.id, drawn.sampling_logprob)),
        turn(RAW, drawn.logprob, tempered=drawn.tempered_logprob, sampling=drawn.sampling_logprob),
    ]
    for one in turns:
        known = known_logprobs(one, params)
        for name in known.keys() - {OTHER}:
            assert known[name][0] == pytest.approx(truth[name], abs=1e-9)
    assert known_logprobs(turns[1], params).keys() == truth.keys()


def turn(
    kind: LogprobsKind, logprob: float, *, tempered: float | None = None, sampling: float | None = None
) -> SampledTurn:
    return SampledTurn(
        ids=token_ids([1]),
        logprobs=array("d", [logprob]),
        logprobs_kind=kind,
        tempered_logprobs=None if tempered is None else array("d", [tempered]),
        sampling_logprobs=None if sampling is None else array("d", [sampling]),
        top_logprobs=None,
        finish=Finish(reason=FinishReason.STOP),
        weights=(),
        num_cached_tokens=0,
        times=None,
    )


def test_an_engine_that_divides_by_the_temperature_reports_no_raw_logprobs_at_another_than_1() -> None:
    sglang = LogprobsReport(kind=TEMPERED, after_constraints=True)
    assert reported_kind(sglang, SamplingParams(temperature=0.7)) is TEMPERED
    hot = turn(TEMPERED, math.log(0.5))
    assert known_logprobs(hot, SamplingParams(temperature=0.7)).keys() == {TEMPERED, SAMPLING}
    assert known_logprobs(hot, SamplingParams()).keys() == {RAW, TEMPERED, SAMPLING}
    assert reported_kind(sglang, SamplingParams(temperature=0.0)) is RAW


def test_a_grammar_that_the_engine_adds_itself_is_in_its_logprobs() -> None:
    sglang = LogprobsReport(kind=TEMPERED, after_constraints=True)
    assert reported_kind(sglang, SamplingParams(), is_forced=True) is SAMPLING
    assert reported_kind(sglang, SamplingParams(top_p=0.5), is_forced=True) is OTHER
    assert known_logprobs(turn(SAMPLING, -1.0), SamplingParams()).keys() == {SAMPLING}


@pytest.mark.parametrize(
    ("json", "mode", "is_held"),
    [
        ('{"function":{"strict":true}}', ToolMode.AUTO, True),
        ('{"function":{"strict" :\n true}}', ToolMode.AUTO, True),
        ('{"function":{"strict":false}}', ToolMode.AUTO, False),
        ("{}", ToolMode.AUTO, False),
        ("{}", ToolMode.REQUIRED, True),
    ],
)
def test_a_reply_is_held_by_an_engine_that_must_call_or_has_a_strict_tool(
    json: str, mode: ToolMode, is_held: bool
) -> None:
    assert bool(is_held_by_engine([Tool(name="f", json=json)], ToolChoice(mode=mode))) is is_held
