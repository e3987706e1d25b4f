"""The table of all routes but the turns, in the order of /openapi.json: the classes with the core's rows, then those of
the parts."""

from functools import cache

from stenograph.core.loaded import entry
from stenograph.http.part import Part
from stenograph.http.route import Route, rows_of

GROUPS = (
    "stenograph.http.control_routes:ControlRoutes",
    "stenograph.http.create_route:CreateRoute",
    "stenograph.http.bulk_routes:BulkRoutes",
    "stenograph.http.session_routes:SessionRoutes",
    "stenograph.http.media_route:MediaRoute",
)


@cache
def rows(parts: tuple[Part, ...]) -> tuple[Route, ...]:
    """The rows of all groups. It imports every group."""
    groups = (*GROUPS, *(group for part in parts for group in part.routes))
    return tuple(row for group in groups for row, _ in rows_of(entry(group)))
