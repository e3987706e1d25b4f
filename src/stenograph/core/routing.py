"""Routing hints of a request, for its engine: its priority, and the engine's workers for it. Pure."""

import enum

from msgspec import Struct


class RoutingHint(enum.StrEnum):
    """A kind of hint for some engines only. Any engine may be given a priority."""

    DP_RANK = "dp_rank"
    DISAGGREGATION = "disaggregation"


class Routing(Struct, frozen=True, kw_only=True, gc=False):
    """The hints of one request; None leaves it to the engine.

    `priority`: an engine with priority scheduling serves the more urgent first. `dp_rank` numbers the engine's
    data-parallel worker for the request. The others are for engines that prefill and decode apart: `prefill_dp_rank`
    numbers the worker for the prefill, and `bootstrap_host`, `bootstrap_port` and `bootstrap_room` say where both sides
    of this request meet.
    """

    priority: int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
