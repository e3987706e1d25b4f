"""The prompts of `stenograph bench engine`: random ids, so that no prompt begins as another did. Pure.

What they say is nothing to a dense model: its work is the same for every id.
"""

import random
from array import array

from stenograph.core.types import token_ids
from stenograph.model.tokenizer import Tokenizer


class PromptIds:
    """The ids of a tokenizer but its control tokens; what is drawn of them is the same for a seed."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int) -> None:
        self._ids = [id_ for id_ in range(tokenizer.vocab_size) if id_ not in tokenizer.special_ids]
        self._seed = seed

    def draw(self, name: str, *, num: int, num_tokens: int) -> "list[array[int]]":
        """`num` times so many ids; each `name` has its own."""
        drawn = random.Random(f"{self._seed} {name}")
        return [token_ids(drawn.choices(self._ids, k=num_tokens)) for _ in range(num)]
