"""docs/settings.md is the table of cli/settings_table.py, row by row."""

from pathlib import Path

from stenograph.cli.settings_table import SETTINGS

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_every_setting_is_documented_as_it_is():
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    expected = [
        f"| `{s.flag}` | `{s.env}` | `{s.name}` | {s.default} | {s.unit} | {s.doc} {s.kind.expected.capitalize()}. |"
        for s in SETTINGS
    ]
    assert rows == expected
