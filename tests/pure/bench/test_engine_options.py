"""What benchmarks ask of the embedded engine: all that is asked for at once is in the batch, and steps hold it."""

from argparse import Namespace
from pathlib import Path

import pytest

from stenograph.bench import engine_plan, guided_plan
from stenograph.bench.engine_plan import Scenario
from stenograph.bench.guided_grammar import of_json_object
from stenograph.bench.guided_prompts import built_in
from stenograph.bench.streaming_load import PromptKind, StreamingPlan
from stenograph.embedded.engine_core import EngineLimits
from stenograph.render.model_files import load_model_files
from stenograph.testing.tiny_llama import write_tiny_folder

SIZES = [1, 16, 255, 256, 4000]


def check(limits: EngineLimits, num_at_once: int) -> None:
    assert limits.max_batch >= num_at_once
    assert limits.step_tokens >= 256
    assert limits.step_tokens > limits.max_batch


@pytest.mark.parametrize("num_at_once", SIZES)
def test_a_guided_batch_fits_a_step(num_at_once: int) -> None:
    options = Namespace(threads=1, concurrency=num_at_once)
    plan = guided_plan.Plan(model=Path("model"), constraint=of_json_object(), prompts=built_in(1), options=options)
    check(plan.engine_options().limits, num_at_once)


@pytest.mark.parametrize("num_at_once", SIZES)
def test_a_decoding_batch_fits_a_step(tmp_path: Path, num_at_once: int) -> None:
    plan = engine_plan.Plan(
        files=load_model_files(write_tiny_folder(tmp_path / "tiny")),
        scenarios=(Scenario.DECODE,),
        batches=(1, num_at_once),
        options=Namespace(threads=1, max_tokens=8, prompt_tokens=8),
    )
    check(plan.engine_options().limits, num_at_once)


@pytest.mark.parametrize("num_at_once", SIZES)
def test_a_streaming_batch_fits_a_step(num_at_once: int) -> None:
    plan = StreamingPlan(
        model="model",
        prompts=PromptKind.SHARED,
        prompt_tokens=4,
        num_requests=1,
        submit_interval_ms=0.0,
        max_tokens=1,
        warm_up=0,
        max_batch=num_at_once,
        kv_tokens=4096,
    )
    check(plan.limits, num_at_once)
