"""Reads a long list of sampled tokens as two columns, without an object for each of its rows. Pure.

Owns one spelling of such a list, SGLang's, without blanks, with a text or a null in each row:

    "output_token_logprobs":[[-0.25,31611," the"],[-1.5,30101," cat"],[-0.125,2,null]]

The brackets between the rows are overwritten, so that the decoder of all other replies reads one flat list. All else is
not taken, however valid it may be. Must know neither a reply nor its laws: the caller takes columns out of a body,
decodes the rest of it, and sees there whether they stood in the right field.
"""

import struct
from array import array

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from stenograph.core.types import token_ids

STAND_IN_ID = int("8" * 19)
"""The id of the one row, of logprob 0, in the place of the columns in the rest of their body.

A number of one digit alone is searched for in large steps."""

LEAST_ROW_BYTES = 8
"""Fewer than a row with its comma has. Where brackets are closer, their places would take more than their text."""

_STAND_IN_DIGITS = str(STAND_IN_ID).encode()
_STAND_IN = b"[[0,%b]]" % _STAND_IN_DIGITS
_BEGIN = b'"output_token_logprobs":[['
_AFTER_TEXT, _AFTER_NULL = (int.from_bytes(text, "little") for text in (b'"],[', b"l],["))
_OF_A_KEY = int.from_bytes(b'":[', "little")
_VALUES = msgspec.json.Decoder(list[int | float | str | None])
_PACKED_FLOAT = np.dtype([("type", "u1"), ("value", ">f8")])
"""A float in msgpack: by it a list of them becomes an array five times faster than by `array`."""
_IS_FLOAT = 0xCB


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
    is_bracket = text == ord("[")
    if np.count_nonzero(is_bracket) > len(text) // LEAST_ROW_BYTES:
        return None
    brackets = np.flatnonzero(is_bracket)[2:]
    ends = np.ndarray(len(text), "<u4", body, begin - 3, strides=(1,))[brackets]  # four bytes, the bracket the last
    is_key = (ends >> 8 == _OF_A_KEY) & (ends & 0xFF != ord("\\"))
    num_before_key = int(is_key.argmax()) if np.logical_or.reduce(is_key) else len(ends)
    rows = brackets[:num_before_key][((ends == _AFTER_TEXT) | (ends == _AFTER_NULL))[:num_before_key]]
    end = body.find(b"]]", begin + int(rows[-1])) + 2 if len(rows) else 0
    if body[end - 3 : end] not in (b'"]]', b"l]]"):
        return None
    columns = _columns(memoryview(body)[begin:end], rows)
    rest = b"".join((body[:begin], _STAND_IN, body[end:]))
    return None if columns is None or rest.count(_STAND_IN_DIGITS) != 1 else (rest, columns)


def _columns(text: memoryview, rows: NDArray[np.int64]) -> Columns | None:
    """The list of tokens that ends with a text or a null, and has `],[` after a quote or an `l` up to each of `rows`.

    The list's strings have none of these: with line breaks in the place of the brackets they would be no JSON. So there
    is one row more, each ends with a text or a null, and if of each three values the first is a float and the second
    an integer, then these are its rows.
    """
    flat = bytearray(text)
    written = np.frombuffer(flat, dtype=np.uint8)
    written[rows - 2] = written[rows] = ord("\n")
    written[1] = written[-2] = ord("\n")
    try:
        values = _VALUES.decode(flat)
        packed_ids = struct.pack(f"{len(rows) + 1}i", *values[1::3])
        packed = msgspec.msgpack.encode(values[0::3])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, struct.error, OverflowError):
        return None
    num_head = 1 if len(rows) < 15 else 3 if len(rows) < 2**16 - 1 else 5
    if len(values) != 3 * (len(rows) + 1) or len(packed) != num_head + _PACKED_FLOAT.itemsize * (len(rows) + 1):
        return None
    floats = np.frombuffer(packed, dtype=_PACKED_FLOAT, offset=num_head)
    found = np.frombuffer(packed_ids, dtype=np.int32)
    if not np.logical_and.reduce(floats["type"] == _IS_FLOAT) or np.minimum.reduce(found) < 0:
        return None
    ids, logprobs = token_ids(), array("d")
    ids.frombytes(packed_ids)
    logprobs.frombytes(floats["value"].astype(np.float64).tobytes())
    return Columns(ids=ids, logprobs=logprobs)
