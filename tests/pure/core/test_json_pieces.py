"""Written in pieces, a value is what msgspec writes at once; and no piece is long."""

from array import array
from collections.abc import Iterator

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.json_pieces import (
    PIECE_BYTES,
    PIECE_CHARS,
    PIECE_FRAGMENTS,
    PIECE_VALUES,
    Written,
    joined,
    json_pieces,
    json_whole,
    list_pieces,
)
from stenograph.core.types import FinishReason

LENGTHS = st.sampled_from([0, 1, 2, PIECE_VALUES - 1, PIECE_VALUES, PIECE_VALUES + 1, 2 * PIECE_VALUES + 3])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
LONG_TEXT = st.builds(lambda text, end: text * (PIECE_CHARS // 2) + end, TEXT, TEXT)
NUMBER = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False))
SCALAR = st.one_of(NUMBER, st.none(), st.booleans(), TEXT, LONG_TEXT, st.sampled_from(FinishReason))
LONG_LIST = st.builds(
    lambda number, length: [number] * length, SCALAR.filter(lambda v: not isinstance(v, str)), LENGTHS
)
VALUE = st.recursive(
    st.one_of(SCALAR, LONG_LIST),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=6,
)


@given(VALUE)
def test_the_pieces_joined_are_what_msgspec_writes(value: object) -> None:
    assert b"".join(json_pieces(value)) == msgspec.json.encode(value)
    assert b"".join(joined(json_pieces(value))) == msgspec.json.encode(value)


@given(LENGTHS, st.sampled_from([1, 3]), st.sampled_from([1, 2]))
def test_arrays_and_iterators_are_lists(length: int, rows: int, top_k: int) -> None:
    ids, logprobs = array("i", range(length)), array("d", [-0.1 * i for i in range(length)])
    experts = np.arange(length * rows * top_k, dtype=np.int32).reshape(length, rows, top_k)

    def one_by_one() -> Iterator[object]:
        yield {"ids": ids}
        yield [experts, None]

    def value() -> dict[str, object]:
        mask = experts.ravel() > 1
        return {"ids": ids, "logprobs": (logprobs,), "experts": experts, "mask": mask, "more": one_by_one()}

    plain = {
        "ids": ids.tolist(),
        "logprobs": (logprobs.tolist(),),
        "experts": experts.tolist(),
        "mask": (experts.ravel() > 1).tolist(),
        "more": [{"ids": ids.tolist()}, [experts.tolist(), None]],
    }
    assert b"".join(json_pieces(value())) == json_whole(value()) == msgspec.json.encode(plain)


@given(st.lists(st.lists(NUMBER, max_size=3), max_size=4))
def test_a_list_of_chunks_is_their_concatenation(chunks: list[list[float]]) -> None:
    flat = [number for chunk in chunks for number in chunk]
    values = [{"before": 1, "list": Written(list_pieces(chunks))} for _ in range(2)]
    assert b"".join(json_pieces(values[0])) == json_whole(values[1]) == msgspec.json.encode({"before": 1, "list": flat})


def test_no_fragment_is_long_however_much_there_is() -> None:
    value = {
        "text": "\u2603\n" * 10**6,
        "ids": array("i", range(10**6)),
        "logprobs": array("d", [-1 / 3] * 10**6),
        "plain": [1.0 / 3] * 10**6,
        "experts": np.zeros((10**4, 8, 8), np.int32),
        "rows": [{"version": "v", "start": i, "end": i + 1} for i in range(10**5)],
    }
    fragments = list(json_pieces(value))
    assert max(map(len, fragments)) < 2**18
    pieces = list(joined(fragments))
    assert max(map(len, pieces)) < PIECE_BYTES + 2**18
    assert len(pieces) <= 1 + sum(map(len, fragments)) // PIECE_BYTES + len(fragments) // PIECE_FRAGMENTS
