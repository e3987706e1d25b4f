"""The forward against one that is written out in loops, and against itself in other batches and other files."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.core.errors import StartupError
from stenograph.embedded.kvcache import SequenceKv
from stenograph.embedded.model import LlamaModel, LogitsFor, Segment
from stenograph.embedded.weights import load_weights
from stenograph.testing import tiny_llama as tiny
from stenograph.testing.tiny_llama import tiny_tensors, write_tiny_folder, write_tiny_gguf

IDS = [1, 17, 240, 3, 99, 99, 310, 42, 7, 2, 1, 55]


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


def fresh(model: LlamaModel) -> SequenceKv:
    return SequenceKv(model.config, max_tokens=tiny.CONTEXT)


def all_logits(model: LlamaModel, ids: list[int]) -> np.ndarray:
    return model.forward([Segment(ids=np.array(ids, np.intc), kv=fresh(model), logits_for=LogitsFor.ALL)])


def test_the_forward_is_the_written_out_one(model: LlamaModel) -> None:
    np.testing.assert_allclose(all_logits(model, IDS), naive_logits(IDS), atol=2e-4)


def test_gguf_and_safetensors_of_the_same_weights_give_the_same_logits(model: LlamaModel, tmp_path: Path) -> None:
    whole = LlamaModel(*load_weights(write_tiny_gguf(tmp_path / "whole.gguf")))
    np.testing.assert_allclose(all_logits(whole, IDS), all_logits(model, IDS), atol=1e-5)
    half = LlamaModel(*load_weights(write_tiny_gguf(tmp_path / "half.gguf", half=True)))
    np.testing.assert_allclose(all_logits(half, IDS), all_logits(model, IDS), atol=0.1)


@settings(deadline=None)
@given(cuts=st.sets(st.integers(1, len(IDS) - 1)))
def test_a_prompt_in_chunks_gives_what_it_gives_whole(model: LlamaModel, cuts: set[int]) -> None:
    kv, rows = fresh(model), []
    edges = [0, *sorted(cuts), len(IDS)]
    for start, end in itertools.pairwise(edges):
        ids = np.array(IDS[start:end], np.intc)
        rows.append(model.forward([Segment(ids=ids, kv=kv, logits_for=LogitsFor.ALL)]))
    np.testing.assert_allclose(np.concatenate(rows), all_logits(model, IDS), atol=2e-5)


@settings(deadline=None)
@given(prompts=st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=9), min_size=1, max_size=5))
def test_a_batch_gives_every_sequence_what_it_gets_alone(model: LlamaModel, prompts: list[list[int]]) -> None:
    segments = [Segment(ids=np.array(ids, np.intc), kv=fresh(model), logits_for=LogitsFor.ALL) for ids in prompts]
    alone = np.concatenate([all_logits(model, ids) for ids in prompts])
    np.testing.assert_allclose(model.forward(segments), alone, atol=2e-5)


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_shape(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"intermediate_size": 48', '"intermediate_size": 47'))


def other_architecture(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "GPT2LMHeadModel"))


@pytest.mark.parametrize("damage", [damage_config, remove_weights, cut_weights, other_shape, other_architecture])
def test_a_damaged_folder_is_one_line_that_names_it(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    damage(folder)
    with pytest.raises(StartupError) as caught:
        load_weights(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.99])
def test_a_gguf_file_that_is_cut_short_is_one_line_that_names_it(share: float, tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(StartupError) as caught:
        load_weights(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
