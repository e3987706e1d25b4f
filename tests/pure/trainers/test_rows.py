"""Rows for every trainer: each trained token meets its own log-probability through the trainer's own shift.

The oracle is a plain model that every token before decides. Each check repeats what the trainer does with its rows:
which logits it takes for a token. The classes have the trainers' own fields; `scripts/test-trainers` has the real ones.
"""

import base64
import dataclasses
import enum
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

from stenograph.client import DecodedSample
from stenograph.client.batch import RolloutBatch
from stenograph.core.support import SupportColumns, SupportWriter
from stenograph.core.types import FinishReason
from stenograph.trainers import dicts, miles, prime_rl, rows, tinker, trl, verl
from stenograph.trainers.rows import WrongRows, WrongTrainer

from .conftest import Grown, group_of, rollouts_samples, teacher


def assert_meets(ids: Any, mask: Any, nats: Any, *, num_trained: int) -> None:
    """Own rows over all tokens: where the mask is set, each stands with its own log-probability, after the shift."""
    tokens, trained, found = np.array(ids, np.int64), np.array(mask, bool), np.array(nats, np.float64)
    assert len(tokens) == len(trained) == len(found)
    assert not trained[:1].any()  # the first token has no logits
    assert trained.sum() == num_trained
    np.testing.assert_allclose(found[1:][trained[1:]], teacher(tokens)[trained[1:]], rtol=1e-6)
    assert not found[~trained].any()


@given(rollouts_samples())
def test_whole_rows_are_shifted_onto_the_logits(samples: tuple[DecodedSample, ...]) -> None:
    for sample in samples:
        made = rows.whole(sample)
        assert_meets(made.tokens, made.mask, made.log_probs, num_trained=sample.num_trained)
        assert len(rows.shifted(made.tokens)) == len(sample.tokens) - 1
        spans = rows.runs(made.mask)
        assert sum(end - start for start, end in spans) == sample.num_trained
        assert all(made.mask[start:end].all() for start, end in spans)
        for turn in sample.turns:
            assert (made.temperatures[turn["prompt_start"] : turn["end"]] == turn["temperature"]).all()
        sampled_by = rows.versions(sample)
        assert set(sampled_by[~made.mask].tolist()) <= {rows.NO_VERSION}
        for span in sample.weight_spans:
            assert (sampled_by[span.start : span.end][made.mask[span.start : span.end]] == int(span.version)).all()


@pytest.mark.parametrize(
    ("cached_from", "num_cached", "prompts"),
    [
        (("3", "4"), 5, (3, 4)),
        (("3", "3"), 5, (3, -1)),  # a part of the prompt may be the older weights'
        ((None, None), 5, (-1, -1)),
        ((None, None), 0, (3, 4)),
    ],
)
def test_a_row_of_routes_is_of_the_weights_that_sampled_its_next_token(
    cached_from: tuple[str | None, ...], num_cached: int, prompts: tuple[int, int]
) -> None:
    grown = Grown()
    grown.turn(grown.turn(None, [1, 2, 3], [4, 5], version="3"), [6, 7], [8], version="4")
    (sample,) = grown.samples()
    turns = [
        {**turn, **({} if name is None else {"cached_from": name})}
        for turn, name in zip(sample.turns, cached_from, strict=True)
    ]
    sample = dataclasses.replace(sample, turns=tuple(turns), num_cached_tokens=num_cached)
    first, second = prompts
    assert rows.route_versions(sample).tolist() == [first, first, 3, 3, second, second, 4]
    numbers = dict(zip("34", "ab", strict=True))
    assert rows.route_versions(sample, lambda text: ord(numbers[text])).max() == ord("b")
    unsampled = dataclasses.replace(sample, weight_spans=())
    assert set(rows.route_versions(unsampled).tolist()) == {rows.NO_VERSION}


