"""An engine's word is not trusted: every law of a chunk stream, broken once."""

from array import array

import pytest

from stenograph.core.errors import UpstreamInvalid
from stenograph.core.types import Chunk, Finish, FinishReason, SampledTurn, WeightSpan, token_ids
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), True, None, 1, "0"])
def test_a_logprob_that_is_no_finite_number_is_refused(bad: object) -> None:
    with pytest.raises(UpstreamInvalid, match="logprob_is_finite"):
        collect(chunk(1, logprob=bad))


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


def test_weights_that_are_told_in_the_end_are_the_turns() -> None:
    told = (WeightSpan(version="a", start=0, end=1), WeightSpan(version="b", start=1, end=3))
    last = Chunk(ids=(3,), logprobs=(-1.0,), finish=STOP, weights=told)
    assert collect(chunk(1), chunk(2), last).result().weights == told


@pytest.mark.parametrize("spans", [[(0, 3)], [(0, 2), (1, 2)], [(1, 1)], [(-1, 1)]])
def test_weight_spans_that_do_not_ascend_within_the_ids_are_refused(spans: list[tuple[int, int]]) -> None:
    told = tuple(WeightSpan(version="a", start=start, end=end) for start, end in spans)
    with pytest.raises(UpstreamInvalid, match="weight_spans"):
        collect(chunk(1), Chunk(ids=(2,), logprobs=(-1.0,), finish=STOP, weights=told)).result()
