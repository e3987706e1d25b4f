"""Routed experts and indexer ids: the rows of the line, whatever was cut or trimmed; refused where they do not fit."""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stenograph.core.errors import SamplesInconsistent
from stenograph.core.json_pieces import json_pieces
from stenograph.core.types import FinishReason
from stenograph.export.replay import ReplayShape
from stenograph.export.samples import Sample, make_samples, to_json
from stenograph.trajectory.turn import TurnStatus

NewSession = Callable[[], Any]
ReplayText = Callable[[int], str]
SHAPE = ReplayShape(layers=3, top_k=2)
ONE = [(10, -1.0)]


def samples_of(session: Any, *, max_seq_len: int | None = None, shape: ReplayShape | None = SHAPE) -> list[Sample]:
    made = make_samples(
        session.nodes, decode=lambda ids: "", max_trim_tokens=1, max_seq_len=max_seq_len, replay_shape=shape
    )
    return list(made.samples)


def trimmed_line(new_session: NewSession, replay_text: ReplayText) -> Any:
    """Two turns, ids 1 2 10 91 3 11: the first drew an opener, 90, that the second replaced with 91."""
    session = new_session()
    root = session.add(None, [1, 2], [(10, -1.0), (90, -1.0)], experts=replay_text(3 * 6), indexer=replay_text(3 * 4))
    session.add(root, [91, 3], [(11, -1.0)], trimmed=1, experts=replay_text(5 * 6), indexer=replay_text(5 * 4))
    return session


def test_a_lines_experts_are_its_last_turns(new_session: NewSession, replay_text: ReplayText) -> None:
    (sample,) = samples_of(trimmed_line(new_session, replay_text))
    assert sample.tokens.tolist() == [1, 2, 10, 91, 3, 11]
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.int32
    assert sample.routed_experts.tolist() == np.arange(30).reshape(5, 3, 2).tolist()
    assert sample.indexer_topk is not None
    assert sample.indexer_topk.tolist() == np.arange(20).reshape(5, 4).tolist()
    body = json.loads(b"".join(json_pieces(to_json(sample))))
    assert body["rollout_routed_experts"] == sample.routed_experts.tolist()
    assert body["rollout_indexer_topk"] == sample.indexer_topk.tolist()


@pytest.mark.parametrize("num", [49_151, 49_152, 49_153, 200_000])
def test_experts_of_any_length_are_decoded_whole(new_session: NewSession, replay_text: ReplayText, num: int) -> None:
    session = new_session()
    session.add(None, range(num), ONE, experts=replay_text(num))
    (sample,) = samples_of(session, shape=ReplayShape(layers=1, top_k=1))
    assert sample.routed_experts is not None
    assert np.array_equal(sample.routed_experts.ravel(), np.arange(num))


@pytest.mark.parametrize(("max_seq_len", "num_tokens"), [(6, 6), (5, 3), (4, 3), (3, 3)])
def test_a_cut_sample_has_a_row_for_each_token_but_its_last(
    new_session: NewSession, replay_text: ReplayText, max_seq_len: int, num_tokens: int
) -> None:
    (sample,) = samples_of(trimmed_line(new_session, replay_text), max_seq_len=max_seq_len)
    assert len(sample.tokens) == num_tokens
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (num_tokens - 1, 3, 2)
    assert sample.routed_experts.ravel().tolist() == list(range((num_tokens - 1) * 6))
    assert sample.indexer_topk is not None
    assert sample.indexer_topk.shape == (num_tokens - 1, 4)


def test_without_any_there_is_none_whatever_the_shape(new_session: NewSession) -> None:
    session = new_session()
    session.add(None, [1], ONE)
    for shape in (None, SHAPE):
        (sample,) = samples_of(session, shape=shape)
        assert sample.routed_experts is sample.indexer_topk is None


