"""Budgets of a session, and the answer to its client once one of them is spent. Pure.

The one place for their names: a session is opened with these fields, keeps them, and is stored with them.
"""

import enum
from typing import Annotated

from msgspec import Meta, Struct


class OverLimit(enum.StrEnum):
    """The answer to a request that a session has no budget for: an error, or an empty reply that ends the turn."""

    ERROR = "error"
    STOP = "stop"


Most = Annotated[int, Meta(ge=1, lt=2**31)]


class Budgets(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a session in all. None is no limit.

    `max_turns` counts the turns of the work: of strands of kind main or unknown; on a linear session and a tree all
    turns. `max_requests` counts every generation, `max_total_tokens` the tokens of all turns, each once. `over_limit`
    None is `error`.
    """

    max_turns: Most | None = None
    max_requests: Most | None = None
    max_total_tokens: Most | None = None
    over_limit: OverLimit | None = None


NO_BUDGETS = Budgets()
