"""The payload of a row with an entry of a session's account. Pure."""

import msgspec

from stenograph.store.codec.rows import RowDamaged
from stenograph.trajectory.account import Entry


class _WrittenEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    idle_since: float
    entry: Entry


_ENCODER = msgspec.msgpack.Encoder()
_ENTRIES = msgspec.msgpack.Decoder(_WrittenEntry)


def encode_entry(entry: Entry, *, idle_since: float) -> bytes:
    """The payload of an entry's row, with the time since which its session is idle."""
    return _ENCODER.encode(_WrittenEntry(idle_since=idle_since, entry=entry))


def decode_entry(payload: memoryview) -> tuple[Entry, float]:
    """An entry, and the time in its row. Raises RowDamaged."""
    try:
        written = _ENTRIES.decode(payload)
    except (ValueError, TypeError) as error:
        raise RowDamaged(f"its content cannot be read: {error}") from error
    return written.entry, written.idle_since