def test_each_line_of_a_tree_has_its_own(new_session: NewSession, replay_text: ReplayText) -> None:
    session = new_session()
    session.add(None, [1, 2], ONE, experts=replay_text(2 * 6))
    session.add(None, [3], ONE)  # a side request that was not asked for experts
    first, second = samples_of(session)
    assert first.routed_experts is not None
    assert second.routed_experts is None


@pytest.mark.parametrize(
    ("experts", "shape", "message"),
    [
        (lambda text: text(11), SHAPE, r"have 11 values, but 2 tokens in 3 layers with top_k 2 make 12"),
        (lambda text: text(18), SHAPE, r"have 18 values, but 2 tokens in 3 layers with top_k 2 make 12"),
        (lambda text: text(12), None, r"layers and top_k are not known"),
        (lambda text: "AAAA", SHAPE, r"have 3 bytes"),
        (lambda text: "AAA", SHAPE, r"not base64"),
        (lambda text: "é" * 4, SHAPE, r"not base64"),
        (lambda text: text(12)[:-8] + "\n" + text(12)[-8:], SHAPE, r"not base64"),
        (lambda text: base64.b64encode(bytes(196_606)).decode() + text(12), SHAPE, r"not base64: .* after the padding"),
        (lambda text: text(200_000)[:-8] + "é" + text(12)[-7:], SHAPE, r"not base64"),
    ],
)
def test_experts_that_do_not_fit_are_refused_with_the_numbers(
    new_session: NewSession,
    replay_text: ReplayText,
    experts: Callable[[ReplayText], str],
    shape: ReplayShape | None,
    message: str,
) -> None:
    session = new_session()
    session.add(None, [1, 2], ONE, experts=experts(replay_text))
    with pytest.raises(SamplesInconsistent, match=r"Turn 0 of its line \(node 0\): .*" + message):
        samples_of(session, shape=shape)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_line_with_replay_data_in_some_turns_only_is_refused_and_names_the_turn(
    new_session: NewSession, replay_text: ReplayText, silent: int
) -> None:
    session = new_session()
    root = session.add(None, [1, 2], ONE, experts=None if silent == 0 else replay_text(12))
    session.add(root, [3], ONE, experts=None if silent == 1 else replay_text(24))
    with pytest.raises(SamplesInconsistent, match=rf"\(node {silent}\): it has no routed experts"):
        samples_of(session)
    if silent == 1:
        assert len(samples_of(session, max_seq_len=3)) == 1  # the silent turn is not in the sample


def test_a_last_turn_aborted_without_tokens_is_left_off_where_the_others_have_experts(
    new_session: NewSession, replay_text: ReplayText
) -> None:
    session = new_session()
    root = session.add(None, [1, 2], ONE, experts=replay_text(12))
    session.add(root, [3, 4], [], reason=FinishReason.ABORT)
    (sample,) = samples_of(session)
    assert sample.routed_experts is not None
    assert (len(sample.tokens), len(sample.routed_experts), sample.status) == (3, 2, TurnStatus.ABORTED)


@pytest.mark.parametrize("num", [0, 3])
def test_indexer_ids_that_the_rows_do_not_divide_are_refused(
    new_session: NewSession, replay_text: ReplayText, num: int
) -> None:
    session = new_session()
    session.add(None, [1, 2], ONE, experts=replay_text(12), indexer=replay_text(num))
    with pytest.raises(SamplesInconsistent, match=rf"indexer top-k ids have {num} values, which 2 tokens"):
        samples_of(session)


def test_a_single_token_has_no_rows(new_session: NewSession) -> None:
    session = new_session()
    session.add(None, [1], [], experts="", indexer="")
    (sample,) = samples_of(session)
    assert sample.routed_experts is not None
    assert sample.indexer_topk is not None
    assert (sample.routed_experts.shape, sample.indexer_topk.shape) == ((0, 3, 2), (0, 0))


@pytest.mark.parametrize(("layers", "top_k"), [(0, 2), (2, 0), (-1, 2)])
def test_a_shape_without_layers_or_experts_cannot_be_made(layers: int, top_k: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ReplayShape(layers=layers, top_k=top_k)
