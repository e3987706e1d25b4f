"""Natural numbers as LEB128 varints: seven bits a byte, the lowest first; the eighth announces another. Pure.

Arrays of them are written and read at once.
"""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

VARINT_LIMIT = 2**31
"""Above every number."""
MAX_BYTES = 5


class BadVarint(ValueError):
    """Bytes are no numbers, or not as many."""


def varint(value: int) -> bytes:
    """A number's bytes."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def varints(values: Numbers) -> bytes:
    """The bytes of numbers [N], one after the other."""
    sizes = np.ones(len(values), np.int64)
    for num in range(1, MAX_BYTES):
        sizes += values >= 1 << 7 * num
    ends = sizes.cumsum()
    written = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for num in range(MAX_BYTES):
        has = np.flatnonzero(sizes > num)
        more = np.where(sizes[has] > num + 1, 0x80, 0)
        written[ends[has] - sizes[has] + num] = values[has] >> 7 * num & 0x7F | more
    return written.tobytes()


def read_varint(written: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where the next byte is. Raises BadVarint."""
    value, shift = 0, 0
    while at < len(written) and shift < 7 * MAX_BYTES:
        value |= (written[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if written[at - 1] < 0x80:
            if value >= VARINT_LIMIT:
                break
            return value, at
    raise BadVarint("a number is cut, or too large")


def read_varints(written: bytes) -> Numbers:
    """All numbers of these bytes. Raises BadVarint."""
    raw = np.frombuffer(written, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if not len(raw):
        return np.zeros(0, np.int64)
    if raw[-1] >= 0x80:
        raise BadVarint("a number is cut, or too large")
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
    sizes = ends - starts + 1
    if sizes.max() > MAX_BYTES:
        raise BadVarint("a number is cut, or too large")
    shifts = 7 * (np.arange(len(raw)) - np.repeat(starts, sizes))
    values: Numbers = np.add.reduceat((raw & 0x7F).astype(np.int64) << shifts, starts)
    if values.max() >= VARINT_LIMIT:
        raise BadVarint("a number is cut, or too large")
    return values


def end_of_varints(written: bytes, at: int, num: int) -> int:
    """The end of `num` numbers from `at` on. Raises BadVarint."""
    if not num:
        return at
    raw = np.frombuffer(written, np.uint8, offset=at) if at < len(written) else np.zeros(0, np.uint8)
    ends = np.flatnonzero(raw[: MAX_BYTES * num] < 0x80)
    if len(ends) < num:
        raise BadVarint("a number is cut, or too large")
    return at + int(ends[num - 1]) + 1
