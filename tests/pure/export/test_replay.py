"""Routed experts and indexer ids: each row from the turn that its next token belongs to, whatever was cut, trimmed or
forked; refused where they do not fit."""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.errors import SamplesInconsistent
from stenograph.core.json_pieces import json_pieces
from stenograph.core.kinds import Compat
from stenograph.core.types import FinishReason
from stenograph.export.replay import ReplayShape
from stenograph.export.samples import Sample, make_samples, to_json
from stenograph.trajectory.commits import SessionOptions
from stenograph.trajectory.strand_facts import SessionFacts
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
    experts, indexer = rows_text(5, 6, from_=100), rows_text(5, 4, from_=1000)
    session.add(root, [91, 3], [(11, -1.0)], trimmed=1, experts=experts, indexer=indexer)
    return session


def rows_text(num_rows: int, width: int, *, from_: int) -> str:
    """The base64 of rows of the values from `from_` on."""
    return base64.b64encode(np.arange(from_, from_ + num_rows * width, dtype="<i4").tobytes()).decode()


def test_a_lines_rows_are_of_the_turn_that_their_next_token_belongs_to(
    new_session: NewSession, replay_text: ReplayText
) -> None:
    (sample,) = samples_of(trimmed_line(new_session, replay_text))
    assert sample.tokens.tolist() == [1, 2, 10, 91, 3, 11]
    assert sample.routed_experts is not None
    assert sample.routed_experts.dtype == np.uint8
    first, second = np.arange(30).reshape(5, 3, 2), np.arange(100, 130).reshape(5, 3, 2)
    # 10 was fed only by the second turn as the line has it: in the first, 90 came after it.
    assert sample.routed_experts.tolist() == [*first[:2].tolist(), *second[2:].tolist()]
    assert sample.indexer_topk is not None
    assert sample.indexer_topk.dtype == np.uint16
    first, second = np.arange(20).reshape(5, 4), np.arange(1000, 1020).reshape(5, 4)
    assert sample.indexer_topk.tolist() == [*first[:2].tolist(), *second[2:].tolist()]
    body = json.loads(b"".join(json_pieces(to_json(sample))))
    assert body["rollout_routed_experts"] == sample.routed_experts.tolist()
    assert body["rollout_indexer_topk"] == sample.indexer_topk.tolist()


class ModelEngine:
    """An engine whose rows say which turn's forward passes they are of, under which weights, and of which position.

    It reports the rows from `first` on: what it was asked for, or all.
    """

    def __init__(self, session: Any) -> None:
        self.session = session
        self.owners: dict[int, list[int]] = {}
        self.versions: list[int] = []

    def row(self, turn: int, position: int) -> list[int]:
        return [turn, self.versions[turn], position]

    def turn(self, parent: Any | None, *, prompt: int, sampled: int, trimmed: int, version: int, is_full: bool) -> Any:
        """Commit a turn: `prompt` new ids after the parent's, less `trimmed`, and `sampled` ones."""
        number = len(self.session.nodes)
        self.versions.append(version)
        kept = [] if parent is None else self.owners[parent.id][: parent.num_tokens - trimmed]
        self.owners[number] = [*kept, *[number] * (prompt + sampled)]
        first = 0 if is_full else max(0, len(kept) - 1)
        rows = [self.row(number, position) for position in range(first, len(self.owners[number]) - 1)]
        text = base64.b64encode(np.array(rows, "<i4").tobytes()).decode()
        full = [self.row(number, position) for position in range(len(self.owners[number]) - 1)]
        return self.session.add(
            parent,
            [1] * prompt,
            [(2, -1.0)] * sampled,
            trimmed=trimmed,
            experts=text,
            indexer=base64.b64encode(np.array(full, "<i4").tobytes()).decode(),
            first_row=first,
        )


@st.composite
def sessions(draw: st.DrawFn) -> list[tuple[int | None, int, int, int, int, bool]]:
    """Turns as (parent, prompt, sampled, trimmed, version, is_full): lines, forks and retries."""
    turns: list[tuple[int | None, int, int, int, int, bool]] = []
    for number in range(draw(st.integers(1, 7))):
        parent = draw(st.none() | st.integers(max(0, number - 3), number - 1)) if number else None
        most_trimmed = 0 if parent is None else min(1, turns[parent][2])
        turns.append(
            (
                parent,
                draw(st.integers(1 if parent is None else 0, 4)),
                draw(st.integers(0, 4)),
                draw(st.integers(0, most_trimmed)),
                draw(st.integers(0, 300)),
                draw(st.booleans()),
            )
        )
    return turns


