"""Images in trainers' rows: verl, prime-rl and SkyRL have a place for them, and no row trains without their pixels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from stenograph.client.samples import DecodedSample, SampleMedia
from stenograph.trainers import dicts, prime_rl, verl
from stenograph.trainers.rows import WrongRows, image_tensors, whole

from .conftest import group_of
from .test_rows import PrimeSample, PrimeTensor

Tensors = dict[str, NDArray[Any]]
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


def processed(number: int, *, height: int = 2) -> Tensors:
    """A processor's tensors for an image of two tokens, four patches each."""
    grid = np.array([[1, height, 4]], np.int64)
    return {"pixel_values": np.full((int(grid.prod()), 3), number, np.float32), "image_grid_thw": grid}


IMAGES = {FIRST: processed(1), SECOND: processed(2)}


def test_the_tensors_of_a_sample_are_its_images_in_their_order_and_fit_the_engine_s_tokens() -> None:
    joined = image_tensors(sample(), IMAGES)
    assert joined["pixel_values"][:, 0].tolist() == [1] * 8 + [2] * 8 + [1] * 8
    assert joined["image_grid_thw"].tolist() == [[1, 2, 4]] * 3
    with pytest.raises(WrongRows, match=SECOND):
        image_tensors(sample(), {FIRST: processed(1)})
    for height in (4, 3):
        with pytest.raises(WrongRows, match="other settings than the engine's"):
            image_tensors(sample(), {**IMAGES, SECOND: processed(2, height=height)})
    with pytest.raises(WrongRows, match="different names"):
        image_tensors(sample(), {**IMAGES, SECOND: {"pixel_values": np.zeros((8, 3))}})


def test_prime_rl_s_samples_have_tensors_and_a_kind_for_each_token() -> None:
    (made,) = prime_rl.training_samples(
        [sample()], PrimeSample, env_name="e", advantage=1.0, images=IMAGES, encoded_tensor=PrimeTensor
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=PrimeSample)
    assert sent.mm_token_type_ids == [0, 1, 1, 1, 1, 0, 1, 1, 0]
    assert sent.mm_kwargs is not None
    for name, tensor in image_tensors(sample(), IMAGES).items():
        read = sent.mm_kwargs[name]
        np.testing.assert_array_equal(np.frombuffer(read.data, read.dtype).reshape(read.shape), tensor)
    with pytest.raises(WrongRows, match="EncodedTensor"):
        prime_rl.training_samples([sample()], PrimeSample, env_name="e", advantage=1.0, images=IMAGES)


def test_skyrl_s_rows_have_their_tensors_in_columns() -> None:
    """A rollout without a trained token is its prompt, with the images of that."""
    untrained = replace(sample(), loss_mask=np.zeros(4, np.uint8))
    groups = [group_of((sample(),), 1.0), replace(group_of((untrained,), 0.0), name="other")]
    out: dict[str, Any] = dicts.skyrl(groups, images=IMAGES, tensor=np.ascontiguousarray)
    first, second = out["pixel_values"]
    assert (len(first), len(second)) == (24, 16)
    assert [len(grid) for grid in out["image_grid_thw"]] == [3, 2]
    assert out["prompt_token_ids"][1] == [1, 9, 9, 9, 9]
    assert "sample" not in out
    with pytest.raises(WrongRows, match="batches of one sort"):
        dicts.skyrl([*groups, replace(group_of((replace(sample(), media=()),), 0.0), name="blind")], images=IMAGES)


@pytest.mark.parametrize(
    "rows",
    [
        whole,
        lambda one: prime_rl.training_samples([one], dict, env_name="e", advantage=1.0),
        lambda one: verl.padded_batch([one], pad_id=0),
        lambda one: dicts.skyrl([group_of((one,), 1.0)]),
        lambda one: dicts.padded([one], pad_id=0, advantages=[1.0]),
    ],
)
def test_no_other_row_trains_on_tokens_of_images_without_pixels(rows: Callable[[DecodedSample], Any]) -> None:
    with pytest.raises(WrongRows, match=r"3 images|session\.media"):
        rows(sample())
