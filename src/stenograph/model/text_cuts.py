"""A long text encoded in parts, with the ids of the whole; what has no place for a cut, in a process of its own.

A library holds the GIL for a copy of the text that it encodes and one of its ids: fastokens 160 to 1,100 ms for 10
million characters with three ids each, in parts 15. Knows no encoder; the reference's pre-tokenizer, merges and
vocabulary decide.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, lru_cache

import tokenizers

from stenograph.model.encode_apart import encode_apart
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer_json import BYTE_OF_CHAR

ENCODED_AT_ONCE = 1 << 18
"""Characters of a part."""
ENCODED_HERE = 1 << 21
"""Characters of the longest part that a thread encodes: 45 ms with the GIL held at most. A longer one has a process."""
_MAX_KEPT = 8
_BEYOND = 64
"""Characters that are encoded beyond what is looked at for the end of a part: tokens end there as in the whole."""
_TRIED = 16
"""Places that the pre-tokenizer is asked for before a part is encoded."""
_STARTS = 16
"""Beginnings of the text before a place. One of them begins a piece, where pieces are no longer."""
_AROUND = ("", " ", "\n", "!", ".", "'", "1", "Z", "a", "é", "漢")
"""Texts before and after a run of characters: some patterns let them decide where a piece ends."""
_BEFORE = (*_AROUND, "!\n", "!a", "aZ")
_AFTER = (*_AROUND, " \n", "Za", "!a", "'s")
"""The same for a piece cut in two. o200k ends a piece between `a漢` and `Za`, and none between `漢` and `Za`."""
_MOST_TOKEN_CHARS = 512
"""A vocabulary with a token as long cuts no text."""
_MOST_IDS = 1 << 24
"""As `tokenizer_json` takes them."""

_SURROGATE = re.compile("[\ud800-\udfff]")

Encode = Callable[[str], "array[int]"]


def ids_in_parts(
    plain: tokenizers.Tokenizer, encode: Encode, text: str, *, source: tuple[str, EncoderKind]
) -> "list[array[int]]":
    """The ids of a text, part by part. `plain` is the reference without added tokens, `encode` gives its ids;
    `source`, a tokenizer.json and a library, makes the same encoder in another process."""

    def encode_anywhere(part: str) -> "array[int]":
        if len(part) > ENCODED_HERE:
            with suppress(OSError, UnicodeEncodeError):  # no process; a lone surrogate, which `encode` has words for
                return encode_apart(*source, part)
        return encode(part)

    return [ids for _, ids in _cuts_of(plain).parts(encode_anywhere, text)]


class TextCuts:
    """Cuts a text where its parts have the ids of the whole.

    Two things must hold. The pre-tokenizer splits the parts as the whole: a piece ends at the place, or one long piece
    becomes two. And BPE makes the tokens on both sides of their joined text. Merges are made in the order of their
    ranks, from the left; so in one piece the first merge across the place would be the first in these two alone.
    """

    def __init__(
        self, plain: tokenizers.Tokenizer, *, at_once: int = ENCODED_AT_ONCE, at_most: int = ENCODED_HERE
    ) -> None:
        self._plain = plain
        self._at_once, self._at_most = at_once, at_most
        self._is_known_place = lru_cache(maxsize=_MAX_KEPT)(self._is_place)

    def parts(self, encode: Encode, text: str) -> "list[tuple[int, array[int]]]":
        """Where each part begins, and its ids. One without a place for its end is longer: all of it is encoded again,
        twice as long each time, and with all that follows where it would be longer than `at_most`."""
        parts: list[tuple[int, array[int]]] = []
        start, num = 0, self._at_once
        while True:
            stop = self._near_place(text, start + num)
            far = stop + 2 * self._longest + _BEYOND
            is_last = far >= len(text) or far - start > self._at_most or self._longest >= _MOST_TOKEN_CHARS
            ids = encode(text[start:] if is_last else text[start:far])
            if parts and not (ids and self._fit(parts[-1][1][-1], ids[0])):
                start = parts.pop()[0]
                num = 2 * (stop - start)
            elif is_last:
                return [*parts, (start, ids)]
            elif (end := self._end(text[:far], stop, ids)) is None:
                num = 2 * (stop - start)
            else:
                place, num_ids = end
                parts.append((start, ids[:num_ids]))
                start, num = place, self._at_once

    def _end(self, text: str, stop: int, ids: "array[int]") -> tuple[int, int] | None:
        """The first place from `stop` on for an end, and the number of ids before it. `ids` are the text's last."""
        ends = self._token_ends(ids)
        for place in range(stop, stop + self._longest):
            num_ids = ends.get(self._bytes(text[place:]))
            if num_ids is not None and self._fit(ids[num_ids - 1], ids[num_ids]) and self._is_place_in(text, place):
                return place, num_ids
        return None

    def _near_place(self, text: str, stop: int) -> int:
        """`stop`, or so far beyond that the pre-tokenizer splits the text soon after: a run of spaces may be one piece
        with a line break after it."""
        while stop + _TRIED < len(text) and self._longest < _MOST_TOKEN_CHARS:
            if any(self._is_place_in(text, place) for place in range(stop, stop + _TRIED)):
                break
            stop += self._at_once
        return stop

    def _is_place_in(self, text: str, place: int) -> bool:
        num = self._longest + 1
        return self._is_known_place(text[max(0, place - num) : place], text[place : place + num])

    def _token_ends(self, ids: "array[int]") -> dict[bytes, int]:
        """The numbers of ids before the last tokens, by the bytes from there on."""
        ends: dict[bytes, int] = {}
        rest, most = b"", 4 * (2 * self._longest + _BEYOND)
        for num_ids in range(len(ids) - 1, 0, -1):
            spelled = self._plain.id_to_token(ids[num_ids]) or ""
            if len(rest) > most or not BYTE_OF_CHAR.keys() >= set(spelled):
                break
            rest = bytes(map(BYTE_OF_CHAR.__getitem__, spelled)) + rest
            ends[rest] = num_ids
        return ends

    def _bytes(self, text: str) -> bytes:
        normalizer = self._plain.normalizer
        return (normalizer.normalize_str(text) if normalizer else text).encode("utf-8", "surrogatepass")

    def _fit(self, left: int, right: int) -> bool:
        """Whether BPE makes these two tokens of their joined text."""
        spelled = (self._plain.id_to_token(left) or "") + (self._plain.id_to_token(right) or "")
        return [token.id for token in self._plain.model.tokenize(spelled)] == [left, right]

    def _is_place(self, left: str, right: str) -> bool:
        """Whether the two are split alike, apart and joined. Both are longer than any token, but at the text's ends."""
        if unicodedata.category(right[0]).startswith("M") or _SURROGATE.search(left + right):
            return False  # a mark may change the character before it; a lone surrogate is no text
        before, after, whole = self._split(left), self._split(right), self._split(left + right)
        if whole == [*before, *after]:
            return self._is_split(left, right, after)
        # Some models do not merge a piece that is a token: each must be longer.
        is_long = min(len(left), len(right)) > self._longest
        return is_long and whole == [before[0] + after[0]] and self._is_joined(left, right)

    def _is_split(self, left: str, right: str, after: list[str]) -> bool:
        """Whether a piece ends between the two, wherever the pieces before begin."""
        befores = [*(left[start:] for start in range(min(_STARTS, len(left)))), *(one + left for one in _AROUND)]
        return all(self._split(before + right) == self._split(before) + after for before in befores)

    def _is_joined(self, left: str, right: str) -> bool:
        """Whether the piece that both are in ends where it would without the first, whatever is around it."""
        if left[-1].isspace() or right[0].isspace():
            return False  # what ends white space may be far: `!\n\n` and ` \n` are two pieces, `\n\n \n` is one
        befores = [(one + left, self._split(one + left)) for one in _BEFORE]
        afters = [(right + one, self._split(right + one)) for one in _AFTER]
        return all(
            self._split(text + rest) == [*before[:-1], before[-1] + after[0], *after[1:]]
            for text, before in befores
            for rest, after in afters
        )

    @cached_property
    def _longest(self) -> int:
        """Of the tokens, in bytes. A loop lets go of the GIL; a dict of the vocabulary keeps it for 110 ms."""
        left, longest = self._plain.get_vocab_size(), 1
        for token_id in range(_MOST_IDS):
            if left == 0:
                return longest
            if token := self._plain.id_to_token(token_id):
                left, longest = left - 1, max(longest, len(token))
        return _MOST_TOKEN_CHARS  # two tokens have one id

    def _split(self, text: str) -> list[str]:
        """The pieces of a text that BPE sees one by one."""
        normalizer, pre_tokenizer = self._plain.normalizer, self._plain.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer else text
        return [split for split, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else [text]


_cuts_of = lru_cache(maxsize=_MAX_KEPT)(TextCuts)