@dataclasses.dataclass(kw_only=True)
class MilesSample:
    """The fields of miles' and slime's `Sample` that are set, and some that are not."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    label: str | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    remove_sample: bool = False
    rollout_id: int | None = None
    status: Any = Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @dataclasses.dataclass
    class PrefixCacheInfo:
        """Its counts of a rollout's prompts."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    prefix_cache_info: PrefixCacheInfo = dataclasses.field(default_factory=PrefixCacheInfo)


@dataclasses.dataclass
class SlimeSample(MilesSample):
    """The fields that slime's `Sample` has beside."""

    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None


def test_the_input_sample_is_neither_changed_nor_shared() -> None:
    grown = Grown()
    first = grown.turn(None, [1, 2], [3])
    for opener in (5, 6):
        grown.turn(grown.turn(first, [opener], [6]), [8], [9])
    samples = grown.samples()
    asked = MilesSample(prompt="p", metadata={"list": [1]}, tokens=[9])
    made = miles.rollout_samples(samples, asked, rollout_id=7)
    made += miles.rollout_samples((), asked) + miles.rollout_samples(None, asked)
    for one in made:
        one.metadata["list"].append(2)
        one.metadata.get("leaf", {}).clear()
        one.prefix_cache_info.cached_tokens += 1
    assert asked == MilesSample(prompt="p", metadata={"list": [1]}, tokens=[9])
    assert [one.metadata["list"] for one in made] == [[1, 2]] * 4
    assert all(sample.metadata["leaf"] for sample in samples)


@pytest.mark.parametrize("kind", [MilesSample, SlimeSample])
def test_a_rollout_without_samples_is_one_aborted_sample_that_trains_nothing(kind: Any) -> None:
    asked = kind(group_index=1, index=2, prompt="p", reward=None)
    (one,) = miles.rollout_samples(
        (), asked, rollout_id=2, reward=-1.0, experts_shape=(2, 3), indexer_shape=(1, 2), filler_id=5
    )
    assert (one.status.value, one.remove_sample, one.rollout_id, one.reward) == ("aborted", True, 2, -1.0)
    assert (one.tokens, one.response_length, one.loss_mask, one.rollout_log_probs) == ([5, 5], 1, [0], [0.0])
    assert one.rollout_routed_experts.tolist() == [[[0, 1, 2], [0, 1, 2]]]  # slime refuses zeros alone
    assert one.rollout_indexer_topk.tolist() == [[[0, 1]]]
    if kind is SlimeSample:
        assert (one.rollout_top_p_token_ids, one.rollout_top_p_token_offsets) == ([], [0, 0])
    assert miles.rollout_samples((), asked)[0].reward is None  # infrastructure is never a reward of 0


def test_replay_data_and_counts_reach_miles_in_its_types() -> None:
    grown = Grown()
    grown.turn(None, [1, 2], [3, 4])
    (sample,) = grown.samples()
    sample = dataclasses.replace(
        sample,
        routed_experts=np.arange(12, dtype=np.uint16).reshape(3, 2, 2),
        indexer_topk=np.arange(12, dtype=np.int32).reshape(3, 4),
        num_prompt_tokens=20,
        num_cached_tokens=8,
    )
    (one,) = miles.rollout_samples([sample], MilesSample(), indexer_shape=(2, 2))
    assert (one.rollout_routed_experts.dtype, one.rollout_routed_experts.shape) == (np.int32, (3, 2, 2))
    assert one.rollout_routed_experts.flags.writeable
    assert (one.rollout_indexer_topk.dtype, one.rollout_indexer_topk.shape) == (np.int32, (3, 2, 2))
    assert one.rollout_indexer_topk[1].tolist() == [[4, 5], [6, 7]]
    assert dataclasses.astuple(one.prefix_cache_info) == (8, 20)
    for shape in (None, (3, 2), (0, 4)):
        with pytest.raises(WrongRows, match=r"4 indexer ids for each token.*indexer_shape"):
            miles.rollout_samples([sample], MilesSample(), indexer_shape=shape)
    made = verl.agent_loop_fields(sample)["routed_experts"]
    assert isinstance(made, np.ndarray)
    assert (made.dtype, made.shape, made[3].any()) == (np.int16, (4, 2, 2), False)
    wide = dataclasses.replace(sample, routed_experts=np.full((3, 2, 2), 40_000, np.uint16))
    with pytest.raises(WrongRows, match=r"a replayed id is 40000.*ends at 32767"):
        verl.agent_loop_fields(wide)


