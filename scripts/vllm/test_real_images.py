"""A thousand turns with images through a real vLLM are exact. Run by scripts/test-vllm."""

import json
import os
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.engine_table import serving
from scripts.real_engine import ask
from scripts.real_images import (
    IMAGE_PAD,
    MOST_IMAGES,
    PARTS,
    VISION_END,
    VISION_START,
    Oracle,
    Picture,
    check_part,
    read_pictures,
)

from .conftest import RealVLLM

GENERATE_PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(
        model=Path(os.environ["VLLM_JOB_VISION"]),
        python=os.environ["VLLM_JOB_PYTHON"],
        packages=os.environ["VLLM_JOB_VISION_PACKAGES"],
        is_raw=True,
    )


@pytest.fixture(scope="module")
def vllm(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVLLM]:
    flags = ["--max-model-len", "4096", "--skip-mm-profiling"]
    flags += ["--limit-mm-per-prompt", json.dumps({"image": MOST_IMAGES, "video": 0})]
    log = tmp_path_factory.mktemp("vllm") / "images.log"
    started = RealVLLM(oracle.model, scale_out=True, log=log, flags=flags, packages=oracle.packages)
    try:
        started.start()
        yield started
    finally:
        started.kill()


@pytest.fixture(scope="module")
def server(vllm: RealVLLM, oracle: Oracle) -> Iterator[str]:
    """A Stenograph before a vLLM of the model."""
    with serving(oracle.model, "--engine", "vllm", "--engine-url", vllm.url) as url:
        yield url


def test_a_turn_whose_image_vllm_has_lost_is_sampled(vllm: RealVLLM, server: str, oracle: Oracle) -> None:
    """A request that vLLM refuses once it has processed the image leaves a hash without it. Asked of vLLM itself, the
    next request fails. Before the others, which show vLLM every picture."""
    one, other = read_pictures(oracle.model)[-2:]
    for picture in (one, other):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(vllm.url, GENERATE_PATH, _seeing(picture, 10**6))
    with pytest.raises(urllib.error.HTTPError, match="500"):
        ask(vllm.url, GENERATE_PATH, _seeing(one))
    content = [{"type": "image_url", "image_url": {"url": other.url}}]
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    assert ask(ask(server, "/sessions", {})["base_url"], "/chat/completions", body)["choices"]


def _seeing(picture: Picture, *ids: int) -> dict[str, Any]:
    """A request to vLLM of these ids and the picture."""
    part = {"type": "image_url", "uuid": picture.sha256, "url": picture.url}
    body = {"model": "smollm2", "content_parts": [part], "sampling_params": {"max_tokens": 1, "logprobs": 0}}
    return {**body, "token_ids": [*ids, VISION_START, IMAGE_PAD, VISION_END]}


@PARTS
def test_turns_with_images_are_exact(part: int, server: str, oracle: Oracle) -> None:
    check_part(part, server, oracle)
