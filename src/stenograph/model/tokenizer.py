"""Text to token ids and back, for byte-level BPE tokenizers.

Owns where control tokens may come from: added tokens are found here (`TokenFinder`), in trusted text only; all other
text goes through a plain tokenizer without them (`fast_encoder` chooses the library). One object serves all threads and
is never reconfigured. Encoding releases the GIL. Knows nothing of messages.
"""

import codecs
import heapq
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter, itemgetter
from types import MappingProxyType

from ahocorasick_rs import AhoCorasick, MatchKind
from msgspec import Struct

from stenograph.core.errors import StartupError, TokenizationFailed, UnrenderableMessage
from stenograph.core.loaded import entry
from stenograph.core.types import token_ids
from stenograph.model.fast_encoder import IDS_AT_ONCE, choose_encoder
from stenograph.model.settings import EncoderKind
from stenograph.model.tokenizer_json import AddedToken, plain_tokenizer_json, read_tokenizer_json, token_bytes

_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_SPACE_AFTER = re.compile(f"[{_SPACE}]*")
"""Unicode's White_Space, as the reference tokenizer strips it; Python's `\\s` has four control characters more."""

_JOINED_AT_ONCE = 8192
"""Tokens with their bytes joined in one call; it holds the GIL."""

_SHORT_CHARS = 16
_MAX_SHORT = 4096
"""Ids of texts of few characters are kept, for so many texts: a role's name and line breaks come in every message."""

_SURROGATE = re.compile("[\ud800-\udfff]")


PIECE_CHARS = 1 << 18
"""Characters searched for added tokens in one call: at most 0.3 ms of copying with the GIL held, and 3 ms of search
without it."""

_SPAN = itemgetter(1, 2)
"""Of a match; it comes with the literal's number."""


class Span(Struct, frozen=True, kw_only=True, gc=False):
    """A piece of a text. Only in trusted text is the spelling of an added token that token."""

    text: str
    trusted: bool


