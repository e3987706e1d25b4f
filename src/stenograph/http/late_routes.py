"""The core's routes that a chat needs none of: sessions that are read, their samples, kept responses.

Their code is loaded, and they are made, when the first request comes to one of them.
"""

from collections.abc import Sequence

from stenograph.core.loaded import entry
from stenograph.http.bulk_routes import BulkRoutes
from stenograph.http.part import Core
from stenograph.http.waste_route import WasteRoute

HELD_RESPONSES = "stenograph.http.response_route:HeldResponses"


def late_groups(core: Core) -> Sequence[object]:
    """The objects whose classes have the rows."""
    groups = (
        BulkRoutes(sessions=core.sessions, parts=core.all_parts),
        WasteRoute(sessions=core.sessions),
        core.sessions,
    )
    held = core.spoken.held
    if held is None:
        return groups
    made = entry(HELD_RESPONSES)(doorman=core.doorman, share=core.services.share, model=core.model, dialect=held)
    return (*groups, made)
