"""A thousand turns with images through a real vLLM are exact. Run by scripts/test-vllm."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.engine_table import serving
from scripts.real_images import MOST_IMAGES, PARTS, Oracle, check_part

from .conftest import RealVLLM


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(
        model=Path(os.environ["VLLM_JOB_VISION"]),
        python=os.environ["VLLM_JOB_PYTHON"],
        packages=os.environ["VLLM_JOB_VISION_PACKAGES"],
        is_raw=True,
    )


@pytest.fixture(scope="module")
def server(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Stenograph before a vLLM of the model."""
    flags = ["--max-model-len", "4096", "--skip-mm-profiling"]
    flags += ["--limit-mm-per-prompt", json.dumps({"image": MOST_IMAGES, "video": 0})]
    log = tmp_path_factory.mktemp("vllm") / "images.log"
    vllm = RealVLLM(oracle.model, scale_out=True, log=log, flags=flags, packages=oracle.packages)
    try:
        vllm.start()
        with serving(oracle.model, "--engine", "vllm", "--engine-url", vllm.url) as url:
            yield url
    finally:
        vllm.kill()


@PARTS
def test_turns_with_images_are_exact(part: int, server: str, oracle: Oracle) -> None:
    check_part(part, server, oracle)
