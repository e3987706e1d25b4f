"""The same agent, greedy, with the same weights, through two engines: exact within each, and apart by what is known."""

from pathlib import Path

import numpy as np
import pytest

from scripts.engine_table import ModelScores, measure_embedded, measure_llamacpp
from stenograph.model.files import load_model_files


@pytest.mark.weights
@pytest.mark.timeout(600)
def test_a_session_is_exact_on_the_embedded_engine_and_on_llama_cpp_and_they_are_the_same_model(
    smollm2_path: Path,
) -> None:
    score = ModelScores(smollm2_path)
    embedded = measure_embedded(smollm2_path, score)  # raises where a turn does not go on from the ids before it
    vocab_size = load_model_files(smollm2_path).vocab_size
    own, against = measure_llamacpp("llama.cpp", smollm2_path, embedded, score, vocab_size=vocab_size, is_exact=True)
    for one in (embedded, own):
        assert len(one.turns) >= 4
        assert one.turns[1].num_cached >= len(one.turns[0].prompt_ids)
        assert one.apart_nats.max() < 1e-3
    # Four-bit weights with eight-bit activations there, dequantized to float32 here: the same but for that.
    assert np.median(against.apart_nats) < 0.1
    assert against.num_other < len(against.apart_nats) / 4
    assert [turn.text for turn in own.turns[:2]] == [turn.text for turn in embedded.turns[:2]]
