"""Calls whose arguments are bare text between tags: where a value ends, and where the block around it closes.

A value is not escaped, so it may hold any marker. It ends where its closing tag is followed by what may come next: a
closing tag that anything else follows is text, and so is one within a string of a JSON object or array. Knows nothing
of any family's tags.
"""

import re
from collections.abc import Sequence
from enum import Enum

_MAX_GAP_CHARS = 8
"""White space that may stand between two tags. Bounded, so that a search has to look back only so far."""

_GAP = rf"\s{{0,{_MAX_GAP_CHARS}}}"
_JSON_CHAR = r"[ \t\r\n{}\[\],:0-9+\-.eEaflnrstu]"
_STRING_CHAR = r'([^"\\\x00-\x1f]|\\[^\x00-\x1f])'
_JSON_CHARS = re.compile(f"{_JSON_CHAR}*+")
_STRING_CHARS = re.compile(f"{_STRING_CHAR}*+")

OPEN_STRING = rf'[{{\[]({_JSON_CHAR}|"{_STRING_CHAR}*")*"{_STRING_CHAR}*\\?'
"""A regular expression: JSON that was cut within a string, where a closing tag on the same line is taken for text."""


class ValueTags:
    """Tags around values. Immutable.

    `head` is a regular expression of what a value follows, of at most `max_head_chars`; `close` its closing tag. One of
    `followers` comes after that: each is tags with nothing but white space between them. `block_close` closes the
    block of calls.
    """

    def __init__(
        self,
        *,
        head: str,
        max_head_chars: int,
        close: str,
        followers: Sequence[Sequence[str]],
        block_close: str,
    ) -> None:
        self.close = close
        self.block_close = block_close
        self.follower = followers[0][0]
        after = "|".join(_GAP.join(map(re.escape, tags)) for tags in followers)
        self.value_end = re.compile(f"{re.escape(close)}{_GAP}(?={after})")
        self.max_end_chars = len(close) + max(sum(len(tag) + _MAX_GAP_CHARS for tag in tags) for tags in followers)
        self.outside = re.compile(f"{head}|{re.escape(block_close)}")
        self.max_outside_chars = max(max_head_chars, len(block_close))

    def __repr__(self) -> str:
        return f"<ValueTags …{self.close}>"


class _Form(Enum):
    """Forms of a value, as far as it has come."""

    NOTHING = "nothing"
    JSON = "json"
    STRING = "a string in json"
    TEXT = "text"


class ValueSearch:
    """Looks for the end of one value, which begins at `at`, in a growing text. Linear in the text."""

    def __init__(self, tags: ValueTags, at: int) -> None:
        self._tags = tags
        self._at = at
        self._form = _Form.NOTHING
        self._quote_at = at

    def find(self, text: str) -> re.Match[str] | None:
        """The closing tag, in `text` that continues the text of the call before; None: not there yet."""
        while self._form is not _Form.TEXT:
            if not self._read_json(text):
                return None
        found = self._tags.value_end.search(text, self._at)
        if found is None:
            self._at = max(self._at, len(text) - self._tags.max_end_chars)
        return found

    def _read_json(self, text: str) -> bool:
        """Read on to what changes the form; False when more text is needed. Text is what is no JSON, from there on."""
        if self._form is _Form.NOTHING:
            first = text[self._at : self._at + 1]
            self._form = _Form.JSON if first in ("{", "[") else _Form.TEXT if first else _Form.NOTHING
            return first != ""
        in_string = self._form is _Form.STRING
        chars = (_STRING_CHARS if in_string else _JSON_CHARS).match(text, self._at)
        assert chars is not None, "no characters match, too"
        self._at = chars.end()
        after = text[self._at : self._at + 2]
        if not after or (in_string and after == "\\"):
            return False
        if after[0] == '"':
            self._form = _Form.JSON if in_string else _Form.STRING
            self._quote_at = self._at
            self._at += 1
            return True
        self._form = _Form.TEXT
        self._at = self._quote_at if in_string else self._at
        return True


class TaggedScanner:
    """Finds the marker that closes a block in a growing text, looking past values. Linear in the text."""

    def __init__(self, tags: ValueTags) -> None:
        self._tags = tags
        self._at = 0
        self._value: ValueSearch | None = None

    def find(self, text: str) -> tuple[int, int] | None:
        """Find the marker's span in `text`, which continues the text of the call before; None: not there yet."""
        while True:
            if self._value is not None:
                ended = self._value.find(text)
                if ended is None:
                    return None
                self._at, self._value = ended.end(), None
            found = self._tags.outside.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - self._tags.max_outside_chars)
                return None
            if found[0] == self._tags.block_close:
                return found.span()
            self._value = ValueSearch(self._tags, found.end())
