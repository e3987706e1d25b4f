"""docs/http-api.md has every route, as tests/http_routes.py writes it, and every honoured field of a request.

docs/parameters.md has the other fields, as tests/parameters.py writes them.
"""

import re

import pytest

from stenograph.dialects.anthropic.fields import MESSAGES_FIELDS
from stenograph.dialects.common.sampling_fields import FieldRules, Rule
from stenograph.dialects.gemini.fields import CONFIG_FIELDS, GEMINI_FIELDS
from stenograph.dialects.openai.chat_fields import CHAT_FIELDS
from stenograph.dialects.openai.completions import COMPLETION_FIELDS
from stenograph.dialects.responses.fields import RESPONSES_FIELDS
from stenograph.dialects.sessions import CreateSession

from ..http_routes import MORE, OPTIONS, PAGE, every_row, page


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


def test_the_tables_of_routes_are_those_of_the_code() -> None:
    assert PAGE.read_text() == page(), "python -m tests.http_routes writes them anew"


def test_every_link_of_a_route_is_of_one_that_there_is() -> None:
    ids = {row.id for row in every_row().values()}
    assert ids >= MORE.keys()
    assert ids >= OPTIONS.keys()


def test_every_option_of_a_session_is_listed() -> None:
    section = PAGE.read_text().split("## Opening a session\n")[1].split("\n### ")[0]
    first_cells = "".join(re.findall(r"^\|([^|]+)\|", section, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", first_cells)) == set(CreateSession.__struct_fields__)
