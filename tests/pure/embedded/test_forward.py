"""The NumPy forward against one that is written out in loops, and against itself in other batches, spans and files."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from standins.teacher_forcing import CHUNK_TOKENS, line_logprobs, log_softmax
from standins.tiny import llama as tiny
from standins.tiny.llama import tiny_tensors, write_tiny_gguf
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import BLOCK_ROWS, FEW_ROWS, NumpyForward
from stenograph.embedded.forward.weights import load_weights

IDS = [1, 17, 240, 3, 99, 99, 310, 42, 7, 2, 1, 55]
ROWS = 512
"""Of the tests' KV store."""

Placed = list[RowSpan]
"""The spans that hold a sequence's positions, in order."""


def naive_logits(ids: list[int]) -> list[list[float]]:
    """The forward in plain Python floats, one token and one head at a time; no numpy, no cache, no batch."""
    tensors = {name: tensor.astype(float).tolist() for name, tensor in tiny_tensors().items()}

    def product(matrix: list[list[float]], vector: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]

    def norm(vector: list[float], weight: list[float]) -> list[float]:
        scale = math.sqrt(sum(x * x for x in vector) / len(vector) + tiny.RMS_EPS)
        return [x / scale * w for x, w in zip(vector, weight, strict=True)]

    def rotated(head: list[float], position: int) -> list[float]:
        half = len(head) // 2
        angles = [position * tiny.ROPE_THETA ** (-i / half) for i in range(half)]
        first = [head[i] * math.cos(angles[i]) - head[half + i] * math.sin(angles[i]) for i in range(half)]
        second = [head[half + i] * math.cos(angles[i]) + head[i] * math.sin(angles[i]) for i in range(half)]
        return first + second

    def heads(vector: list[float]) -> list[list[float]]:
        return [vector[i : i + tiny.HEAD_DIM] for i in range(0, len(vector), tiny.HEAD_DIM)]

    states = [list(tensors["model.embed_tokens.weight"][id_]) for id_ in ids]
    for index in range(tiny.LAYERS):
        weight = {name.split(f"layers.{index}.")[1]: t for name, t in tensors.items() if f"layers.{index}." in name}
        inputs = [norm(state, weight["input_layernorm.weight"]) for state in states]
        keys = [
            [rotated(head, at) for head in heads(product(weight["self_attn.k_proj.weight"], x))]
            for at, x in enumerate(inputs)
        ]
        values = [heads(product(weight["self_attn.v_proj.weight"], x)) for x in inputs]
        for at, x in enumerate(inputs):
            mixed: list[float] = []
            for number, head in enumerate(heads(product(weight["self_attn.q_proj.weight"], x))):
                query, group = rotated(head, at), number // (tiny.HEADS // tiny.KV_HEADS)
                scores = [
                    sum(q * k for q, k in zip(query, keys[past][group], strict=True)) / math.sqrt(tiny.HEAD_DIM)
                    for past in range(at + 1)
                ]
                powers = [math.exp(score - max(scores)) for score in scores]
                for dim in range(tiny.HEAD_DIM):
                    total = sum(power * values[past][group][dim] for past, power in enumerate(powers))
                    mixed.append(total / sum(powers))
            out = product(weight["self_attn.o_proj.weight"], mixed)
            states[at] = [a + b for a, b in zip(states[at], out, strict=True)]
        for at, state in enumerate(states):
            x = norm(state, weight["post_attention_layernorm.weight"])
            gate = product(weight["mlp.gate_proj.weight"], x)
            up = product(weight["mlp.up_proj.weight"], x)
            active = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            down = product(weight["mlp.down_proj.weight"], active)
            states[at] = [a + b for a, b in zip(state, down, strict=True)]
    final = [norm(state, tensors["model.norm.weight"]) for state in states]
    return [product(tensors["model.embed_tokens.weight"], state) for state in final]


@pytest.fixture(scope="module")
def forward(folder: Path) -> NumpyForward:
    return NumpyForward(*load_weights(folder), num_kv_tokens=ROWS)


