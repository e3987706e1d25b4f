"""A teacher-forced pass in parts, and its alternatives."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import EngineUnavailable, UpstreamInvalid
from stenograph.core.types import RequestId, TopLogprob, token_ids
from stenograph.engine.scoring import MAX_TOP, Alternatives, ScoreRequest, Scores


def rows_of(part: ScoreRequest) -> list[tuple[TopLogprob, ...]]:
    places = range(part.start, len(part.ids))
    return [tuple(TopLogprob(id=at, logprob=-1.0 - rank) for rank in range(part.num_top)) for at in places]


def answer(part: ScoreRequest, version: str = "v1") -> Scores:
    logprobs = [-float(at) for at in range(part.start, len(part.ids))]
    return part.answered_in_rows(logprobs, rows_of(part) if part.num_top else None, version=version)


@given(num=st.integers(2, 80_000), data=st.data(), num_top=st.sampled_from([0, 1, MAX_TOP]))
def test_the_parts_of_a_pass_give_together_what_it_would(num: int, data: st.DataObject, num_top: int) -> None:
    start = data.draw(st.integers(max(1, num - 4000 if num_top else 1), num - 1))
    whole = ScoreRequest(request_id=RequestId("r"), ids=token_ids(range(num)), start=start, num_top=num_top)
    parts = whole.parts()
    assert parts[0].start == start
    assert parts[-1].ids == whole.ids
    assert all(one.start == len(before.ids) for before, one in pairwise(parts))
    assert all(part.num_scored * (1 + num_top) <= 2**15 for part in parts)
    assert whole.joined([answer(part) for part in parts]) == answer(whole)


def test_parts_by_other_weights_are_no_result() -> None:
    whole = ScoreRequest(request_id=RequestId("r"), ids=token_ids(range(4000)), start=1, num_top=MAX_TOP)
    first, *others = whole.parts()
    with pytest.raises(EngineUnavailable):
        whole.joined([answer(first), *(answer(part, "v2") for part in others)])


def test_a_row_with_too_few_alternatives_breaks_a_law() -> None:
    with pytest.raises(UpstreamInvalid, match="has_logprobs"):
        Alternatives().add([(1, -0.5)], 2)
    request = ScoreRequest(request_id=RequestId("r"), ids=token_ids([1, 2, 3]), start=1, num_top=1)
    with pytest.raises(UpstreamInvalid, match="has_logprobs"):
        request.answered(array("d", [-1.0, -1.0]))
