"""The media of a line, as its sample names them. Pure; loaded by lines with media alone."""

from stenograph.core.media import ranges
from stenograph.core.message_json import MediaRow
from stenograph.export.lines import SampleLine
from stenograph.trajectory.turn import CommittedTurn


def media_rows(line: SampleLine) -> list[MediaRow]:
    """A row for each medium in a line."""
    media = [one for part in line.parts for one in part.node.turn.media]
    return [
        {"sha256": one.ref.sha256, "kind": one.ref.kind, "start": placed.start, "length": placed.length}
        for one, placed in zip(media, ranges(media), strict=True)
    ]


def is_reported(turn: CommittedTurn) -> bool:
    """Whether the effective ids of its prompt are known. Nothing follows a turn that ended before its engine reported
    them, and it has no sampled token."""
    return bool(turn.media) or not any(message.media for message in turn.messages)
