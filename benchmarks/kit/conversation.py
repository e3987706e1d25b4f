"""The messages of a load's clients: text of a given size, as JSON fragments that are joined, never parsed. Pure."""

import random
from collections.abc import Iterator, Sequence

_TEXT = """
the of and to in is that for it was on are as with his they at be this from have or by one had not but what all
were when we there can an your which their said if do will each about how up out them then she many some so
these would other into has more her two like him see time could no make than first been its who now people my
made over did down only way find use may water long little very after words called just where most know get
through back much before go good new write our used me man too any day same right look think also around
another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name should
function return value error index list import class method string result test file path request response server
session token model turn message content user assistant argument parameter config default option timeout
"""
"""Common words of English, and of code."""

_WORDS = _TEXT.split()
_BASE_CHARS = 2**20
MAX_DISTINCT_BYTES = 64 * 2**20
"""Bound of what is held ready. Beyond it, messages differ in their first words only."""


def _base_text() -> str:
    rng = random.Random(0)
    parts: list[str] = []
    size = 0
    while size < _BASE_CHARS:
        word = rng.choice(_WORDS)
        match rng.randrange(24):
            case 0:
                word = f"{word}_{rng.choice(_WORDS)}({rng.randrange(10_000)})"
            case 1:
                word = word.capitalize()
            case 2:
                word += "."
            case 3:
                word += ","
            case _:
                pass
        parts.append(word)
        size += len(word) + 1
    return " ".join(parts)


class Messages:
    """User messages of `num_bytes` each, as JSON. The n-th is always the same; no two of a run are equal."""

    def __init__(self, *, num_bytes: int, num_messages: int) -> None:
        base = _base_text()
        num_distinct = max(1, min(num_messages, 512, MAX_DISTINCT_BYTES // max(1, num_bytes)))
        longer = base * (num_bytes // len(base) + 2)
        self._num_bytes = num_bytes
        self._texts = [
            longer[start : start + num_bytes].encode()
            for start in (index * len(base) // num_distinct for index in range(num_distinct))
        ]

    def fragment(self, index: int) -> bytes:
        """The `index`-th message: `{"role": "user", …}`."""
        return b'{"role":"user","content":%b}' % self.text(index)

    def text(self, index: int) -> bytes:
        """The `index`-th text as JSON: plain ASCII that needs no escapes."""
        begin = b"Step %d: " % index
        text = self._texts[index % len(self._texts)]
        return b'"%b%b"' % (begin, text[len(begin) :])

    def texts(self, num: int) -> Iterator[str]:
        """The first messages as text."""
        for index in range(num):
            yield (b"Step %d: " % index + self._texts[index % len(self._texts)]).decode()[: self._num_bytes]


def completion_parts(prompts: Sequence[bytes]) -> list[bytes]:
    """A completion request's body in pieces; one prompt goes as a string, several as a list."""
    text = prompts[0] if len(prompts) == 1 else b"[%b]" % b",".join(prompts)
    return [b'{"model":"bench","prompt":', text, b"}"]


class Conversation:
    """The messages of one session so far, as JSON with commas between."""

    def __init__(self) -> None:
        self._so_far = b""

    def request_parts(self, user: bytes) -> list[bytes]:
        """A chat request's body in pieces: everything so far, and a new message."""
        begin = b'{"model":"bench","messages":['
        return [begin, self._so_far, user, b"]}"]

    def add_turn(self, user: bytes, assistant: bytes) -> None:
        """Keep a turn that was answered."""
        self._so_far = b"".join((self._so_far, user, b",", assistant, b","))