@given(sessions(), st.none() | st.integers(1, 30))
def test_each_row_is_of_the_turn_and_the_weights_that_sampled_its_next_token(
    new_session: NewSession, turns: list[tuple[int | None, int, int, int, int, bool]], max_seq_len: int | None
) -> None:
    engine = ModelEngine(new_session())
    nodes: list[Any] = []
    for parent, prompt, sampled, trimmed, version, is_full in turns:
        node = None if parent is None else nodes[parent]
        made = engine.turn(node, prompt=prompt, sampled=sampled, trimmed=trimmed, version=version, is_full=is_full)
        nodes.append(made)
    shape = ReplayShape(layers=1, top_k=3)
    for sample in samples_of(engine.session, max_seq_len=max_seq_len, shape=shape):
        leaf = sample.metadata["leaf"]["node_id"]  # type: ignore[call-overload,index]
        owners = engine.owners[leaf][: len(sample.tokens)]
        assert len(owners) == len(sample.tokens)
        expected = [engine.row(owner, position) for position, owner in enumerate(owners[1:])]
        for rows in (sample.routed_experts, sample.indexer_topk):
            assert rows is not None
            assert [row.ravel().tolist() for row in rows] == expected
            widest = max((value for row in expected for value in row), default=0)
            assert rows.dtype == (np.uint8 if widest < 256 else np.uint16)


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(255, np.uint8), (256, np.uint16), (65_535, np.uint16), (65_536, np.uint32), (2**31 - 1, np.uint32)],
)
@pytest.mark.parametrize("smallest", [0, -1])
def test_rows_have_the_smallest_unsigned_type_and_int32_for_miles_or_below_zero(
    new_session: NewSession, largest: int, dtype: type, smallest: int
) -> None:
    session = new_session()
    text = base64.b64encode(np.array([smallest, largest], "<i4").tobytes()).decode()
    session.add(None, [1, 2], ONE, experts=text, indexer=text)
    for compat in (None, Compat.MILES):
        facts = SessionFacts(options=SessionOptions(compat=compat), strands=())
        made = make_samples(
            session.nodes, decode=lambda ids: "", max_trim_tokens=1, replay_shape=ReplayShape(layers=1, top_k=1),
            session=facts,
        )  # fmt: skip
        expected = np.int32 if compat or smallest < 0 else dtype
        for rows in (made.samples[0].routed_experts, made.samples[0].indexer_topk):
            assert rows is not None
            assert (rows.dtype, rows.ravel().tolist()) == (expected, [smallest, largest])


@pytest.mark.parametrize("num", [49_151, 49_152, 49_153, 200_000])
def test_experts_of_any_length_are_decoded_whole(new_session: NewSession, replay_text: ReplayText, num: int) -> None:
    session = new_session()
    session.add(None, range(num), ONE, experts=replay_text(num))
    (sample,) = samples_of(session, shape=ReplayShape(layers=1, top_k=1))
    assert sample.routed_experts is not None
    assert np.array_equal(sample.routed_experts.ravel(), np.arange(num))


@pytest.mark.parametrize("max_seq_len", [None, 4])
def test_the_rows_of_one_turn_are_the_bytes_that_it_keeps(
    new_session: NewSession, replay_text: ReplayText, max_seq_len: int | None
) -> None:
    session = new_session()
    node = session.add(None, [1, 2], [(10, -1.0), (11, -1.0), (12, -1.0)], experts=replay_text(4 * 6))
    (sample,) = samples_of(session, max_seq_len=max_seq_len)
    kept = node.turn.sampled.replay.routed_experts
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == (max_seq_len or 5) - 1
    assert np.shares_memory(sample.routed_experts, np.frombuffer(kept.data, np.uint8))


@pytest.mark.parametrize(("max_seq_len", "num_tokens"), [(6, 6), (5, 3), (4, 3), (3, 3)])
def test_a_cut_sample_has_a_row_for_each_token_but_its_last(
    new_session: NewSession, replay_text: ReplayText, max_seq_len: int, num_tokens: int
) -> None:
    (sample,) = samples_of(trimmed_line(new_session, replay_text), max_seq_len=max_seq_len)
    assert len(sample.tokens) == num_tokens
    assert sample.routed_experts is not None
    assert sample.routed_experts.shape == (num_tokens - 1, 3, 2)
    second = range(100 + 2 * 6, 100 + 5 * 6)
    assert sample.routed_experts.ravel().tolist() == [*range(2 * 6), *second][: (num_tokens - 1) * 6]
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


def test_rows_that_were_not_asked_for_do_not_stand_for_those_that_are_missing(
    new_session: NewSession, replay_text: ReplayText
) -> None:
    session = new_session()
    root = session.add(None, [1, 2], ONE, experts=replay_text(12))
    session.add(root, [3, 4], ONE, experts=replay_text(2 * 6), first_row=3)
    message = r"\(node 1\): its routed experts begin with token 3, but the line needs those of 2 too"
    with pytest.raises(SamplesInconsistent, match=message):
        samples_of(session)
    session = new_session()
    root = session.add(None, [1, 2], ONE, experts=replay_text(12))
    session.add(root, [3, 4], ONE, experts=replay_text(4 * 6), first_row=2)
    with pytest.raises(SamplesInconsistent, match=r"have 24 values, but 5 tokens .* make 30, and from token 2 on 18"):
        samples_of(session)


def test_indexer_rows_of_another_length_are_refused(new_session: NewSession, replay_text: ReplayText) -> None:
    session = new_session()
    root = session.add(None, [1, 2], ONE, indexer=replay_text(2 * 4))
    session.add(root, [3], ONE, indexer=replay_text(4 * 5))
    with pytest.raises(SamplesInconsistent, match=r"it has 5 indexer top-k ids for a token, .* before it 4"):
        samples_of(session)


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
