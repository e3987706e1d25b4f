"""Reads a server's answer to a command about the weights. Pure."""

from dataclasses import dataclass

import msgspec

from stenograph.engine.http.adapter import Call
from stenograph.engine.http.transport import HttpReply

_SHOWN_BYTES = 300


class _ToldControl(msgspec.Struct):
    success: bool | None = None
    message: str | None = None
    error: str | None = None
    num_paused_requests: int | None = None


_TOLD = msgspec.json.Decoder(_ToldControl)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlReply:
    """A server's answer. `problem`: why it has not done it, in its own words; empty where it has."""

    problem: str
    num_paused: int = 0


def read_control(call: Call, http: HttpReply) -> ControlReply:
    """A 200 is a yes, unless it says `success` false; any other status is a no."""
    try:
        told = _TOLD.decode(http.body)
    except msgspec.DecodeError:
        told = _ToldControl()
    if http.status == 200 and told.success is not False:
        return ControlReply(problem="", num_paused=max(told.num_paused_requests or 0, 0))
    words = told.message or told.error or http.body[:_SHOWN_BYTES].decode(errors="replace")
    return ControlReply(problem=f"{call.path} answered {http.status}: {' '.join(words.split())}")
