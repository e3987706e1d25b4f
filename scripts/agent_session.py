"""A scripted agent, always greedy, through a running server: what it was sent and drew, turn by turn, by the records.

Whoever compares engines plays it through each of them. Knows the HTTP surface alone; blocks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.real_engine import ask

MAX_TOKENS = 96
MOST_MESSAGES = 24
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
FACT = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}
_AS_FACT = {"response_format": {"type": "json_schema", "json_schema": {"name": "fact", "schema": FACT}}}
SCRIPT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("What is the capital of France?", {}),
    ("And of Italy?", {}),
    ("Give the first of them as JSON.", _AS_FACT),
    ("What is 12 times 7?", {}),
    ("Write a sentence about the river there \U0001f642", {}),
    ("Repeat this: \U0001f600 \U0001f680 €", {}),
)
"""The user's message, and the request's other fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """One turn as its record tells it. `logprobs[i]` is ln p(ids[i]), `text` what the agent was given."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_cached: int
    text: str


def play(url: str) -> list[PlayedTurn]:
    """Play the script through a session of the server at `url`. Raises OSError for whatever it refuses."""
    session = ask(url, "/sessions", {})
    messages: list[dict[str, Any]] = []
    for text, asked in SCRIPT:
        messages.append({"role": "user", "content": text})
        reason = "tool_calls"
        while reason == "tool_calls" and len(messages) < MOST_MESSAGES:
            (choice,) = ask(session["base_url"], "/chat/completions", _chat(messages, asked))["choices"]
            reason = choice["finish_reason"]
            messages.append(choice["message"])
            calls: list[dict[str, str]] = choice["message"].get("tool_calls") or []
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "84"} for call in calls]
        if reason != "stop":  # cut: it cannot be gone on from
            break
    return [played(record) for record in ask(url, f"/sessions/{session['session_id']}")["records"]]


def check_exact(turns: Sequence[PlayedTurn]) -> None:
    """The ids of each turn, prompt and reply, are where the next one begins. Raises AssertionError."""
    for number, (before, after) in enumerate(itertools.pairwise(turns), start=1):
        line = before.prompt_ids + before.ids
        assert after.prompt_ids[: len(line)] == line, f"turn {number + 1} does not go on from the ids of turn {number}"


def _chat(messages: Sequence[dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
    options = {"model": "m", "temperature": 0, "max_tokens": MAX_TOKENS, "stop": ["\n\n"]}
    return {"messages": messages, "tools": TOOLS, **options, **asked}


def played(record: Any) -> PlayedTurn:
    """One turn as its record tells it."""
    choice = record["response"]["choices"][0]
    rows = choice["meta_info"]["output_token_logprobs"]
    return PlayedTurn(
        prompt_ids=tuple(record["request"]["input_ids"]),
        ids=tuple(row[1] for row in rows),
        logprobs=tuple(row[0] for row in rows),
        num_cached=choice["meta_info"].get("cached_tokens") or 0,
        text=choice["message"]["content"] or "",
    )
