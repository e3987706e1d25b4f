"""A session as a rollout of its group, to be compared with the others: made where the session is. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from stenograph.core.json_types import Count, Hex32
from stenograph.export.records import WireOutcome, outcome_json
from stenograph.trajectory.strand_facts import SessionFacts
from stenograph.trajectory.turn import Node, TurnStatus, line_ids

COMPARED_TOKENS = 65_536
"""Number of compared tokens of a rollout's line, its first ones."""
MAX_SPANS = 512


class TurnSpan(TypedDict):
    """One turn in a rollout's line: its prompt's ids begin at `prompt_start`, `[start, end)` were sampled."""

    prompt_start: Count
    start: Count
    end: Count


class GroupRollout(TypedDict):
    """A rollout by its own line. `like` is the rollout with which its line begins in common for longest, `parts_at` the
    first token that differs, the length of the shorter one where none does; both null of the first.

    `spans` are its first 512 turns. `status` is its last turn's, null if it has none.
    """

    session_id: Hex32
    created_at: float
    outcome: WireOutcome | None
    busy: bool | None
    num_turns: Count
    num_tokens: Count
    sampled_tokens: Count
    leaf: Count | None
    status: TurnStatus | None
    spans: Sequence[TurnSpan]
    like: Hex32 | None
    parts_at: Count | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    """A session of a group as it is now: its row, not yet compared, and the first ids of its line, int32."""

    row: GroupRollout
    ids: NDArray[np.int32]

    @staticmethod
    def of(facts: SessionFacts, *, created_at: float, busy: bool) -> "RolloutFacts":
        """The rollout of a session."""
        ids = line_ids(facts.latest)[:COMPARED_TOKENS]
        return RolloutFacts(row=_row(facts, created_at, busy=busy), ids=np.frombuffer(ids.tobytes(), np.int32))


def _row(facts: SessionFacts, created_at: float, *, busy: bool) -> GroupRollout:
    leaf = facts.latest
    line = [] if leaf is None else leaf.line()
    return {
        "session_id": facts.session_id,
        "created_at": created_at,
        "outcome": outcome_json(facts.outcome),
        "busy": busy,
        "num_turns": len(line),
        "num_tokens": 0 if leaf is None else leaf.num_tokens,
        "sampled_tokens": sum(len(node.turn.sampled.ids) for node in line),
        "leaf": None if leaf is None else leaf.id,
        "status": None if leaf is None else leaf.turn.status,
        "spans": [_span(node) for node in line[:MAX_SPANS]],
        "like": None,
        "parts_at": None,
    }


def _span(node: Node) -> TurnSpan:
    start = node.num_tokens - len(node.turn.sampled.ids)
    return {"prompt_start": start - len(node.turn.new_prompt_ids), "start": start, "end": node.num_tokens}
