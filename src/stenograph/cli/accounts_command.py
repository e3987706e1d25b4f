"""`stenograph accounts`: the fate of all sampled tokens of a running server, as a table."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from stenograph.cli.session_calls import CallFailed, ServerCalls
from stenograph.cli.settings_table import load_settings
from stenograph.cli.terminal_text import safe_line
from stenograph.core.errors import StartupError

_COLUMN = 10
_MOST_KEY_CHARS = 40


def accounts(options: dict[str, Any]) -> int:
    """Print the accounts of the server at a URL; returns the exit code. Raises StartupError."""
    url, by, group, config = (options.pop(name) for name in ("url", "by", "group", "config"))
    settings = load_settings(options, os.environ, config)
    try:
        told = ServerCalls(url, settings.api_key[0] if settings.api_key else None).accounts(by, group)
    except CallFailed as error:
        raise StartupError(f"accounts: {error}") from error
    print("\n".join(table(told)))
    return 0


def table(told: Mapping[str, object]) -> Sequence[str]:
    """The lines of an account, the fates without a token left out."""
    whole = cast("Mapping[str, Any]", told["whole"])
    rows = [*cast("Sequence[Mapping[str, Any]]", told["rows"]), {**whole, "key": "in all"}]
    fates = [fate for fate, num in whole["tokens"].items() if num]
    has_cost = whole["cost"] is not None
    names = ["sampled", *fates, *(["cost"] if has_cost else [])]
    width = max((len(_key(row["key"])) for row in rows), default=0)
    lines = [" ".join([str(told["by"]).ljust(width), *(name.rjust(_COLUMN) for name in names)])]
    for row in rows:
        numbers = [f"{row['sampled']:,}", *(f"{row['tokens'][fate]:,}" for fate in fates)]
        numbers += [f"{row['cost']:.2f}"] if has_cost else []
        lines.append(" ".join([_key(row["key"]).ljust(width), *(number.rjust(_COLUMN) for number in numbers)]))
    if told["left_out"]:
        lines.append(f"and {told['left_out']} rows with fewer tokens")
    return lines


def _key(key: object) -> str:
    return "-" if key is None else safe_line(str(key))[:_MOST_KEY_CHARS] or "''"
