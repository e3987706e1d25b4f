"""The body of `POST /engines`. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta

from stenograph.dialects.common.json_bodies import decode_json


class AddEngine(msgspec.Struct, forbid_unknown_fields=True):
    """The address of an engine of the kind that the server was started with."""

    url: Annotated[str, Meta(min_length=1, max_length=2048)]


_ADD = msgspec.json.Decoder(AddEngine)


def decode_engine(body: bytes) -> AddEngine:
    """Read the body. Raises InvalidJson or InvalidRequest."""
    return decode_json(body, _ADD, known=AddEngine.__struct_fields__)
