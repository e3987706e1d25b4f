"""The drift of lines, compared on the CPU pool once for all readers: a committed line never changes, nor does its
drift.

Its routes, the samples and the console ask for the same lines; a report is kept while there is room.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypedDict

from stenograph.core.drift import DriftFacts, DriftReport, drift_json, num_by_class
from stenograph.core.json_pieces import as_list
from stenograph.core.json_types import Count, Hex32
from stenograph.offload.kept_values import KeptValues
from stenograph.offload.pool import CpuPool
from stenograph.session.facts import line_drift
from stenograph.text.renderer import Renderer
from stenograph.trajectory.turn import Node

KEPT_DRIFTS = 20_000
"""Most drifts of all kept reports, of about a kilobyte each; a report counts as one more."""
LINES_AT_ONCE = 16
"""Lines looked at in one event-loop iteration: a short one takes 0.2 ms."""
_BYTES_PER_TOKEN = 8
"""The approximate cost of a token's comparison; only decides whether a line is small enough for the loop."""


class DriftedLine(TypedDict):
    """The drift of one line. `unrenderable` says why nothing was compared; `mismatches` is null then."""

    leaf: Count
    path_node_ids: Sequence[Count]
    num_tokens: Count
    counts: Mapping[str, Count]
    unrenderable: str | None
    mismatches: Sequence[DriftFacts] | None


class DriftReports(TypedDict):
    """The drift of each line."""

    session_id: Hex32
    lines: Sequence[DriftedLine]


def _weight(report: DriftReport) -> int:
    return 1 + len(report.drifts)


class LineDrifts:
    """The drift of the lines of one server."""

    def __init__(self, pool: CpuPool, renderer: Renderer) -> None:
        self._pool = pool
        self._renderer = renderer
        self._kept: KeptValues[tuple[str, int], DriftReport] = KeptValues(most=KEPT_DRIFTS, weigh=_weight)
        self.num_compared = 0
        """Compared lines."""

    def __repr__(self) -> str:
        return f"<LineDrifts {self._kept!r}>"

    def known(self, session_id: str, leaf: Node) -> DriftReport | None:
        """The report of the line down to `leaf`, if it is kept."""
        return self._kept.find((session_id, leaf.id))

    async def of(self, session_id: str, leaf: Node) -> DriftReport:
        """The report of the line down to `leaf`. A session counts its commits and never forgets a count, so the two ids
        name a line for ever."""

        async def compared() -> DriftReport:
            self.num_compared += 1
            work = partial(line_drift, leaf, self._renderer)
            return await self._pool.run(work, num_bytes=_BYTES_PER_TOKEN * leaf.num_tokens)

        return await self._kept.get((session_id, leaf.id), compared)

    async def of_all(self, session_id: str, leaves: Sequence[Node]) -> list[tuple[Node, DriftReport]]:
        """The report of each line, one after the other: between two of them the worker is free for others, and between
        so many short ones, compared on the loop, the loop is."""
        found: list[tuple[Node, DriftReport]] = []
        for leaf in leaves:
            found.append((leaf, await self.of(session_id, leaf)))
            if len(found) % LINES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return found


def drift_reports(session_id: str, reports: Sequence[tuple[Node, DriftReport]]) -> DriftReports:
    """The drift of each line, as it is told. To be written once."""
    return {"session_id": session_id, "lines": as_list(_drifted_line(leaf, report) for leaf, report in reports)}


def _drifted_line(leaf: Node, report: DriftReport) -> DriftedLine:
    return {
        "leaf": leaf.id,
        "path_node_ids": [node.id for node in leaf.line()],
        "num_tokens": leaf.num_tokens,
        "counts": {str(kind): num for kind, num in num_by_class(report).items()},
        "unrenderable": report.unrenderable,
        "mismatches": drift_json(report),
    }
