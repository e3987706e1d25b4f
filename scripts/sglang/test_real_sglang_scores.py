"""A real SGLang scores what the model gives. Run by scripts/test-sglang."""

from scripts.real_scores import check_scores
from stenograph.engine.sglang.generate import SGLangGenerate

from .conftest import RealSGLang


def test_ten_thousand_tokens_have_the_scores_of_the_model(sglang: RealSGLang) -> None:
    check_scores(sglang.url, sglang.model, SGLangGenerate)
