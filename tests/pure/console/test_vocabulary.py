"""The vocabulary's bytes have every token's, for whoever reads them as docs/console.md says."""

import hashlib
import struct

from stenograph.console.vocabulary import AT_ONCE, VocabularyMaker, vocabulary_of
from stenograph.model.tokenizer import Tokenizer


def read(content: bytes) -> tuple[list[bytes], list[int]]:
    """The tokens and their kinds."""
    (num,) = struct.unpack_from("<I", content)
    kinds, at = list(content[4 : 4 + num]), 4 + num + -num % 4
    ends = struct.unpack_from(f"<{num}I", content, at)
    text = content[at + 4 * num :]
    assert ends[-1] == len(text)
    return [text[start:end] for start, end in zip((0, *ends), ends, strict=False)], kinds


def test_every_token_is_there_by_its_bytes(tokenizer: Tokenizer) -> None:
    made = vocabulary_of(tokenizer)
    tokens, kinds = read(made.content)
    assert tokens == [tokenizer.bytes_of(id_) for id_ in range(tokenizer.vocab_size)]
    assert {id_ for id_, kind in enumerate(kinds) if kind == 2} == tokenizer.special_ids
    assert {id_ for id_, kind in enumerate(kinds) if kind} == set(tokenizer.added_tokens.values())
    assert made.digest == hashlib.sha256(made.content).hexdigest()


def test_of_some_ids_the_others_are_empty(tokenizer: Tokenizer) -> None:
    tokens, _ = read(vocabulary_of(tokenizer, only={7, 70}).content)
    assert [id_ for id_, token in enumerate(tokens) if token] == [7, 70]


def test_it_is_made_in_steps(tokenizer: Tokenizer) -> None:
    maker = VocabularyMaker(tokenizer)
    steps = list(maker.steps())
    assert steps[-1] == tokenizer.vocab_size
    assert all(later - earlier <= AT_ONCE for earlier, later in zip([0, *steps], steps, strict=False))
    assert maker.made() == vocabulary_of(tokenizer)
