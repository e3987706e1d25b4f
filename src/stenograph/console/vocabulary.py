"""The vocabulary as one piece of bytes, for a viewer to fetch once and keep by its hash. Pure.

Little-endian: the number of ids N (uint32); N bytes, 0 for a plain token, 1 for an added one, 2 for a control token;
zeros up to a multiple of four; the end of each token's bytes (N uint32); the bytes of all tokens.
"""

import hashlib
from array import array
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from stenograph.model.tokenizer import Tokenizer

AT_ONCE = 4096
"""Tokens looked up in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyBytes:
    """A vocabulary, and the SHA-256 of it in hex."""

    content: bytes
    digest: str


class VocabularyMaker:
    """Makes a vocabulary: first its `steps`, each of less than a millisecond, then `made`."""

    def __init__(self, tokenizer: Tokenizer, only: Container[int] | None = None) -> None:
        """`only`: the wanted ids; all others are empty."""
        self._tokenizer = tokenizer
        self._only = only
        self._lengths = array("I")
        self._texts: list[bytes] = []

    def __repr__(self) -> str:
        return f"<VocabularyMaker {len(self._lengths)} of {self._tokenizer.vocab_size} ids>"

    def steps(self) -> Iterator[int]:
        """Look all tokens up; the number of ids after each step. To be taken from once, to its end."""
        only, num = self._only, self._tokenizer.vocab_size
        for start in range(0, num, AT_ONCE):
            ids = range(start, min(start + AT_ONCE, num))
            tokens = [self._tokenizer.bytes_of(id_) if only is None or id_ in only else b"" for id_ in ids]
            self._lengths.extend(map(len, tokens))
            self._texts.append(b"".join(tokens))
            yield ids.stop

    def made(self) -> VocabularyBytes:
        """The vocabulary, after all steps. Hashes some megabytes: work for the CPU pool."""
        tokenizer, num = self._tokenizer, len(self._lengths)
        kinds = bytearray(num)
        for id_ in tokenizer.added_tokens.values():
            kinds[id_] = 2 if id_ in tokenizer.special_ids else 1
        ends = np.cumsum(np.frombuffer(self._lengths, np.uint32), dtype="<u4")
        head = num.to_bytes(4, "little") + bytes(kinds) + bytes(-num % 4)
        content = b"".join([head, ends.tobytes(), *self._texts])
        return VocabularyBytes(content=content, digest=hashlib.sha256(content).hexdigest())


def vocabulary_of(tokenizer: Tokenizer, only: Container[int] | None = None) -> VocabularyBytes:
    """A vocabulary, made at once."""
    maker = VocabularyMaker(tokenizer, only)
    for _ in maker.steps():
        pass
    return maker.made()
