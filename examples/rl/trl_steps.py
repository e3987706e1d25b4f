"""`--trainer trl`: the same steps by TRL's `GRPOTrainer` on the CPU; its rollouts, questions and measure are the run's.

Its loss is the loop's: all tokens of a step count alike, clip 0.2, no KL term. Two things differ: advantages are
divided by the sample standard deviation, and without vLLM old log-probabilities are its own, never the recorded ones.
These are compared before the update, by one more forward pass.
"""

import asyncio
import copy
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from policy import StepFigures
from run import Run, SampledStep
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from stenograph.client import DecodedSamples, RolloutBatch
from stenograph.trainers import trl

UNCLIPPED = 1e9


class StepsOfTrl(TrainerCallback):  # type: ignore[misc]
    """Stands on TRL's thread; what is asynchronous runs on the run's loop."""

    def __init__(self, run: Run, loop: asyncio.AbstractEventLoop, filler_id: int) -> None:
        self.run, self.loop, self.filler_id = run, loop, filler_id
        self.step: SampledStep | None = None
        self.figures: StepFigures | None = None
        self.began = 0.0

    def rollout_func(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[object]]:
        """One row for each prompt, in order. A prompt is a place in the step; the run draws what is asked."""
        del trainer
        size = self.run.options.group_size
        # Each a value of its own: its place decides what is sampled.
        episodes = [copy.copy(episode) for episode in self.run.asked() for _ in range(size)]
        if len(prompts) != len(episodes):
            raise ValueError(f"TRL asks for {len(prompts)} rollouts at a time, where a step has {len(episodes)}")
        sampled = self.run.sampled(len(self.run.steps), episodes, 1)  # TRL makes the groups
        self.step = asyncio.run_coroutine_threadsafe(sampled, self.loop).result()
        self.began = time.monotonic()
        self.figures = self.run.policy.look(self.step.rows)
        return trl.rollout_rows(with_rows(self.step), num_prompts=len(prompts), filler_id=self.filler_id)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The gradient is there, and nothing has used it."""
        del args, state, control, rest
        assert self.figures is not None
        self.figures = dataclasses.replace(self.figures, gradient_norm=self.run.policy.gradient_norm())

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """The update is done: the swap, and the step's line."""
        del args, state, control, rest
        assert self.step is not None
        assert self.figures is not None
        over = self.run.over(self.step, self.figures, time.monotonic() - self.began)
        asyncio.run_coroutine_threadsafe(over, self.loop).result()


def with_rows(step: SampledStep) -> RolloutBatch[Any]:
    """The step's batch, with each sample as the trainer is to get it."""
    rows = {id(one.sample): one.row for one in step.samples}

    def changed(rollout: Any) -> Any:
        samples = [rows[id(one)].as_sample(one) for one in rollout.samples or () if id(one) in rows]
        made = DecodedSamples(samples=tuple(samples), session_metadata={})
        return dataclasses.replace(rollout, samples=made)

    groups = [dataclasses.replace(group, rollouts=tuple(map(changed, group.rollouts))) for group in step.batch.groups]
    return dataclasses.replace(step.batch, groups=tuple(groups))


async def steps_by_trl(run: Run) -> None:
    """All of the run's steps."""
    options = run.options
    folder = options.out / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    steps = StepsOfTrl(run, asyncio.get_running_loop(), tokenizer.eos_token_id)
    config = GRPOConfig(
        output_dir=str(options.out / "trl"), use_cpu=True, bf16=False, seed=options.seed, max_steps=options.steps,
        per_device_train_batch_size=options.group_size, gradient_accumulation_steps=options.prompts,
        num_generations=options.group_size, shuffle_dataset=False, learning_rate=options.lr,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=UNCLIPPED, beta=0.0, epsilon=0.2,
        loss_type="dapo", temperature=options.temperature,
        gradient_checkpointing=False, max_completion_length=8192, save_strategy="no", logging_strategy="no",
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    places = [f"step {step}, item {item}" for step in range(options.steps) for item in range(options.prompts)]
    trainer = GRPOTrainer(
        model=run.policy.model,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": places}),
        reward_funcs=[trl.rollout_reward],
        rollout_func=steps.rollout_func,
        callbacks=[steps],
    )
    await asyncio.to_thread(trainer.train)
