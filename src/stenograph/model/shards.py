"""The files of a folder's weights, as `model.safetensors.index.json` lists them. Opens none of them."""

from pathlib import Path

import msgspec

SHARD_INDEX = "model.safetensors.index.json"
WHOLE_WEIGHTS = "model.safetensors"
"""The one file of weights where there is no index."""


class _ShardIndex(msgspec.Struct, frozen=True):
    """`weight_map`: the file of each tensor."""

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's files of weights, sorted, whether they are there or not.

    Raises OSError or msgspec.DecodeError where the index cannot be read.
    """
    index = folder / SHARD_INDEX
    if not index.exists():
        return [WHOLE_WEIGHTS]
    return sorted(set(msgspec.json.decode(index.read_bytes(), type=_ShardIndex).weight_map.values()))
