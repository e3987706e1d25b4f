"""Drift as values: the differences of a line's ids from the chat template's text. Pure.

Owns their classes and how a report is written. text/drift.py finds them; docs/drift.md says how to read a report.
"""

import enum
from dataclasses import dataclass
from typing import TypedDict

from stenograph.core.json_types import Count


class DriftClass(enum.StrEnum):
    """The kind of a difference. The values are those of miles' `tito_session_mismatch`."""

    SPECIAL_TOKEN_COUNT = "special_token_count"
    """There are more or fewer control tokens."""
    SPECIAL_TOKEN_TYPE = "special_token_type"
    """A control token in the place of another."""
    NON_ASSISTANT_TEXT = "non_assistant_text"
    """Other tokens between two control tokens, and not because of ids sampled there."""
    ASSISTANT_TEXT = "assistant_text"
    """The model wrote its reply with other tokens than the template writes it with. Tolerated."""


FORBIDDEN = frozenset(DriftClass) - {DriftClass.ASSISTANT_TEXT}
"""Classes caused only by a bug, or by a template that is not append-only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One difference. Ids `[start, end)` of the line are concerned; of none if the line lacks what the template writes.

    `segment_index` counts texts and control tokens in turn, as the template writes them: 2k is the text before control
    token k (it may be empty), 2k + 1 the token. The texts are cut, around the difference.
    """

    type: DriftClass
    segment_index: int
    expected_text: str
    actual_text: str
    detail: str
    start: int
    end: int


class DriftFacts(TypedDict):
    """One difference between a line and what the template makes of its messages."""

    type: DriftClass
    segment_index: Count
    expected_text: str
    actual_text: str
    detail: str
    start: Count
    end: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """The drift of one line, in its order. `unrenderable` is why nothing could be compared, if so."""

    drifts: tuple[Drift, ...] = ()
    unrenderable: str | None = None

    @property
    def is_forbidden(self) -> bool:
        """Whether there is drift that no model can be blamed for."""
        return any(drift.type in FORBIDDEN for drift in self.drifts)


def drift_json(report: DriftReport) -> list[DriftFacts] | None:
    """The report as plain values: `[]` is clean, None is not compared."""
    if report.unrenderable is not None:
        return None
    return [
        {
            "type": drift.type,
            "segment_index": drift.segment_index,
            "expected_text": drift.expected_text,
            "actual_text": drift.actual_text,
            "detail": drift.detail,
            "start": drift.start,
            "end": drift.end,
        }
        for drift in report.drifts
    ]


def num_by_class(report: DriftReport) -> dict[DriftClass, int]:
    """The number of drifts of each class, zeros included."""
    return {kind: sum(drift.type is kind for drift in report.drifts) for kind in DriftClass}
