"""Ids of replies, items and encrypted reasoning: each carries the id of its turn's request. Pure.

A response is `resp_`, an item `rs_`, `msg_`, `fc_`, `ctc_` or `tsc_` and the id of its request, a call its number
besides. An id of another server has no such form, and means nothing.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

RESPONSE = "resp_"
_TURN = re.compile(r"(?:resp_|chatcmpl-)?([0-9a-f]{32})")
_ITEM = re.compile(r"(rs|msg|fc|ctc|tsc)_([0-9a-f]{32})(?:_([0-9]{1,6}))?")
_SEAL = b"stg1."
_MAX_SEAL_CHARS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemId:
    """One of our item's ids: its `prefix`, its turn's request, and its number among the items of its kind."""

    prefix: str
    turn: str
    number: int = 0

    def __str__(self) -> str:
        """As it is written."""
        number = f"_{self.number}" if self.number or self.prefix in ("fc", "ctc", "tsc") else ""
        return f"{self.prefix}_{self.turn}{number}"


def turn_of_response(response_id: str) -> str | None:
    """The request's id in a response's id; None if it is not one of ours."""
    found = _TURN.fullmatch(response_id)
    return None if found is None else found[1]


def item_id(text: str | None) -> ItemId | None:
    """One of our item's ids; None for any other text."""
    found = None if text is None else _ITEM.fullmatch(text)
    return None if found is None else ItemId(prefix=found[1], turn=found[2], number=int(found[3] or 0))


def sealed(turn: str) -> str:
    """The `encrypted_content` of a turn's reasoning: a name for it, no secret."""
    return urlsafe_b64encode(_SEAL + turn.encode()).decode().rstrip("=")


def turn_of_sealed(text: str | None) -> str | None:
    """The turn named by an `encrypted_content`; None if it is not one of ours."""
    if not text or len(text) > _MAX_SEAL_CHARS:
        return None
    try:
        opened = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    if not opened.startswith(_SEAL):
        return None
    return turn_of_response(opened[len(_SEAL) :].decode("ascii", "replace"))
