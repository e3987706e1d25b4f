"""A tiny ChatML model: a byte-level BPE tokenizer trained here, and the family's template."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from stenograph.families import family_for
from stenograph.model.files import ModelFiles
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.renderer import Renderer
from stenograph.text.template.template import ChatTemplate

STOCK_SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template in the model's own files, letter by letter."""


def train_reference() -> tokenizers.Tokenizer:
    """A tokenizer of a few hundred ids with special and plain added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant system hello tool_call name arguments " * 9], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [
            AddedToken("<x>", normalized=False),
            AddedToken("<x>y", normalized=False),
            AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("<é>", normalized=True),
        ]
    )
    return tokenizer


@pytest.fixture(scope="session")
def reference() -> tokenizers.Tokenizer:
    return train_reference()


@pytest.fixture(scope="session", params=list(EncoderKind), ids=str)
def tokenizer(reference: tokenizers.Tokenizer, request: pytest.FixtureRequest) -> Tokenizer:
    """What holds of a tokenizer holds whichever library encodes."""
    kind: EncoderKind = request.param
    made = Tokenizer(reference.to_str(), prefer=kind)
    assert made.encoder is kind
    return made


@pytest.fixture(scope="session")
def stock_template() -> str:
    return STOCK_SMOLLM2_TEMPLATE


@pytest.fixture(scope="session")
def renderer(reference: tokenizers.Tokenizer, tokenizer: Tokenizer) -> Renderer:
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=json.dumps(json.loads(reference.to_str()), separators=(",", ":")),
        chat_template=STOCK_SMOLLM2_TEMPLATE,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(),
        vocab_size=tokenizer.vocab_size,
        max_context_tokens=64,
        architecture="llama",
    )
    family = family_for(files)
    return Renderer(tokenizer, ChatTemplate(family.template or "", None, None), family)
