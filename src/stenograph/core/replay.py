"""The numbers for a trainer's replay, such as the experts of a turn's tokens, in the smallest fitting type. Pure."""

import base64

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.uint8 | np.uint16 | np.int32]

_PIECE_CHARS = 256 * 1024
"""Base64 decoded at once, in a millisecond, since each call holds the GIL. A multiple of 4."""
_DTYPES: dict[int, "np.dtype[np.uint8 | np.uint16 | np.int32]"] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<i4"),
}


class PackedInts(Struct, frozen=True, gc=False):
    """Numbers of `item_bytes` each, little-endian: unsigned in 1 or 2 bytes, int32 in 4."""

    data: bytes
    item_bytes: int

    def __post_init__(self) -> None:
        if self.item_bytes not in _DTYPES or len(self.data) % self.item_bytes:
            raise ValueError(f"{len(self.data)} bytes are no numbers of {self.item_bytes} bytes each")

    @staticmethod
    def of(values: "NDArray[np.integer]") -> "PackedInts":
        """Pack values, in their order; each fits in int32."""
        lowest, highest = (int(values.min()), int(values.max())) if values.size else (0, 0)
        item_bytes = 4 if lowest < 0 or highest >= 2**16 else 1 if highest < 2**8 else 2
        return PackedInts(values.astype(_DTYPES[item_bytes]).tobytes(), item_bytes)

    @staticmethod
    def of_base64(text: str) -> "PackedInts":
        """Pack int32 in base64. Raises ValueError: damaged, or not whole numbers."""
        data = bytearray()
        for start in range(0, len(text), _PIECE_CHARS):
            if len(data) != start // 4 * 3:
                raise ValueError("there is data after the padding")
            data += base64.b64decode(text[start : start + _PIECE_CHARS], validate=True)
        return PackedInts.of_int32(data)

    @staticmethod
    def of_int32(data: bytes | bytearray) -> "PackedInts":
        """Pack int32, little-endian. Raises ValueError: not whole numbers."""
        if len(data) % 4:
            raise ValueError(f"{len(data)} bytes are not a whole number of int32 values")
        return PackedInts.of(np.frombuffer(data, "<i4"))

    @property
    def values(self) -> Ints:
        """The numbers [N], a read-only view."""
        return np.frombuffer(self.data, _DTYPES[self.item_bytes])

    @property
    def base64(self) -> str:
        """The numbers as int32 in base64, as SGLang writes them."""
        return base64.b64encode(self.values.astype("<i4").tobytes()).decode()


class Replay(Struct, frozen=True, kw_only=True, gc=False):
    """The data for a trainer to route the same tokens as the engine did.

    A row is one position of prompt and completion, in order, the last token excepted: the engine never fed it.
    `routed_experts` [rows, layers, top_k]: the rows from `first_row` on; an SGLang that cannot leave rows out sends
    all. `indexer_topk`: of all rows, as the engine's model defines it.
    """

    routed_experts: PackedInts | None = None
    indexer_topk: PackedInts | None = None
    first_row: int = 0
