"""The prompts of `bench streaming`: texts of so many tokens, all different or all one. Pure."""

import enum
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.kit.conversation import Messages
from stenograph.model.tokenizer import Tokenizer

BYTES_PER_TOKEN = 8
"""More than a token of these texts has."""
CUTS = (0, -1, 1, -2, 2, -3, 3)
"""Distances from the wanted length at which a text is cut: its last word may encode to another number of tokens."""


class PromptKind(enum.StrEnum):
    """Whether requests share their prompt, and so its keys and values."""

    UNIQUE = "unique"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A text, and its ids [T] by the tokenizer that will be measured."""

    text: str
    ids: "array[int]"


def make_prompts(
    tokenizer: Tokenizer, kind: PromptKind, *, num: int, num_tokens: int, skip: int = 0
) -> list[TextPrompt]:
    """`num` prompts of `num_tokens` tokens, or as near as a text can come; the same for the same arguments.

    `skip` leaves out so many first ones. The text is words of English and of code, repeated where that is too short.
    """
    first = skip if kind is PromptKind.SHARED else skip + num
    messages = Messages(num_bytes=num_tokens * BYTES_PER_TOKEN, num_messages=first + 1)
    texts = list(messages.texts(first + 1))
    if kind is PromptKind.SHARED:
        return [_cut(texts[skip], num_tokens, tokenizer)] * num
    return [_cut(text, num_tokens, tokenizer) for text in texts[skip : skip + num]]


def prompts_of(text: str, tokenizer: Tokenizer, kind: PromptKind, *, num: int) -> list[TextPrompt]:
    """`num` prompts of one text: all the same, or each with its number before it."""
    if kind is PromptKind.SHARED:
        return [TextPrompt(text=text, ids=tokenizer.encode(text))] * num
    texts = [f"{number}. {text}" for number in range(1, num + 1)]
    return [TextPrompt(text=one, ids=tokenizer.encode(one)) for one in texts]


def _cut(text: str, num_tokens: int, tokenizer: Tokenizer) -> TextPrompt:
    """The beginning of a text that has so many tokens, or nearly."""
    cut = list(_beginnings(text, num_tokens, tokenizer))
    return min(cut, key=lambda prompt: abs(len(prompt.ids) - num_tokens))


def _beginnings(text: str, num_tokens: int, tokenizer: Tokenizer) -> Iterator[TextPrompt]:
    ids = tokenizer.encode(text)
    for cut in CUTS:
        beginning = tokenizer.decode(ids[: max(1, num_tokens + cut)])
        yield (prompt := TextPrompt(text=beginning, ids=tokenizer.encode(beginning)))
        if len(prompt.ids) == num_tokens:
            return