class Tokenizer:
    """One vocabulary. All methods are pure and may be called from any thread.

    `sample_texts` join the texts that the preferred encoder must encode as the reference does, or it is not used;
    `encoder` is then the encoder in use, `why_not_preferred` a line for the log, empty where it is the preferred one.
    Raises StartupError at construction for a tokenizer impossible to serve exactly; the message says why.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        sample_texts: Iterable[str] = (),
        prefer: EncoderKind = EncoderKind.FASTOKENS,
    ) -> None:
        document = read_tokenizer_json(tokenizer_json)
        spelled = (spelling for token in document.added for spelling in _spellings(token.content))
        chosen = choose_encoder(plain_tokenizer_json(document), (*spelled, *sample_texts), prefer=prefer)
        self._json, self._encoder = tokenizer_json, chosen.encoder
        self._short_ids = lru_cache(maxsize=_MAX_SHORT)(self._encoder.encode)
        self.encoder = chosen.encoder.kind
        self.why_not_preferred = chosen.why_not_preferred
        self._added_by_id: dict[int, AddedToken] = {token.id: token for token in document.added}
        self._added_by_text: dict[str, AddedToken] = {token.content: token for token in document.added}
        # The reference looks for tokens that are not normalized first, then for the others in what is left.
        groups = [[t.content for t in document.added if t.normalized is normalized] for normalized in (False, True)]
        self._finders = [TokenFinder(contents) for contents in groups if contents]
        self.find_added = TokenFinder(self._added_by_text).find
        """Finds added tokens in a text: spans [start, end), from the left, the longest at each."""
        self._bytes = token_bytes(document)
        self.added_tokens: Mapping[str, int] = MappingProxyType({t.content: t.id for t in document.added})
        self.added_spellings = tuple(self.added_tokens)
        self.added_numbers: Mapping[str, int] = MappingProxyType({t: n for n, t in enumerate(self.added_spellings)})
        self.special_ids = frozenset(token.id for token in document.added if token.special)
        self._ids_of: dict[str, int] = {**document.vocab, **self.added_tokens}
        self._check_plain_is_plain()

    def __repr__(self) -> str:
        return f"<Tokenizer {self.vocab_size} ids, {len(self.added_tokens)} added, by {self.encoder}>"

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return len(self._bytes)

    def id_of(self, token: str) -> int | None:
        """The id of an added token by its text, or of any other by its spelling in the vocabulary."""
        return self._ids_of.get(token)

    def encode(self, text: str) -> "array[int]":
        """Ids [T] of trusted text: an added token's spelling is that token. Raises UnrenderableMessage."""
        return self.encode_spans((Span(text=text, trusted=True),))

    def encode_plain(self, text: str) -> "array[int]":
        """Ids [T] of untrusted text: never an added token's. Raises UnrenderableMessage: a lone surrogate."""
        self._extend(ids := token_ids(), text)
        return ids

    def encode_spans(self, spans: Sequence[Span]) -> "array[int]":
        """Ids [T] of the spans' joined text; added tokens only where they lie wholly within trusted text.

        Text between two added tokens is encoded as one, across span borders, as if it were all of one kind.
        Raises UnrenderableMessage: the text has a lone surrogate.
        """
        text = "".join(map(attrgetter("text"), spans))
        ids: array[int] = token_ids()
        end = 0
        for token, start, stop in self._find(text, _trusted_runs(spans)):
            if start > end:
                self._extend(ids, text[end:start])
            ids.append(token.id)
            end = stop
        if end < len(text):
            self._extend(ids, text[end:])
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""
        table, num = self._bytes, len(self._bytes)
        rest = iter(ids)
        skipped: Collection[int] = self.special_ids if skip_special else ()
        texts: list[bytes] = []
        while some := list(islice(rest, _JOINED_AT_ONCE)):
            if not skipped and min(some) >= 0 and max(some) < num:
                texts.append(b"".join(map(table.__getitem__, some)))
            else:
                texts.append(b"".join([table[i] if 0 <= i < num and i not in skipped else b"" for i in some]))
        return b"".join(texts).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """One token, for a person to read; U+FFFD where it is a piece of a character."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def text_stream(self, *, skip_special: bool, keep: Collection[int] = ()) -> "TextStream":
        """A new incremental decoder; it belongs to one reader. Of the special ids those in `keep` are not skipped."""
        return TextStream(self, skip=self.special_ids.difference(keep) if skip_special else frozenset())

    def _extend(self, ids: "array[int]", text: str) -> None:
        """Add the ids of a text without added tokens, some at once: each call keeps the GIL."""
        for more in (self._encoded(text),) if len(text) <= PIECE_CHARS else self._in_parts(text):
            for start in range(0, len(more), IDS_AT_ONCE):
                ids.extend(more[start : start + IDS_AT_ONCE])

    def _in_parts(self, text: str) -> "list[array[int]]":
        source = self._json, self.encoder
        in_parts = entry("stenograph.model.text_cuts:ids_in_parts")
        parts: list[array[int]] = in_parts(self._encoder.plain, self._encoded, text, source=source)
        return parts

    def _encoded(self, text: str) -> "array[int]":
        """Ids of a text without added tokens; not the caller's to change."""
        try:
            return self._short_ids(text) if len(text) <= _SHORT_CHARS else self._encoder.encode(text)
        except (TypeError, UnicodeEncodeError) as error:  # which of them, depends on the library's version
            raise why_not_encoded(text) from error

    def _find(self, text: str, runs: list[tuple[int, int]]) -> list[tuple[AddedToken, int, int]]:
        """Added tokens inside `runs` in order, with the white space they swallow: [start, end) each."""
        found: list[list[tuple[int, int]]] = []
        for finder in self._finders:
            new: list[tuple[int, int]] = []
            for start, end in runs:
                new += finder.find(text, start, end)
            found.append(new)
            if len(found) < len(self._finders):
                runs = _without(runs, new)
        tokens: list[tuple[AddedToken, int, int]] = []
        before = 0
        for start, end in heapq.merge(*found) if len(found) > 1 else found[0] if found else ():
            token = self._added_by_text[text[start:end]]
            if token.lstrip:
                start = before + len(text[before:start].rstrip(_SPACE))  # noqa: PLW2901 -- the token swallows it
            if token.rstrip and (space := _SPACE_AFTER.match(text, end)):
                end = space.end()  # noqa: PLW2901 -- the token swallows it
            tokens.append((token, start, end))
            before = end
        return tokens

    def _check_plain_is_plain(self) -> None:
        for content in self.added_tokens:
            for text in _spellings(content):
                if not self._added_by_id.keys().isdisjoint(self._encoded(text)):
                    raise StartupError(f"tokenizer.json: the plain spelling of {content!r} encodes to an added token")


class TextStream:
    """Ids to text, one at a time, in constant time each. Owned by one reader; not for several threads.

    The pieces, joined, with `flush` last, are `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text completed by `token_id`; an incomplete character is kept back."""
        return "" if token_id in self._skip else self._utf8.decode(self._tokenizer.bytes_of(token_id))

    def flush(self) -> str:
        """The rest: U+FFFD for a character never completed. The stream is then empty again."""
        return self._utf8.decode(b"", final=True)


