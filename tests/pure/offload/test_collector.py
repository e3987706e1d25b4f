"""An engine's word is not trusted: every law of a chunk stream, broken once."""

import math
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.types import (
    Chunk,
    Finish,
    FinishReason,
    SampledTurn,
    TopLogprob,
    WeightSpan,
    all_finite,
    token_ids,
)
from stenograph.engine.validate import TurnCollector

STOP = Finish(reason=FinishReason.STOP)


def collect(*chunks: Chunk, max_tokens: int | None = None) -> TurnCollector:
    collector = TurnCollector(vocab_size=10, max_tokens=max_tokens)
    for chunk in chunks:
        collector.add(chunk)
    return collector


def chunk(*ids: object, logprob: object = -1.0, finish: Finish | None = None, version: str | None = None) -> Chunk:
    return Chunk(ids=ids, logprobs=(logprob,) * len(ids), finish=finish, weight_version=version)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad_id", [-1, 10, True, 1.0, "1", None])
def test_an_id_that_is_no_token_is_refused(bad_id: object) -> None:
    with pytest.raises(UpstreamInvalid, match="id_in_vocab"):
        collect(chunk(bad_id))


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ({"logprobs": (-1.0,)}, "logprobs"),
        ({"logprobs": array("d", [-1.0] * 3)}, "logprobs"),
        ({"tempered_logprobs": (-1.0,)}, "tempered logprobs"),
        ({"sampling_logprobs": ()}, "sampling logprobs"),
        ({"top_logprobs": ((),)}, "rows of top logprobs"),
        ({"forced": (True,)}, "marks of forced ids"),
    ],
)
def test_a_row_of_another_length_than_the_ids_is_refused(rows: dict[str, Any], what: str) -> None:
    bad = Chunk(**{"ids": (1, 2), "logprobs": (-1.0, -1.0), "finish": STOP, **rows})
    with pytest.raises(UpstreamInvalid, match=f"lengths: 2 ids but [013] {what}"):
        collect(bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), True, None, 1, "0"])
def test_a_logprob_that_is_no_finite_number_is_refused(bad: object) -> None:
    with pytest.raises(UpstreamInvalid, match="logprob_is_finite"):
        collect(chunk(1, logprob=bad))


@pytest.mark.parametrize("form", [tuple, lambda values: array("d", values)], ids=["tuple", "array"])
@pytest.mark.parametrize("field", ["logprobs", "sampling_logprobs", "top_logprobs"])
@pytest.mark.parametrize(("told", "taken"), [(1e-4, 0.0), (1e-9, 0.0), (0.0, 0.0), (-0.0, 0.0), (-1e-9, -1e-9)])
def test_a_logprob_that_is_rounded_to_above_0_is_taken_as_0(
    form: Callable[[Any], Any], field: str, told: float, taken: float
) -> None:
    collector = TurnCollector(vocab_size=10, max_tokens=None)
    sent = chunk_with(form, field, told)
    got = collector.add(sent)
    turn = collector.result()
    assert _values(getattr(got, field)) == _values(getattr(turn, field)) == [-1.0, taken, -2.0]
    assert (got is sent) == (told <= 0)


@pytest.mark.parametrize("form", [tuple, lambda values: array("d", values)], ids=["tuple", "array"])
@pytest.mark.parametrize("field", ["logprobs", "sampling_logprobs", "top_logprobs"])
@pytest.mark.parametrize(
    ("lie", "law"),
    [
        *[(lie, "logprob_not_positive") for lie in (1.1e-4, 0.5, 1e300)],
        *[(lie, "logprob_is_finite") for lie in (float("nan"), float("inf"), -float("inf"))],
    ],
)
def test_a_logprob_above_0_is_refused_wherever_it_stands(
    form: Callable[[Any], Any], field: str, lie: float, law: str
) -> None:
    collector = TurnCollector(vocab_size=10, max_tokens=None)
    with pytest.raises(UpstreamInvalid) as caught:
        collector.add(chunk_with(form, field, lie))
    assert caught.value.law == law
    assert collector.add(chunk(1, finish=STOP)).finish == STOP, "nothing of the bad chunk was kept"


@given(st.lists(st.floats(), max_size=8), st.booleans())
def test_logprobs_are_kept_refused_or_0(values: list[float], is_array: bool) -> None:
    told = array("d", values) if is_array else tuple(values)
    collector = TurnCollector(vocab_size=10, max_tokens=None)
    is_good = all(math.isfinite(value) and value <= 1e-4 for value in values)
    try:
        collector.add(Chunk(ids=(1,) * len(values), logprobs=told, finish=Finish(reason=FinishReason.ABORT)))
    except UpstreamInvalid:
        assert not is_good
    else:
        assert is_good
        assert list(collector.result().logprobs) == [min(value, 0.0) for value in values]


BOUNDS = [-(2**31), -1, 0, 9, 10, 2**31 - 1]


@given(st.lists(st.sampled_from(BOUNDS) | st.integers(0, 9), max_size=4), st.booleans())
def test_ids_are_kept_or_refused_whether_they_come_as_a_tuple_or_an_array(ids: list[int], is_array: bool) -> None:
    told = Chunk(ids=token_ids(ids) if is_array else tuple(ids), logprobs=(-1.0,) * len(ids))
    bad = [id_ for id_ in ids if not 0 <= id_ < 10]
    if not bad:
        assert collect(told).add(chunk(1)).ids == (1,)
        return
    with pytest.raises(UpstreamInvalid) as caught:
        collect(told)
    expected = f"id_in_vocab: {bad[0]} is not a token id: the vocabulary has 10 ids"
    assert (caught.value.law, str(caught.value)) == ("id_in_vocab", expected)


