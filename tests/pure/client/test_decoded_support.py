"""The support of a sample as arrays: the ids that the server's writer was given, token by token."""

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.client.errors import BadPayload
from stenograph.client.samples import DecodedSample
from stenograph.core.support import SupportColumns, SupportWriter

VOCAB = 64


@st.composite
def turns_of_support(draw: st.DrawFn) -> tuple[DecodedSample, list[list[int] | None]]:
    """A sample of turns with a support, some without, and what the support of each token after the prompt is."""
    tokens, rows, expected = [1, 2], [], []
    for node_id in range(draw(st.integers(0, 3))):
        added = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)) if tokens[2:] else []
        sampled = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5))
        start = len(tokens) + len(added)
        row: dict[str, Any] = {"node_id": node_id, "prompt_start": len(tokens), "start": start}
        tokens += [*added, *sampled]
        row["end"] = len(tokens)
        expected += [None] * len(added)
        if draw(st.booleans()):
            kept = [draw(st.none() | st.sets(st.integers(0, VOCAB - 1), max_size=VOCAB)) for _ in sampled]
            kept_rows = [None if ids is None else sorted({*ids, id_}) for ids, id_ in zip(kept, sampled, strict=True)]
            row["support"] = base64.b64encode(written(sampled, kept_rows)).decode()
            expected += kept_rows
        else:
            expected += [None] * len(sampled)
        rows.append(row)
    num = len(tokens) - 2
    sample = DecodedSample(
        tokens=np.array(tokens), loss_mask=np.ones(num, np.uint8), log_probs=np.zeros(num), status="completed",
        turns=tuple(rows), metadata={},
    )  # fmt: skip
    return sample, expected


def written(ids: list[int], rows: list[list[int] | None]) -> bytes:
    writer, columns = SupportWriter(VOCAB), SupportColumns(VOCAB)
    for id_, row in zip(ids, rows, strict=True):
        columns.extend(writer.write(id_, None if row is None else np.array(row)), 1)
    return columns.whole()


@given(turns_of_support())
def test_each_token_has_the_ids_that_could_be_sampled(made: tuple[DecodedSample, list[list[int] | None]]) -> None:
    sample, expected = made
    support = sample.support()
    if support is None:
        assert not any("support" in turn for turn in sample.turns)
        return
    assert [None if ids is None else ids.tolist() for ids in map(support.__getitem__, range(len(support)))] == expected
    assert support.vocab_size == VOCAB
    assert (str(support.ids.dtype), str(support.offsets.dtype)) == ("int32", "int64")
    assert support.offsets[-1] == len(support.ids)
    assert support[-1] is None if expected[-1] is None else support[-1].tolist() == expected[-1]  # type: ignore[union-attr]


@given(st.binary(max_size=40))
def test_bytes_that_are_no_support_are_a_bad_payload(junk: bytes) -> None:
    row = {"start": 1, "end": 3, "support": base64.b64encode(junk).decode()}
    sample = DecodedSample(
        tokens=np.array([1, 2, 3]), loss_mask=np.ones(2, np.uint8), log_probs=np.zeros(2), status="completed",
        turns=(row,), metadata={},
    )  # fmt: skip
    with pytest.raises(BadPayload, match="support of the turn at tokens 1 to 3"):
        sample.support()
