"""Ids as JSON text: what a JSON encoder writes of them, whatever they are and however they are cut."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenograph.core.ids_json import PIECE_IDS, encode_ids, join_ids, pieces_of

in_table = st.integers(0, 2**18 - 1)
any_id = st.integers(0, 2**31 - 1)


def written(ids: "array[int]") -> bytes:
    return msgspec.json.encode(ids.tolist())[1:-1]


@given(st.lists(in_table | any_id, max_size=300) | st.lists(in_table, min_size=64, max_size=300))
def test_ids_are_written_as_a_json_encoder_writes_them(ids: list[int]) -> None:
    assert encode_ids(array("i", ids)) == written(array("i", ids))


def test_every_id_of_a_vocabulary_is_written() -> None:
    ids = array("i", range(2**18))
    assert encode_ids(ids) == written(ids)


@pytest.mark.parametrize("beyond", [2**18, 2**31 - 1, -1, -(2**31)])
def test_an_id_beyond_every_vocabulary_is_written_too(beyond: int) -> None:
    ids = array("i", [*range(100), beyond])
    assert encode_ids(ids) == written(ids)


@pytest.mark.parametrize("num_ids", [0, 1, PIECE_IDS - 1, PIECE_IDS, PIECE_IDS + 1, 3 * PIECE_IDS + 7])
def test_pieces_join_to_the_whole(num_ids: int) -> None:
    ids = array("i", [number * 7919 % 2**18 for number in range(num_ids)])
    assert join_ids(map(encode_ids, pieces_of(ids))) == encode_ids(ids) == written(ids)
