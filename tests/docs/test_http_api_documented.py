"""docs/http-api.md lists every route, and every field of a request that is honoured. docs/parameters.md has the others,
as tests/parameters.py writes them."""

import re
from pathlib import Path

import pytest

from stenograph.cli.parts import PARTS
from stenograph.dialects.anthropic.fields import MESSAGES_FIELDS
from stenograph.dialects.common.sampling_fields import FieldRules, Rule
from stenograph.dialects.gemini.fields import CONFIG_FIELDS, GEMINI_FIELDS
from stenograph.dialects.openai.chat_fields import CHAT_FIELDS
from stenograph.dialects.openai.completions import COMPLETION_FIELDS
from stenograph.dialects.responses.fields import RESPONSES_FIELDS
from stenograph.dialects.sessions import CreateSession
from stenograph.dialects.settings import DialectKind
from stenograph.http.openapi.turns import turn_rows
from stenograph.http.response_route import HeldResponses
from stenograph.http.route import rows_of
from stenograph.http.route_table import rows

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"


def honoured_fields(dialect: str) -> list[str]:
    part = PAGE.read_text().split(f"## Fields of a {dialect} request\n")[1].split("\n## ")[0]
    section = part.split("### Honoured\n")[1].split("\n#")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize(
    ("dialect", "rules"),
    [
        ("chat", [CHAT_FIELDS]),
        ("completions", [COMPLETION_FIELDS]),
        ("messages", [MESSAGES_FIELDS]),
        ("responses", [RESPONSES_FIELDS]),
        ("Gemini", [GEMINI_FIELDS, CONFIG_FIELDS]),
    ],
)
def test_every_honoured_field_is_listed_once(dialect: str, rules: list[FieldRules]) -> None:
    known = [name for fields in rules for name in fields.names if fields.rule_of(name) is Rule.HONOURED]
    assert sorted(honoured_fields(dialect)) == sorted(known)


def test_every_route_is_listed() -> None:
    known = {row.name for row in rows(PARTS)} | {row.name for row, _ in rows_of(HeldResponses)}
    known |= {row.name for kind in DialectKind for row in turn_rows(kind, forwards=False)}
    section = PAGE.read_text().split("## Routes\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+ [^`]+)` \|", section, re.MULTILINE)) == known


def test_every_option_of_a_session_is_listed() -> None:
    section = PAGE.read_text().split("## Opening a session\n")[1].split("\n### ")[0]
    first_cells = "".join(re.findall(r"^\|([^|]+)\|", section, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(CreateSession.__struct_fields__)