def why_not_encoded(text: str) -> UnrenderableMessage | TokenizationFailed:
    """The error for a text without ids: the client's, for a lone surrogate, else ours."""
    found = _SURROGATE.search(text)
    if found is None:
        return TokenizationFailed(f"The tokenizer failed on a text of {len(text)} characters.")
    return UnrenderableMessage(f"The text has a lone surrogate, U+{ord(found.group()):04X}, which has no UTF-8.")


def _spellings(content: str) -> tuple[str, ...]:
    """An added token's text as clients may write it."""
    return content, f" {content}", f"a{content}\n"


def _trusted_runs(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """The joined text's maximal trusted stretches [start, end)."""
    if len(spans) == 1:
        return [(0, len(spans[0].text))] if spans[0].trusted else []
    runs: list[tuple[int, int]] = []
    start = 0
    for span in spans:
        end = start + len(span.text)
        if span.trusted and runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], end)
        elif span.trusted:
            runs.append((start, end))
        start = end
    return runs


def _without(runs: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """`runs` less the stretches taken out of them; both in order. Each stretch lies within a run."""
    left: list[tuple[int, int]] = []
    rest = iter(taken)
    next_taken = next(rest, None)
    for start, end in runs:
        while next_taken is not None and next_taken[1] <= end:
            left.append((start, next_taken[0]))
            start = next_taken[1]  # noqa: PLW2901 -- what is left of this run
            next_taken = next(rest, None)
        left.append((start, end))
    return left


class TokenFinder:
    """Finds literals: leftmost match, the longest of those with the same start; then on from its end.

    One Aho-Corasick automaton finds them in time linear in the text. A regular expression of the same literals tries
    each of them wherever one may begin, and holds the GIL throughout: DeepSeek V4's 1,283 added tokens took 0.75 s for
    1 MB of HTML, 6.1 s for 1 MB of `<｜`; now 2 and 13 ms. A text is searched `piece_chars` at a time, not to hold the
    GIL for long: the library releases it while it searches, and holds it for the copy before and the list of matches
    after. Immutable; may be used from any thread. No literal may be empty.
    """

    def __init__(self, literals: Iterable[str], *, piece_chars: int = PIECE_CHARS) -> None:
        self._piece_chars = piece_chars
        distinct = list(dict.fromkeys(literals))
        chars = set("".join(distinct))
        self._stranger = next(char for char in map(chr, range(0x110000)) if char not in chars)
        """A character of no literal. It is never a surrogate: no vocabulary has all characters before those."""
        self._num_ahead = max(map(len, distinct), default=1) - 1
        self._automaton = AhoCorasick(distinct, matchkind=MatchKind.LeftmostLongest)
        firsts = {literal[0] for literal in distinct}
        self._only_first = firsts.pop() if len(firsts) == 1 else ""
        """The common first character of all of them, as of most vocabularies' control tokens; empty: there is none."""

    def find(self, text: str, start: int = 0, end: int | None = None) -> Iterable[tuple[int, int]]:
        """The matches within text[start:end], as spans [start, end) of `text`, in order."""
        if not start and len(text) <= self._piece_chars and (end is None or end >= len(text)):
            if self._only_first not in text:
                return []
            found = self._automaton.find_matches_as_indexes(text) if text.isascii() else self._matches(text)
            return map(_SPAN, found)
        return self._find_in_pieces(text, start, len(text) if end is None else min(end, len(text)))

    def _find_in_pieces(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        while start < end:
            first, border = start, start + self._piece_chars
            for _, at, match_end in self._matches(text[first : min(border + self._num_ahead, end)]):
                if first + at >= border:
                    break  # it may be longer than what of it was looked at
                start = first + match_end
                yield first + at, start
            start = max(start, border)

    def _matches(self, piece: str) -> list[tuple[int, int, int]]:
        """The matches in a piece: literal, start, end.

        The library reads UTF-8. CPython keeps it beside a non-ASCII text for as long as the text lives, so the library
        gets a copy. One stranger more changes no match; nor does one for each surrogate, as these have no UTF-8.
        """
        if piece.isascii():
            return self._automaton.find_matches_as_indexes(piece)
        try:
            return self._automaton.find_matches_as_indexes(piece + self._stranger)
        except UnicodeEncodeError:
            return self._automaton.find_matches_as_indexes(_SURROGATE.sub(self._stranger, piece) + self._stranger)
