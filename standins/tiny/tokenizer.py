"""The smallest model files that are real: a byte-level BPE tokenizer with ChatML's control tokens.

Trained on the spot, from a few lines of text; the same every time.
"""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2, as in SmolLM2."""

_TEXT = [
    "the user asks and the assistant answers the user in the language of the user",
    'system user assistant tool {"name": "add", "arguments": {"a": 1, "b": 2}}',
    "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>",
]


def tiny_tokenizer_json(vocab_size: int = 320, *, more: Sequence[str] = ()) -> str:
    """A `tokenizer.json` of `vocab_size` ids, control tokens first, then `more`; every byte has a token,
    so any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in (*CONTROL_TOKENS, *more)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    text: str = tokenizer.to_str()
    return text
