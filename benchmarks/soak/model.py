"""A client's model of its session, and the differences between it and the session at the server. Pure.

Knows what was committed, and in what place; which turns nobody can know of (their client hung up); and, from the engine
itself, which ids it was sent for each request. Every id that a session shows is compared with these.
"""

import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from standins.ordered_engine import Generation

COMPLETED, TRUNCATED, ABORTED = "completed", "truncated", "aborted"


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """A turn that the session holds, or may hold. `user` and `assistant` are its messages as JSON.

    `rid` is empty where no reply came. `ids` are what was drawn, where that is known.
    """

    turn: str
    parent: "Kept | None"
    user: bytes
    assistant: bytes = b""
    status: str = COMPLETED
    rid: str = ""
    ids: tuple[int, ...] = ()

    def line(self) -> "list[Kept]":
        """From the first turn to this one."""
        turns: list[Kept] = []
        at: Kept | None = self
        while at is not None:
            turns.append(at)
            at = at.parent
        return turns[::-1]


@dataclass(slots=True, kw_only=True)
class SessionModel:
    """A session. `kept` are its turns, in order of commit, those of a linear one its line; `maybe` may be there."""

    is_tree: bool
    kept: list[Kept] = field(default_factory=list[Kept])
    maybe: list[Kept] = field(default_factory=list[Kept])

    @property
    def tip(self) -> Kept | None:
        """The turn that the next one follows: the last, or where that cannot be continued, the one before it."""
        last = self.kept[-1] if self.kept else None
        while last is not None and last.status != COMPLETED:
            last = last.parent
        return last

    def commit(self, turn: Kept) -> None:
        """A turn is kept. On a line it replaces what came after its parent, and what may have come."""
        if not self.is_tree:
            del self.kept[0 if turn.parent is None else self.kept.index(turn.parent) + 1 :]
            self.maybe.clear()
        self.kept.append(turn)

    def doubt(self, turn: Kept) -> None:
        """A turn may be kept."""
        self.maybe.append(turn)


class Shown(msgspec.Struct, kw_only=True):
    """A turn as the session shows it: what was drawn is `[start, end)` of the ids down to it.

    `line` are these ids; None where the session does not show them (a later sibling supersedes the turn).
    """

    rid: str
    parent: str | None
    status: str
    start: int
    end: int
    line: "array[int] | None"


Said = Mapping[tuple[str, int], tuple[int, ...]]
"""The ids that the engine was ordered to draw, by turn and play."""


def differences(model: SessionModel, shown: Sequence[Shown], seen: Sequence[Generation], said: Said) -> Iterator[str]:
    """Everything in which a session is not what it must be, in words."""
    by_rid = {request.rid: request for request in seen}
    if len(by_rid) != len(seen):
        yield "the engine was sent a request id twice"
    for turn in shown:
        request = by_rid.get(turn.rid)
        if request is None:
            yield f"record {turn.rid} is of no request that the engine saw"
        else:
            yield from _wrong_ids(turn, request, said)
    yield from _wrong_shape(model, shown, by_rid)


def _wrong_ids(turn: Shown, request: Generation, said: Said) -> Iterator[str]:
    """Prompt and reply of a turn against what the engine was sent, and drew."""
    whole = said[request.turn, request.play]
    half = whole[: len(whole) // 2]
    num_drawn = turn.end - turn.start
    expected = half if turn.status == ABORTED and num_drawn == len(half) else whole
    if turn.start != request.num_prompt or num_drawn != len(expected):
        yield (
            f"turn {request.turn}: {turn.start} ids are kept as its prompt and {num_drawn} as drawn,"
            f" {request.num_prompt} were sent and {len(expected)} drawn"
        )
    elif turn.line is not None:
        if zlib.crc32(turn.line[: turn.start].tobytes()) != request.prompt_crc:
            yield f"turn {request.turn}: its {turn.start} prompt ids are not those that were sent"
        if tuple(turn.line[turn.start :]) != expected:
            yield f"turn {request.turn}: its {num_drawn} ids are not those that were drawn"


def _wrong_shape(model: SessionModel, shown: Sequence[Shown], by_rid: Mapping[str, Generation]) -> Iterator[str]:
    """Turns too many or too few, and turns after another than theirs."""
    found = {turn.rid: turn for turn in shown}
    extra = [rid for rid in found if rid not in {turn.rid for turn in model.kept}]
    missing = [turn for turn in model.kept if turn.rid not in found]
    doubted = {turn.turn: turn for turn in model.maybe}
    for rid in extra:
        name = by_rid[rid].turn if rid in by_rid else rid
        if name not in doubted:
            yield f"turn {name} is kept, and must not be"
        elif found[rid].parent != _rid(doubted[name].parent):
            yield f"turn {name} follows {found[rid].parent}, not {_rid(doubted[name].parent)}"
    if missing and (model.is_tree or len(extra) != 1 or missing != model.kept[-1:] or missing[0] is model.tip):
        yield from (f"turn {turn.turn} is lost" for turn in missing)
    if len(extra) > (len(model.maybe) if model.is_tree else 1):
        yield f"{len(extra)} turns are kept of which at most {len(model.maybe)} may be"
    for kept in model.kept:
        there = found.get(kept.rid)
        if there is None:
            continue
        if there.parent != _rid(kept.parent):
            yield f"turn {kept.turn} follows {there.parent}, not {_rid(kept.parent)}"
        if there.status != kept.status:
            yield f"turn {kept.turn} is {there.status}, not {kept.status}"
        if there.line is not None and tuple(there.line[there.start :]) != kept.ids:
            yield f"turn {kept.turn} is not what its client was answered"


def _rid(turn: Kept | None) -> str | None:
    return None if turn is None else turn.rid