def truncated(*, support: bool, **cut: float) -> DecodedSample:
    """Two turns: one of three tokens with the supports [3], [3, 4], every id; one that nothing cut."""
    writer, columns = SupportWriter(8), SupportColumns(8)
    for id_, kept in ((3, [3]), (4, [3, 4]), (5, None)):
        columns.extend(writer.write(id_, None if kept is None else np.array(kept)), 1)
    first: dict[str, Any] = {"node_id": 1, "prompt_start": 0, "start": 2, "end": 5, "temperature": 1.0, **cut}
    if support:
        first["support"] = base64.b64encode(columns.whole()).decode()
    second = {"node_id": 2, "prompt_start": 5, "start": 6, "end": 7, "temperature": 1.0}
    return DecodedSample(
        tokens=np.array([1, 2, 3, 4, 5, 6, 7]),
        loss_mask=np.array([1, 1, 1, 0, 1], np.uint8),
        log_probs=np.array([-2.0, -2.0, -2.0, 0.0, -2.0]),
        sampling_log_probs=np.array([0.0, -1.0, -2.0, 0.0, -2.0]),
        status="completed",
        turns=(first, second),
        metadata={},
    )


def test_slime_gets_the_ids_that_could_be_sampled_and_log_probabilities_over_them() -> None:
    sample = truncated(support=True, top_p=0.9)
    (one,) = miles.rollout_samples([sample], SlimeSample())
    ids, offsets = one.rollout_top_p_token_ids, one.rollout_top_p_token_offsets
    assert ids is not None
    assert offsets is not None
    spans = [ids[start:end] for start, end in itertools.pairwise(offsets)]
    every = list(range(8))
    assert spans == [[3], [3, 4], every, [], every]  # nothing cut the last; the fourth is a prompt's
    assert one.rollout_log_probs == [0.0, -1.0, -2.0, 0.0, -2.0]
    (plain,) = miles.rollout_samples([sample], SlimeSample(), replays_top_p=False)
    assert (plain.rollout_top_p_token_ids, plain.rollout_log_probs) == (None, sample.log_probs.tolist())
    (of_miles,) = miles.rollout_samples([sample], MilesSample())  # it normalizes over every id
    assert of_miles.rollout_log_probs == sample.log_probs.tolist()


def test_a_truncated_sample_without_support_is_refused_in_words_where_it_is_needed() -> None:
    sample = truncated(support=False, top_p=0.9)
    with pytest.raises(WrongRows, match=r"turn 1 was sampled with top_p.*support=True"):
        miles.rollout_samples([sample], SlimeSample())
    with pytest.raises(WrongRows, match=r"turn 1 was sampled with top_k, min_p.*support=True"):
        miles.rollout_samples([truncated(support=False, top_k=2, min_p=0.1)], SlimeSample(), replays_top_p=True)
    with pytest.raises(WrongRows, match="turn 1 was sampled from every id"):
        miles.rollout_samples([truncated(support=False)], SlimeSample(), replays_top_p=True)
    unknown = dataclasses.replace(truncated(support=True, top_p=0.9), sampling_log_probs=None)
    with pytest.raises(WrongRows, match="no log-probabilities of that distribution"):
        miles.rollout_samples([unknown], SlimeSample())
    assert len(miles.rollout_samples([sample], SlimeSample(), replays_top_p=False)) == 1
    assert len(miles.rollout_samples([sample], MilesSample())) == 1
    assert rows.whole(sample).mask.sum() == 4


