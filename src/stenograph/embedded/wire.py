"""The messages between server and engine process: msgpack frames over two pipes.

A frame is its length in 4 bytes, little-endian, and that many bytes of msgpack. Owns the messages and their framing;
both ends are of one version, started together, so there is no negotiation.
"""

import enum
from array import array
from dataclasses import dataclass
from typing import IO

import msgspec

from stenograph.core.blame import Blame
from stenograph.core.telemetry import GrammarStep
from stenograph.core.types import ID_TYPECODE, Chunk, GrammarKind, RequestId, SamplingParams

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 30


@dataclass(slots=True, kw_only=True)
class Times:
    """A request's stamps on its way to its last chunk, in seconds of the machine's monotonic clock; 0.0 at each point
    still ahead. A preempted request keeps the time of its first admission. One thread at a time stamps it."""

    submitted: float
    admitted: float = 0.0
    first_token: float = 0.0


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Begins a generation. `ids` are int32 in the machine's order. `routes_from`: the first position with its experts
    in the last chunk; None: it has none. `score_from`: nothing is sampled, and the one chunk has the log-probabilities
    of the ids from there on."""

    request_id: RequestId
    ids: bytes
    params: SamplingParams
    routes_from: int | None = None
    score_from: int | None = None

    def prompt(self) -> "array[int]":
        """The ids as an array."""
        return array(ID_TYPECODE, self.ids)


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends a generation soon; its last chunk confirms it."""

    request_id: RequestId


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a text. Only in trusted text is the spelling of an added token that token."""

    text: str
    trusted: bool


class TokenizeText(msgspec.Struct, frozen=True, tag="tokenize"):
    """Asks for the ids of a text in ordered pieces; `Abort` under the same id drops it unanswered."""

    request_id: RequestId
    pieces: tuple[Piece, ...]


class ControlKind(enum.StrEnum):
    """Kinds of control commands."""

    LOAD = "load"
    """Load the weights at `path`, swap them in between two steps, and call them `version`."""
    PAUSE = "pause"
    RETRACT = "retract"
    """Pause, and take the blocks of all running requests."""
    RESUME = "resume"
    FLUSH = "flush"
    NAME = "name"
    """Call the weights `version`."""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """Asks for something about the weights or the steps; `Controlled` under the same id answers it."""

    request_id: RequestId
    kind: ControlKind
    path: str = ""
    version: str = ""


Command = Generate | Abort | TokenizeText | Control


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded."""

    model: str
    vocab_size: int
    max_context_tokens: int
    grammars: tuple[GrammarKind, ...]


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The model cannot be loaded; the process ends."""

    message: str


class Sampled(msgspec.Struct, frozen=True, tag="drew"):
    """The next chunk of a generation."""

    request_id: RequestId
    chunk: Chunk


class TokenizedText(msgspec.Struct, frozen=True, tag="tokenized"):
    """A text's ids, int32 in the machine's order."""

    request_id: RequestId
    ids: bytes

    def prompt(self) -> "array[int]":
        """The ids as an array."""
        return array(ID_TYPECODE, self.ids)


class GrammarTook(msgspec.Struct, frozen=True, tag="grammar_took"):
    """Time of grammars since the last event of this kind, in seconds, by step."""

    durations_s: dict[GrammarStep, tuple[float, ...]]


class FailureKind(enum.StrEnum):
    """The party at fault for a failed generation."""

    INVALID_REQUEST = "invalid_request"
    UNAVAILABLE = "unavailable"
    TOKENIZATION = "tokenization"
    """A fault of ours: the tokenizer failed on the text."""
    INTERNAL = "internal"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A generation ended without a finish. `blame` is the part of the request at fault.

    `retry_after_s`: when there may be capacity again, if there was none.
    """

    request_id: RequestId
    kind: FailureKind
    message: str
    blame: Blame | None = None
    retry_after_s: float | None = None


class Controlled(msgspec.Struct, frozen=True, tag="controlled"):
    """The answer to a control command. `problem`: why nothing was done; empty where it was. `num_paused` requests ran
    at that moment; `version` names the weights after it."""

    request_id: RequestId
    problem: str = ""
    num_paused: int = 0
    version: str = ""


Event = Ready | LoadFailed | Sampled | Failed | TokenizedText | GrammarTook | Controlled

_ENCODER = msgspec.msgpack.Encoder()
COMMANDS = msgspec.msgpack.Decoder(Command)
EVENTS: "msgspec.msgpack.Decoder[Event]" = msgspec.msgpack.Decoder(Event)


def frame(message: Command | Event) -> bytes:
    """One message, framed."""
    payload = _ENCODER.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame's payload, waiting for it; None at the end of the stream, also within a frame.

    Raises ValueError for one of more than MAX_FRAME_BYTES: such a length is not the start of a frame.
    """
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    size = int.from_bytes(head, "little")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    payload = stream.read(size)
    return payload if len(payload) == size else None
