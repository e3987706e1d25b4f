"""What Gemini CLI sends, turn after turn: every request is taken, and what it replays is known again.

The recording has its fields, shapes and habits, in words of ours. It was made against a server that gave calls no ids,
so the CLI made some; here it sends those that our server gave.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Answer, Live, output_ids
from .test_gemini import parts_of

RECORDING = json.loads((Path(__file__).parent / "recordings" / "gemini_cli" / "basic.json").read_text(encoding="utf-8"))


def spelled(parts: list[dict[str, Any]]) -> str:
    """A recorded reply as the model of our tests writes it."""
    texts = [part["text"] for part in parts if "text" in part]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    written = [json.dumps({"name": call["name"], "arguments": call["args"]}) for call in calls]
    return "\n".join([*texts, *(f"<tool_call>\n{text}\n</tool_call>" for text in written)])


class Replayed:
    """The recorded client. `ids` are those of its calls, by the ones that it made itself."""

    def __init__(self, live: Live, session: str) -> None:
        self._live = live
        self._session = session
        self.ids: dict[str, str] = {}
        self._given: list[str] = []

    async def ask(self, exchange: dict[str, Any]) -> list[dict[str, Any]]:
        self._live.says(spelled(exchange["reply"]))
        body = exchange["body"]
        sent = [part for content in body["contents"] for part in content["parts"]]
        own = [part["functionCall"]["id"] for part in sent if "functionCall" in part]
        self.ids |= dict(zip(own, self._given, strict=True)) if own else {}
        text = json.dumps(body)
        for theirs, ours in self.ids.items():
            text = text.replace(theirs, ours)
        path = f"/sessions/{self._session}{exchange['path']}"
        answer = await self._live.call("POST", path, text.encode(), user_agent=exchange["client"])
        assert answer.status == 200, answer.body
        parts = heard(answer)
        self._given += [part["functionCall"]["id"] for part in parts if "functionCall" in part]
        return parts


def heard(answer: Answer) -> list[dict[str, Any]]:
    if answer.headers["content-type"] == "application/json":
        return parts_of(answer.json())
    events = [json.loads(event.removeprefix("data: ")) for event in answer.body.decode().split("\n\n") if event]
    return [part for event in events for part in parts_of(event)]


@pytest.mark.parametrize("history", ["strands", "tree"])
async def test_a_recorded_run_is_served_and_nothing_that_was_sampled_is_lost(live: Live, history: str) -> None:
    session = await live.open(history=history)
    client = Replayed(live, session)
    for exchange in RECORDING["exchanges"]:
        parts = await client.ask(exchange)
        texts = "".join(part.get("text", "") for part in parts)
        assert texts.strip() == "".join(part.get("text", "") for part in exchange["reply"]).strip()
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        recorded = [part["functionCall"] for part in exchange["reply"] if "functionCall" in part]
        assert [(call["name"], call["args"]) for call in calls] == [(call["name"], call["args"]) for call in recorded]
    body = {"format": "json", "include_side": True}
    samples = (await live.call("POST", f"/sessions/{session}/samples", body)).json()["samples"]
    drawn = sum(len(ids) for ids in live.engine.drawn.values())
    assert (len(samples), sum(sum(sample["loss_mask"]) for sample in samples)) == (2, drawn)
    view = (await live.call("GET", f"/sessions/{session}")).json()
    if history == "strands":
        found = [(row["kind"], row["rule"], row["num_turns"]) for row in view["metadata"]["strands"]]
        assert found == [("router", "gm-router", 1), ("main", None, 3)]
    for before, after in zip(view["records"], view["records"][1:], strict=False):
        line = before["request"]["input_ids"] + output_ids(before)
        assert after["request"]["input_ids"][: len(line)] == line
