"""The sender of a request, as its route saw it. It labels and is logged; it decides about nothing but the agent id."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stenograph.session.ledger import NO_NOTE, LedgerNote


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A request's sender: the name that it calls itself, the path, and the headers that rules look at.

    `note` is the request's row in its session's ledger.
    """

    name: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    note: LedgerNote = NO_NOTE
