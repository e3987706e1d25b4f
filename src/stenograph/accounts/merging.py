"""One account from the accounts of all workers. Pure."""

from collections.abc import Sequence

import msgspec

MAX_ROWS = 10_000
"""Rows of an answer, those with most tokens; the sums are of all."""


class _Row(msgspec.Struct):
    key: str | int | None
    sampled: int
    tokens: dict[str, int]
    cost: float | None

    def add(self, other: "_Row") -> None:
        self.sampled += other.sampled
        self.tokens = {fate: num + other.tokens[fate] for fate, num in self.tokens.items()}
        self.cost = None if self.cost is None or other.cost is None else self.cost + other.cost


class _Accounts(msgspec.Struct):
    by: str
    live_sessions: int
    ended_sessions: int
    whole: _Row
    rows: list[_Row]
    left_out: int


def accounts(bodies: Sequence[bytes]) -> bytes:
    """The accounts of all workers, in all and by key, those with most tokens first."""
    first, *others = (msgspec.json.decode(body, type=_Accounts) for body in bodies)
    rows = {row.key: row for row in first.rows}
    for other in others:
        first.live_sessions += other.live_sessions
        first.ended_sessions += other.ended_sessions
        first.left_out += other.left_out
        first.whole.add(other.whole)
        for row in other.rows:
            if (seen := rows.setdefault(row.key, row)) is not row:
                seen.add(row)
    first.rows = sorted(rows.values(), key=lambda row: -row.sampled)[:MAX_ROWS]
    first.left_out += len(rows) - len(first.rows)
    return msgspec.json.encode(first)


class _Why(msgspec.Struct):
    group: str
    rows: list[msgspec.Raw]


def why(bodies: Sequence[bytes]) -> bytes:
    """The rows of all workers."""
    first, *others = (msgspec.json.decode(body, type=_Why) for body in bodies)
    return msgspec.json.encode(_Why(first.group, [*first.rows, *(row for other in others for row in other.rows)]))