@given(rollouts_samples())
def test_miles_and_slime(samples: tuple[DecodedSample, ...]) -> None:
    asked = MilesSample(group_index=3, index=25, prompt="What?", label="42", metadata={"own": 1})
    made = miles.rollout_samples(samples, asked, rollout_id=7, reward=0.5)
    assert asked == MilesSample(group_index=3, index=25, prompt="What?", label="42", metadata={"own": 1})
    assert len(made) == max(1, len(samples))
    for one, sample in zip(made, samples, strict=False):
        prompt_length = len(one.tokens) - one.response_length
        padded = [0.0] * prompt_length + list(one.rollout_log_probs or [])  # as it pads, (prompt - 1, 1), and shifts
        mask = [0] * prompt_length + list(one.loss_mask or [])
        assert_meets(one.tokens, mask, padded, num_trained=sample.num_trained)
        assert (one.group_index, one.index, one.prompt, one.label, one.reward) == (3, 25, "What?", "42", 0.5)
        assert one.status.value == sample.status
        assert one.metadata["rollout_id"] == 7
        assert one.metadata["own"] == 1
        assert all(type(version) is str for version in one.weight_versions)


class LoopOutput(msgspec.Struct, kw_only=True):
    """The fields of verl's `AgentLoopOutput`."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any
    extra_fields: dict[str, Any] = {}


@given(rollouts_samples())
def test_verl(samples: tuple[DecodedSample, ...]) -> None:
    made = verl.agent_loop_outputs(samples, LoopOutput, "metrics", reward={"reward": 0.5, "tests": 1.0})
    kept = [sample for sample in samples if sample.response_length]
    assert len(made) == max(1, len(kept))
    for one, sample in zip(made, kept, strict=False):
        nothing = [0] * len(one.prompt_ids)
        assert_meets(
            one.prompt_ids + one.response_ids,
            nothing + one.response_mask,
            nothing + (one.response_logprobs or []),
            num_trained=sample.num_trained,
        )
        extra = one.extra_fields
        assert (extra["min_global_steps"], extra["max_global_steps"]) == rows.version_range(sample)
    assert [one.reward_score for one in made] == [None] * (len(made) - 1) + [0.5]
    if not kept:
        assert (made[0].prompt_ids, made[0].response_ids, made[0].response_mask) == ([0], [0], [0])
        return
    batch = verl.padded_batch(kept, pad_id=99, rewards=[1.0] * len(kept))
    for index, sample in enumerate(kept):
        there = batch["attention_mask"][index] == 1
        ids = batch["input_ids"][index]
        assert ids[there].tolist() == sample.tokens.tolist()
        assert (ids[~there] == 99).all()
        # Its trainer takes the last R of the logits that stand before each token.
        width = batch["responses"].shape[1]
        mask = np.concatenate([np.zeros(len(ids) - width), batch["response_mask"][index]])[there]
        nats = np.concatenate([np.zeros(len(ids) - width), batch["rollout_log_probs"][index]])[there]
        assert_meets(ids[there], mask, nats, num_trained=sample.num_trained)
        assert batch["position_ids"][index][there].tolist() == list(range(len(sample.tokens)))
        assert np.flatnonzero(batch["rm_scores"][index]).tolist() == [sample.response_length - 1]
    with pytest.raises(WrongRows, match="max_seq_len"):
        verl.padded_batch(kept, pad_id=99, response_length=0, prompt_length=1)


class PrimeExperts(msgspec.Struct, array_like=True):
    """The fields of prime-rl's `RoutedExperts`."""

    data: bytes
    shape: list[int]
    dtype: str


class PrimeTensor(msgspec.Struct, array_like=True):
    """The fields of prime-rl's `EncodedTensor`."""

    dtype: str
    shape: list[int]
    data: bytes


