"""Samples as one safetensors payload, in the format of the miles session server's clients. Pure.

Such a client pops its tensors by name, refuses any left over, requires all of its fields under `_samples_meta`, and the
names of missing tensors in the sample's `nulls`; it ignores further fields in the JSON. So only its tensors are
tensors, and everything else stands in the JSON.

The library would hold the GIL for the whole payload, so the payload is written here; byte for byte it is the library's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.json_pieces import joined, json_pieces
from stenograph.export.replay import ReplayRows
from stenograph.export.samples import Sample, as_numpy, describe

META = "_samples_meta"
"""The uint8 tensor for the rest, as compact UTF-8 JSON."""

_PIECE_VALUES = 32 * 1024
"""Numbers copied at once, in a tenth of a millisecond."""

_STEP_SAMPLES = 64
_STEP_TENSORS = 256
"""Samples, and entries of the header, made at once."""

FORMAT_NAMES = {"<i8": "I64", "<f8": "F64", "<u4": "U32", "<i4": "I32", "<u2": "U16", "|u1": "U8"}
"""The types in the library's order of tensors; those of one type it writes in the order of names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor: its entry in the header, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterator[bytes]

    @property
    def num_bytes(self) -> int:
        num_values = 1
        for size in self.shape:
            num_values *= size
        return num_values * np.dtype(self.dtype).itemsize


def to_safetensors(
    samples: Sequence[Sample], *, session_metadata: Mapping[str, object], empty_reason: str | None
) -> Iterator[bytes]:
    """`tokens.i` int64 [T], `loss_mask.i` uint8 [R], `rollout_log_probs.i` float64 [R] of sample i; `_samples_meta`.

    Where there is something to replay, `rollout_routed_experts.i` and `rollout_indexer_topk.i` [T - 1, …] too, in their
    own types. In pieces of about a tenth of a millisecond; an empty one is a step of work with nothing to send yet.
    """
    tensors: list[Tensor] = []
    for index, sample in enumerate(samples):
        tensors += sample_tensors(sample, index)
        if index % _STEP_SAMPLES == 0:
            yield b""
    metas = (sample_meta(sample) for sample in samples)
    meta: list[bytes] = []
    described = {"samples": metas, "session_metadata": session_metadata, "empty_reason": empty_reason}
    for piece in joined(json_pieces(described)):  # first, because the header states its length
        meta.append(piece)
        yield b""
    tensors.append(Tensor(name=META, dtype="|u1", shape=(sum(map(len, meta)),), pieces=iter(meta)))
    yield from payload(tensors)


def payload(tensors: list[Tensor]) -> Iterator[bytes]:
    """These tensors, which it sorts as the library does, as one payload, in pieces."""
    order = {dtype: place for place, dtype in enumerate(FORMAT_NAMES)}
    tensors.sort(key=lambda tensor: (order[tensor.dtype], tensor.name))
    entries: list[bytes] = []
    for entry in _entries(tensors):
        entries.append(entry)
        yield b""
    pieces = chain.from_iterable(tensor.pieces for tensor in tensors)
    yield from joined(chain(_headed(entries), pieces))


def header(tensors: Sequence[Tensor]) -> bytes:
    """The header of a payload with these tensors, in this order: the length of its JSON, and the JSON, filled up with
    blanks to whole eights."""
    return b"".join(_headed(list(_entries(tensors))))


def _headed(entries: Sequence[bytes]) -> Iterator[bytes]:
    num_bytes = sum(map(len, entries))
    yield (num_bytes + -num_bytes % 8).to_bytes(8, "little")
    yield from entries
    yield b" " * (-num_bytes % 8)


def _entries(tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """The JSON object with the type, shape and place of each tensor, in pieces."""
    end = 0
    for start in range(0, len(tensors), _STEP_TENSORS):
        entries: dict[str, object] = {}
        for tensor in tensors[start : start + _STEP_TENSORS]:
            begin, end = end, end + tensor.num_bytes
            offsets = (begin, end)
            entries[tensor.name] = {
                "dtype": FORMAT_NAMES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": offsets,
            }
        yield (b"," if start else b"{") + msgspec.json.encode(entries)[1:-1]
    yield b"}" if tensors else b"{}"


def sample_tensors(sample: Sample, index: int) -> Iterator[Tensor]:
    yield tensor_of(f"tokens.{index}", "<i8", as_numpy(sample.tokens))
    yield tensor_of(f"loss_mask.{index}", "|u1", np.frombuffer(sample.loss_mask, np.uint8))
    yield tensor_of(f"rollout_log_probs.{index}", "<f8", as_numpy(sample.rollout_log_probs))
    for name, replay in _replays(sample).items():
        if replay is not None:
            yield tensor_of(f"{name}.{index}", replay.dtype.newbyteorder("<").str, replay)


def tensor_of(name: str, dtype: str, values: NDArray[np.generic]) -> Tensor:
    flat = values.reshape(-1)
    starts = range(0, len(flat), _PIECE_VALUES)
    pieces = (flat[start : start + _PIECE_VALUES].astype(dtype, copy=False).tobytes() for start in starts)
    return Tensor(name=name, dtype=dtype, shape=values.shape, pieces=pieces)


def _replays(sample: Sample) -> dict[str, ReplayRows | None]:
    return {"rollout_routed_experts": sample.routed_experts, "rollout_indexer_topk": sample.indexer_topk}


def sample_meta(sample: Sample) -> dict[str, object]:
    """A sample's part of the JSON. `spec_info` empty is not measured."""
    return {
        **describe(sample),
        "response_length": sample.response_length,
        "raw_log_probs": sample.raw_log_probs,
        "sampling_log_probs": sample.sampling_log_probs,
        **({"scores": sample.scores} if sample.scores else {}),
        **({} if sample.token_rewards is None else {"token_rewards": sample.token_rewards}),
        "spec_info": {},
        "nulls": [name for name, replay in _replays(sample).items() if replay is None],
    }
