"""Sessions by two LoRAs at once through a real vLLM are exact. Run by scripts/test-vllm."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.engine_table import serving
from scripts.loras import RANK, check_reload, check_sessions, write_lora

from .conftest import RealVLLM


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, root = Path(os.environ["VLLM_JOB_MODEL"]), tmp_path_factory.mktemp("loras")
    return {name: write_lora(model, root / name, seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module", params=["generate", "completions"])
def vllm_with_loras(
    request: pytest.FixtureRequest, loras: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealVLLM]:
    log = tmp_path_factory.mktemp("vllm-loras") / f"{request.param}.log"
    known = ("--lora-modules", *(f"{name}={folder}" for name, folder in loras.items()))
    flags = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", str(RANK), *known)
    is_generate = request.param == "generate"
    server = RealVLLM(Path(os.environ["VLLM_JOB_MODEL"]), scale_out=is_generate, log=log, flags=flags)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_sessions_by_two_loras_are_exact(vllm_with_loras: RealVLLM, loras: dict[str, Path]) -> None:
    vllm = vllm_with_loras
    with serving(vllm.model, "--engine", "vllm", "--engine-url", vllm.url) as url:
        check_sessions(url, os.environ["VLLM_JOB_PYTHON"], vllm.model, loras)


def test_a_lora_loaded_again_from_its_folder_samples_at_once(
    vllm_with_loras: RealVLLM, loras: dict[str, Path], tmp_path: Path
) -> None:
    vllm = vllm_with_loras
    flags = ("--engine", "vllm", "--engine-url", vllm.url, "--weights-dir", str(tmp_path), "--weight-version", "base")
    with serving(vllm.model, *flags) as url:
        check_reload(url, os.environ["VLLM_JOB_PYTHON"], vllm.model, loras, tmp_path / "live")
