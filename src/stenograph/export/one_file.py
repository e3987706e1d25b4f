"""The samples of many sessions as one file, for programs that read the samples of one session. Pure.

The beginning of a format is known only at the end: until then samples wait in files lent by the caller, and memory
holds those of one session. `session_metadata` of the file is `{"sessions": […]}`, a row for each session.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

import msgspec

from stenograph.core.json_pieces import json_pieces
from stenograph.export.arrow import END_OF_STREAM, arrow_row, arrow_schema
from stenograph.export.safetensors import FORMAT_NAMES, META, Tensor, header, sample_meta, sample_tensors
from stenograph.export.samples import EmptyReason, Sample, SampleSet, to_json

Lend = Callable[[], BinaryIO]
"""Gives an empty file for reading and writing."""

ACCUMULATED = "accumulated_token_ids"
"""Left out of a session's metadata: the ids are those of its samples."""

_COPIED_BYTES = 2**20


class _Rows(Protocol):
    """Samples in one format."""

    def add(self, sample: Sample, index: int) -> None:
        """Keep a sample, the file's number `index`."""
        ...

    def pieces(self, sessions: "_JsonList", empty_reason: str | None) -> Iterator[bytes | memoryview]:
        """The whole file."""
        ...


class OneFile:
    """The samples of sessions, added one after the other. Raises ArrowMissing when it is made, without pyarrow."""

    def __init__(self, format_: str, lend: Lend) -> None:
        makers: Mapping[str, Callable[[Lend], _Rows]] = {
            "safetensors": _SafetensorsRows,
            "json": _JsonRows,
            "arrow": _ArrowRows,
        }
        self._rows = makers[format_](lend)
        self._sessions = _JsonList(lend())
        self._empty_reason: EmptyReason | None = None
        self.num_samples = 0

    def __repr__(self) -> str:
        return f"<OneFile {self.num_samples} samples>"

    def add(self, session_id: str, made: SampleSet, metadata: Mapping[str, object]) -> None:
        """Add a session, with or without samples."""
        for sample in made.samples:
            self._rows.add(sample, self.num_samples)
            self.num_samples += 1
        self._empty_reason = self._empty_reason or made.empty_reason
        self._sessions.add(
            {
                "session_id": session_id,
                "num_samples": len(made.samples),
                "empty_reason": made.empty_reason,
                "metadata": {key: value for key, value in metadata.items() if key != ACCUMULATED},
            }
        )

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The file's bytes. `empty_reason` is that of the first session without samples if there is none at all."""
        reason = None if self.num_samples else self._empty_reason or EmptyReason.NO_RECORDS
        return self._rows.pieces(self._sessions, reason)


class _JsonList:
    """A growing list in JSON, in a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._before = b"["

    def add(self, value: object) -> None:
        self._file.write(self._before)
        self._file.writelines(json_pieces(value))
        self._before = b","

    def pieces(self) -> Iterator[bytes]:
        """The list's text."""
        yield from _copied(self._file)
        yield b"[]" if self._before == b"[" else b"]"


def _copied(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(_COPIED_BYTES):
        yield piece


def _described(samples: _JsonList, sessions: _JsonList, empty_reason: str | None) -> Iterator[bytes]:
    """The JSON of samples and sessions."""
    yield b'{"samples":'
    yield from samples.pieces()
    yield b',"session_metadata":{"sessions":'
    yield from sessions.pieces()
    yield b'},"empty_reason":' + msgspec.json.encode(empty_reason) + b"}"


class _JsonRows:
    def __init__(self, lend: Lend) -> None:
        self._samples = _JsonList(lend())

    def add(self, sample: Sample, index: int) -> None:
        self._samples.add(to_json(sample))

    def pieces(self, sessions: _JsonList, empty_reason: str | None) -> Iterator[bytes]:
        return _described(self._samples, sessions, empty_reason)


@dataclass(slots=True)
class _Column:
    """The tensors of one type, one behind the other. Of each only its place is kept in memory."""

    file: BinaryIO
    tensors: list[Tensor] = field(default_factory=list[Tensor])


class _SafetensorsRows:
    def __init__(self, lend: Lend) -> None:
        self._columns = {dtype: _Column(lend()) for dtype in FORMAT_NAMES}
        self._metas = _JsonList(lend())
        self._lend = lend

    def add(self, sample: Sample, index: int) -> None:
        for tensor in sample_tensors(sample, index):
            column = self._columns[tensor.dtype]
            column.file.writelines(tensor.pieces)
            column.tensors.append(tensor)
        self._metas.add(sample_meta(sample))

    def pieces(self, sessions: _JsonList, empty_reason: str | None) -> Iterator[bytes]:
        meta = self._lend()
        meta.writelines(_described(self._metas, sessions, empty_reason))
        tensors = [tensor for column in self._columns.values() for tensor in column.tensors]
        yield header([*tensors, Tensor(name=META, dtype="|u1", shape=(meta.tell(),), pieces=iter(()))])
        for column in self._columns.values():  # bytes are the last type
            yield from _copied(column.file)
        yield from _copied(meta)


class _ArrowRows:
    def __init__(self, lend: Lend) -> None:
        arrow_schema({})  # raises where there is no pyarrow
        self._file = lend()

    def add(self, sample: Sample, index: int) -> None:
        self._file.write(arrow_row(sample))

    def pieces(self, sessions: _JsonList, empty_reason: str | None) -> Iterator[bytes | memoryview]:
        told = b'{"sessions":' + b"".join(sessions.pieces()) + b"}"
        yield arrow_schema({"session_metadata": told, "empty_reason": msgspec.json.encode(empty_reason)})
        yield from _copied(self._file)
        yield END_OF_STREAM
