"""Samples as a tree: shared history once, the flat samples as its paths bit for bit, and one pass for all of them."""

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from standins.teacher_forcing import line_logprobs
from standins.tiny import llama as tiny
from standins.tiny.llama import tiny_tensors, write_tiny_gguf
from stenograph.client.errors import BadPayload
from stenograph.client.samples import DecodedSample, decoded
from stenograph.client.tree import Tree, framed_tree, tree_of
from stenograph.core.prefix_tree import LineTree
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.export.safetensors import to_safetensors
from stenograph.export.samples import Sample, SampleSet
from stenograph.export.tree import TreeJoin, sample_tree
from stenograph.trainers.rows import WrongRows
from stenograph.trainers.trees import areal_trie, packed
from stenograph.trajectory.turn import TurnStatus

SHA = {0: "0" * 63 + "a", 1: "f" * 64}


def rows_of(tokens: list[int], flavour: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Routes that the tokens so far decide, and the flavour."""
    found = np.zeros((len(tokens) - 1, *shape), dtype)
    for at in range(len(tokens) - 1):
        found[at] = zlib.crc32(bytes([flavour, *tokens[: at + 1]])) % 200
    return found


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """A sample over few ids, so that several begin alike; numbers where its mask is 1."""
    tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
    length = draw(st.integers(0, len(tokens)))
    mask = bytes(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))

    def nats() -> "array[float]":
        return array("d", [draw(st.floats(-9, 0)) if one else 0.0 for one in mask])

    kind = draw(st.integers(0, 3))
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.int32]))
    media: list[Any] = []
    if draw(st.booleans()):
        start = draw(st.integers(0, len(tokens) - 1))
        size = draw(st.integers(1, len(tokens) - start))
        media.append({"sha256": SHA[draw(st.integers(0, 1))], "kind": "image", "start": start, "length": size})
    turn: Any = {
        "node_id": 0,
        "prompt_start": 0,
        "start": 0,
        "end": len(tokens),
        "temperature": draw(st.floats(0.1, 2)),
    }
    return Sample(
        tokens=array("i", tokens),
        response_length=length,
        loss_mask=mask,
        rollout_log_probs=nats(),
        raw_log_probs=nats() if draw(st.booleans()) else None,
        sampling_log_probs=nats() if draw(st.booleans()) else None,
        logprobs_kind=draw(st.sampled_from([None, "raw"])),
        status=TurnStatus.COMPLETED,
        weight_versions=("3",),
        weight_spans=(),
        turns=[turn],
        response="text",
        routed_experts=rows_of(tokens, draw(st.integers(0, 1)), (2, 1), dtype) if kind & 1 else None,
        indexer_topk=rows_of(tokens, 2, (draw(st.integers(1, 2)),), dtype) if kind & 2 else None,
        metadata={"a": draw(st.integers(0, 3))},
        token_rewards=nats() if draw(st.booleans()) else None,
        scores={"teacher": nats()} if draw(st.booleans()) else {},
        media=media,
    )


SESSIONS = st.lists(st.lists(samples(), max_size=4), max_size=4)


def made_of(of_session: list[Sample]) -> SampleSet:
    return SampleSet(samples=tuple(of_session), empty_reason=None if of_session else "no_records")  # type: ignore[arg-type]


def flat(sessions: Iterable[list[Sample]]) -> list[DecodedSample]:
    """What the client gets of each session, flat; a tree has no text."""
    found: list[DecodedSample] = []
    for one in sessions:
        payload = b"".join(to_safetensors(one, session_metadata={}, empty_reason=None))
        found += (replace(sample, response="") for sample in decoded(payload).samples)
    return found


def frames(sessions: Iterable[list[Sample]]) -> list[bytes]:
    """The parts of an answer of many sessions, each as its own process makes it."""
    found: list[bytes] = []
    for one in sessions:
        head = msgspec.json.encode({"session_id": "a", "num_samples": len(one)})
        body = b"".join(sample_tree(made_of(one)).pieces({"accumulated_token_ids": [1]}))
        found.append(len(head).to_bytes(8, "little") + head + len(body).to_bytes(8, "little") + body)
    return found


END = b"".join(len(part).to_bytes(8, "little") + part for part in (b'{"done":true}', b""))


def plain(value: Any) -> Any:
    """A value to compare: of an array its type, shape and bytes."""
    if isinstance(value, np.ndarray):
        values = cast("NDArray[Any]", value)
        return values.dtype.str, values.shape, values.tobytes()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in cast("dict[str, Any]", value).items()}
    return [*map(plain, cast("list[Any]", value))] if isinstance(value, tuple | list) else value


def facts(sample: DecodedSample) -> dict[str, Any]:
    return {one.name: plain(getattr(sample, one.name)) for one in fields(sample)}


def shape(tree: Tree) -> list[Any]:
    return [(node.parent, node.start, node.end, [plain(row) for row in node.replays]) for node in tree.nodes]


@given(SESSIONS)
def test_the_paths_of_a_tree_are_the_flat_samples_bit_for_bit_and_back(sessions: list[list[Sample]]) -> None:
    wanted = flat(sessions)
    join = TreeJoin()
    answer = b"".join(map(join.frame, frames(sessions))) + END
    tree = framed_tree(answer, set())
    assert [facts(one) for one in tree.samples()] == [facts(one) for one in wanted]
    again = tree_of(wanted)
    assert [facts(one) for one in again.samples()] == [facts(one) for one in wanted]
    assert (again.tokens.tolist(), shape(again)) == (tree.tokens.tolist(), shape(tree))
    assert tree_of(tree.samples()).parents.tolist() == tree.parents.tolist()


@given(SESSIONS)
def test_what_lines_begin_with_in_common_is_in_the_tree_once(sessions: list[list[Sample]]) -> None:
    bare = [[replace(one, routed_experts=None, indexer_topk=None, media=()) for one in of] for of in sessions]
    tree = tree_of(flat(bare))
    beginnings = {tuple(one.tokens[: end + 1]) for of in bare for one in of for end in range(len(one.tokens))}
    assert len(tree.tokens) == len(beginnings)
    assert tree.num_flat == sum(len(one.tokens) for of in bare for one in of)


@given(SESSIONS)
def test_tokens_with_other_routes_or_images_are_not_one(sessions: list[list[Sample]]) -> None:
    tree = tree_of(flat(sessions))
    by_place: dict[int, Any] = {}
    for path, sample in zip(tree.paths, flat(sessions), strict=True):
        for at, place in enumerate(tree.line(path).tolist()):
            media = [one.sha256 for one in sample.media if one.start <= at < one.start + one.length]
            rows = [
                None if row is None or at == len(row) else row[at].tolist()
                for row in (sample.routed_experts, sample.indexer_topk)
            ]
            found = [int(sample.tokens[at]), at, media, rows]
            assert by_place.setdefault(place, found) == found


@given(SESSIONS)
def test_ranges_and_positions_say_what_the_mask_says(sessions: list[list[Sample]]) -> None:
    tree = tree_of(flat(sessions))
    mask = np.zeros_like(tree.mask())
    for (q_start, q_end), (k_start, k_end), causal in zip(*tree.ranges(), strict=True):
        block = np.ones((q_end - q_start, k_end - k_start), np.bool_)
        mask[q_start:q_end, k_start:k_end] |= np.tril(block) if causal else block
    assert mask.tolist() == tree.mask().tolist()
    assert tree.positions.tolist() == [int(row.sum()) - 1 for row in mask]


@given(SESSIONS, st.integers(1, 200))
def test_a_tree_that_forgets_still_has_each_line(sessions: list[list[Sample]], held: int) -> None:
    tree, tokens, parents = LineTree(max_held_bytes=held), dict[int, int](), dict[int, int]()
    for one in (sample for of in sessions for sample in of):
        keys = np.array(one.tokens, np.int64)
        places, node = tree.add(-1, keys)
        if node is not None:
            parents[node.start] = node.parent
            tokens.update(zip(range(node.start, node.end), keys[-(node.end - node.start) :].tolist(), strict=True))
        assert [tokens[place] for place in places.tolist()] == keys.tolist()
        for before, place in zip([-1, *places.tolist()], places.tolist(), strict=False):
            assert parents.get(place, place - 1) == before


@given(SESSIONS, st.data())
def test_an_answer_that_is_cut_or_changed_is_a_tree_or_bad(sessions: list[list[Sample]], data: st.DataObject) -> None:
    answer = bytearray(b"".join(map(TreeJoin().frame, frames(sessions))) + END)
    for _ in range(data.draw(st.integers(0, 3))):
        answer[data.draw(st.integers(0, len(answer) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(answer[: data.draw(st.integers(0, len(answer)))])
    try:
        framed_tree(cut, set()).samples()
    except BadPayload:
        return


def test_a_payload_is_what_the_library_reads(tmp_path: Path) -> None:
    one = Sample(
        tokens=array("i", [5, 6, 7]), response_length=2, loss_mask=b"\0\1", rollout_log_probs=array("d", [0.0, -1.5]),
        raw_log_probs=None, sampling_log_probs=None, logprobs_kind=None, status=TurnStatus.COMPLETED,
        weight_versions=(), weight_spans=(), turns=[], response="x",
    )  # fmt: skip
    tensors = safetensors.numpy.load(b"".join(sample_tree(made_of([one, one])).pieces({})))
    assert tensors["nodes"].tolist() == [[-1, 0, 3]]
    assert tensors["paths"].tolist() == [[2, 3, 2], [2, 3, 2]]
    assert tensors["trained"].tolist() == [[0, 2, 3], [1, 2, 3]]
    assert tensors["log_probs"].tolist() == [-1.5, -1.5]


def test_numbers_of_untrained_tokens_have_no_place_in_a_tree() -> None:
    sample = DecodedSample(
        tokens=np.array([1, 2]), loss_mask=np.zeros(1, np.uint8), log_probs=np.array([-1.0]), status="completed",
        metadata={},
    )  # fmt: skip
    with pytest.raises(ValueError, match="mask 0"):
        tree_of([sample])


# --- one pass over the tree -------------------------------------------------------------------------------------------


def masked_nats(tree: Tree) -> NDArray[np.float64]:
    """[N, vocabulary] log-probabilities of the tiny llama in float64, in one pass over all tokens: attention where the
    mask allows it, rotations by the tree's positions."""
    tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tiny_tensors().items()}
    half = tiny.HEAD_DIM // 2
    angles = tree.positions[:, None] * tiny.ROPE_THETA ** (-np.arange(half) / half)
    cos, sin, hidden = (
        np.cos(angles)[:, None],
        np.sin(angles)[:, None],
        tensors["model.embed_tokens.weight"][tree.tokens],
    )

    def norm(states: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        return states / np.sqrt((states**2).mean(-1, keepdims=True) + tiny.RMS_EPS) * weight

    def heads(states: NDArray[np.float64], weight: NDArray[np.float64], *, turned: bool) -> NDArray[np.float64]:
        found = (states @ weight.T).reshape(len(states), -1, tiny.HEAD_DIM)
        first, second = found[..., :half], found[..., half:]
        if turned:
            found = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        return found.transpose(1, 0, 2)

    for layer in range(tiny.LAYERS):
        at = f"model.layers.{layer}."
        states = norm(hidden, tensors[f"{at}input_layernorm.weight"])
        query = heads(states, tensors[f"{at}self_attn.q_proj.weight"], turned=True)
        key = heads(states, tensors[f"{at}self_attn.k_proj.weight"], turned=True)
        value = heads(states, tensors[f"{at}self_attn.v_proj.weight"], turned=False)
        key, value = (np.repeat(one, tiny.HEADS // tiny.KV_HEADS, axis=0) for one in (key, value))
        scores = np.where(tree.mask(), query @ key.transpose(0, 2, 1) / np.sqrt(tiny.HEAD_DIM), -np.inf)
        power = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (power / power.sum(-1, keepdims=True) @ value).transpose(1, 0, 2).reshape(len(hidden), -1)
        hidden = hidden + mixed @ tensors[f"{at}self_attn.o_proj.weight"].T
        states = norm(hidden, tensors[f"{at}post_attention_layernorm.weight"])
        gate = states @ tensors[f"{at}mlp.gate_proj.weight"].T
        active = gate / (1 + np.exp(-gate)) * (states @ tensors[f"{at}mlp.up_proj.weight"].T)
        hidden = hidden + active @ tensors[f"{at}mlp.down_proj.weight"].T
    last = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    logits = norm(hidden, tensors["model.norm.weight"]) @ last.T
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: NDArray[np.float64] = np.log(powers / powers.sum(-1, keepdims=True))
    return found


def test_one_pass_over_a_packed_tree_gives_each_trained_token_its_flat_log_probability(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    model = NumpyForward(*load_weights(path), num_kv_tokens=512)
    chance, lines = np.random.default_rng(3), list[list[int]]()
    for _ in range(12):  # branches of branches
        begun = lines[chance.integers(len(lines))] if lines else [1, 7, 30]
        cut = int(chance.integers(1, len(begun) + 1))
        lines.append([*begun[:cut], *chance.integers(1, 300, chance.integers(1, 12)).tolist()])
    flats = [recorded(model, line) for line in lines]
    tree = tree_of(flats)
    assert len(tree.tokens) < sum(map(len, lines))
    pack = packed(tree, advantages=[float(number) for number in range(len(lines))])
    nats = masked_nats(tree)[pack.predicted_by, pack.targets]
    assert np.abs(nats - pack.log_probs).max() <= 1e-4
    of_flat = np.concatenate([one.log_probs[one.loss_mask == 1] for one in flats])
    assert pack.log_probs.tolist() == of_flat.tolist()
    assert pack.advantages is not None
    assert pack.advantages.tolist() == pack.samples.tolist()


def recorded(model: NumpyForward, line: list[int]) -> DecodedSample:
    """A flat row whose tokens behind the first have the engine's own log-probabilities."""
    nats = np.array(line_logprobs(model, line, 1))
    ones = np.ones(len(nats), np.uint8)
    turn = {"node_id": 0, "prompt_start": 0, "start": 1, "end": len(line), "temperature": 1.0}
    return DecodedSample(
        tokens=np.array(line, np.int64), loss_mask=ones, log_probs=nats, status="completed", metadata={}, turns=(turn,)
    )


@dataclass
class TrieNode:
    """The fields of AReaL's class."""

    tree_id: int
    start_idx: int = -1
    end_idx: int = -1
    tokens: list[int] = field(default_factory=list[int])
    sequence_ids: list[int] = field(default_factory=list[int])
    children: dict[int, "TrieNode"] = field(default_factory=dict[int, Any])
    ancestors: list["TrieNode"] = field(default_factory=list[Any])
    nodes: list["TrieNode"] = field(default_factory=list[Any])


@given(SESSIONS)
def test_areals_nodes_give_each_sequence_its_tokens_in_their_flattened_order(sessions: list[list[Sample]]) -> None:
    bare = [[replace(one, routed_experts=None, indexer_topk=None, media=()) for one in of] for of in sessions]
    tree = tree_of(flat(bare))
    root, order = areal_trie(tree, TrieNode)
    ids: Sequence[int] = tree.tokens[order].tolist()
    assert sorted(order.tolist()) == list(range(len(tree.tokens)))
    for number, sample in enumerate(flat(bare)):
        runs = [(node.start_idx, node.end_idx + 1) for node in root.nodes if number in node.sequence_ids]
        assert [id_ for start, end in runs for id_ in ids[start:end]] == sample.tokens.tolist()
    for node in root.nodes:
        assert ids[node.start_idx : node.end_idx + 1] == node.tokens
        above = node.ancestors[-1] if node.ancestors else root
        assert above.children[node.tokens[0]] is node
        assert [one.start_idx for one in node.ancestors] == sorted(one.start_idx for one in node.ancestors)


@given(SESSIONS)
def test_lines_that_part_at_equal_ids_are_no_trie_of_areal(sessions: list[list[Sample]]) -> None:
    """By their images or routes: the second node would take the place of the first."""
    tree = tree_of(flat(sessions))
    children = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    if len(set(children)) == len(children):
        areal_trie(tree, TrieNode)
    else:
        with pytest.raises(WrongRows, match="part at equal ids"):
            areal_trie(tree, TrieNode)
