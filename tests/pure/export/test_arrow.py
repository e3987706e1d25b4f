"""The Arrow stream says what the JSON format says, row by row."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest

from stenograph.core.json_pieces import json_pieces
from stenograph.core.kinds import HistoryKind, StrandKind
from stenograph.core.outcome import SessionOutcome
from stenograph.core.types import FinishReason, SamplingParams
from stenograph.export.arrow import to_arrow
from stenograph.export.replay import ReplayShape
from stenograph.export.samples import make_samples, to_json
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.strand_facts import SessionFacts, StrandFacts

NewSession = Callable[[], Any]
ReplayText = Callable[[int], str]


def read(messages: Iterable[memoryview]) -> pa.Table:
    with pa.ipc.open_stream(b"".join(messages)) as reader:
        return reader.read_all()


def test_every_row_equals_the_sample_in_json(new_session: NewSession, replay_text: ReplayText) -> None:
    session = new_session()
    session.add(
        None, [1, 2], [(10, -0.5), (90, -1.5)], sampling=[-0.25, -1.0], versions=[("a", 0, 2)],
        experts=replay_text(3 * 6), indexer=replay_text(3 * 4), params=SamplingParams(temperature=0.5, top_k=2),
    )  # fmt: skip
    session.add(None, [7], [], reason=FinishReason.ABORT)
    made = make_samples(
        session.nodes,
        decode=lambda ids: "é",
        max_trim_tokens=1,
        replay_shape=ReplayShape(layers=3, top_k=2),
        metadata={"k": ["v", 1.0]},
    )
    table = read(to_arrow(made.samples, session_metadata={"m": 1}, empty_reason=None))
    rows = table.to_pylist()
    assert len(rows) == 2
    for row, sample in zip(rows, made.samples, strict=True):
        expected = json.loads(b"".join(json_pieces(to_json(sample))))
        expected.setdefault("logprobs_kind", None)
        for name in ("media", "scores", "token_rewards"):
            expected.setdefault(name, None)
        assert row.pop("supports") == [None] * len(expected["turns"])
        for name in ("metadata", "prefix_cache_info", "turns"):
            assert json.loads(row.pop(name)) == expected.pop(name)
        assert json.loads(row.pop("rewards")) == expected["reward"]
        assert row == expected
    assert {key: json.loads(value) for key, value in table.schema.metadata.items()} == {
        b"session_metadata": {"m": 1},
        b"empty_reason": None,
    }


@pytest.mark.parametrize("reward", [0.5, {"a": 0.5}, None])
def test_a_reward_is_a_number_where_it_is_one_and_json_in_any_case(new_session: NewSession, reward: Any) -> None:
    session = new_session()
    session.add(None, [1], [(10, -0.5)])
    facts = SessionFacts(
        options=SessionOptions(history=HistoryKind.LINEAR),
        strands=[StrandFacts(number=0, kind=StrandKind.MAIN, nodes=session.nodes)],
        outcome=SessionOutcome(reward=reward),
    )
    made = make_samples(session.nodes, decode=lambda ids: "", max_trim_tokens=1, session=facts)
    (row,) = read(to_arrow(made.samples, session_metadata={}, empty_reason=None)).to_pylist()
    assert row["reward"] == (reward if isinstance(reward, float) else None)
    assert (json.loads(row["rewards"]), row["outcome"]) == (reward, "ok")


@pytest.mark.parametrize("reason", ["no_records", "all_truncated"])
def test_no_samples_is_a_table_without_rows_that_says_why(reason: str) -> None:
    table = read(to_arrow([], session_metadata={}, empty_reason=reason))
    assert table.num_rows == 0
    assert json.loads(table.schema.metadata[b"empty_reason"]) == reason
    assert table.schema.field("tokens").type == pa.list_(pa.int64())
