"""Answers of routes served by Starlette: values as JSON, whole or in pieces."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response, StreamingResponse

from stenograph.core.json_pieces import joined, json_pieces
from stenograph.core.loaded import entry
from stenograph.offload.pool import CpuPool, LoopShare

if TYPE_CHECKING:
    from stenograph.export.samples import SampleSet

WHOLE_PIECES = 2
"""An answer of no more pieces than this is sent whole, with its length."""


def json_response(value: object, *, status: int = 200) -> Response:
    """A value as a Starlette response."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def in_pieces(share: LoopShare, pieces: Iterator[bytes], *, media_type: str) -> Response:
    """An answer made a piece at a time while it is sent; between two pieces the loop serves others."""
    first = list(islice(pieces, WHOLE_PIECES + 1))
    if len(first) <= WHOLE_PIECES:
        return Response(b"".join(first), media_type=media_type)
    return StreamingResponse(share.pieces(chain(first, pieces)), media_type=media_type)


def json_in_pieces(share: LoopShare, value: object) -> Response:
    """A value as `json_pieces` writes it; like `json_response`, for large values."""
    return in_pieces(share, joined(json_pieces(value)), media_type="application/json")


async def tree_payload(
    pool: CpuPool, made: "SampleSet", session_metadata: Mapping[str, object], num_bytes: int
) -> Iterator[bytes]:
    """A session's samples as a tree, in pieces for the loop; they are about `num_bytes`."""
    tree = await pool.run(partial(entry("stenograph.export.tree:sample_tree"), made), num_bytes=num_bytes)
    pieces: Iterator[bytes] = tree.pieces(session_metadata)
    return pieces