class PrimeSample(msgspec.Struct, array_like=True, omit_defaults=True):
    """The fields of prime-rl's `TrainingSample`, in its order."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: dict[str, PrimeTensor] | None = None
    routed_experts: PrimeExperts | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


@given(rollouts_samples())
def test_prime_rl(samples: tuple[DecodedSample, ...]) -> None:
    made = prime_rl.training_samples(samples, PrimeSample, env_name="e", advantage=-2.0)
    kept = [sample for sample in samples if sample.num_trained]
    assert len(made) == len(kept)
    for one, sample in zip(made, kept, strict=True):
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=PrimeSample)
        assert_meets(sent.token_ids, sent.mask, sent.logprobs, num_trained=sample.num_trained)
        assert len(sent.temperatures) == len(sent.token_ids)
        assert sent.advantages == [-2.0 if is_trained else 0.0 for is_trained in sent.mask]
    made = prime_rl.training_samples(kept, PrimeSample, env_name="e", advantage=None, ce_weight=0.5, ref_kl_weight=2.0)
    for one in made:
        assert (one.advantages, set(one.rl_weights or ())) == (None, {0.0})
        assert one.ce_weights == [0.5 if is_trained else 0.0 for is_trained in one.mask]
        assert one.ref_kl_weights == [2.0 if is_trained else 0.0 for is_trained in one.mask]
    with pytest.raises(WrongRows, match=r"without advantages.*ce_weight or ref_kl_weight"):
        prime_rl.training_samples(kept, PrimeSample, env_name="e", advantage=None)


@dataclasses.dataclass(frozen=True)
class TinkerDatum:
    """The fields of tinker's `Datum`."""

    model_input: Any
    loss_fn_inputs: dict[str, NDArray[Any]]


@given(rollouts_samples())
def test_tinker(samples: tuple[DecodedSample, ...]) -> None:
    made = tinker.datums(samples, TinkerDatum, np.array, advantage=0.5, with_mask=True)
    kept = [sample for sample in samples if sample.num_trained]
    for one, sample in zip(made, kept, strict=True):
        inputs, mask = one.loss_fn_inputs, one.loss_fn_inputs["mask"] == 1
        tokens = np.concatenate([one.model_input[:1], inputs["target_tokens"]])
        assert tokens[:-1].tolist() == one.model_input.tolist()  # targets are the inputs, one later
        np.testing.assert_allclose(inputs["logprobs"][mask], teacher(tokens)[mask], rtol=1e-6)
        assert mask.sum() == sample.num_trained
        assert (inputs["advantages"] == np.where(mask, 0.5, 0.0)).all()
        dtypes = {name: str(row.dtype) for name, row in inputs.items()}
        assert dtypes == {"target_tokens": "int64", "logprobs": "float32", "advantages": "float32", "mask": "float32"}
        assert {len(row) for row in inputs.values()} == {len(sample.tokens) - 1}


@dataclasses.dataclass(kw_only=True)
class TrlSample:
    """The fields of TRL's `RolloutSample`."""

    prompt: Any
    completion: Any
    input_ids: NDArray[Any]
    completion_mask: NDArray[Any]
    old_log_probs: NDArray[Any]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


@given(rollouts_samples())
def test_trl_async(samples: tuple[DecodedSample, ...]) -> None:
    made = trl.rollout_samples([group_of(samples, 0.0, 1.0)], TrlSample, model_version=9)
    kept = [sample for sample in samples if sample.num_trained]
    assert [one.advantage for one in made] == [-1.0] * len(kept) + [1.0] * len(kept)
    for one, sample in zip(made, kept + kept, strict=True):
        assert_meets(one.input_ids, one.completion_mask, one.old_log_probs, num_trained=sample.num_trained)
        assert (one.group_id, str(one.old_log_probs.dtype)) == (5, "float32")
        assert one.model_version == (9 if rows.version_range(sample)[0] is None else rows.version_range(sample)[0])


