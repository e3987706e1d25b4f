"""Pins: what a client can see of the server, in files of `pins/`, so that a change of the code inside is seen to change
nothing outside.

To write pins anew, delete their files and run test_pins.py until it passes: a test whose file is missing writes it, and
fails.
"""

import difflib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).with_name("pins")
LEAST_SHARED = 60
"""Parts of a JSON value that are shorter, in characters, are written each time that they occur."""
RANDOM = re.compile(
    r"(?<![0-9a-f])(?:[0-9a-f]{32}|[0-9a-f]{64})(?![0-9a-f])|(?<=_)[0-9a-f]{12,32}(?![0-9a-f])|c3RnMS[\w+/]+=*"
)
"""Ids of sessions and requests, digests over them, ids of calls, and signatures of thoughts."""


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def masked(text: str) -> str:
    """The text with what is random replaced by its length and the order in which it occurs."""
    names: dict[str, str] = {}
    return RANDOM.sub(lambda found: names.setdefault(found[0], f"<{len(found[0])} characters, {len(names)}>"), text)


def without_repeats(value: Any) -> tuple[dict[str, Any], Any]:
    """Each part that occurs repeatedly, by name, and the value with those names in its place: a quarter of the size."""
    written: dict[int, str] = {}
    counts: dict[str, int] = {}

    def count(part: Any) -> None:
        if not isinstance(part, dict | list):
            return
        text = written[id(part)] = compact(part)
        counts[text] = counts.get(text, 0) + 1
        if counts[text] == 1:
            for inner in part.values() if isinstance(part, dict) else part:
                count(inner)

    table: dict[str, Any] = {}

    def named(part: Any) -> Any:
        if not isinstance(part, dict | list):
            return part
        text = written.get(id(part)) or compact(part)
        name = f"${digest(text)[:8]}"
        is_shared = counts.get(text, 0) > 1 and len(text) >= LEAST_SHARED
        if is_shared and name in table:
            return name
        found = {key: named(one) for key, one in part.items()} if isinstance(part, dict) else [*map(named, part)]
        if not is_shared:
            return found
        table[name] = found
        return name

    count(value)
    return table, named(value)


def with_repeats(table: dict[str, Any], part: Any) -> Any:
    """The value whose repeated parts are in `table`."""
    if isinstance(part, str) and part in table:
        return with_repeats(table, table[part])
    if isinstance(part, dict):
        return {key: with_repeats(table, one) for key, one in part.items()}
    return [with_repeats(table, one) for one in part] if isinstance(part, list) else part


def lines_of(value: Any) -> list[str]:
    """A JSON value in lines, in which a difference is found."""
    text = json.dumps(value, ensure_ascii=False, indent=1)
    # A list of numbers is one line.
    return re.sub(r"\[\s*(-?[\d.][^\[\]{}\"]*?)\s*\]", lambda found: re.sub(r"\s+", " ", found[0]), text).splitlines()


def check_lines(name: str, found: list[str]) -> None:
    """Hold lines of text against those that are pinned."""
    path = FOLDER / name
    if not path.exists():
        path.write_text("\n".join(found) + "\n", encoding="utf-8")
        pytest.fail(f"written anew: {path}")
    pinned = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    if found != pinned:
        pytest.fail(
            "\n".join([f"{name} differs:", *difflib.unified_diff(pinned, found, "pinned", "found", lineterm="")])
        )


def check_rows(name: str, found: dict[str, Any]) -> None:
    """Hold small values, by name, against those that are pinned, one in a line."""
    check_lines(name, [f"{compact(key)}: {compact(value)}" for key, value in found.items()])


def check_bodies(name: str, found: dict[str, str]) -> None:
    """Hold JSON bodies, by name, against those that are pinned: byte for byte, and where they differ by their lines."""
    path = FOLDER / name
    values = {key: json.loads(text) for key, text in found.items()}
    bytes_of = {key: digest(text) for key, text in found.items()}
    if not path.exists():
        table, bodies = without_repeats(values)
        rows = [*({key: part} for key, part in table.items()), {"$bytes": bytes_of}, {"$bodies": bodies}]
        path.write_text("\n".join(map(compact, rows)) + "\n", encoding="utf-8")
        pytest.fail(f"written anew: {path}")
    table = {key: part for line in path.read_text().splitlines() for key, part in json.loads(line).items()}
    pinned = with_repeats(table, table["$bodies"])
    assert list(values) == list(pinned), f"{name} has other bodies"
    for key, value in values.items():
        diff = difflib.unified_diff(lines_of(pinned[key]), lines_of(value), "pinned", "found", lineterm="")
        if differing := "\n".join(diff):
            pytest.fail(f"{name}: {key} differs:\n{differing}")
    assert bytes_of == table["$bytes"], f"{name}: the values are the same, and their bytes are not"
