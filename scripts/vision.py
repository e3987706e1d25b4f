"""A small Qwen2.5-VL with random weights, pictures for it, and its log-probabilities by transformers.

Runs in an engine's Python, and imports nothing of this project: what it computes is an oracle.

    vision.py make FOLDER       the model; in images/ pictures of many sizes and formats, in images.json their tokens
    vision.py score FOLDER      standard input has lines {tokens, media: [names], rows: [{at, temperature?, bias?}]};
                                standard output, for each, ln p of the tokens at the rows, and the numbers of tokens
                                of its pictures
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

NUM_PICTURES = 120
FORMATS = ("png", "jpeg", "webp", "gif")
EXTREMES = ((1, 1), (3, 500), (500, 3), (28, 28), (27, 29), (640, 480))
IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END, IM_END, END_OF_TEXT = 151655, 151656, 151652, 151653, 151645, 151643
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 4 * 28 * 28,
    "max_pixels": 128 * 28 * 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
TEXT = {
    "vocab_size": 151936,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "initializer_range": 0.2,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": TEXT["hidden_size"],
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.1,
}


def make(folder: Path) -> None:
    """Write the model and the pictures."""
    torch.manual_seed(5)
    config = Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "images").mkdir(exist_ok=True)
    for number in range(NUM_PICTURES):
        _draw(folder / "images", number)
    names = sorted(path.name for path in (folder / "images").iterdir())
    (folder / "images.json").write_text(json.dumps({name: num_tokens(pixels(folder, [name]))[0] for name in names}))


def _draw(folder: Path, number: int) -> None:
    """A picture of waves and noise; every third one without colours."""
    chosen = random.Random(number)
    width, height = EXTREMES[number] if number < len(EXTREMES) else (chosen.randint(14, 700), chosen.randint(14, 700))
    noise = np.random.default_rng(number).integers(0, 60, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    waves = 90 + 60 * np.sin(x / chosen.uniform(3, 40) + number) + 40 * np.cos(y / chosen.uniform(3, 40))
    picture = Image.fromarray(np.clip(waves[:, :, None] + noise, 0, 255).astype(np.uint8))
    kind = FORMATS[number % len(FORMATS)]
    (picture.convert("L") if number % 3 == 0 else picture).save(folder / f"{number:03d}.{kind}")


def pixels(folder: Path, names: list[str]) -> Any:
    """Pictures as processed by the model's own image processor."""
    opened = [Image.open(folder / "images" / name).convert("RGB") for name in names]
    return AutoImageProcessor.from_pretrained(folder)(images=opened, return_tensors="pt")


def num_tokens(processed: Any) -> list[int]:
    """The number of tokens that stand for each picture: its patches, merged two by two."""
    return [int(grid.prod()) // PREPROCESSOR["merge_size"] ** 2 for grid in processed["image_grid_thw"]]


def score(folder: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log-probabilities of each line's rows, each after all tokens before it."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    scored: list[dict[str, Any]] = []
    for line in lines:
        ids, rows = torch.tensor([line["tokens"]]), torch.tensor([row["at"] for row in line["rows"]])
        processed = pixels(folder, line["media"])
        with torch.inference_mode():
            logits = model(
                input_ids=ids,
                mm_token_type_ids=(ids == IMAGE_PAD).int(),
                logits_to_keep=rows - 1,
                use_cache=False,
                **processed,
            ).logits[0]
        logits = logits.double().clone()  # an inference tensor takes no bias in place
        for number, row in enumerate(line["rows"]):
            for one in row.get("bias", ()):
                logits[number, one["id"]] += one["bias"]
            logits[number] /= row.get("temperature", 1.0)
        told = torch.log_softmax(logits, dim=-1)[torch.arange(len(rows)), ids[0][rows]]
        scored.append({"logprobs": told.tolist(), "lengths": num_tokens(processed)})
    return scored


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2])
    if verb == "make":
        make(place)
    else:
        sys.stdout.write(json.dumps(score(place, json.load(sys.stdin))))
