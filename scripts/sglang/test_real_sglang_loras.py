"""Sessions by two LoRAs at once through a real SGLang are exact. Run by scripts/test-sglang."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.engine_table import serving
from scripts.loras import RANK, check_reload, check_sessions, write_lora

from .conftest import RealSGLang


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model, root = Path(os.environ["SGLANG_JOB_MODEL"]), tmp_path_factory.mktemp("loras")
    return {name: write_lora(model, root / name, seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def sglang_with_loras(loras: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSGLang]:
    known = ("--lora-paths", *(f"{name}={folder}" for name, folder in loras.items()))
    room = ("--lora-backend", "torch_native", "--max-loras-per-batch", "3", "--max-lora-rank", str(RANK))
    server = RealSGLang(
        Path(os.environ["SGLANG_JOB_MODEL"]),
        log=tmp_path_factory.mktemp("sglang-loras") / "sglang.log",
        flags=("--enable-lora", *room, *known),
    )
    try:
        server.start()
        yield server
    finally:
        server.kill()


def test_sessions_by_two_loras_are_exact(sglang_with_loras: RealSGLang, loras: dict[str, Path]) -> None:
    sglang = sglang_with_loras
    with serving(sglang.model, "--engine", "sglang", "--engine-url", sglang.url) as url:
        check_sessions(url, os.environ["SGLANG_JOB_PYTHON"], sglang.model, loras)


def test_a_lora_loaded_again_from_its_folder_samples_at_once(
    sglang_with_loras: RealSGLang, loras: dict[str, Path], tmp_path: Path
) -> None:
    sglang = sglang_with_loras
    flags = (
        "--engine",
        "sglang",
        "--engine-url",
        sglang.url,
        "--weights-dir",
        str(tmp_path),
        "--weight-version",
        "base",
    )
    with serving(sglang.model, *flags) as url:
        check_reload(url, os.environ["SGLANG_JOB_PYTHON"], sglang.model, loras, tmp_path / "live")