@given(st.integers(0, 3), st.floats(), st.floats(), st.integers(0, 600))
def test_few_values_and_many_are_finite_if_each_of_them_is(num: int, one: float, other: float, num_more: int) -> None:
    values = [one, other, other][:num]
    assert all_finite(array("d", values + [1e308] * num_more)) == all(map(math.isfinite, values))


def chunk_with(form: Callable[[Any], Any], field: str, value: float) -> Chunk:
    """Three tokens; `value` is the second's logprob, in one of the three places."""
    values, good = [-1.0, value, -2.0], [-1.0] * 3
    top = tuple((TopLogprob(id=1, logprob=one),) for one in (values if field == "top_logprobs" else good))
    return Chunk(
        ids=token_ids((1, 2, 3)),
        logprobs=form(values if field == "logprobs" else good),
        sampling_logprobs=form(values if field == "sampling_logprobs" else good),
        top_logprobs=top,
        finish=STOP,
    )


def _values(told: Any) -> list[float]:
    return [one if isinstance(one, float) else one[0].logprob for one in told]


@pytest.mark.parametrize("lie", [-1, 5, 2**31 + 1, 10**400, 10**4000, -(10**400)])
def test_more_cached_tokens_than_the_prompt_has_are_refused(lie: int) -> None:
    collector = TurnCollector(vocab_size=10, max_tokens=None, num_prompt=4)
    with pytest.raises(UpstreamInvalid) as caught:
        collector.add(Chunk(ids=(1,), logprobs=(-1.0,), num_cached_tokens=lie))
    assert (caught.value.law, len(str(caught.value)) < 200) == ("cached_in_prompt", True)
    whole = Chunk(ids=(1,), logprobs=(-1.0,), num_cached_tokens=4, finish=STOP)
    assert collector.add(whole) is whole


def test_a_generation_without_an_end_is_refused() -> None:
    with pytest.raises(UpstreamInvalid, match="has_finish"):
        collect(chunk(1)).result()


def test_a_chunk_after_the_end_is_refused() -> None:
    with pytest.raises(UpstreamInvalid, match="finish_is_last"):
        collect(chunk(1, finish=STOP), chunk(2))


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(UpstreamInvalid, match="max_tokens"):
        collect(chunk(1, 2), chunk(3), max_tokens=2)


def test_no_tokens_are_valid_only_for_an_aborted_turn() -> None:
    with pytest.raises(UpstreamInvalid, match="has_tokens"):
        collect(chunk(finish=STOP)).result()
    assert len(collect(chunk(finish=Finish(reason=FinishReason.ABORT))).result().ids) == 0


def test_neighbouring_tokens_of_one_weight_version_share_a_span() -> None:
    turn = collect(chunk(1, version="a"), chunk(2, version="a"), chunk(3, version="b", finish=STOP)).result()
    assert turn.weights == (WeightSpan(version="a", start=0, end=2), WeightSpan(version="b", start=2, end=3))


def sampled(**changed: object) -> SampledTurn:
    facts: dict[str, object] = {
        "ids": token_ids([1, 2]),
        "logprobs": array("d", [-1.0, -1.0]),
        "sampling_logprobs": None,
        "top_logprobs": None,
        "finish": STOP,
        "weights": (),
        "num_cached_tokens": 0,
        "times": None,
    }
    return SampledTurn(**{**facts, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize("spans", [[("a", 0, 3)], [("a", 0, 2), ("b", 1, 2)], [("a", 2, 1)], [("a", 1, 1)]])
def test_a_turn_with_weights_for_tokens_that_are_not_there_cannot_be_made(spans: list[tuple[str, int, int]]) -> None:
    with pytest.raises(ValueError, match="within 2 ids"):
        sampled(weights=tuple(WeightSpan(version=v, start=start, end=end) for v, start, end in spans))


def test_a_turn_with_logprobs_of_another_length_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="2 ids but 1 sampling logprobs"):
        sampled(sampling_logprobs=array("d", [-1.0]))
    with pytest.raises(ValueError, match="2 ids but 1 logprobs"):
        sampled(logprobs=array("d", [-1.0]))


def test_weights_reported_in_the_last_chunk_are_the_turns() -> None:
    told = (WeightSpan(version="a", start=0, end=1), WeightSpan(version="b", start=1, end=3))
    last = Chunk(ids=(3,), logprobs=(-1.0,), finish=STOP, weights=told)
    assert collect(chunk(1), chunk(2), last).result().weights == told


@pytest.mark.parametrize("spans", [[(0, 3)], [(0, 2), (1, 2)], [(1, 1)], [(-1, 1)]])
def test_weight_spans_that_do_not_ascend_within_the_ids_are_refused(spans: list[tuple[int, int]]) -> None:
    told = tuple(WeightSpan(version="a", start=start, end=end) for start, end in spans)
    with pytest.raises(UpstreamInvalid, match="weight_spans"):
        collect(chunk(1), Chunk(ids=(2,), logprobs=(-1.0,), finish=STOP, weights=told)).result()
