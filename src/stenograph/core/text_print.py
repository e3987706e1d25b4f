"""A fingerprint that recognizes a long text without keeping it. Pure."""

from typing import Self

import xxhash


class TextPrint:
    """A text's length and its hash, XXH3 of 128 bits. It goes on: a longer text's is made of it.

    It protects no secret: a client that makes two texts with the same print confuses only its own session.
    """

    __slots__ = ("_state", "length")

    def __init__(self) -> None:
        self.length = 0
        self._state = xxhash.xxh3_128()

    def __repr__(self) -> str:
        return f"<TextPrint of {self.length} bytes>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TextPrint):
            return NotImplemented
        return self.length == other.length and self._state.digest() == other._state.digest()

    def __hash__(self) -> int:
        return hash((self.length, self._state.digest()))

    def then(self, text: "bytes | memoryview") -> Self:
        """The print of this text with `text` after it."""
        later = self.__new__(type(self))  # without a state of its own
        later.length = self.length + len(text)
        later._state = self._state.copy()
        later._state.update(text)
        return later

    def begins(self, text: bytes) -> bool:
        """Whether `text` begins with this text."""
        beginning = memoryview(text)[: self.length]
        return len(beginning) == self.length and xxhash.xxh3_128_digest(beginning) == self._state.digest()
