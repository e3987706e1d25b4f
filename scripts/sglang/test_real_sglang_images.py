"""A thousand turns with images through a real SGLang's own route are exact. Run by scripts/test-sglang."""

import os
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.engine_table import serving
from scripts.real_engine import ask
from scripts.real_images import PARTS, PLACEHOLDER, WORDS, Oracle, check_part, read_pictures

from .conftest import SHIMS, RealSGLang


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(
        model=Path(os.environ["SGLANG_JOB_VISION"]),
        python=os.environ["SGLANG_JOB_PYTHON"],
        packages=SHIMS,
        is_raw=False,
    )


@pytest.fixture(scope="module")
def server(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Stenograph before an SGLang of the model."""
    sglang = RealSGLang(oracle.model, log=tmp_path_factory.mktemp("sglang") / "images.log", context=4096)
    try:
        sglang.start()
        with serving(oracle.model, "--engine", "sglang-generate", "--engine-url", sglang.url) as url:
            yield url
    finally:
        sglang.kill()


@PARTS
def test_turns_with_images_are_exact(part: int, server: str, oracle: Oracle) -> None:
    check_part(part, server, oracle, [word for word in WORDS if word != PLACEHOLDER])


def test_a_spelled_placeholder_is_refused_and_sglang_goes_on(server: str, oracle: Oracle) -> None:
    picture = {"type": "image_url", "image_url": {"url": read_pictures(oracle.model)[0].url}}
    url = ask(server, "/sessions", {})["base_url"]
    for words, is_taken in (("what is this?", True), (PLACEHOLDER, False), ("and this?", True)):
        content = [picture, {"type": "text", "text": words}]
        body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
        if is_taken:
            assert ask(url, "/chat/completions", body)["choices"]
            continue
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, "/chat/completions", body)
