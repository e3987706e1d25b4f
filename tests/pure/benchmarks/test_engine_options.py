"""What benchmarks ask of the embedded engine: all that is asked for at once is in the batch, and steps hold it."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.engine import plan as engine_plan
from benchmarks.engine.plan import EngineScenario
from benchmarks.guided.command import guided_engine
from benchmarks.kit.options import engine_options
from standins.tiny.llama import write_tiny_folder
from stenograph.embedded.engine_core import EngineLimits
from stenograph.model.files import load_model_files

SIZES = [1, 16, 255, 256, 4000]


def check(limits: EngineLimits, num_at_once: int) -> None:
    assert limits.max_batch >= num_at_once
    assert limits.step_tokens >= 256
    assert limits.step_tokens > limits.max_batch


@pytest.mark.parametrize("num_at_once", SIZES)
def test_a_guided_batch_fits_a_step(num_at_once: int) -> None:
    check(EngineLimits.of(guided_engine(Namespace(threads=1, concurrency=num_at_once))), num_at_once)


@pytest.mark.parametrize("num_at_once", SIZES)
def test_a_decoding_batch_fits_a_step(tmp_path: Path, num_at_once: int) -> None:
    plan = engine_plan.EngineBenchPlan(
        files=load_model_files(write_tiny_folder(tmp_path / "tiny")),
        scenarios=(EngineScenario.DECODE,),
        batches=(1, num_at_once),
        options=Namespace(threads=1, max_tokens=8, prompt_tokens=8),
    )
    check(EngineLimits.of(plan.engine_options()), num_at_once)


@pytest.mark.parametrize("num_at_once", SIZES)
def test_a_streaming_batch_fits_a_step(num_at_once: int) -> None:
    check(EngineLimits.of(engine_options(threads=1, max_batch=num_at_once)), num_at_once)
