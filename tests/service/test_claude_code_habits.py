"""Claude Code's habits, as its recorded requests have them, in words of ours: all of them leave its turns on one line.

The real client is in tests/process/agents; these requests are what it made, turn after turn.
"""

from typing import Any

import pytest

from .conftest import Live, output_ids
from .messages_kit import events_of, post

EPHEMERAL = {"type": "ephemeral"}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.f8c; cc_entrypoint=cli;"}
RULES = {"type": "text", "text": "You are an agent in a terminal.", "cache_control": EPHEMERAL}
TOOLS = [
    {"name": name, "description": f"{name} it.", "input_schema": {"type": "object", "properties": {"x": {}}}}
    for name in ("Bash", "Read", "ToolSearch")
]
FETCH = {**TOOLS[0], "name": "WebFetch", "description": "WebFetch it.", "defer_loading": True}
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
ASKED: dict[str, Any] = {
    "max_tokens": 900,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": EDITS,
    "metadata": {"user_id": '{"session_id":"s"}'},
    "stream": True,
}
TITLE = {
    "system": [BILLING, {"type": "text", "text": "Generate a concise, sentence-case title for this session."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "What is here?"}]}],
    "tools": [],
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {}}}}},
}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def calls(thought: str, said: str, *names: str) -> str:
    made = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"x":  1}}}}\n</tool_call>' for name in names)
    return f"<think>\n{thought}\n</think>\n\n{said}{made}"


def replayed(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a streamed reply as the client sends them back: without the thinking that it did not see."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            elif delta["type"] == "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
    return [{**block, "input": {"x": 1}} if block["type"] == "tool_use" else block for block in blocks]


class Client:
    """Keeps the conversation as Claude Code does: the marker of the cache is on the newest block alone."""

    def __init__(self, live: Live, session: str) -> None:
        self._live = live
        self._session = session
        self._messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = list(TOOLS)

    def says(self, role: str, content: Any) -> None:
        self._messages.append({"role": role, "content": content})

    async def turn(self, reply: str) -> list[dict[str, Any]]:
        """A turn that is answered so; the events that it got. Later, a message of one text is a string."""
        self._live.says(reply)
        answer = await post(
            self._live, self._session, *self._messages, system=[BILLING, RULES], tools=self.tools, **ASKED
        )
        assert answer.status == 200, answer.body
        events = events_of(answer.body)
        for message in self._messages:
            match message["content"]:
                case [{"type": "text", "text": str(said)}]:
                    message["content"] = said
                case [*blocks]:
                    message["content"] = [
                        {name: value for name, value in block.items() if name != "cache_control"} for block in blocks
                    ]
                case _:
                    pass
        self.says("assistant", replayed(events))
        return events

    def results(self, *contents: Any) -> None:
        """Results of the last reply's calls, in the order in which they ended: the last call's first."""
        used = [block for block in self._messages[-1]["content"] if block["type"] == "tool_use"]
        blocks = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": content, "is_error": False}
            for block, content in reversed(list(zip(used, contents, strict=True)))
        ]
        self.says("user", [*blocks[:-1], {**blocks[-1], "cache_control": EPHEMERAL}])


@pytest.mark.parametrize("history", ["strands", "linear", "tree"])
async def test_its_turns_are_one_line_whatever_it_changes_of_what_it_sends_back(live: Live, history: str) -> None:
    session = await live.open(history=history)
    client = Client(live, session)
    client.says(
        "user", [text("<system-reminder>\nhm\n</system-reminder>\n"), text("What is here?", cache_control=EPHEMERAL)]
    )
    client.says("system", "# Environment\nThere is a folder.")
    await client.turn(calls("Look.", "I look.\n", "Bash"))
    client.results("notes.txt")
    await client.turn(calls("Both.", "", "Read", "ToolSearch"))
    client.results("a note", [{"type": "tool_reference", "tool_name": "WebFetch"}])
    client.says("system", [text("One thing more.")])
    client.tools = [*TOOLS, FETCH, {**FETCH, "name": "DeferredToolPlaceholder"}]
    await client.turn(calls("Fetch.", "", "WebFetch"))
    client.results("page")
    last = await client.turn("Done.")
    assert last[-2]["delta"]["stop_reason"] == "end_turn"
    records = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    before: list[int] = []
    for record in records:
        assert record["request"]["input_ids"][: len(before)] == before
        before = record["request"]["input_ids"] + output_ids(record)
    assert len(records) == 4
    shown = live.renderer.tokenizer.decode(before)
    assert ("x-anthropic-billing-header" in shown, "WebFetch it." in shown) == (False, True)
    rules = {rewrite["rule"] for record in records for rewrite in record["request"]["rewrites"]}
    assert rules >= {"cc-billing", "deferred-tool", "tool-reference"}


async def test_its_title_request_runs_beside_the_first_turn(live: Live) -> None:
    session = await live.open()
    client = Client(live, session)
    client.says("user", [text("What is here?")])
    await client.turn("A note.")
    live.says('{"title": "A folder"}')
    fields = {**TITLE, "thinking": {"type": "disabled"}, "max_tokens": 900}
    messages = fields.pop("messages")
    answer = await post(live, session, *messages, **fields)
    assert answer.status == 200, answer.body
    client.says("user", "And now?")
    await client.turn("The same.")
    strands = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["strands"]
    assert [(strand["kind"], strand["num_turns"]) for strand in strands] == [("main", 2), ("title", 1)]
