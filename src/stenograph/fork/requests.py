"""A request for forks, as it comes. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta

from stenograph.core.stated_options import GroupName
from stenograph.dialects.common.json_bodies import decode_json

MAX_FORKS = 64
"""Most forks by one request."""


class ForkBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The place to fork at, and the number of forks. `null` means absent.

    A fork begins with the line down to `turn`, by the id of its node. With `token` the reply of that turn is cut after
    so many of its sampled tokens: the request for this turn, sent again, continues it. With `replay` requests for the
    turns before get their recorded replies, so an agent can begin anew. `group` is the forks' own; the other options
    are the session's.
    """

    turn: Annotated[int, Meta(ge=0, lt=2**31)]
    token: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_FORKS)] | None = None
    group: GroupName | None = None
    replay: bool | None = None


_FORK = msgspec.json.Decoder(ForkBody)


def decode_fork(body: bytes) -> ForkBody:
    """Read the body of `POST /sessions/{id}/fork`. Raises InvalidJson or InvalidRequest."""
    return decode_json(body, _FORK, known=ForkBody.__struct_fields__)
