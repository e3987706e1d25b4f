"""A real vLLM scores what the model gives. Run by scripts/test-vllm."""

from scripts.real_scores import check_scores
from stenograph.engine.vllm.adapter import VLLM

from .conftest import RealVLLM


def test_ten_thousand_tokens_have_the_scores_of_the_model(vllm: RealVLLM) -> None:
    check_scores(vllm.url, vllm.model, VLLM)
