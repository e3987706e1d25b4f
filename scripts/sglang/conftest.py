"""A real SGLang, with two models that differ in their weights."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType] - as in hf_folder.py

from scripts.real_engine import RealEngine

CONTEXT = 1024
SHIMS = str(Path(__file__).parents[1] / "shims")
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",  # with two, beside other work, each step takes ten times as long
    "MKL_NUM_THREADS": "1",
    "PYTHONPATH": f"{Path(__file__).with_name('shim')}{os.pathsep}{SHIMS}",
}
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.3", "--max-total-tokens", "16384"),
    *("--max-running-requests", "16", "--skip-server-warmup", "--enable-metrics", "--enable-cache-report"),
    *("--tool-call-parser", "hermes", "--incremental-streaming-output"),
)


class RealSGLang(RealEngine):
    """An SGLang of `model`, with more `flags`. `/model_info` waits for no generation."""

    def __init__(self, model: Path, *, log: Path, context: int = CONTEXT, flags: Sequence[str] = ()) -> None:
        command = [os.environ["SGLANG_JOB_PYTHON"], "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--served-model-name", "smollm2", "--context-length", str(context), *FLAGS, *flags]
        super().__init__(model, command=command, environment=ENVIRONMENT, probe="/model_info", log=log)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model as `first`, and as `second` with other weights, as training would leave it."""
    folder, first = tmp_path_factory.mktemp("models"), Path(os.environ["SGLANG_JOB_MODEL"])
    (folder / "first").symlink_to(first)
    second = folder / "second"
    shutil.copytree(first, second)
    draw = np.random.default_rng(5)
    tensors = load_file(first / "model.safetensors")
    for name, tensor in tensors.items():
        if "down_proj" in name:
            noise = draw.standard_normal(tensor.shape, dtype=np.float32)
            tensors[name] = tensor + 0.02 * float(np.abs(tensor).mean()) * noise
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def sglang(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSGLang]:
    server = RealSGLang(models / "first", log=tmp_path_factory.mktemp("sglang") / "sglang.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()
