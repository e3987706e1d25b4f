"""The events of a download from the hub: JSON lines on its standard output."""

import msgspec


class FetchProgress(msgspec.Struct, frozen=True, tag="told"):
    """The bytes downloaded so far."""

    done_bytes: int
    total_bytes: int


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """The download succeeded: all files are in `folder`, each with the hash on the hub."""

    folder: str


class FetchFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The download failed; `why` also says what to do."""

    why: str


Event = FetchProgress | Fetched | FetchFailed

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One line."""
    return msgspec.json.encode(event) + b"\n"


def decode_event(line: bytes) -> Event:
    """Raises msgspec.DecodeError for anything else."""
    return _DECODER.decode(line)
