"""The engine on SmolLM2's own weights: the greedy reply that others get, and logprobs that can be checked again."""

from pathlib import Path

import numpy as np
import pytest

from standins.teacher_forcing import line_logprobs
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer

from .conftest import Bench

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.weights
@pytest.mark.timeout(600)
def test_the_greedy_reply_is_the_known_one_and_sampled_logprobs_are_the_teacher_forced_ones(
    smollm2_path: Path,
) -> None:
    loaded = load_weights(smollm2_path)
    tokenizer = Tokenizer(load_model_files(smollm2_path).tokenizer_json)
    prompt = tokenizer.encode(PROMPT).tolist()
    run = Bench(loaded, tokenizer, max_batch=4, step_tokens=16)
    run.add("greedy", prompt, temperature=0.0, ignore_eos=False, max_tokens=20)
    run.add("sampled", prompt, temperature=1.0, seed=11, max_tokens=40)
    run.run()
    assert run.ids("greedy") == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    scorer = NumpyForward(*loaded, num_kv_tokens=512)
    for name in ("greedy", "sampled"):
        forced = line_logprobs(scorer, [*prompt, *run.ids(name)], len(prompt))
        np.testing.assert_allclose(run.logprobs(name), forced, rtol=0, atol=1e-4)
