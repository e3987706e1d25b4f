"""A session's ledger as its reader sees it: rows as plain values, with the present kinds of its strands. Pure."""

from collections.abc import Sequence
from typing import TypedDict

from stenograph.core.json_types import Count, Hex32
from stenograph.core.kinds import StrandKind
from stenograph.trajectory.commits import LedgerRow
from stenograph.trajectory.strand_facts import SessionFacts


class LedgerEntry(TypedDict):
    """A chat or completion that named the session. Times are in seconds of the epoch; `ended` is null while it runs.

    `kind` is that which a `rule` says, else its strand's; `client` is the user agent, `known_as` whose client the rule
    takes it for. `strand` and `turn` (a node id) are null if it made no turn; `overlaps` are the numbers of requests
    that ran with it, at most 16. `status` is null if its client left before an answer; `error` is the error's code.
    Of a stream that fails after it has begun, both are those of its error event.
    """

    number: Count
    received: float
    ended: float | None
    path: str
    dialect: str
    client: str
    known_as: str | None
    kind: StrandKind
    rule: str | None
    strand: Count | None
    turn: Count | None
    overlaps: Sequence[Count]
    prompt_tokens: Count
    cached_tokens: Count
    sampled_tokens: Count
    status: Count | None
    error: str | None
    rewrites: Sequence[str]


class LedgerPage(TypedDict):
    """Requests of a session, in order. `num_requests` counts all, of which the first 10,000 are kept; `next` is the
    `after` of the next page, or null at the end."""

    session_id: Hex32
    requests: Sequence[LedgerEntry]
    num_requests: Count
    next: Count | None


def ledger_rows(rows: Sequence[LedgerRow], session: SessionFacts) -> list[LedgerEntry]:
    """Rows of a session's ledger, as plain values."""
    by_node = session.by_node()
    return [_entry(row, session, None if row.turn not in by_node else by_node[row.turn].number) for row in rows]


def _entry(row: LedgerRow, session: SessionFacts, strand: int | None) -> LedgerEntry:
    number = row.strand if strand is None else strand
    of_strand = StrandKind.UNKNOWN if number is None else session.strands[number].kind
    return {
        "number": row.number,
        "received": row.received_s,
        "ended": row.ended_s,
        "path": row.path,
        "dialect": row.dialect,
        "client": row.client,
        "known_as": row.label.client,
        "kind": row.label.kind or of_strand,
        "rule": row.label.rule,
        "strand": number,
        "turn": row.turn,
        "overlaps": row.overlaps,
        "prompt_tokens": row.num_prompt_tokens,
        "cached_tokens": row.num_cached_tokens,
        "sampled_tokens": row.num_sampled_tokens,
        "status": row.status,
        "error": row.error,
        "rewrites": row.rewrites,
    }
