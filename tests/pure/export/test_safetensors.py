"""Samples through safetensors: exact, and readable by a client that refuses what it does not know."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.json_pieces import json_pieces
from stenograph.core.types import FinishReason
from stenograph.export.replay import ReplayShape
from stenograph.export.safetensors import META, to_safetensors
from stenograph.export.samples import make_samples, to_json

NewSession = Callable[[], Any]

PER_TOKEN = {"tokens": "<i8", "loss_mask": "|u1", "rollout_log_probs": "<f8"}
REPLAY = ("rollout_routed_experts", "rollout_indexer_topk")
IN_JSON = ("response", "response_length", "status", "weight_versions", "spec_info", "prefix_cache_info", "metadata")


def read(pieces: Iterable[bytes]) -> dict[str, Any]:
    """What a client of the miles session server reads: by name, each field there or in `nulls`, nothing left over."""
    payload = b"".join(pieces)
    tensors = safetensors.numpy.load(payload)
    assert payload == safetensors.numpy.save(tensors)  # byte for byte what the library writes
    meta: dict[str, Any] = json.loads(tensors.pop(META).tobytes())
    for index, sample in enumerate(meta["samples"]):
        assert set(IN_JSON) < set(sample)
        assert all(type(version) is str for version in sample["weight_versions"])  # one for each call
        assert sample["reward"] is None
        assert set(sample["nulls"]) <= set(REPLAY)
        for name in (*PER_TOKEN, *REPLAY):
            values = None if name in sample["nulls"] else tensors.pop(f"{name}.{index}")
            assert values is None or values.dtype in ([PER_TOKEN[name]] if name in PER_TOKEN else ["u1", "<u2", "<u4"])
            sample[name] = None if values is None else values.tolist()
    assert not tensors
    return meta


DRAWN = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(min_value=-50, max_value=0)), min_size=1, max_size=8)
LINE = st.lists(st.tuples(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6), DRAWN), min_size=1, max_size=4)


@given(st.lists(LINE, max_size=3))
def test_a_sample_says_the_same_in_safetensors_as_in_json(new_session: NewSession, lines: list[Any]) -> None:
    session = new_session()
    for line in lines:
        parent = None
        for prompt, drawn in line:
            parent = session.add(parent, prompt, drawn, versions=[("v", 0, len(drawn))])
    made = make_samples(session.nodes, decode=lambda ids: f"☃ {len(ids)}", max_trim_tokens=0, metadata={"s": "☃"})
    payload = to_safetensors(made.samples, session_metadata={"s": "☃"}, empty_reason=made.empty_reason)
    meta = read(payload)
    assert (meta["session_metadata"], meta["empty_reason"]) == ({"s": "☃"}, None if lines else "no_records")
    assert len(meta["samples"]) == len(made.samples)
    for got, sample in zip(meta["samples"], made.samples, strict=True):
        expected = json.loads(b"".join(json_pieces(to_json(sample))))
        assert {name: got[name] for name in expected} == expected
        assert got["nulls"] == list(REPLAY)


def test_replay_tensors_keep_their_shape_after_a_cut(
    new_session: NewSession, replay_text: Callable[[int], str]
) -> None:
    session = new_session()
    session.add(None, [1, 2], [(10, -1.0), (11, -1.0)], experts=replay_text(3 * 4), indexer=replay_text(3 * 5))
    session.add(None, [3], [(12, -1.0)], experts=replay_text(4))
    shape = ReplayShape(layers=2, top_k=2)
    made = make_samples(session.nodes, decode=lambda ids: "", max_trim_tokens=0, max_seq_len=3, replay_shape=shape)
    payload = to_safetensors(made.samples, session_metadata={}, empty_reason=None)
    first, second = read(payload)["samples"]
    assert first["rollout_routed_experts"] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert first["rollout_indexer_topk"] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (first["nulls"], second["nulls"]) == ([], ["rollout_indexer_topk"])
    assert second["rollout_routed_experts"] == [[[0, 1], [2, 3]]]


@pytest.mark.parametrize("prompt", [[1], [1, 2]])
def test_a_sample_without_a_response_has_empty_tensors(new_session: NewSession, prompt: list[int]) -> None:
    session = new_session()
    session.add(None, prompt, [], reason=FinishReason.ABORT)
    made = make_samples(session.nodes, decode=lambda ids: "", max_trim_tokens=0)
    (sample,) = read(to_safetensors(made.samples, session_metadata={}, empty_reason=None))["samples"]
    assert (sample["tokens"], sample["loss_mask"], sample["rollout_log_probs"]) == (prompt, [], [])
    assert sample["status"] == "aborted"


def test_no_piece_of_a_long_sample_holds_more_than_a_millisecond_of_copying(
    new_session: NewSession, replay_text: Callable[[int], str]
) -> None:
    session = new_session()
    root = session.add(None, range(50_000), [(7, -0.5)] * 50_000, sampling=[-0.5] * 50_000, experts=replay_text(99_999))
    session.add(root, range(50_000), [(7, -0.5)] * 10, sampling=[-0.5] * 10, experts=replay_text(150_009))
    shape = ReplayShape(layers=1, top_k=1)
    made = make_samples(session.nodes, decode=lambda ids: "é" * len(ids), max_trim_tokens=0, replay_shape=shape)
    pieces = list(to_safetensors(made.samples, session_metadata={}, empty_reason=None))
    read(pieces)
    assert max(map(len, pieces)) < 2**19
