"""Keeps the text of clients from becoming control tokens on its way through a chat template.

Before a template sees a client's string, each spelling of an added token in it is replaced by a seal: a
noncharacter of Unicode, the spelling's number, the noncharacter again. After rendering the seals are opened, and what
was sealed is untrusted text. Knows nothing of messages or templates.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import UnrenderableMessage
from stenograph.model.tokenizer import Span, Tokenizer

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode reserves these for internal use: texts hardly ever have one, and never all."""


class Sealer:
    """The seals of one rendering. `mark` occurs in no string that the rendering is given.

    One that `is_open` seals nothing: in what clients write, a control token's spelling is that token.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str], *, is_open: bool = False) -> None:
        texts = list(texts)
        mark = next((char for char in _NONCHARACTERS if not any(char in text for text in texts)), None)
        if mark is None:
            raise UnrenderableMessage(
                "The messages use every noncharacter from U+FDD0 to U+FDEF.", blame=Blame(RequestPart.MESSAGES)
            )
        self.mark = mark
        self._tokenizer = tokenizer
        self._is_open = is_open

    def seal(self, text: str) -> str:
        """`text` with every spelling of an added token sealed."""
        if self._is_open:
            return text
        pieces: list[str] = []
        numbers = self._tokenizer.added_numbers
        end = 0
        for start, stop in self._tokenizer.find_added(text):
            pieces.append(f"{text[end:start]}{self.mark}{numbers[text[start:stop]]}{self.mark}")
            end = stop
        return "".join(pieces) + text[end:] if pieces else text

    def seal_value(self, value: object) -> object:
        """A JSON-like value with all its strings sealed, keys included."""
        return map_strings(value, self.seal)

    def open(self, text: str) -> list[Span]:
        """A rendered text as spans: what was sealed is untrusted, the rest trusted.

        Raises UnrenderableMessage: the template took a seal apart.
        """
        if self.mark not in text:
            return [Span(text=text, trusted=True)]
        spans: list[Span] = []
        spellings = self._tokenizer.added_spellings
        pieces = text.split(self.mark)
        for index, piece in enumerate(pieces):
            if index % 2 == 0:
                spans.append(Span(text=piece, trusted=True))
            elif piece.isascii() and piece.isdigit() and int(piece) < len(spellings):
                spans.append(Span(text=spellings[int(piece)], trusted=False))
            else:
                raise UnrenderableMessage("The model's chat template cuts up a control token's spelling in a message.")
        if len(pieces) % 2 == 0:
            raise UnrenderableMessage("The model's chat template cuts up a control token's spelling in a message.")
        return spans


def map_strings(value: object, change: Callable[[str], str]) -> object:
    """A JSON-like value with every string changed, keys included. The value itself stays as it is."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {map_strings(key, change): map_strings(item, change) for key, item in items}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [map_strings(item, change) for item in cast("Sequence[object]", value)]
    return value


def strings_in(value: object) -> Iterator[str]:
    """Every string inside a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for item in cast("Sequence[object]", value):
            yield from strings_in(item)
