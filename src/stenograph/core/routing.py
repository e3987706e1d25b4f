"""Routing hints of a request, for its engine: how urgent it is, and which of the engine's workers serve it. Pure."""

import enum

from msgspec import Struct


class RoutingHint(enum.StrEnum):
    """A kind of hint that not every engine takes. Any engine may be given a priority."""

    DP_RANK = "dp_rank"
    DISAGGREGATION = "disaggregation"


class Routing(Struct, frozen=True, kw_only=True, gc=False):
    """The hints of one request; None leaves it to the engine.

    `priority`: an engine with priority scheduling serves the more urgent first. `dp_rank` numbers the engine's
    data-parallel worker that runs the request. The others are for engines that prefill and decode apart:
    `prefill_dp_rank` numbers the worker that prefills, and `bootstrap_host`, `bootstrap_port` and `bootstrap_room`
    say where both sides of this request meet.
    """

    priority: int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
