"""The media of a line, as its sample names them. Pure; loaded by lines with media alone."""

from stenograph.core.media import ranges
from stenograph.core.message_json import MediaRow
from stenograph.export.lines import SampleLine


def media_rows(line: SampleLine) -> list[MediaRow]:
    """A row for each medium in a line."""
    media = [one for part in line.parts for one in part.node.turn.media]
    return [
        {"sha256": one.ref.sha256, "kind": one.ref.kind, "start": placed.start, "length": placed.length}
        for one, placed in zip(media, ranges(media), strict=True)
    ]
