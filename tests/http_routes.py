"""The tables of routes in docs/http-api.md, from the rows of the routes; `python -m tests.http_routes` writes them.

A row has the route, its summary, the fields of its query and body, and those of its reply: all from the code. Where a
page says more of a route, or of its fields, MORE has the link.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_type_hints

import msgspec

from stenograph.cli.parts import PARTS
from stenograph.dialects.settings import DialectKind
from stenograph.http.openapi.turns import turn_rows
from stenograph.http.response_route import HeldResponses
from stenograph.http.route import Needs, Route, rows_of
from stenograph.http.route_table import rows

PAGE = Path(__file__).parents[1] / "docs" / "http-api.md"
BEGINS = "<!-- Written by `python -m tests.http_routes`: begin -->\n"
ENDS = "<!-- end -->\n"
ON_SESSION = "/sessions/{id}"

LEAST = {
    Needs.NOTHING: "Open to all",
    Needs.TOKEN: "With the session's token",
    Needs.KEY: "With a key",
    Needs.ADMIN: "With an administrator's key",
}
"""The headings: the least credential, where the server has keys."""

MORE = {
    "getMetrics": "metrics.md",
    "getConsole": "console.md",
    "getNow": "console.md#the-data",
    "getSessionShape": "console.md#the-data",
    "listSessions": "#sessions-by-filter",
    "deleteSessions": "#sessions-by-filter",
    "getSession": "#records",
    "getDrift": "drift.md",
    "getLedger": "#the-ledger",
    "getFindings": "samples.md#why-is-this-sample-bad",
    "putOutcome": "samples.md#the-outcome-of-a-rollout",
    "getMedia": "images.md",
    "getAccounts": "accounts.md",
    "getGroupWhy": "accounts.md",
    "forkSession": "replay.md#forks",
    "claimSamples": "accounts.md#who-may-train",
    "receiveSamples": "accounts.md#who-may-train",
    "abandonSessions": "accounts.md#who-may-train",
    "updateWeights": "#weights",
    "pauseGeneration": "#weights",
    "addEngine": "engines.md#engines-that-join-and-leave",
    "removeEngine": "engines.md#engines-that-join-and-leave",
    "chatOnSession": "#a-chat-on-a-session",
    "completeOnSession": "#completions",
    "respondOnSession": "#responses",
    "messageOnSession": "#anthropic-messages",
    "generateContentOnSession": "#gemini",
}
"""Where a page says more of an operation."""
MOST_NAMES = 11
"""Of a body's fields in a row."""
OPTIONS = {
    "openSession": "[options](#opening-a-session)",
    "getManySamples": "[options](samples.md#many-sessions-at-once)",
    "getSamples": "[options](samples.md)",
    "scoreSession": "[options](samples.md#scores)",
    "scoreSessions": "[options](samples.md#scores)",
}
"""Where a page lists the fields of a body."""


def every_row() -> dict[str, Route]:
    """Every route but the forwarded ones, by its name."""
    turns = [row for kind in DialectKind for row in turn_rows(kind, forwards=False)]
    return {row.name: row for row in [*rows(PARTS), *(row for row, _ in rows_of(HeldResponses)), *turns]}


def tables() -> str:
    """The tables, one for each credential. A route that may also name its session in a header has one row for both."""
    by_name = every_row()
    either = {
        name
        for name, row in by_name.items()
        if row.path.startswith("/v1") and f"{row.method} {ON_SESSION}{row.shown_path}" in by_name
    }
    parts = [BEGINS]
    for needs, heading in LEAST.items():
        table = "\n".join(
            _row(row, is_either=name.replace(ON_SESSION, "", 1) in either)
            for name, row in by_name.items()
            if row.needs is needs and name not in either
        )
        parts.append(f"### {heading}\n\n| route | does | query, body | answer |\n|---|---|---|---|\n{table}\n")
    return "\n".join([*parts, ENDS])


def page() -> str:
    """docs/http-api.md with today's tables."""
    text = PAGE.read_text()
    before, rest = text.split(BEGINS)
    return before + tables() + rest.split(ENDS, 1)[1]


def _row(row: Route, *, is_either: bool) -> str:
    path, does = row.shown_path, row.summary
    if is_either:
        path, does = path.replace(ON_SESSION, f"[{ON_SESSION}]", 1), does.replace(" on a session", "", 1)
    if row.id in MORE:
        does = f"[{does}]({MORE[row.id]})"
    query = [f"?{one['name']}=" for one in row.parameters if one["in"] == "query"]
    asked = OPTIONS.get(row.id) or _named([*query, *([] if is_either else _fields(row.body))])
    return f"| `{row.method} {path}` | {does} | {asked} | {_named(_fields(row.reply))} |"


def _named(names: Iterable[str]) -> str:
    """The names, or the first of them."""
    named = [f"`{name}`" for name in names]
    return ", ".join(named if len(named) <= MOST_NAMES else [*named[:MOST_NAMES], "…"])


def _fields(kind: type | None) -> Iterator[str]:
    """The names of a body's fields as JSON has them."""
    if kind is None:
        return
    if issubclass(kind, msgspec.Struct):
        yield from (field.encode_name for field in msgspec.structs.fields(kind))
    else:
        yield from get_type_hints(kind)


if __name__ == "__main__":
    PAGE.write_text(page())
