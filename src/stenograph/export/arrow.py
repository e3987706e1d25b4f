"""Samples as one Arrow IPC stream: a row per sample, for trainers that read tables (datasets, Ray Data, Polars). Pure.

Needs pyarrow, which is three times the size of all else together and so an extra (`pip install stenograph[arrow]`);
it is imported when the first sample is asked for in this format. Its columns are those of the JSON format; `metadata`
and `prefix_cache_info` are JSON texts. `session_metadata` and `empty_reason` are in the schema's metadata, as JSON.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from stenograph.core.errors import InvalidRequest
from stenograph.export.samples import Sample, describe

MEDIA_TYPE = "application/vnd.apache.arrow.stream"
"""As registered with IANA."""


def to_arrow(samples: Sequence[Sample], *, session_metadata: Mapping[str, object], empty_reason: str | None) -> bytes:
    """A record batch with a row per sample, in an IPC stream. Raises InvalidRequest where there is no pyarrow."""
    pa = _pyarrow()
    meta = {"session_metadata": session_metadata, "empty_reason": empty_reason}
    span = pa.struct([("version", pa.string()), ("start", pa.int64()), ("end", pa.int64())])
    described = [describe(sample) for sample in samples]
    columns: dict[str, Any] = {
        "tokens": _lists(pa, [np.asarray(sample.tokens, dtype=np.int64) for sample in samples], pa.int64()),
        "response_length": pa.array([sample.response_length for sample in samples], pa.int64()),
        "loss_mask": _lists(pa, [np.frombuffer(sample.loss_mask, np.uint8) for sample in samples], pa.uint8()),
        "rollout_log_probs": _lists(pa, [_floats(sample.rollout_log_probs) for sample in samples], pa.float64()),
        "sampling_log_probs": _lists(pa, [_floats(sample.sampling_log_probs) for sample in samples], pa.float64()),
        "rollout_routed_experts": _nested(pa, [sample.routed_experts for sample in samples], depth=3),
        "rollout_indexer_topk": _nested(pa, [sample.indexer_topk for sample in samples], depth=2),
        "response": pa.array([sample.response for sample in samples], pa.string()),
        "status": pa.array([str(sample.status) for sample in samples], pa.string()),
        "weight_versions": pa.array([row["weight_versions"] for row in described], pa.list_(span)),
        "prefix_cache_info": _json_texts(pa, [row["prefix_cache_info"] for row in described]),
        "metadata": _json_texts(pa, [row["metadata"] for row in described]),
    }
    batch = pa.RecordBatch.from_pydict(columns)
    batch = batch.replace_schema_metadata({key: msgspec.json.encode(value) for key, value in meta.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return cast("bytes", sink.getvalue().to_pybytes())


def _pyarrow() -> Any:
    try:
        module = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.ipc")
    except ImportError as error:
        raise InvalidRequest(
            "format 'arrow' needs pyarrow, which this server does not have: pip install 'stenograph[arrow]'.",
            param="/format",
        ) from error
    return module


def _floats(values: "Sequence[float] | None") -> NDArray[np.float64] | None:
    return None if values is None else np.asarray(values, dtype=np.float64)


def _lists(pa: Any, rows: Sequence[NDArray[Any] | None], kind: Any) -> Any:
    """A column of lists, each from one flat array, without an object per number."""
    sizes = [0 if row is None else len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    flat = [row for row in rows if row is not None]
    values = pa.array(np.concatenate(flat) if flat else [], kind)
    mask = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _nested(pa: Any, rows: Sequence[NDArray[np.int32] | None], *, depth: int) -> Any:
    """A column of arrays of `depth` dimensions, as lists of lists of int32."""
    kind = pa.int32()
    for _ in range(depth):
        kind = pa.list_(kind)
    return pa.array([None if row is None else row.tolist() for row in rows], kind)


def _json_texts(pa: Any, values: Sequence[object]) -> Any:
    return pa.array([msgspec.json.encode(value).decode() for value in values], pa.string())