def first_rows(placed: Placed, num_tokens: int) -> tuple[RowSpan, ...]:
    """The spans of positions [0, num_tokens)."""
    spans: list[RowSpan] = []
    for span in placed:
        room = min(span.end - span.begin, num_tokens)
        if room:
            spans.append(RowSpan(span.begin, span.begin + room))
        num_tokens -= room
    return tuple(spans)


def segment(ids: Sequence[int], placed: Placed, start: int = 0, logits_for: LogitsFor = LogitsFor.ALL) -> Segment:
    spans = first_rows(placed, start + len(ids))
    return Segment(ids=np.array(ids, np.intc), start=start, spans=spans, logits_for=logits_for)


def all_logits(forward: NumpyForward, ids: Sequence[int], begin: int = 0) -> np.ndarray:
    return forward.forward([segment(ids, [RowSpan(begin, begin + len(ids))])])


@st.composite
def placements(draw: st.DrawFn, nums_tokens: Sequence[int]) -> list[Placed]:
    """Places for sequences of so many tokens: cut anyhow, the pieces in any order, gaps between them."""
    pieces = [
        (number, piece)
        for number, num_tokens in enumerate(nums_tokens)
        for piece in itertools.pairwise([0, *sorted(draw(st.sets(st.integers(1, num_tokens)))), num_tokens])
        if piece[0] < piece[1]
    ]
    placed: list[dict[int, RowSpan]] = [{} for _ in nums_tokens]
    row = 0
    for number, (start, end) in draw(st.permutations(pieces)):
        begin = row + draw(st.integers(1, 3))  # a gap: what lies side by side would be one span
        row = begin + end - start
        placed[number][start] = RowSpan(begin, row)
    return [[spans[start] for start in sorted(spans)] for spans in placed]


def test_the_forward_equals_the_naive_reference(forward: NumpyForward) -> None:
    np.testing.assert_allclose(all_logits(forward, IDS), naive_logits(IDS), atol=2e-4)


def test_gguf_and_safetensors_of_the_same_weights_give_the_same_logits(forward: NumpyForward, tmp_path: Path) -> None:
    whole = NumpyForward(*load_weights(write_tiny_gguf(tmp_path / "whole.gguf")), num_kv_tokens=ROWS)
    np.testing.assert_allclose(all_logits(whole, IDS), all_logits(forward, IDS), atol=1e-5)
    path = write_tiny_gguf(tmp_path / "half.gguf", matrices=GGMLQuantizationType.F16)
    half = NumpyForward(*load_weights(path), num_kv_tokens=ROWS)
    np.testing.assert_allclose(all_logits(half, IDS), all_logits(forward, IDS), atol=0.1)


@settings(deadline=None)
@given(data=st.data())
def test_spans_cut_and_placed_anyhow_give_what_one_span_gives(forward: NumpyForward, data: st.DataObject) -> None:
    (placed,) = data.draw(placements([len(IDS)]))
    np.testing.assert_allclose(forward.forward([segment(IDS, placed)]), all_logits(forward, IDS), atol=2e-5)


@settings(deadline=None)
@given(data=st.data(), cuts=st.sets(st.integers(1, len(IDS) - 1)))
def test_a_chunked_prompt_has_the_logits_of_the_whole_one(
    forward: NumpyForward, data: st.DataObject, cuts: set[int]
) -> None:
    (placed,) = data.draw(placements([len(IDS)]))
    rows = [
        forward.forward([segment(IDS[start:end], placed, start)])
        for start, end in itertools.pairwise([0, *sorted(cuts), len(IDS)])
    ]
    np.testing.assert_allclose(np.concatenate(rows), all_logits(forward, IDS), atol=2e-5)


