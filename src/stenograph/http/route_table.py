"""The table of all routes but the turns, in the order of /openapi.json: the classes that have their rows."""

from functools import cache

from stenograph.core.loaded import entry
from stenograph.http.route import Route, rows_of

GROUPS = (
    "stenograph.http.control_routes:ControlRoutes",
    "stenograph.http.create_route:CreateRoute",
    "stenograph.http.bulk_routes:BulkRoutes",
    "stenograph.http.waste_route:WasteRoute",
    "stenograph.http.session_routes:SessionRoutes",
    "stenograph.http.weight_routes:WeightRoutes",
    "stenograph.http.engine_routes:EngineRoutes",
    "stenograph.http.weight_routes:ModelInfoRoute",
    "stenograph.http.storage:BackupRoute",
    "stenograph.http.console_routes:ConsoleRoutes",
)


@cache
def rows() -> tuple[Route, ...]:
    """The rows of all groups. It imports every group."""
    return tuple(row for group in GROUPS for row, _ in rows_of(entry(group)))
