"""A mixture of experts against a naive reference; its files, its routes, and routes that are given to it."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standins.teacher_forcing import line_logprobs, log_softmax
from standins.tiny import llama as tiny
from standins.tiny.llama import LAYERS, write_tiny_folder
from standins.tiny.mixture import (
    EXPERTS,
    TOP_K,
    mixture_tensors,
    write_mixture_folder,
    write_mixture_gguf,
)
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.model.files import load_model_files

IDS = [1, 17, 240, 3, 99, 99, 310, 42, 7, 2, 1, 55]
ROWS = 512


def naive(ids: list[int], *, normalizes: bool) -> tuple[np.ndarray, np.ndarray]:
    """Logits [T, V] and routes [T, layers, top_k], in float64, of the whole line at once: no cache, no batch."""
    tensors = {name: tensor.astype(float) for name, tensor in mixture_tensors().items()}
    positions, half = np.arange(len(ids)), tiny.HEAD_DIM // 2
    angles = positions[:, None] * tiny.ROPE_THETA ** (-np.arange(half) / half)
    routes = np.zeros((len(ids), LAYERS, TOP_K), int)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + tiny.RMS_EPS) * weight

    def rotated(heads: np.ndarray) -> np.ndarray:  # [T, H, D]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = heads[..., :half], heads[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    states = tensors["model.embed_tokens.weight"][ids]
    for index in range(LAYERS):
        weight = {n.split(f"layers.{index}.")[1][:-7]: t for n, t in tensors.items() if f"layers.{index}." in n}
        x = norm(states, weight["input_layernorm"])
        heads = {name: (x @ weight[f"self_attn.{name}_proj"].T).reshape(len(ids), -1, tiny.HEAD_DIM) for name in "qkv"}
        queries = rotated(norm(heads["q"], weight["self_attn.q_norm"]))
        keys = rotated(norm(heads["k"], weight["self_attn.k_norm"]))
        mixed = np.zeros((len(ids), tiny.HEADS, tiny.HEAD_DIM))
        for at in range(len(ids)):
            for head in range(tiny.HEADS):
                group = head // (tiny.HEADS // tiny.KV_HEADS)
                scores = keys[: at + 1, group] @ queries[at, head] / math.sqrt(tiny.HEAD_DIM)
                shares = np.exp(scores - scores.max())
                mixed[at, head] = shares @ heads["v"][: at + 1, group] / shares.sum()
        states = states + mixed.reshape(len(ids), -1) @ weight["self_attn.o_proj"].T
        for at, state in enumerate(norm(states, weight["post_attention_layernorm"])):
            logits = weight["mlp.gate"] @ state
            probs = np.exp(logits) / np.exp(logits).sum()
            best = sorted(range(EXPERTS), key=lambda expert: -probs[expert])[:TOP_K]
            routes[at, index] = best
            total = probs[best].sum() if normalizes else 1.0
            for expert in best:
                gate, up, down = (weight[f"mlp.experts.{expert}.{role}_proj"] for role in ("gate", "up", "down"))
                g = gate @ state
                states[at] = states[at] + probs[expert] / total * (down @ (g / (1 + np.exp(-g)) * (up @ state)))
    return norm(states, tensors["model.norm.weight"]) @ tensors["model.embed_tokens.weight"].T, routes


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture_folder(tmp_path_factory.mktemp("mixture") / "model")


@pytest.fixture(scope="module")
def forward(mixture: Path) -> NumpyForward:
    return NumpyForward(*load_weights(mixture), num_kv_tokens=ROWS)


def computed(
    forward: NumpyForward, ids: list[int], routes: np.ndarray | None = None, begin: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    span = RowSpan(begin, begin + len(ids))
    given = None if routes is None else routes.astype(np.intc)
    segment = Segment(ids=np.array(ids, np.intc), start=0, spans=(span,), logits_for=LogitsFor.ALL, routes=given)
    logits = forward.forward([segment])
    found = forward.routes([span])
    assert found is not None
    return logits, found


@pytest.mark.parametrize("normalizes", [True, False])
def test_the_mixture_equals_the_naive_reference(normalizes: bool, tmp_path: Path) -> None:
    folder = write_mixture_folder(tmp_path / "model", normalizes=normalizes)
    forward = NumpyForward(*load_weights(folder), num_kv_tokens=ROWS)
    logits, routes = computed(forward, IDS)
    expected, best = naive(IDS, normalizes=normalizes)
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    np.testing.assert_array_equal(routes, best)
    assert routes.dtype == np.uint8


def test_gguf_and_safetensors_of_the_same_mixture_give_the_same_logits(forward: NumpyForward, tmp_path: Path) -> None:
    path = write_mixture_gguf(tmp_path / "mixture.gguf")
    whole = NumpyForward(*load_weights(path), num_kv_tokens=ROWS)
    for got, expected in zip(computed(whole, IDS), computed(forward, IDS), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert load_model_files(path).moe_shape == (LAYERS, TOP_K)


def test_both_layouts_say_how_many_layers_and_experts_a_token_has(mixture: Path, tmp_path: Path) -> None:
    assert load_model_files(mixture).moe_shape == (LAYERS, TOP_K)
    assert load_model_files(write_tiny_folder(tmp_path / "dense")).moe_shape is None


@settings(deadline=None)
@given(cuts=st.sets(st.integers(1, len(IDS) - 1)), begin=st.integers(0, 9))
def test_chunks_and_copies_have_the_routes_of_the_whole_line(forward: NumpyForward, cuts: set[int], begin: int) -> None:
    logits, routes = computed(forward, IDS)
    steps, last = [0, *sorted(cuts), len(IDS)], np.zeros(0)
    for start, end in itertools.pairwise(steps):
        ids = np.array(IDS[start:end], np.intc)
        last = forward.forward([Segment(ids=ids, start=start, spans=(RowSpan(begin, begin + end),))])
    np.testing.assert_allclose(last[0], logits[-1], atol=1e-4)
    forward.copy_kv(begin, 100, len(IDS))
    spans = [RowSpan(begin, begin + 5), RowSpan(105, 100 + len(IDS))]
    np.testing.assert_array_equal(forward.routes(spans), routes)


def test_its_own_routes_given_to_it_change_nothing_and_others_do(forward: NumpyForward) -> None:
    logits, routes = computed(forward, IDS)
    again, replayed = computed(forward, IDS, routes)
    np.testing.assert_array_equal(again, logits)
    np.testing.assert_array_equal(replayed, routes)
    others = (routes.astype(int) + 1) % EXPERTS
    moved, taken = computed(forward, IDS, others)
    assert abs(moved - logits).max() > 0.1
    np.testing.assert_array_equal(taken, others)
    free = others.copy()
    free[:, :, 0] = -1
    np.testing.assert_array_equal(computed(forward, IDS, free)[0], logits)


def test_scores_are_under_the_routes_that_are_given(forward: NumpyForward) -> None:
    ids = [*IDS * 14]
    others = np.random.default_rng(3).permuted(np.tile(np.arange(EXPERTS), (len(ids), LAYERS, 1)), axis=-1)[..., :TOP_K]
    logits, _ = computed(forward, ids, others)
    expected = [log_softmax(row.astype(float))[id_] for row, id_ in zip(logits[3:], ids[4:], strict=False)]
    np.testing.assert_allclose(line_logprobs(forward, ids, 4, routes=others[:-1]), expected, atol=1e-4)
    assert abs(np.array(line_logprobs(forward, ids, 4)) - expected).max() > 0.1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda routes: routes[:-1], "routes have the shape"),
        (lambda routes: routes[:, :, :1], "routes have the shape"),
        (lambda routes: routes + EXPERTS, "experts must be from 0 to 7"),
        (lambda routes: routes * 0, "to one expert twice"),
    ],
)
def test_routes_that_are_none_are_refused(
    forward: NumpyForward, change: Callable[[np.ndarray], np.ndarray], words: str
) -> None:
    routes = computed(forward, IDS)[1].astype(np.intc)
    with pytest.raises(ValueError, match=words):
        computed(forward, IDS, change(routes))


def test_a_dense_model_has_no_routes_and_takes_none(folder: Path) -> None:
    dense = NumpyForward(*load_weights(folder), num_kv_tokens=ROWS)
    assert dense.routes([RowSpan(0, 4)]) is None
    with pytest.raises(ValueError, match="has no experts"):
        computed(dense, IDS, np.zeros((len(IDS), LAYERS, TOP_K)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_only_layers": [1]}, "some of its layers have no experts"),
        ({"decoder_sparse_step": 2}, "some of its layers have no experts"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"num_experts_per_tok": 9}, "cannot go to 9 of 8 experts"),
        ({"num_experts": 9}, "experts.8.gate_proj.weight is missing"),
        ({"num_experts": None}, "num_experts must be"),
        ({"moe_intermediate_size": 25}, "gate_proj.weight has shape"),
    ],
)
def test_a_folder_that_is_no_mixture_is_one_line(changes: dict[str, object], words: str, mixture: Path) -> None:
    folder = write_mixture_folder(mixture.parent / "-".join(f"{name}{value}" for name, value in changes.items()))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(StartupError, match=words) as caught:
        load_weights(folder)
    assert "\n" not in str(caught.value)
