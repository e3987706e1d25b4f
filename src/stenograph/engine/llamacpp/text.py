"""From text back to the tokens left out of a stream: the only ids that make the received bytes. Pure.

llama.cpp holds a token back while the text so far ends within a UTF-8 character, and then reports the last of them
alone; their number and their text are known. Where several ids make the same bytes, nothing is guessed.
"""

import json
from collections.abc import Iterator, Sequence

from stenograph.model.tokenizer_json import read_tokenizer_json, token_bytes

MOST_MISSING = 8
"""In a row; a character has at most four bytes."""


class Pieces:
    """The text of each token of a model, as llama.cpp writes it: control tokens have none."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._ids_of: dict[bytes, list[int]] = {}
        for id_, piece in enumerate(pieces):
            if not piece or piece[-1] >= 0x80:
                ids = self._ids_of.setdefault(piece, [])
                if len(ids) < 2:  # two ids are as ambiguous as many
                    ids.append(id_)
        self._longest = max(map(len, self._ids_of), default=0)

    def __repr__(self) -> str:
        return f"<Pieces of {len(self._pieces)} tokens>"

    def is_silent(self, id_: int) -> bool:
        """Whether the token has no text: it is a control token."""
        return id_ < len(self._pieces) and not self._pieces[id_]

    def text(self, ids: Sequence[int]) -> bytes | None:
        """The bytes of tokens; None where one is not known."""
        return b"".join(self._pieces[id_] for id_ in ids) if max(ids, default=-1) < len(self._pieces) else None

    def padded(self, vocab_size: int) -> "Pieces":
        """The same for a vocabulary of `vocab_size` ids, those after ours without text; `vocab_size` is not less."""
        return Pieces([*self._pieces, *(b"" for _ in range(vocab_size - len(self._pieces)))])

    def fill(self, tokens: Sequence[int | None], text: bytes) -> list[int] | None:
        """The tokens with each None replaced, where `text`, maybe without its end, allows one way to do it alone."""
        filled: list[int] = []
        at, place = 0, 0
        while place < len(tokens):
            token = tokens[place]
            if token is None:
                num = _num_missing(tokens, place)
                found = None if num > MOST_MISSING else self._between(text, at, num, tokens[place + num :])
                if found is None:
                    return None
                filled += found
                at += sum(len(self._pieces[id_]) for id_ in found)
                place += num
            elif _agree(text, at, self._pieces[token]):
                filled.append(token)
                at += len(self._pieces[token])
                place += 1
            else:
                return None
        return filled

    def _between(self, text: bytes, at: int, num: int, following: Sequence[int | None]) -> tuple[int, ...] | None:
        """The `num` tokens of the text from `at` on, before the following ones; None unless there is one way."""
        if not following or following[0] is None:
            return None  # nothing was reported after them
        end = self._pieces[following[0]]
        ways = (
            ids
            for ids, stop in self._ways(text, at, at, num)
            if text.startswith(end, stop) and not ends_within_character(text[at : stop + len(end)])
        )
        found = next(ways, None)
        return found if next(ways, None) is None else None

    def _ways(self, text: bytes, start: int, at: int, num: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Runs of `num` tokens from `at` on, each token ending within a character; and where they end."""
        if not num:
            yield (), at
            return
        for id_, stop in self._tokens_at(text, start, at):
            for ids, end in self._ways(text, start, stop, num - 1):
                yield (id_, *ids), end

    def _tokens_at(self, text: bytes, start: int, at: int) -> Iterator[tuple[int, int]]:
        """Tokens from `at` on, leaving the text from `start` on within a character; and where each ends."""
        for stop in range(at, min(at + self._longest, len(text)) + 1):
            if ends_within_character(text[start:stop]):
                yield from ((id_, stop) for id_ in self._ids_of.get(text[at:stop], ()))


def pieces_of(tokenizer_json: str, vocab_size: int) -> Pieces:
    """The pieces of a model by its tokenizer.json. Raises StartupError for any but byte-level BPE."""
    document = read_tokenizer_json(tokenizer_json)
    table = token_bytes(document)
    for token in document.added:
        if token.special:
            table[token.id] = b""
    return Pieces([*table, *(b"" for _ in range(vocab_size - len(table)))])


def ends_within_character(text: bytes) -> bool:
    """Whether llama.cpp waits for more: the last character is shorter than its first byte says.

    Source: `validate_utf8` in llama.cpp's `tools/server/server-common.cpp`. Bytes that begin nothing pass.
    """
    for num_bytes, byte in enumerate(reversed(text[-4:]), start=1):
        if byte >= 0xC0:
            return num_bytes < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte < 0xF8 else 0)
    return False


def is_json(text: bytes) -> bool:
    """Whether it is JSON. Numbers of any size are; text nested too deeply to be read passes."""
    try:
        json.loads(text.decode(), parse_int=str, parse_float=str, parse_constant=_no_constant)
    except ValueError:
        return False
    except RecursionError:
        return True
    return True


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _num_missing(tokens: Sequence[int | None], place: int) -> int:
    return next((n for n, token in enumerate(tokens[place:]) if token is not None), len(tokens) - place)


def _agree(text: bytes, at: int, piece: bytes) -> bool:
    """Whether the piece stands there, as far as the text goes."""
    there = text[at : at + len(piece)]
    return there == piece[: len(there)]
