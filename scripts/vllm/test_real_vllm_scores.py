"""A real vLLM scores stored sessions as the model does. Run by scripts/test-vllm."""

import os
from pathlib import Path

from scripts.real_scores import check_stored_scores

from .conftest import RealVLLM


def test_ten_thousand_stored_tokens_have_the_scores_of_the_model(vllm: RealVLLM, tmp_path: Path) -> None:
    name = "vllm-generate" if vllm.scale_out else "vllm-completions"
    at = ("--engine", "vllm", "--engine-url", vllm.url)
    check_stored_scores(os.environ["VLLM_JOB_PYTHON"], vllm.model, tmp_path, name, *at)
