"""Rows as the trainers' own classes, at the versions that they were written against; skipped where these are missing.

`scripts/test-trainers` installs them, and fails where one is missing.
"""

import dataclasses
import importlib
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from stenograph.client import DecodedSample
from stenograph.client.batch import RolloutBatch
from stenograph.client.samples import SampleMedia
from stenograph.trainers import rows, tinker, trl, verl

from .conftest import Grown, group_of, rollouts_samples, teacher

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the trainers' own imports
    pytest.mark.timeout(600),
]


def real(module: str) -> Any:
    """A trainer's module; skips without it, but in the script, where it must be there."""
    if "TEST_TRAINERS" in os.environ:
        return importlib.import_module(module)
    return pytest.importorskip(module)


@settings(max_examples=30)
@given(rollouts_samples())
def test_trl_s_rollout_sample(samples: tuple[DecodedSample, ...]) -> None:
    worker = real("trl.experimental.async_grpo.async_rollout_worker")
    made = trl.rollout_samples([group_of(samples, 0.0, 1.0)], worker.RolloutSample)
    assert len(made) == 2 * sum(sample.num_trained > 0 for sample in samples)
    for one in made:
        assert len(one.input_ids) == len(one.completion_mask) == len(one.old_log_probs)


@settings(max_examples=30)
@given(rollouts_samples())
def test_verl_s_agent_loop_output_and_data_proto(samples: tuple[DecodedSample, ...]) -> None:
    loop = real("verl.experimental.agent_loop.agent_loop")
    protocol, torch = real("verl.protocol"), real("torch")
    made = verl.agent_loop_outputs(samples, loop.AgentLoopOutput, loop.AgentLoopMetrics(), reward=0.5)
    kept = [sample for sample in samples if sample.response_length]
    assert len(made) == max(1, len(kept))
    for one, sample in zip(made, kept, strict=False):
        tensors = one.as_dict()
        start = sample.prompt_length
        mask = tensors["response_mask"].numpy() == 1
        nats = tensors["rollout_log_probs"].numpy()
        ids = np.concatenate([tensors["prompts"].numpy(), tensors["responses"].numpy()])
        # dp_actor takes the logits [-R - 1, -1) for the response.
        expected = np.concatenate([[0.0], teacher(ids)])[start:]
        np.testing.assert_allclose(nats[mask], expected[mask], rtol=1e-6)
        assert mask.sum() == sample.num_trained
    last = made[-1].as_dict()  # of a rollout without a response, too
    assert last["rm_scores"][-1] == 0.5
    assert kept or last["response_mask"].tolist() == [0]
    if kept:
        batch = verl.padded_batch(kept, pad_id=0, rewards=[0.5] * len(kept))
        tensors = {name: torch.from_numpy(np.ascontiguousarray(row)) for name, row in batch.items()}
        proto = protocol.DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["g"] * len(kept), object)})
        assert len(proto) == len(kept)
        assert proto.batch["rollout_log_probs"].shape == proto.batch["responses"].shape


def test_verl_s_agent_loop_output_has_the_routes_of_each_token() -> None:
    """As its v1 trainer stores them: a row for each token, at its place, zero for the last, which no pass was fed."""
    loop = real("verl.experimental.agent_loop.agent_loop")
    grown = Grown()
    grown.turn(grown.turn(None, [1, 2], [3, 4]), [5], [6, 7])
    (sample,) = grown.samples()
    num_rows = len(sample.tokens) - 1
    routes = np.random.default_rng(0).integers(0, 128, (num_rows, 3, 2)).astype(np.uint8)
    routed = dataclasses.replace(sample, routed_experts=routes)
    (one,) = verl.agent_loop_outputs([routed], loop.AgentLoopOutput, loop.AgentLoopMetrics(), reward=0.5)
    (filler,) = verl.agent_loop_outputs(
        (), loop.AgentLoopOutput, loop.AgentLoopMetrics(), reward=0.5, experts_shape=(3, 2)
    )
    made = one.as_dict()["routed_experts"].numpy()
    assert (made.dtype, made[num_rows].any()) == (np.int16, False)
    np.testing.assert_array_equal(made[:num_rows], routes)
    assert filler.as_dict()["routed_experts"].shape == (2, 3, 2)


