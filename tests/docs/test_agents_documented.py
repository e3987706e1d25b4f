"""docs/agents.md says what each client sends as `tool_choice`: what its recorded requests have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/agents.md"
RECORDINGS = TESTS / "service/recordings"
RECORDED = {
    "smolagents `ToolCallingAgent`": ("smolagents.json", "smolagents-stream.json", "sessions/smolagents-planning.json"),
    "pydantic-ai with an `output_type`": ("pydantic-ai-structured.json",),
    "strands-agents": ("strands.json", "strands-compaction.json"),
    "Codex": ("sessions/codex.json",),
    "opencode": ("opencode.json",),
    "pydantic-ai": ("pydantic-ai.json",),
    "Claude Code": ("sessions/claude-code.json",),
    "Gemini CLI": ("sessions/gemini-cli.json",),
    "mini-SWE-agent": ("mini-swe-agent.json",),
}
"""Of each client, the files of `RECORDINGS` with its requests."""
UP_TO_CODE = "what your code says"


def documented() -> dict[str, str]:
    """What each client is said to send."""
    table = PAGE.read_text().split("| client | `tool_choice` |\n|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: said for names, said in rows for name in names.replace("; ", ", ").split(", ") if said != UP_TO_CODE}


def choices(name: str) -> Iterator[str]:
    """What the requests of a recording that show tools have as `tool_choice`."""
    recording: dict[str, Any] = json.loads((RECORDINGS / name).read_text())
    common = recording.get("body", {})
    for request in recording["requests"]:
        body: dict[str, Any] = {**common, **request.get("body", request)}
        if body.get("tools"):
            choice = body.get("toolConfig", body.get("tool_choice"))
            yield "none" if choice is None else f"`{choice}`"


def test_each_client_sends_the_choice_that_the_table_says() -> None:
    said = documented()
    assert set(said) == set(RECORDED)
    for name, files in RECORDED.items():
        sent = {choice for file in files for choice in choices(file)}
        assert sent == {said[name].partition(",")[0].partition(";")[0]}, name
