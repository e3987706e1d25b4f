"""Samples: every token accounted for, masked and cut at the right place, and exact through safetensors."""

import json
from array import array

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.chat import Message, ParsedReply, Role
from stenograph.core.errors import SamplesInconsistent
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn, WeightSpan, token_ids
from stenograph.export.safetensors import META, to_safetensors
from stenograph.export.samples import Sample, assemble, to_json
from stenograph.session.history import CommittedTurn, PromptContext, TurnStatus

FINITE = st.floats(min_value=-50, max_value=0)
DRAWN = st.lists(st.tuples(st.integers(0, 2**31 - 1), FINITE), min_size=1, max_size=8)


def turn(
    prompt: list[int],
    drawn: list[tuple[int, float]],
    *,
    reason: FinishReason = FinishReason.STOP,
    version: str | None = None,
) -> CommittedTurn:
    logprobs = array("d", [logprob for _, logprob in drawn])
    return CommittedTurn(
        request_id=RequestId("r"),
        new_prompt_ids=token_ids(prompt),
        sampled=SampledTurn(
            ids=token_ids(id_ for id_, _ in drawn),
            logprobs=logprobs,
            sampling_logprobs=logprobs,
            top_logprobs=None,
            finish=Finish(reason=reason),
            weights=() if version is None else (WeightSpan(version=version, start=0, end=len(drawn)),),
            num_cached_tokens=0,
            times=None,
        ),
        status=TurnStatus.of(reason),
        messages=(Message(role=Role.USER, content="x"),),
        reply=ParsedReply(message=Message(role=Role.ASSISTANT, content="y")),
        context=PromptContext(),
    )


LINES = st.lists(
    st.builds(turn, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), DRAWN), min_size=1, max_size=5
)


def sample_of(line: list[CommittedTurn], max_seq_len: int | None = None) -> Sample:
    return assemble(line, decode=lambda ids: f"{len(ids)} ids", max_seq_len=max_seq_len, metadata={"k": 1})


def test_a_worked_example() -> None:
    line = [turn([1, 2, 3], [(10, -0.5), (11, -1.5)], version="a"), turn([4], [(12, -2.5)], version="b")]
    assert to_json(sample_of(line)) == {
        "tokens": [1, 2, 3, 10, 11, 4, 12],
        "response_length": 4,
        "loss_mask": [1, 1, 0, 1],
        "rollout_log_probs": [-0.5, -1.5, 0.0, -2.5],
        "sampling_log_probs": [-0.5, -1.5, 0.0, -2.5],
        "response": "4 ids",
        "status": "completed",
        "weight_versions": [{"version": "a", "start": 3, "end": 5}, {"version": "b", "start": 6, "end": 7}],
        "metadata": {"k": 1},
    }


@pytest.mark.parametrize(
    ("max_seq_len", "tokens", "mask", "status"),
    [
        (7, [1, 2, 3, 10, 11, 4, 12], [1, 1, 0, 1], TurnStatus.COMPLETED),
        (6, [1, 2, 3, 10, 11], [1, 1], TurnStatus.TRUNCATED),  # the second prompt alone is no turn
        (5, [1, 2, 3, 10, 11], [1, 1], TurnStatus.TRUNCATED),
        (4, [1, 2, 3, 10], [1], TurnStatus.TRUNCATED),
    ],
)
def test_max_seq_len_cuts_inside_a_turn_and_drops_the_rest(
    max_seq_len: int, tokens: list[int], mask: list[int], status: TurnStatus
) -> None:
    sample = sample_of([turn([1, 2, 3], [(10, -0.5), (11, -1.5)]), turn([4], [(12, -2.5)])], max_seq_len)
    assert (sample.tokens.tolist(), list(sample.loss_mask), sample.status) == (tokens, mask, status)


def test_a_max_seq_len_without_room_for_one_sampled_token_is_refused_with_the_reason() -> None:
    with pytest.raises(SamplesInconsistent, match="first prompt alone has 3 tokens"):
        sample_of([turn([1, 2, 3], [(10, -0.5)])], 3)


@pytest.mark.parametrize(
    ("reason", "status"),
    [(FinishReason.STOP, "completed"), (FinishReason.LENGTH, "truncated"), (FinishReason.ABORT, "aborted")],
)
def test_the_status_is_the_last_turns(reason: FinishReason, status: str) -> None:
    assert sample_of([turn([1], [(2, -1.0)]), turn([3], [(4, -1.0)], reason=reason)]).status == status


@given(LINES)
def test_every_token_is_there_once_and_the_mask_marks_the_sampled_ones(line: list[CommittedTurn]) -> None:
    sample = sample_of(line)
    expected = [id_ for turn in line for id_ in (*turn.new_prompt_ids, *turn.sampled.ids)]
    assert sample.tokens.tolist() == expected
    start = len(sample.tokens) - sample.response_length
    assert start == len(line[0].new_prompt_ids)
    masked = [id_ for id_, bit in zip(sample.tokens[start:], sample.loss_mask, strict=True) if bit]
    assert masked == [id_ for turn in line for id_ in turn.sampled.ids]
    assert all(bit or not lp for bit, lp in zip(sample.loss_mask, sample.rollout_log_probs, strict=True))


@given(LINES, st.integers(1, 60))
def test_a_shorter_sample_is_the_beginning_of_a_longer_one(line: list[CommittedTurn], max_seq_len: int) -> None:
    if max_seq_len <= len(line[0].new_prompt_ids):
        with pytest.raises(SamplesInconsistent):
            sample_of(line, max_seq_len)
        return
    whole, cut = sample_of(line), sample_of(line, max_seq_len)
    assert len(cut.tokens) <= max_seq_len
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert cut.loss_mask == whole.loss_mask[: len(cut.loss_mask)]
    assert cut.loss_mask[-1] == 1  # a sample never ends in a prompt
    assert (cut.status is TurnStatus.TRUNCATED) == (len(cut.tokens) < len(whole.tokens))


@given(st.lists(LINES, max_size=3))
def test_a_sample_is_exact_through_safetensors(lines: list[list[CommittedTurn]]) -> None:
    samples = [sample_of(line) for line in lines]
    payload = to_safetensors(samples, session_metadata={"s": "☃"}, empty_reason=None)
    tensors = safetensors.numpy.load(payload)
    meta = json.loads(tensors.pop(META).tobytes())
    assert (meta["session_metadata"], meta["empty_reason"], len(meta["samples"])) == ({"s": "☃"}, None, len(samples))
    for index, sample in enumerate(samples):
        assert tensors.pop(f"tokens.{index}").tolist() == sample.tokens.tolist()
        assert tensors.pop(f"loss_mask.{index}").tolist() == list(sample.loss_mask)
        assert tensors.pop(f"rollout_log_probs.{index}").tolist() == sample.rollout_log_probs.tolist()
        assert meta["samples"][index]["response_length"] == sample.response_length
    assert not tensors