def test_verl_s_agent_loop_output_has_each_image_in_its_order() -> None:
    """Its worker reads `multi_modal_data["images"]`, and gives them to the model's processor in this order."""
    loop = real("verl.experimental.agent_loop.agent_loop")
    grown = Grown()
    grown.turn(None, [1, 9, 9, 2, 9], [3, 4])
    (sample,) = grown.samples()
    hashes = ["ab" * 32, "cd" * 32]
    places = zip(hashes, ((1, 2), (4, 1)), strict=True)
    media = tuple(SampleMedia(sha256=one, kind="image", start=at, length=num) for one, (at, num) in places)
    images = {one: np.full((2, 2), number) for number, one in enumerate(hashes)}
    shown = dataclasses.replace(sample, media=media)
    (one,) = verl.agent_loop_outputs([shown], loop.AgentLoopOutput, loop.AgentLoopMetrics(), images=images)
    assert [int(image[0, 0]) for image in one.multi_modal_data["images"]] == [0, 1]
    assert one.as_dict()["prompts"].tolist() == [1, 9, 9, 2, 9]


@settings(max_examples=30)
@given(rollouts_samples())
def test_tinker_s_datum(samples: tuple[DecodedSample, ...]) -> None:
    types = real("tinker.types")
    made = tinker.datums(samples, types.Datum, types.ModelInput.from_ints, advantage=0.5)
    kept = [sample for sample in samples if sample.num_trained]
    for one, sample in zip(made, kept, strict=True):
        fields = {name: np.array(data.to_numpy()) for name, data in one.loss_fn_inputs.items()}
        assert one.model_input.to_ints() == sample.tokens[:-1].tolist()
        assert fields["target_tokens"].tolist() == sample.tokens[1:].tolist()
        trained = rows.shifted(rows.whole(sample).mask)
        np.testing.assert_allclose(fields["logprobs"][trained], teacher(sample.tokens)[trained], rtol=1e-6)
        assert (fields["advantages"] == np.where(trained, 0.5, 0.0)).all()


def test_trl_s_trainer_takes_a_step_with_our_rows(tmp_path: Any) -> None:
    package, datasets, transformers = real("trl"), real("datasets"), real("transformers")
    tokenizers = real("tokenizers")
    vocab = {"<end>": 0, **{str(number): number for number in range(1, 32)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<end>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    asked: list[int] = []

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[object]]:
        groups = []
        for index, _ in enumerate(prompts):
            grown = Grown()
            grown.turn(grown.turn(None, [1, 2], [3, 4 + index]), [5], [6])
            groups.append(rows_of(grown, index))
        asked.append(len(prompts))
        batch = RolloutBatch(groups=tuple(groups[:-1]), others=(), is_complete=False, seconds=0.0)  # one was lost
        return trl.rollout_rows(batch, num_prompts=len(prompts), filler_id=0)

    def rows_of(grown: Grown, index: int) -> Any:
        group = group_of(grown.samples(), float(index))
        return type(group)(**{**{name: getattr(group, name) for name in group.__slots__}, "index": index})

    arguments = package.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, num_generations=4, per_device_train_batch_size=4,
        report_to=[], logging_steps=1, save_strategy="no", max_completion_length=16, beta=0.0, bf16=False,
    )  # fmt: skip
    trainer = package.GRPOTrainer(
        model=model,
        args=arguments,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1 2"] * 4}),
        reward_funcs=[trl.rollout_reward],
        rollout_func=rollout_func,
    )
    trainer.train()
    assert asked == [4]
    (logged,) = [one for one in trainer.state.log_history if "reward" in one]
    assert logged["reward"] == pytest.approx(1.0)  # 0, 1, 2, and none of the lost one
    assert np.isfinite(logged["loss"])
