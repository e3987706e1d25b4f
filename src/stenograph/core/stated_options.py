"""Options of a session that stay as its creator states them, its budgets among them. Pure.

The one place for their names: the body of `POST /sessions` has these fields, the session keeps them, and the store
writes them by name. A further option of this sort is a row here, one in client/session.py, and its place in a view.
"""

import enum
import hashlib
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

GroupName = Annotated[str, Meta(min_length=1, max_length=256)]


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

    @property
    def has_budget(self) -> bool:
        """Whether one of them can be spent."""
        return (self.max_turns, self.max_requests, self.max_total_tokens) != (None, None, None)


NO_BUDGETS = Budgets()


class StatedOptions(Budgets, frozen=True, kw_only=True, omit_defaults=True):
    """All of them. None is absent. `group` names the rollouts to compare with each other, `policy` the LoRA's name."""

    group: GroupName | None = None
    policy: Annotated[str, Meta(min_length=1, max_length=512)] | None = None

    def beside_budgets(self) -> dict[str, object]:
        """Those given that are no budgets, by name, as a session's metadata shows them."""
        stated: dict[str, object] = to_builtins(self)
        return {name: value for name, value in stated.items() if name not in Budgets.__struct_fields__}


NOTHING_STATED = StatedOptions()

TAG = slice(2, 12)
"""Of a tenant's session, the place in its id for the tenant's tag."""


def tag_of(tenant: str) -> str:
    """A tenant's tag: 40 bits, in hex."""
    return hashlib.sha256(tenant.encode()).hexdigest()[: TAG.stop - TAG.start]