@given(rollouts_samples())
def test_trl_has_one_row_for_each_prompt_and_none_is_empty(samples: tuple[DecodedSample, ...]) -> None:
    batch = RolloutBatch(groups=(group_of(samples, 0.5),), others=(), is_complete=True, seconds=0.0)
    made: dict[str, list[Any]] = trl.rollout_rows(batch, num_prompts=7, filler_id=99)
    assert {len(column) for column in made.values()} == {7}
    for index in range(7):
        ids, nats, mask = made["completion_ids"][index], made["logprobs"][index], made["env_mask"][index]
        assert len(ids) == len(nats) == len(mask) > 0
        assert len(made["prompt_ids"][index]) > 0
        if index != 5:
            assert (ids, mask, made["rollout_reward"][index]) == ([99], [0], None)
    total = sum(sample.num_trained for sample in samples)
    assert sum(made["env_mask"][5]) + made["num_left_out"][5] == total
    if any(sample.response_length for sample in samples):
        nothing = [0] * len(made["prompt_ids"][5])
        assert_meets(
            made["prompt_ids"][5] + made["completion_ids"][5],
            nothing + made["env_mask"][5],
            nothing + made["logprobs"][5],
            num_trained=max(sample.num_trained for sample in samples),
        )
    assert trl.rollout_reward(**made)[4:] == [None, 0.5, None]  # it counts, whatever it trains


@given(rollouts_samples())
def test_dicts(samples: tuple[DecodedSample, ...]) -> None:
    kept = [sample for sample in samples if sample.num_trained]
    out: dict[str, Any] = dicts.skyrl([group_of(samples, 0.5)])
    metrics, experts = out.pop("rollout_metrics"), out.pop("rollout_expert_indices")
    assert experts is None
    assert {len(column) for column in out.values()} == {max(1, len(kept))}
    assert metrics["generate/max_assistant_tokens"] == max([sample.num_trained for sample in kept], default=0)
    assert all(type(number) is float for number in metrics.values())
    for index, sample in enumerate(kept):
        nothing = [0] * len(out["prompt_token_ids"][index])
        assert_meets(
            out["prompt_token_ids"][index] + out["response_ids"][index],
            nothing + out["loss_masks"][index],
            nothing + out["rollout_logprobs"][index],
            num_trained=sample.num_trained,
        )
    assert out["rewards"] == [0.0] * (len(kept) - 1) + [0.5]
    assert out["is_last_step"] == [False] * (len(kept) - 1) + [True]
    for sample in samples:
        of_areal = dicts.areal(sample, reward=0.5)
        (ids,), (mask,), (nats,) = of_areal["input_ids"], of_areal["loss_mask"], of_areal["logprobs"]
        assert_meets(ids, mask, nats, num_trained=sample.num_trained)
        assert of_areal["versions"].shape == of_areal["attention_mask"].shape == (1, len(sample.tokens))

        of_openrlhf: dict[str, Any] = dicts.openrlhf(sample, reward=0.5)
        mask = np.zeros(len(sample.tokens))
        for start, end in of_openrlhf["action_ranges"]:
            mask[start:end] = 1
        assert_meets(
            of_openrlhf["observation_tokens"], mask, of_openrlhf["rollout_log_probs"], num_trained=sample.num_trained
        )

        log: list[dict[str, Any]] = dicts.nemo_rl(sample)
        parts = [message.get("generation_logprobs") for message in log]
        sizes = [len(message["token_ids"]) for message in log]
        assert_meets(
            np.concatenate([message["token_ids"] for message in log]),
            np.concatenate([np.full(size, part is not None) for size, part in zip(sizes, parts, strict=True)]),
            np.concatenate([np.zeros(size) if part is None else part for size, part in zip(sizes, parts, strict=True)]),
            num_trained=sample.num_trained,
        )
        for step in dicts.rllm(sample):
            ids = np.array(step["prompt_ids"] + step["response_ids"])
            assert ids.tolist() == sample.tokens[: len(ids)].tolist()
            trained = rows.whole(sample).mask[len(step["prompt_ids"]) : len(ids)]
            found = np.array(step["logprobs"])[trained]
            np.testing.assert_allclose(found, teacher(ids)[len(step["prompt_ids"]) - 1 :][trained])


