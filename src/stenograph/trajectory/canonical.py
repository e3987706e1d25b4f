"""The form of a request for matching and rendering, and the rules for it: drop and pin. Pure.

Owns the order of rewrites, and where a rule looks. `drop` cuts a block of the system text addressed to a vendor's
server. `pin` (pins.py) makes openings one if they differ only where a rule says so. Knows no file of rules and no
session.
"""

import enum
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, SystemBlocks
from stenograph.core.messages import Role
from stenograph.core.rewrites import AppliedRewrite, kept_text
from stenograph.trajectory.late_system import with_reminders


@dataclass(frozen=True, slots=True, kw_only=True)
class DropRule:
    """Cuts each of the first `num_blocks` blocks of the system text if `block` matches at its beginning."""

    name: str
    block: re.Pattern[str]
    num_blocks: int


class PinPlace(enum.StrEnum):
    """The parts of an opening where a pin may look."""

    SYSTEM = "system"
    """The system's and developer's messages before the first other message."""
    FIRST_USER = "first_user"
    TOOL_TEXT = "tool_text"
    """The descriptions of tools, never their names or schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRule:
    """Openings are one if they differ only in matches of `pattern` in a text at `place` that `begins` so.

    Of tools' descriptions the whole text may differ: there is no pattern then.
    """

    name: str
    place: PinPlace
    begins: re.Pattern[str] | None = None
    pattern: re.Pattern[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """The rules for a session's requests."""

    drops: tuple[DropRule, ...] = ()
    pins: tuple[PinRule, ...] = ()


def rewritten(request: ChatRequest, drops: Sequence[DropRule], hidden: Set[Role]) -> ChatRequest:
    """The request without the blocks dropped by a rule, and with late messages of `hidden` roles as reminders.

    Changes nothing of one without blocks where no role is hidden.
    """
    if request.known is not None and request.known.gaps:
        request = replace(request, gaps=request.known.gaps)
    if request.system_blocks is not None and drops:
        request = _without_dropped(request, request.system_blocks, drops)
    return with_reminders(request, hidden) if hidden else request


def _without_dropped(request: ChatRequest, blocks: SystemBlocks, drops: Sequence[DropRule]) -> ChatRequest:
    """The request without blocks of its system text. Its known beginning lacks them already."""
    kept: list[str] = []
    rewrites: list[AppliedRewrite] = []
    for index, text in enumerate(blocks.texts):
        rule = next((one for one in drops if index < one.num_blocks and one.block.match(text)), None)
        if rule is None:
            kept.append(text)
            continue
        where = request.spelling.pointer(Blame(RequestPart.MESSAGES, 0, ("content", index))) or ""
        rewrites.append(AppliedRewrite(rule=rule.name, where=where, before=kept_text(text), after=""))
    if not rewrites:
        return request
    first, *others = request.messages
    request = replace(request, rewrites=(*request.rewrites, *rewrites))
    if first.content != blocks.joined:
        return request
    if kept or not others:
        first = replace(first, content=blocks.separator.join(kept))
        return replace(request, messages=(first, *others))
    return replace(request, messages=tuple(others), gaps=(0, *request.gaps))
