"""The supports of tokens are few bytes, and come back as they were; nothing else is taken for one."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.support import (
    MAX_RECENT,
    SupportColumns,
    SupportDamaged,
    SupportReader,
    SupportWriter,
    first_supports,
    split,
    supports,
)
from stenograph.core.types import SupportPiece
from stenograph.core.varints import VARINT_LIMIT, read_varints, varint, varints

VOCAB = 130
Support = frozenset[int] | None
Token = tuple[int, Support]

_some = st.frozensets(st.integers(0, VOCAB - 1), min_size=1, max_size=VOCAB)
_grammars = st.sampled_from([frozenset(range(0, VOCAB, 2)), frozenset(range(VOCAB - 1)), frozenset(range(50, VOCAB))])


@st.composite
def tokens(draw: st.DrawFn) -> list[Token]:
    """Sampled tokens with their supports, of which some come again."""
    drawn: list[Support] = draw(st.lists(st.one_of(st.none(), _some, _grammars), max_size=2 * MAX_RECENT))
    return [
        (draw(st.integers(0, VOCAB - 1)) if one is None else draw(st.sampled_from(sorted(one))), one) for one in drawn
    ]


def as_ids(support: Support) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    return None if support is None else np.array(sorted(support), np.int64)


def written(drawn: Sequence[Token], vocab_size: int = VOCAB) -> bytes:
    writer, columns = SupportWriter(vocab_size), SupportColumns(vocab_size)
    for id_, support in drawn:
        columns.extend(writer.write(id_, as_ids(support)), 1)
    return columns.whole()


def read(whole: bytes, ids: Sequence[int]) -> list[Support]:
    return [None if one is None else frozenset(one.tolist()) for one in supports(whole, ids)]


@given(tokens())
def test_what_was_written_is_read(drawn: list[Token]) -> None:
    whole = written(drawn)
    ids = [id_ for id_, _ in drawn]
    assert read(whole, ids) == [support for _, support in drawn]
    reader = SupportReader(VOCAB)
    assert len(reader.read(split(whole)[1], ids).counts) == len(drawn)


@given(tokens(), st.data())
def test_a_turn_that_is_cut_has_the_supports_of_its_first_tokens(drawn: list[Token], data: st.DataObject) -> None:
    num = data.draw(st.integers(0, len(drawn)))
    assert first_supports(written(drawn), num) == written(drawn[:num])


@given(tokens(), st.data())
def test_rows_of_ids_are_written_as_tokens_one_by_one(drawn: list[Token], data: st.DataObject) -> None:
    drawn = [(id_, support) for id_, support in drawn if support is not None]
    writer = SupportWriter(VOCAB)
    columns = SupportColumns(VOCAB)
    at = data.draw(st.integers(0, len(drawn)))
    for part in (drawn[:at], drawn[at:]):
        rows = [data.draw(st.permutations(sorted(support or ()))) for _, support in part]
        columns.extend(writer.write_rows([id_ for id_, _ in part], rows), len(part))
    assert columns.whole() == written(drawn)


@pytest.mark.parametrize(
    ("id_", "rows"),
    [
        (1, [[2, 3]]),
        (1, [[]]),
        (1, [[1, 2, 2]]),
        (1, [[1, 1]]),
        (1, [[1, VOCAB]]),
        (1, [[1, -1]]),
        (1, []),
    ],
)
def test_rows_that_are_no_supports_are_refused(id_: int, rows: list[list[int]]) -> None:
    with pytest.raises(SupportDamaged):
        SupportWriter(VOCAB).write_rows([id_], rows)


@given(tokens(), st.data())
def test_whatever_bytes_are_read_either_are_supports_of_the_tokens_or_are_refused(
    drawn: list[Token], data: st.DataObject
) -> None:
    whole = bytearray(written(drawn))
    for _ in range(data.draw(st.integers(1, 3))):
        if whole:
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    del whole[data.draw(st.integers(0, len(whole))) :]
    ids = [id_ for id_, _ in drawn]
    try:
        vocab_size, piece = split(bytes(whole))
        if vocab_size > 1000:  # whoever reads knows the vocabulary
            return
        SupportReader(vocab_size).read(piece, ids)
        found = read(bytes(whole), ids)
    except ValueError:
        return
    for id_, support in zip(ids, found, strict=True):
        assert support is None or (id_ in support and support <= set(range(vocab_size)))


@given(st.binary(max_size=40), st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 8))
def test_any_columns_are_read_or_refused(heads: bytes, gaps: bytes, sets: bytes, num: int) -> None:
    ids = list(range(num))
    try:
        rows = SupportReader(VOCAB).read(SupportPiece(heads=heads, gaps=gaps, sets=sets), ids)
    except ValueError:
        return
    assert len(rows.counts) == num
    assert not len(rows.others) or 0 <= rows.others.min() <= rows.others.max() < VOCAB


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, VARINT_LIMIT - 1))))
def test_numbers_are_written_at_once_as_one_by_one(numbers: list[int]) -> None:
    together = varints(np.array(numbers, np.int64))
    assert together == b"".join(map(varint, numbers))
    assert read_varints(together).tolist() == numbers


def test_a_support_of_few_ids_is_few_bytes_and_one_that_comes_again_is_one() -> None:
    def num_bytes(drawn: Sequence[Token]) -> int:
        _, piece = split(written(drawn, 50_000))
        return len(piece.heads) + len(piece.gaps) + len(piece.sets)

    assert num_bytes([(7, None)]) == 1
    assert num_bytes([(7, frozenset({7}))]) == 1
    assert num_bytes([(7, frozenset({7, 40_000, 49_000}))]) == 6
    mask = frozenset(range(0, 50_000, 3))
    assert num_bytes([(3, mask)]) <= 2 + 50_000 // 8
    assert num_bytes([(3, mask)] * 100) <= 101 + 50_000 // 8
    assert num_bytes([(3, mask), (6, mask - {9})]) <= 8 + 50_000 // 8
    assert num_bytes([(0, frozenset(range(50_000)) - {9})]) <= 4
