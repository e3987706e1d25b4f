"""Types of a GGUF file's tensors, as `gguf` knows them: for the types not read without it (gguf_header)."""

import gguf
import numpy as np
from numpy.typing import NDArray

from stenograph.model.gguf_header import TensorType


def type_of(number: int) -> TensorType:
    """The type with a number. Raises ValueError or KeyError for an unknown one."""
    kind = gguf.GGMLQuantizationType(number)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return TensorType(number=number, name=kind.name, block_values=block_values, block_bytes=block_bytes)


def dequantize(blocks: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    """The values of blocks [N, bytes]. Raises as `gguf` does, also for a type it cannot dequantize."""
    one_row = blocks.reshape(1, -1)  # `gguf` takes 16 rows at a time: of short ones too few for NumPy
    values: NDArray[np.float32] = gguf.quants.dequantize(one_row, gguf.GGMLQuantizationType(kind.number))
    return values.reshape(-1)