@given(rollouts_samples())
def test_a_padded_batch_is_aligned_with_the_logits_before_each_token(samples: tuple[DecodedSample, ...]) -> None:
    if not samples:
        return
    batch = dicts.padded(samples, [float(index) for index in range(len(samples))], pad_id=99)
    for index, sample in enumerate(samples):
        length = len(sample.tokens) - 1
        mask = batch["mask"][index]
        assert not mask[length:].any()
        assert mask.sum() == sample.num_trained
        passed = teacher(sample.tokens)[mask[:length]]
        np.testing.assert_allclose(batch["log_probs"][index][mask], passed, rtol=1e-6)
        assert (batch["advantages"][index] == mask * index).all()
        assert batch["targets"][index][:length].tolist() == sample.tokens[1:].tolist()
        assert batch["input_ids"][index][batch["attention_mask"][index] == 1].tolist() == sample.tokens.tolist()


def test_skyrl_gets_experts_for_every_row_or_for_none() -> None:
    grown = Grown()
    grown.turn(None, [1, 2], [3, 4])
    (sample,) = grown.samples()
    routed = dataclasses.replace(sample, routed_experts=np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    whole, without = group_of((routed,), 0.5, 1.0), group_of((), 0.0)
    out: dict[str, Any] = dicts.skyrl([whole, dataclasses.replace(without, name="h")])
    assert [one.shape for one in out["rollout_expert_indices"]] == [(3, 2, 2), (3, 2, 2), (1, 2, 2)]
    assert out["rollout_expert_indices"][0] is routed.routed_experts
    assert out["rollout_expert_indices"][2].tolist() == [[[0, 1], [0, 1]]]
    with pytest.raises(WrongRows, match="all or nothing"):
        dicts.skyrl([group_of((routed, sample), 0.5)])
    assert dicts.skyrl([])["rollout_metrics"] == {}


def test_a_tree_trains_its_shared_turn_once_in_every_trainer() -> None:
    grown = Grown()
    first = grown.turn(None, [1, 2], [3, 4])
    for opener in (5, 6):
        grown.turn(grown.turn(first, [opener], [6, 7]), [8], [9])
    samples = grown.samples()
    assert [sample.num_trained for sample in samples] == [5, 3]
    made = prime_rl.training_samples(samples, PrimeSample, env_name="e", advantage=1.0)
    assert sum(sum(one.mask) for one in made) == 8
    assert sum(len(step["response_ids"]) for sample in samples for step in dicts.rllm(sample)) == 8


def test_advantages_are_by_group_and_a_rollout_counts_once() -> None:
    grown = Grown()
    grown.turn(None, [1], [2])
    group = group_of(grown.samples(), 0.0, 1.0, 2.0)
    found = [advantage for _, advantage in rows.advantages([group])]
    np.testing.assert_allclose(found, np.array([-1, 0, 1]) / np.std([0, 1, 2]))
    assert [advantage for _, advantage in rows.advantages([group], scaled=False)] == [-1.0, 0.0, 1.0]
    assert [advantage for _, advantage in rows.advantages([group_of((), 1.0, 1.0)])] == [0.0, 0.0]
    lost = dataclasses.replace(group.rollouts[0], reward=None)
    mixed = dataclasses.replace(group, rollouts=(lost, *group.rollouts[1:]))
    assert [advantage for _, advantage in rows.advantages([mixed], scaled=False)] == [-0.5, 0.5]
    assert list(rows.advantages([dataclasses.replace(group, rollouts=(lost,))])) == []


def test_what_cannot_be_right_is_refused_in_words() -> None:
    grown = Grown()
    grown.turn(None, [1], [2], reason=FinishReason.STOP, version="model.gguf")
    (sample,) = grown.samples()
    with pytest.raises(WrongRows, match=r"model\.gguf.*--weight-version"):
        verl.agent_loop_fields(sample)
    assert verl.agent_loop_fields(sample, version=lambda text: 7)["extra_fields"] == {
        "min_global_steps": 7, "max_global_steps": 7,
    }  # fmt: skip
    raw = dataclasses.replace(sample, logprobs_kind="raw")
    for refused in (rows.whole, dicts.openrlhf):
        with pytest.raises(WrongRows, match=r"'raw' log-prob.*temperature 1"):
            refused(raw, **({} if refused is rows.whole else {"reward": 1.0}))  # type: ignore[operator]
    with pytest.raises(WrongRows, match="a, b"):
        rows.number_of({"a": 1.0, "b": 2.0})
    assert (rows.number_of({"a": 1.0}), rows.number_of({"a": 1.0, "reward": 2.0})) == (1.0, 2.0)

    @dataclasses.dataclass
    class Other:
        """A class of another version."""

        token_ids: list[int]

    with pytest.raises(WrongTrainer, match=r"Other has no .*mask.*written against prime-rl"):
        prime_rl.training_samples([sample], Other, env_name="e", advantage=1.0)
    with pytest.raises(WrongTrainer, match="has no loss_mask"):
        miles.rollout_samples([sample], Other([]))
    with pytest.raises(WrongTrainer, match="written against tinker"):
        tinker.datums([sample], lambda model_input: model_input, list, advantage=1.0)
    experts = dataclasses.replace(sample, routed_experts=np.ones((1, 2, 2), np.int32))
    with pytest.raises(WrongRows, match="RoutedExperts"):
        prime_rl.training_samples([experts], PrimeSample, env_name="e", advantage=1.0)
    (made,) = prime_rl.training_samples(
        [experts], PrimeSample, env_name="e", advantage=1.0, routed_experts=PrimeExperts
    )
    assert made.routed_experts is not None
    assert made.routed_experts.shape == [2, 2, 2]  # a row for the last token too
    assert (made.routed_experts.dtype, len(made.routed_experts.data)) == ("int16", 16)
    assert dicts.staleness(sample, newest=9, version=lambda text: 7) == 2


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint8, 255), (np.uint16, 32_767), (np.int32, 32_767)])
def test_routed_experts_of_each_type_are_in_the_type_that_the_trainer_takes(dtype: type, largest: int) -> None:
    routed = np.full((1, 2, 2), largest, dtype)
    sample = DecodedSample(
        tokens=np.array([1, 2]), loss_mask=np.ones(1, np.uint8), log_probs=np.zeros(1), status="completed",
        routed_experts=routed, metadata={}, turns=({"prompt_start": 0, "start": 1, "end": 2, "temperature": 1.0},),
    )  # fmt: skip
    (asked,) = miles.rollout_samples([sample], MilesSample())
    assert asked.rollout_routed_experts.dtype == np.int32
    assert np.array_equal(asked.rollout_routed_experts, routed)
    (output,) = verl.agent_loop_outputs([sample], LoopOutput, "metrics")
    assert output.routed_experts.dtype == np.int16
    assert np.array_equal(output.routed_experts, [routed[0].tolist(), [[0, 0], [0, 0]]])
    (prime,) = prime_rl.training_samples(
        [sample], PrimeSample, env_name="e", advantage=1.0, routed_experts=PrimeExperts
    )
    assert prime.routed_experts is not None
    assert prime.routed_experts.dtype == "int16"  # one type: it packs samples together, and asserts that theirs are one
    read = np.frombuffer(prime.routed_experts.data, prime.routed_experts.dtype).reshape(2, 2, 2)
    assert np.array_equal(read, output.routed_experts)
    (filler,) = verl.agent_loop_outputs((), LoopOutput, "metrics", experts_shape=(2, 2))
    assert filler.routed_experts.dtype == np.int16, "its worker joins the rows of a batch, and takes none without"
    assert filler.routed_experts.tolist() == [[[0, 1], [0, 1]]]
    large = dataclasses.replace(sample, routed_experts=np.full((1, 2, 2), 32_768, np.uint16))
    with pytest.raises(WrongRows, match="a replayed id is 32768, and this trainer's int16 ends at 32767"):
        verl.agent_loop_outputs([large], LoopOutput, "metrics")
