"""A real SGLang scores stored sessions as the model does. Run by scripts/test-sglang."""

import os
from pathlib import Path

from scripts.real_scores import check_stored_scores

from .conftest import RealSGLang


def test_ten_thousand_stored_tokens_have_the_scores_of_the_model(sglang: RealSGLang, tmp_path: Path) -> None:
    at = ("--engine", "sglang", "--engine-url", sglang.url)
    check_stored_scores(os.environ["SGLANG_JOB_PYTHON"], sglang.model, tmp_path, "sglang", *at)
