"""What server and engine process say to each other: msgpack frames over two pipes.

A frame is its length in 4 bytes, little-endian, and that many bytes of msgpack. Owns the messages and their framing;
both ends are of one version, started together, so there is no negotiation.
"""

import enum
from array import array
from typing import IO

import msgspec

from stenograph.core.types import ID_TYPECODE, Chunk, GrammarKind, RequestId, SamplingParams

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 30


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Begin a generation. `ids` are int32 in the machine's order."""

    request_id: RequestId
    ids: bytes
    params: SamplingParams

    def prompt(self) -> "array[int]":
        """The ids as an array."""
        return array(ID_TYPECODE, self.ids)


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a generation soon; it answers with its finish."""

    request_id: RequestId


Command = Generate | Abort


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded."""

    model: str
    vocab_size: int
    max_context_tokens: int
    grammars: tuple[GrammarKind, ...]


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The model cannot be loaded; the process ends."""

    message: str


class Drew(msgspec.Struct, frozen=True, tag="drew"):
    """A step of a generation."""

    request_id: RequestId
    chunk: Chunk


class FailureKind(enum.StrEnum):
    """Whose fault a failed generation is."""

    INVALID_REQUEST = "invalid_request"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A generation ended without a finish. `param` is the JSON pointer of what is to blame in the request.

    `retry_after_s` is when there may be room for it, where there was none.
    """

    request_id: RequestId
    kind: FailureKind
    message: str
    param: str | None = None
    retry_after_s: float | None = None


Event = Ready | LoadFailed | Drew | Failed

_ENCODER = msgspec.msgpack.Encoder()
COMMANDS = msgspec.msgpack.Decoder(Command)
EVENTS: "msgspec.msgpack.Decoder[Event]" = msgspec.msgpack.Decoder(Event)


def frame(message: Command | Event) -> bytes:
    """One message, framed."""
    payload = _ENCODER.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame's payload, waiting for it; None at the end of the stream, also within a frame.

    Raises ValueError for one of more than MAX_FRAME_BYTES: who writes such a length writes no frames.
    """
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes, of which {MAX_FRAME_BYTES} are taken")
    payload = stream.read(size)
    return payload if len(payload) == size else None