@settings(deadline=None)
@given(
    data=st.data(),
    prompts=st.lists(st.lists(st.integers(0, tiny.VOCAB - 1), min_size=2, max_size=9), min_size=1, max_size=5),
)
def test_a_sequence_has_the_same_logits_alone_and_in_a_batch(
    forward: NumpyForward, data: st.DataObject, prompts: list[list[int]]
) -> None:
    """Prefills first, then one step in which some decode and others go on with their prompts."""
    wanted = [all_logits(forward, ids) for ids in prompts]
    placed = data.draw(placements([len(ids) for ids in prompts]))
    heads = [data.draw(st.integers(1, len(ids) - 1)) for ids in prompts]
    first = [segment(ids[:head], spans) for ids, spans, head in zip(prompts, placed, heads, strict=True)]
    then = [segment(ids[head:], spans, head) for ids, spans, head in zip(prompts, placed, heads, strict=True)]
    begun = np.concatenate([rows[:head] for rows, head in zip(wanted, heads, strict=True)])
    ended = np.concatenate([rows[head:] for rows, head in zip(wanted, heads, strict=True)])
    np.testing.assert_allclose(forward.forward(first), begun, atol=2e-5)
    np.testing.assert_allclose(forward.forward(then), ended, atol=2e-5)


@pytest.mark.parametrize("num_rows", [2, BLOCK_ROWS, BLOCK_ROWS + 1, FEW_ROWS, FEW_ROWS + 1])
def test_a_product_of_many_rows_equals_the_products_of_each_row(forward: NumpyForward, num_rows: int) -> None:
    ids = [(7 * at) % tiny.VOCAB for at in range(FEW_ROWS + 1)]
    one = [forward.forward([segment([id_], [RowSpan(0, len(ids))], at)]) for at, id_ in enumerate(ids)]
    edges = [*range(0, len(ids), num_rows), len(ids)]
    many = [
        forward.forward([segment(ids[at:end], [RowSpan(100, 100 + len(ids))], at)])
        for at, end in itertools.pairwise(edges)
    ]
    np.testing.assert_allclose(np.concatenate(many), np.concatenate(one), atol=2e-5)


def test_two_sequences_of_a_batch_read_the_same_prefix(forward: NumpyForward) -> None:
    prefix, tails = IDS[:6], [[5, 6], [200, 3, 77]]
    alone = np.concatenate([all_logits(forward, [*prefix, *tail], 100)[len(prefix) :] for tail in tails])
    shared = RowSpan(300, 306)
    forward.forward([segment(prefix, [shared], logits_for=LogitsFor.NONE)])
    batch = [segment(tail, [shared, RowSpan(at, at + len(tail))], 6) for tail, at in zip(tails, (20, 10), strict=True)]
    np.testing.assert_allclose(forward.forward(batch), alone, atol=2e-5)


def test_copied_rows_are_read_as_those_that_they_were_copied_from(forward: NumpyForward) -> None:
    wanted = all_logits(forward, IDS)
    forward.forward([segment(IDS[:8], [RowSpan(40, 48)], logits_for=LogitsFor.NONE)])
    forward.copy_kv(43, 90, 5)
    # The copy alone is read: what it was copied from is overwritten.
    forward.forward([segment([0] * 5, [RowSpan(43, 48)], logits_for=LogitsFor.NONE)])
    placed = [RowSpan(40, 43), RowSpan(90, 95), RowSpan(200, 204)]
    np.testing.assert_allclose(forward.forward([segment(IDS[8:], placed, 8)]), wanted[8:], atol=2e-5)


def test_only_the_logits_that_are_asked_for_come_in_order(forward: NumpyForward) -> None:
    wanted = all_logits(forward, IDS, 400)
    batch = [
        segment(IDS[:5], [RowSpan(0, 5)], logits_for=LogitsFor.LAST),
        segment(IDS, [RowSpan(10, 22)], logits_for=LogitsFor.NONE),
        segment(IDS[:3], [RowSpan(30, 33)], logits_for=LogitsFor.ALL),
    ]
    np.testing.assert_allclose(forward.forward(batch), wanted[[4, 0, 1, 2]], atol=2e-5)
    assert forward.forward(batch[1:2]).shape == (0, tiny.VOCAB)


def test_positions_beyond_the_stores_capacity_take_no_memory(folder: Path, forward: NumpyForward) -> None:
    config, weights = load_weights(folder)
    endless = NumpyForward(replace(config, max_context=2**45), weights, num_kv_tokens=len(IDS))
    np.testing.assert_array_equal(all_logits(endless, IDS), all_logits(forward, IDS))
    with pytest.raises(ValueError, match="the store 12"):
        endless.forward([segment([1], [RowSpan(0, len(IDS)), RowSpan(0, 1)], len(IDS))])


