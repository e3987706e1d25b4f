"""The support of sampled tokens: which ids could be sampled beside each, as few bytes. Pure.

The support of a token is the set of ids left by a grammar, `min_tokens` and truncation. The token is always in it.
The bytes are in three columns, so all of a turn is read at once; docs/samples.md has them byte by byte:

    heads   a varint for each token: 0, every id; 2 n + 1, the token and n others; 2, a new set; 2 (r + 2), the
            set used r sets ago
    gaps    the others of all tokens with few, as varints: the first id, then each one's distance to the last, less 1
    sets    the new sets: a varint for the form, then ids, the missing ids, a bitmap, or the differing ids beside a set
            used lately
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stenograph.core.types import SupportPiece
from stenograph.core.varints import VARINT_LIMIT, end_of_varints, read_varint, read_varints, varint, varints

Ids = NDArray[np.int64]
Bits = NDArray[np.uint8]

MAX_OTHERS = 32
"""The most others beside a token; larger supports are sets, shared by tokens."""
MAX_RECENT = 32
"""Sets within reach of a reference; the least recently used one is forgotten first."""
_COMPARED = 8
"""Recent sets compared with a new one."""

_EVERY, _NEW_SET = 0, 2
_IDS, _MISSING, _BITMAP, _DIFFERS = range(4)
_HEADER = struct.Struct("<IIII")


class SupportDamaged(ValueError):
    """Bytes are no supports of the tokens they came with. The message says why. `BadVarint` is one too: readers catch
    ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupportRows:
    """The supports of T tokens. `counts` [T]: how many ids others than the token a support has; -1 every id, -2 those
    of `sets`, by place. `others` are those of all tokens with a count, in order and ascending for each."""

    counts: Ids
    others: Ids
    sets: dict[int, Bits]


