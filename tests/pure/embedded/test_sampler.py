"""Sampling over the whole vocabulary: what each parameter keeps, and that the logprobs are those of what was done."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from standins.teacher_forcing import log_softmax
from stenograph.core.types import SamplingParams
from stenograph.embedded.sampler import (
    BadLogits,
    DeadEnd,
    TokenSampler,
    highest_places,
    kept_places,
    log_sum_exp,
    top_logprobs,
)

ROWS = st.lists(st.floats(-20, 20), min_size=3, max_size=30).map(lambda row: np.array(row, np.float32))


def kept_of(row: np.ndarray, **params: float) -> set[int]:
    kept = kept_places(row.astype(np.float64), SamplingParams(**params))  # type: ignore[arg-type]
    return set(range(len(row)) if kept is None else kept.tolist())


def by_sorting(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What `kept_places` promises, written down plainly: everything is sorted, and what is left out becomes -inf."""
    kept = np.where(scores >= scores.max() + np.log(params.min_p), scores, -np.inf) if params.min_p else scores
    order = np.argsort(-kept, kind="stable")
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    if params.top_p < 1.0:
        probabilities = np.exp(kept[order] - kept[order[0]])
        needed = params.top_p * float(probabilities.sum())
        order = order[: int(np.searchsorted(np.cumsum(probabilities), needed, side="left")) + 1]
    only = np.full_like(kept, -np.inf)
    only[order] = kept[order]
    return only


FEW_VALUES = st.lists(st.integers(-3, 3), min_size=1, max_size=30).map(lambda row: np.array(row, np.float64))