@pytest.mark.parametrize("num_kv_tokens", [2**40, 2**70])
def test_a_store_larger_than_memory_is_refused_with_its_size(folder: Path, num_kv_tokens: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^{num_kv_tokens} tokens of KV are [0-9.]+ GiB, more than the memory available$"
    ):
        NumpyForward(*load_weights(folder), num_kv_tokens=num_kv_tokens)


@pytest.mark.parametrize("num_kv_tokens", [0, -1])
def test_a_store_for_no_tokens_is_refused(folder: Path, num_kv_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        NumpyForward(*load_weights(folder), num_kv_tokens=num_kv_tokens)


def test_an_id_position_or_row_out_of_range_is_refused_before_anything_is_written(forward: NumpyForward) -> None:
    before = all_logits(forward, IDS)
    for id_ in (-1, tiny.VOCAB):
        with pytest.raises(ValueError, match="ids must be from 0 to 319"):
            forward.forward([segment([3, 4], [RowSpan(0, 2)]), segment([5, id_], [RowSpan(2, 4)])])
    with pytest.raises(ValueError, match="the store 512"):
        forward.forward([segment([1, 2], [RowSpan(-1, 1)])])
    with pytest.raises(ValueError, match="at least one segment"):
        forward.forward([])
    with pytest.raises(ValueError, match="the store 512"):
        forward.forward([segment([1, 2], [RowSpan(ROWS - 1, ROWS + 1)])])
    with pytest.raises(ValueError, match="the context has 256"):
        forward.forward([segment([1], [RowSpan(0, 257)], 256)])
    for source, target in ((ROWS - 4, 0), (0, ROWS - 4), (-1, 0)):
        with pytest.raises(ValueError, match="5 rows"):
            forward.copy_kv(source, target, 5)
    again = segment(IDS[-1:], [RowSpan(0, len(IDS))], len(IDS) - 1)
    np.testing.assert_allclose(forward.forward([again])[0], before[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [2, CHUNK_TOKENS, CHUNK_TOKENS + 30])
def test_a_line_is_scored_as_its_whole_logits_say(forward: NumpyForward, num_tokens: int) -> None:
    ids = [(11 * at) % tiny.VOCAB for at in range(num_tokens)]
    rows = [log_softmax(row.astype(np.float64)) for row in all_logits(forward, ids)]
    for num_given in {1, 2, num_tokens - 1, num_tokens} - {0}:
        forced = [rows[at - 1][ids[at]] for at in range(num_given, num_tokens)]
        assert line_logprobs(forward, ids, num_given) == pytest.approx(forced, abs=1e-5)
    with pytest.raises(ValueError, match="first token"):
        line_logprobs(forward, ids, 0)


def test_swapped_weights_compute_as_a_forward_of_their_own(tmp_path: Path) -> None:
    old, new = (load_weights(tiny.write_tiny_folder(tmp_path / str(seed), seed=seed)) for seed in range(2))
    forward = NumpyForward(*old, num_kv_tokens=tiny.CONTEXT)
    ids = np.array([1, 17, 240, 3, 99], np.intc)
    line = Segment(ids=ids, start=0, spans=(RowSpan(0, len(ids)),), logits_for=LogitsFor.ALL)
    before = forward.forward([line])
    replaced = forward.swap(forward.prepare(*new))
    np.testing.assert_array_equal(
        forward.forward([line]), NumpyForward(*new, num_kv_tokens=tiny.CONTEXT).forward([line])
    )
    forward.swap(replaced).free()
    np.testing.assert_array_equal(forward.forward([line]), before)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [({"ffn": 47}, "ffn is 47"), ({"hidden": 64}, "hidden is 64"), ({"max_context": 9}, "shorter")],
)
def test_weights_of_another_shape_are_not_prepared(tmp_path: Path, sizes: dict[str, int], problem: str) -> None:
    config, weights = load_weights(tiny.write_tiny_folder(tmp_path / "tiny"))
    forward = NumpyForward(config, weights, num_kv_tokens=16)
    with pytest.raises(ValueError, match=problem):
        forward.prepare(replace(config, **sizes), weights)
