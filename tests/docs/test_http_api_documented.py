"""docs/http-api.md lists every route, and every field of a chat request by its rule."""

import re
from pathlib import Path

from stenograph.protocol.openai_chat_fields import FIELD_NAMES, Rule, rule_of

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"


def fields_under(heading: str) -> set[str]:
    section = PAGE.read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_field_is_listed_once_under_its_rule() -> None:
    for rule in Rule:
        assert fields_under(rule.capitalize()) == {name for name in FIELD_NAMES if rule_of(name) is rule}


def test_every_route_is_listed() -> None:
    source = (PAGE.parents[1] / "src" / "stenograph" / "http" / "control_routes.py").read_text()
    routes = re.findall(r'Route\("([^"]+)", .*methods=\["(\w+)"\]\)', source)
    known = {f"{method} {path}" for path, method in routes}
    known |= {"POST /v1/chat/completions", "POST /sessions/{id}/v1/chat/completions"}
    section = PAGE.read_text().split("## Routes\n")[1].split("\n## ")[0]
    assert len(routes) > 10
    assert set(re.findall(r"^\| `(\w+ [^`]+)` \|", section, re.MULTILINE)) == known