@given(FEW_VALUES, st.integers(0, 31), st.sampled_from([1.0, 0.97, 0.51, 0.13, 0.001]), st.sampled_from([0.0, 0.3]))
def test_the_kept_tokens_are_those_of_a_full_sort_with_ties_in_order(
    row: np.ndarray, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_places(row, params)
    places = np.arange(len(row)) if kept is None else kept
    assert places.tolist() == np.flatnonzero(np.isfinite(by_sorting(row, params))).tolist()


@given(FEW_VALUES, st.integers(1, 31))
def test_the_highest_places_are_the_first_of_a_full_sort(row: np.ndarray, num: int) -> None:
    assert highest_places(row, num).tolist() == sorted(np.argsort(-row, kind="stable")[:num].tolist())


def test_a_nucleus_of_a_whole_vocabulary_is_that_of_a_full_sort() -> None:
    random = np.random.default_rng(0)
    for spread in (0.1, 1.0, 4.0):
        row = spread * random.standard_normal(50_000)
        for top_p in (0.1, 0.9, 0.999):
            params = SamplingParams(top_p=top_p)
            kept = kept_places(row, params)
            assert kept is not None
            assert kept.tolist() == np.flatnonzero(np.isfinite(by_sorting(row, params))).tolist()


@given(ROWS, st.integers(1, 40))
def test_top_k_keeps_the_k_likeliest(row: np.ndarray, k: int) -> None:
    kept = kept_of(row, top_k=k)
    assert len(kept) == min(k, len(row))
    assert min(row[list(kept)]) >= max((row[i] for i in range(len(row)) if i not in kept), default=-np.inf)


@given(ROWS, st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_p(row: np.ndarray, p: float) -> None:
    kept = kept_of(row, top_p=p)
    probabilities = np.exp(log_softmax(row.astype(np.float64)))
    assert sum(probabilities[list(kept)]) >= p - 1e-9
    least = min(kept, key=lambda id_: probabilities[id_])
    assert sum(probabilities[list(kept - {least})]) < p + 1e-9
    assert int(np.argmax(row)) in kept


@given(ROWS, st.floats(0.001, 1.0))
def test_min_p_keeps_what_is_near_enough_to_the_likeliest(row: np.ndarray, p: float) -> None:
    probabilities = np.exp(log_softmax(row.astype(np.float64)))
    kept = kept_of(row, min_p=p)
    assert int(np.argmax(row)) in kept
    assert all(probabilities[id_] >= p * probabilities.max() * (1 - 1e-9) for id_ in kept)


@given(ROWS, st.integers(0, 2**63), st.floats(0.1, 3), st.floats(0.1, 1), st.integers(0, 5))
def test_a_draw_is_kept_and_carries_both_of_its_logprobs(
    row: np.ndarray, seed: int, temperature: float, top_p: float, top_k: int
) -> None:
    params = SamplingParams(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k, num_top_logprobs=2)
    drawn, again = (TokenSampler(params, [0]).sample(row, None) for _ in range(2))
    assert drawn == again
    exact = row.astype(np.float64)
    scores = by_sorting(exact / temperature, params)
    assert drawn.sampling_logprob == pytest.approx(log_softmax(scores)[drawn.id], abs=1e-9)
    assert drawn.logprob == pytest.approx(log_softmax(exact)[drawn.id], abs=1e-9)
    assert drawn.top == top_logprobs(exact, log_sum_exp(exact), 2)
    assert [top.id for top in drawn.top] == np.argsort(-exact, kind="stable")[:2].tolist()
    assert [top.logprob for top in drawn.top] == pytest.approx(np.sort(log_softmax(exact))[:-3:-1], abs=1e-9)


@given(ROWS, st.sampled_from([0.0, 1e-300, 1e-6]))
def test_no_temperature_is_greedy_and_certain(row: np.ndarray, temperature: float) -> None:
    drawn = TokenSampler(SamplingParams(temperature=temperature), [0]).sample(row, None)
    assert (drawn.id, drawn.sampling_logprob) == (int(np.argmax(row)), 0.0)


def test_sampled_tokens_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    sampler = TokenSampler(SamplingParams(seed=1), [0])
    row = np.log(probabilities).astype(np.float32)
    counts = np.bincount([sampler.sample(row, None).id for _ in range(20_000)], minlength=4)
    np.testing.assert_allclose(counts / 20_000, probabilities, atol=0.015)  # over four standard deviations


def test_penalties_and_bias_move_the_logits_as_they_say() -> None:
    row = np.array([2.0, 1.9, -1.0], np.float32)
    for params, second in (
        ({"presence_penalty": 0.2}, 1),
        ({"frequency_penalty": 0.2}, 1),
        ({"repetition_penalty": 1.2}, 1),
        ({}, 0),
    ):
        sampler = TokenSampler(SamplingParams(temperature=0.0, **params), [2])  # type: ignore[arg-type]
        assert [sampler.sample(row, None).id for _ in range(2)] == [0, second]
    assert TokenSampler(SamplingParams(temperature=0.0, logit_bias=((2, 50.0),)), [0]).sample(row, None).id == 2


def test_only_allowed_tokens_are_sampled_and_no_allowed_token_is_a_dead_end() -> None:
    row = np.array([5.0, 1.0, 0.0], np.float32)
    assert TokenSampler(SamplingParams(), [0]).sample(row, np.array([False, False, True])).id == 2
    with pytest.raises(DeadEnd):
        TokenSampler(SamplingParams(), [0]).sample(row, np.zeros(3, np.bool_))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("allowed", [None, np.array([False, False, True])])
def test_logits_that_are_no_numbers_are_the_models_failure_also_where_the_grammar_passes_over_them(
    bad: float, allowed: np.ndarray | None
) -> None:
    with pytest.raises(BadLogits):
        TokenSampler(SamplingParams(), [0]).sample(np.array([bad, 1.0, 0.0], np.float32), allowed)


def test_no_bias_that_a_caller_may_give_excludes_a_token() -> None:
    only = TokenSampler(SamplingParams(logit_bias=((2, -100.0), (2, -100.0))), [0])
    assert only.sample(np.array([5.0, 1.0, 0.0], np.float32), np.array([False, False, True])).id == 2
