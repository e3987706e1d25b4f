"""Images in trainers' rows: verl has a place for them, and no other row trains on their tokens without them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stenograph.client.samples import DecodedSample, SampleMedia
from stenograph.trainers import dicts, prime_rl, verl
from stenograph.trainers.rows import WrongRows, whole

FIRST, SECOND = "ab" * 32, "cd" * 32
MEDIA = tuple(
    SampleMedia(sha256=sha256, kind="image", start=at, length=2) for sha256, at in ((FIRST, 1), (SECOND, 3), (FIRST, 6))
)


def sample() -> DecodedSample:
    return DecodedSample(
        tokens=np.array([1, 9, 9, 9, 9, 2, 9, 9, 3]),
        loss_mask=np.array([1, 0, 0, 1], np.uint8),
        log_probs=np.array([-1.0, 0.0, 0.0, -2.0]),
        status="completed",
        metadata={},
        media=MEDIA,
    )


def test_verl_s_outputs_have_each_image_in_its_order() -> None:
    images = {FIRST: "first", SECOND: "second"}
    (row,) = verl.agent_loop_outputs([sample()], dict, None, images=images)
    assert row["multi_modal_data"] == {"images": ["first", "second", "first"]}
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 9, 9, 9, 9], [2, 9, 9, 3])
    with pytest.raises(WrongRows, match=SECOND):
        verl.agent_loop_outputs([sample()], dict, None, images={FIRST: "first"})
    with pytest.raises(WrongRows, match=r"session\.media"):
        verl.agent_loop_outputs([sample()], dict, None)


@pytest.mark.parametrize(
    "rows",
    [
        whole,
        lambda one: prime_rl.training_samples([one], dict, env_name="e", advantage=1.0),
        lambda one: verl.padded_batch([one], pad_id=0),
        lambda one: dicts.padded([one], pad_id=0, advantages=[1.0]),
    ],
)
def test_no_other_row_trains_on_tokens_of_images_without_pixels(rows: Callable[[DecodedSample], Any]) -> None:
    with pytest.raises(WrongRows, match="3 images"):
        rows(sample())
