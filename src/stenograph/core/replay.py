"""The numbers for a trainer's replay, such as the experts of a turn's tokens, in the smallest fitting type. Pure."""

from typing import TYPE_CHECKING, TypeAlias

import pybase64
from msgspec import Struct

from stenograph.core.loaded import entry

if TYPE_CHECKING:  # to carry these numbers takes no NumPy
    import numpy as np
    from numpy.typing import NDArray

Ints: TypeAlias = "NDArray[np.uint8 | np.uint16 | np.int32]"

_DTYPES = {1: "u1", 2: "<u2", 4: "<i4"}


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

    @property
    def values(self) -> Ints:
        """The numbers [N], a read-only view."""
        values: Ints = entry("numpy:frombuffer")(self.data, _DTYPES[self.item_bytes])
        return values

    @property
    def base64(self) -> str:
        """The numbers as int32 in base64, as SGLang writes them."""
        return pybase64.b64encode_as_string(self.values.astype("<i4").data)


def int32_of_base64(text: str | bytes | memoryview) -> "NDArray[np.int32]":
    """The int32, little-endian, in base64, as SGLang writes them. Raises ValueError: damaged, or not whole numbers."""
    data = pybase64.b64decode(text, validate=True)
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are not a whole number of int32 values")
    values: NDArray[np.int32] = entry("numpy:frombuffer")(data, "<i4")
    return values


class Replay(Struct, frozen=True, kw_only=True, gc=False):
    """The data for a trainer to route the same tokens as the engine did.

    A row is one position of prompt and completion, in order, the last token excepted: the engine never fed it.
    `routed_experts` [rows, layers, top_k]: the rows from `first_row` on, or all rows where an engine sent all and the
    size of a row was not known. `indexer_topk`: of all rows, as the engine's model defines it.
    """

    routed_experts: PackedInts | None = None
    indexer_topk: PackedInts | None = None
    first_row: int = 0
