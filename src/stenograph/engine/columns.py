"""Reads a long list of sampled tokens as two columns, without an object for each of its rows. Pure.

Owns one spelling of such a list, the one that SGLang writes where it reports no texts, without a blank:

    "output_token_logprobs":[[-0.25,31611,null],[-1.5,30101,null],[-0.125,2,null]]

The brackets and nulls are overwritten, so that the list's numbers stand alone in it; the decoder of all other replies
reads them, and NumPy holds the ids to their text. All else is not taken, however valid it may be. Must not know what a
reply is, nor which laws it has to keep: whoever takes columns out of a body decodes the rest of it, and sees there
whether they stood in the field that it means.
"""

from array import array

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from stenograph.core.types import token_ids

STAND_IN_ID = 0x5EED_0FC0_1A35_0115
"""The id of the one row, of logprob 0, that stands in the place of the columns in the rest of their body."""

_STAND_IN_DIGITS = str(STAND_IN_ID).encode()
_STAND_IN = b"[[0,%b]]" % _STAND_IN_DIGITS
_BEGIN = b'"output_token_logprobs":[['
_END = b",null]]"
_NUMBERS = msgspec.json.Decoder(list[float])
_PACKED_FLOAT = np.dtype([("type", "u1"), ("value", ">f8")])
"""A float in msgpack, by which a list of them becomes an array five times faster than by `array`."""


def _word(text: bytes) -> np.uint64:
    """Eight bytes as they are compared and written."""
    return np.uint64(int.from_bytes(text, "little"))


_BETWEEN = _word(b",null],[")
_COMMA = _word(b",       ")
_POWERS = [10**power for power in range(1, 7)]
"""An id has at most seven digits here: with the comma before them they are a word."""
_ID_MASKS = np.array([_word(b"\0" * (6 - more) + b"\xff" + b"\xf0" * (more + 1)) for more in range(7)])
_ID_WORDS = np.array([_word(b"\0" * (6 - more) + b"," + b"0" * (more + 1)) for more in range(7)])
"""The word of a comma and digits, by the number of digits after the first, under a mask that makes each digit a 0."""


class Columns(Struct, frozen=True, kw_only=True):
    """Rows of tokens by columns. `logprobs[i]` is ln p(ids[i]) in nats. The ids may be of any vocabulary."""

    ids: "array[int]"
    logprobs: "array[float]"

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, span: slice) -> "Columns":
        return Columns(ids=self.ids[span], logprobs=self.logprobs[span])


def cut_columns(body: bytes) -> tuple[bytes, Columns] | None:
    """The body with one row of `STAND_IN_ID` in the place of its first list of tokens, and that list; None unless it is
    spelled as above.

    If the rest is JSON, and decodes to that row in some place, then the body is JSON, and decodes to the same with the
    columns in its place: the digits of the row's id are nowhere else in the rest.
    """
    begin = body.find(_BEGIN)
    if begin < 0:
        return None
    begin += len(_BEGIN) - 2
    text = np.frombuffer(body, dtype=np.uint8, offset=begin)
    words = np.ndarray(len(text) + 1, "<u8", body, begin - 8, strides=(1,))  # [i]: the eight bytes before i
    rows = np.flatnonzero(text == ord("["))[2:]
    is_row = words[rows + 1] == _BETWEEN
    if not np.logical_and.reduce(is_row):
        rows = rows[: int(is_row.argmin())]
    end = body.find(b"]]", begin + int(rows[-1])) + 2 if len(rows) else 0
    if not body.endswith(_END, begin, end):
        return None
    commas = np.append(rows - 7, end - begin - len(_END))
    columns = _columns(memoryview(body)[begin:end], words, commas)
    rest = b"".join((body[:begin], _STAND_IN, body[end:]))
    return None if columns is None or rest.count(_STAND_IN_DIGITS) != 1 else (rest, columns)


def _columns(text: memoryview, words: NDArray[np.uint64], commas: NDArray[np.int64]) -> Columns | None:
    """The list of one row for each of `commas`, the commas before its nulls; None unless it has a logprob and an id in
    each."""
    numbers = _numbers(text, commas)
    if numbers is None or len(numbers) != 2 * len(commas):
        return None
    told = numbers[1::2].astype(np.float64)
    if not (np.minimum.reduce(told) >= 0 and np.maximum.reduce(told) < 10 * _POWERS[-1]):
        return None
    found = told.astype(np.int32)
    num_more = np.zeros(len(found), dtype=np.uint8)
    for power in _POWERS:
        num_more += found >= power
    # As many digits as the number has, and a comma before them: so it is spelled as an integer, and since there are
    # two numbers for each row, each row has two.
    if not np.logical_and.reduce(words[commas] & _ID_MASKS[num_more] == _ID_WORDS[num_more]):
        return None
    ids, logprobs = token_ids(), array("d")
    ids.frombytes(found.tobytes())
    logprobs.frombytes(numbers[0::2].astype(np.float64).tobytes())
    return Columns(ids=ids, logprobs=logprobs)


def _numbers(text: memoryview, commas: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """All numbers between the rows' brackets; None if there is anything else."""
    flat = bytearray(text)
    np.ndarray(len(flat) - 7, dtype="<u8", buffer=flat, strides=(1,))[commas[:-1]] = _COMMA
    flat[1:2], flat[-len(_END) :] = b" ", b"      ]"
    try:
        numbers = _NUMBERS.decode(flat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    packed = msgspec.msgpack.encode(numbers)
    size = _PACKED_FLOAT.itemsize * len(numbers)
    return np.frombuffer(packed, dtype=_PACKED_FLOAT, offset=len(packed) - size)["value"]
