"""Places to cut a long text, so that the ids of its parts are those of the whole. Pure.

A library holds the GIL for a copy of the text that it encodes and one of its ids: fastokens 84 ms for 7.7 million
characters that SmolLM2 has three ids for each, in parts 10. Knows no encoder; the reference's pre-tokenizer decides.
"""

import re
from collections.abc import Iterator
from functools import cached_property, lru_cache

import tokenizers

ENCODED_AT_ONCE = 1 << 18
"""Characters of a part."""
_MAX_KEPT = 8
_AROUND = 2
"""A separator and the letter after it."""
_SEPARATORS = "\n ，。、.,/_01"
_LETTERS = "aZéǅʰЯกかカ々漢㐀𠮷한"
"""Letters that some pre-tokenizer tells apart: each of the categories, scripts with patterns of their own, and Han in
and out of the ranges that patterns spell."""


def parts_of(plain: tokenizers.Tokenizer, text: str) -> Iterator[str]:
    """The text in parts with the ids of the whole; `plain` has no added tokens."""
    return _cuts_of(plain).parts(text)


class TextCuts:
    """Places where a tokenizer splits every text, so that the ids of the parts are those of the whole.

    Its pre-tokenizer splits a text before BPE sees it; no merge crosses a split, and no pattern in use looks back over
    one. Before one of `_SEPARATORS` between two letters is such a place for most, which is tried with `_LETTERS`; after
    other characters a pattern may take more in, and in white space it looks at what follows.
    """

    def __init__(self, plain: tokenizers.Tokenizer, *, at_once: int = ENCODED_AT_ONCE) -> None:
        self._plain = plain
        self._at_once = at_once

    @cached_property
    def _places(self) -> re.Pattern[str]:
        """Finds them; the match begins where the text may be cut."""
        separators = "".join(one for one in _SEPARATORS if self._is_split_at(one))
        return re.compile(f"(?<=[^\\W\\d_])[{separators}](?=[^\\W\\d_])" if separators else "(?!)")

    def parts(self, text: str) -> Iterator[str]:
        """The text in parts of about `at_once` characters; a part without such a place is longer."""
        start, border = 0, self._at_once
        while border < len(text):
            found = self._places.search(text, border, border + self._at_once + _AROUND)
            border += self._at_once
            if found and text[found.start() - 1].isalpha() and text[found.end()].isalpha():
                yield text[start : found.start()]
                start, border = found.start(), found.start() + self._at_once
        yield text[start:]

    def _is_split_at(self, separator: str) -> bool:
        """Whether a text is split before each `separator` between two letters, and its parts as they are alone."""
        heads = {text: self._split(text) for text in (f"b1. {left}" for left in _LETTERS)}
        tails = {text: self._split(text) for text in (f"{separator}{right}\u0301's\n" for right in _LETTERS)}
        return all(self._split(head + tail) == heads[head] + tails[tail] for head in heads for tail in tails)

    def _split(self, text: str) -> list[str]:
        """The pieces of a text that BPE sees one by one."""
        normalizer, pre_tokenizer = self._plain.normalizer, self._plain.pre_tokenizer
        text = normalizer.normalize_str(text) if normalizer else text
        return [split for split, _ in pre_tokenizer.pre_tokenize_str(text)] if pre_tokenizer else [text]


_cuts_of = lru_cache(maxsize=_MAX_KEPT)(TextCuts)