class SupportWriter:
    """Writes the supports of one turn's tokens, in order. `vocab_size` is above every id."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._recent: list[Bits] = []

    def __repr__(self) -> str:
        return f"<SupportWriter {len(self._recent)} sets>"

    def write(self, id_: int, kept: Ids | None) -> SupportPiece:
        """The support of a token: ids `kept`, ascending, the token among them; None: every id."""
        if kept is None:
            return SupportPiece(heads=b"\x00", gaps=b"", sets=b"")
        if len(kept) > MAX_OTHERS + 1:
            head, sets = self._set(_bits_of(kept, self._vocab_size))
            return SupportPiece(heads=varint(head), gaps=b"", sets=sets)
        others = [one for one in kept.tolist() if one != id_]
        return SupportPiece(heads=bytes((2 * len(others) + 1,)), gaps=_gap_varints(others), sets=b"")

    def write_rows(self, ids: Sequence[int], rows: Sequence[Sequence[int]]) -> SupportPiece:
        """The supports of tokens `ids` [T]: of each a row of ids in any order. Raises SupportDamaged for a row without
        its token, with an id twice, or with an id outside the vocabulary."""
        if len(rows) != len(ids):
            raise SupportDamaged(f"{len(ids)} tokens, but supports of {len(rows)}")
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter((id_ for row in rows for id_ in row), np.int64, int(counts.sum()))
        row_of = np.repeat(np.arange(len(rows)), counts)
        flat = flat[np.lexsort((flat, row_of))]
        sampled = np.asarray(ids, np.int64)
        is_token = flat == sampled[row_of]
        if (np.bincount(row_of[is_token], minlength=len(rows)) != 1).any():
            raise SupportDamaged("a sampled token is not in its support, or twice")
        if len(flat) and not 0 <= flat.min() <= flat.max() < self._vocab_size:
            raise SupportDamaged(f"an id is not of the vocabulary, which has {self._vocab_size} ids")
        if ((flat[1:] == flat[:-1]) & (row_of[1:] == row_of[:-1])).any():
            raise SupportDamaged("an id is twice in a support")
        is_small = counts <= MAX_OTHERS + 1
        heads, sets = 2 * counts - 1, bytearray()
        ends = counts.cumsum()
        for place in np.flatnonzero(~is_small).tolist():
            bits = _bits_of(flat[ends[place] - counts[place] : ends[place]], self._vocab_size)
            heads[place], new = self._set(bits)
            sets += new
        is_other = is_small[row_of] & ~is_token
        gaps = _gaps(flat[is_other], np.where(is_small, counts - 1, 0))
        return SupportPiece(heads=varints(heads), gaps=varints(gaps), sets=bytes(sets))

    def _set(self, bits: Bits) -> tuple[int, bytes]:
        """The head of a token with a set, and the set as bytes if it is new."""
        recent = self._recent
        for place, known in enumerate(recent):
            if np.array_equal(known, bits):
                recent.insert(0, recent.pop(place))
                return 2 * (place + 2), b""
        written = self._set_bytes(bits)
        recent.insert(0, bits)
        del recent[MAX_RECENT:]
        return _NEW_SET, written

    def _set_bytes(self, bits: Bits) -> bytes:
        """A set in the shortest of its forms."""
        best = bits, _IDS
        num_least = _num_bits(bits)
        if self._vocab_size - num_least < num_least:
            best, num_least = (bits ^ _every_bit(self._vocab_size), _MISSING), self._vocab_size - num_least
        for place, known in enumerate(self._recent[:_COMPARED]):
            apart = bits ^ known
            if (num := _num_bits(apart)) < num_least:
                best, num_least = (apart, _DIFFERS + place), num
        if num_least < len(bits):  # else they take more bytes, at least one each
            listed = varints(_gaps_of(_ids_of(best[0], self._vocab_size)))
            if len(listed) < len(bits):
                return varint(best[1]) + varint(num_least) + listed
        return varint(_BITMAP) + bits.tobytes()


class SupportReader:
    """Reads the supports of one turn's tokens, in order, and checks them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._recent: list[Bits] = []

    def __repr__(self) -> str:
        return f"<SupportReader {len(self._recent)} sets>"

    def read(self, piece: SupportPiece, ids: Sequence[int]) -> SupportRows:
        """The supports of the next tokens, `ids` [T]. Raises ValueError."""
        heads = read_varints(piece.heads)
        if len(heads) != len(ids):
            raise SupportDamaged(f"{len(ids)} tokens, but supports of {len(heads)}")
        sampled = np.asarray(ids, np.int64)
        is_set = (heads > 0) & (heads % 2 == 0)
        counts = np.where(is_set, -2, (heads - 1) // 2)  # 0 becomes -1
        others = self._others(piece.gaps, np.maximum(counts, 0), sampled)
        return SupportRows(counts=counts, others=others, sets=self._sets(piece.sets, heads, is_set, sampled))

    def _others(self, written: bytes, counts: Ids, sampled: Ids) -> Ids:
        gaps = read_varints(written)
        if len(gaps) != int(counts.sum()):
            raise SupportDamaged(f"{int(counts.sum())} ids beside the tokens, but {len(gaps)} came")
        if not len(gaps):
            return gaps
        sums = (gaps + 1).cumsum()
        before = np.concatenate((np.zeros(1, np.int64), sums))[counts.cumsum() - counts]
        others: Ids = sums - np.repeat(before, counts) - 1
        if others.max() >= self._vocab_size:
            raise SupportDamaged(f"{int(others.max())} is not a token id: the vocabulary has {self._vocab_size} ids")
        if (others == np.repeat(sampled, counts)).any():
            raise SupportDamaged("a sampled token is among the others of its support")
        return others

    def _sets(self, written: bytes, heads: Ids, is_set: NDArray[np.bool_], sampled: Ids) -> dict[int, Bits]:
        found: dict[int, Bits] = {}
        at, recent = 0, self._recent
        for place in np.flatnonzero(is_set).tolist():
            used = int(heads[place]) // 2 - 2
            if used < 0:
                bits, at = self._new_set(written, at)
            elif used < len(recent):
                bits = recent.pop(used)
            else:
                raise SupportDamaged(f"there is no set that was used {used} sets ago")
            recent.insert(0, bits)
            del recent[MAX_RECENT:]
            id_ = int(sampled[place])
            if not id_ < self._vocab_size or not int(bits[id_ >> 3]) >> (id_ & 7) & 1:
                raise SupportDamaged(f"the sampled token {id_} is not in its support")
            found[place] = bits
        if at != len(written):
            raise SupportDamaged(f"{len(written) - at} bytes follow the last set")
        return found

    def _new_set(self, written: bytes, at: int) -> tuple[Bits, int]:
        form, at = read_varint(written, at)
        end = _end_of_set(written, at, form, self._vocab_size)
        num_bytes = -(-self._vocab_size // 8)
        if form == _BITMAP:
            bits = np.frombuffer(written, np.uint8, num_bytes, at)
            if (bits & ~_every_bit(self._vocab_size)).any():
                raise SupportDamaged(f"a set has ids beyond the vocabulary of {self._vocab_size} ids")
            return bits, end
        _, at = read_varint(written, at)
        ids = (read_varints(written[at:end]) + 1).cumsum() - 1
        if len(ids) and ids[-1] >= self._vocab_size:
            raise SupportDamaged(f"{int(ids[-1])} is not a token id: the vocabulary has {self._vocab_size} ids")
        bits = _bits_of(ids, self._vocab_size)
        if form == _IDS:
            return bits, end
        if form == _MISSING:
            return bits ^ _every_bit(self._vocab_size), end
        if form - _DIFFERS >= len(self._recent):
            raise SupportDamaged(f"there is no set that was used {form - _DIFFERS} sets ago")
        return bits ^ self._recent[form - _DIFFERS], end


# -- a whole turn


class SupportColumns:
    """The supports of a turn as they come, piece by piece."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.num_tokens = 0
        self._heads, self._gaps, self._sets = bytearray(), bytearray(), bytearray()

    def __repr__(self) -> str:
        return f"<SupportColumns of {self.num_tokens} tokens>"

    def extend(self, piece: SupportPiece, num_tokens: int) -> None:
        """Add the supports of so many tokens more."""
        self.num_tokens += num_tokens
        self._heads += piece.heads
        self._gaps += piece.gaps
        self._sets += piece.sets

    def whole(self) -> bytes:
        """The turn's supports: vocabulary, number of tokens, bytes of heads and of gaps, as uint32; the columns."""
        header = _HEADER.pack(self._vocab_size, self.num_tokens, len(self._heads), len(self._gaps))
        return b"".join((header, self._heads, self._gaps, self._sets))


def split(whole: bytes) -> tuple[int, SupportPiece]:
    """A turn's vocabulary size, and its columns. Raises SupportDamaged."""
    if len(whole) < _HEADER.size:
        raise SupportDamaged(f"{len(whole)} bytes are too few")
    vocab_size, _, num_heads, num_gaps = _HEADER.unpack_from(whole)
    gaps_at = _HEADER.size + num_heads
    sets_at = gaps_at + num_gaps
    if sets_at > len(whole) or not 0 < vocab_size < VARINT_LIMIT:
        raise SupportDamaged(f"its header does not fit its {len(whole)} bytes")
    piece = SupportPiece(heads=whole[_HEADER.size : gaps_at], gaps=whole[gaps_at:sets_at], sets=whole[sets_at:])
    return vocab_size, piece


def first_supports(whole: bytes, num_tokens: int) -> bytes:
    """The supports of a turn's first tokens. Raises ValueError."""
    vocab_size, piece = split(whole)
    heads = read_varints(piece.heads)[:num_tokens]
    num_gaps = int(((heads[heads % 2 == 1] - 1) // 2).sum())
    at = 0
    for _ in range(int((heads == _NEW_SET).sum())):
        form, at = read_varint(piece.sets, at)
        at = _end_of_set(piece.sets, at, form, vocab_size)
    kept = SupportColumns(vocab_size)
    heads_end, gaps_end = end_of_varints(piece.heads, 0, len(heads)), end_of_varints(piece.gaps, 0, num_gaps)
    first = SupportPiece(heads=piece.heads[:heads_end], gaps=piece.gaps[:gaps_end], sets=piece.sets[:at])
    kept.extend(first, len(heads))
    return kept.whole()


def joined_supports(first: bytes | None, num_first: int, second: bytes) -> bytes:
    """The supports of so many tokens, and those of the tokens after them; `first` None: every id. Raises ValueError."""
    vocab_size, after = split(second)
    columns = SupportColumns(vocab_size)
    before = SupportPiece(heads=bytes(num_first), gaps=b"", sets=b"") if first is None else split(first)[1]
    columns.extend(before, num_first)
    columns.extend(after, _HEADER.unpack_from(second)[1])
    return columns.whole()


def supports(whole: bytes, ids: "Sequence[int] | array[int]") -> Iterator[Ids | None]:
    """The support of each token of a turn with the sampled ids `ids` [T]: ids, ascending; None: every id.

    Raises ValueError before the first.
    """
    vocab_size, piece = split(whole)
    rows = SupportReader(vocab_size).read(piece, ids)
    ends = np.maximum(rows.counts, 0).cumsum()
    for place, (id_, count) in enumerate(zip(ids, rows.counts.tolist(), strict=True)):
        if count == -1:
            yield None
        elif count == -2:
            yield _ids_of(rows.sets[place], vocab_size)
        else:
            others = rows.others[ends[place] - count : ends[place]]
            yield np.insert(others, int(others.searchsorted(id_)), id_)


# -- sets


def _bits_of(ids: Ids, vocab_size: int) -> Bits:
    mask = np.zeros(vocab_size, np.bool_)
    mask[ids] = True
    return np.packbits(mask, bitorder="little")


def _ids_of(bits: Bits, vocab_size: int) -> Ids:
    return np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little"))


def _every_bit(vocab_size: int) -> Bits:
    return np.packbits(np.ones(vocab_size, np.bool_), bitorder="little")


def _num_bits(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def _end_of_set(written: bytes, at: int, form: int, vocab_size: int) -> int:
    """The end of a set; its form ends at `at`. Raises ValueError."""
    if form == _BITMAP:
        end = at + -(-vocab_size // 8)
        if end > len(written):
            raise SupportDamaged("a set is cut")
        return end
    num_ids, at = read_varint(written, at)
    if num_ids > vocab_size:
        raise SupportDamaged(f"a set of {num_ids} ids, and a vocabulary of {vocab_size}")
    return end_of_varints(written, at, num_ids)


def _gaps_of(ids: Ids) -> Ids:
    return np.diff(ids, prepend=-1) - 1


def _gaps(others: Ids, counts: Ids) -> Ids:
    """Distances less 1 within each row of ids, with `counts` of them in each; from -1 to a row's first."""
    gaps = np.diff(others, prepend=-1) - 1
    firsts = (counts.cumsum() - counts)[counts > 0]
    gaps[firsts] = others[firsts]
    return gaps


def _gap_varints(others: Sequence[int]) -> bytes:
    written, last = bytearray(), -1
    for id_ in others:
        written += varint(id_ - last - 1)
        last = id_
    return bytes(written)
