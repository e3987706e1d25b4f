"""What becomes of every request of a recorded client in one default session: the table of a golden file.

The sessions are in words of ours, in the shapes and with the habits of the real clients (recordings/): chats, and in
recordings/sessions whole bodies of any protocol, in which `$CALL2` is the id that our server gave the third call.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import ScriptedEngine
from stenograph.text.renderer import Renderer

from .conftest import Live, running
from .test_harness_recordings import RECORDINGS, Client

GOLDEN = Path(__file__).with_name("table_of_clients.json")
SESSIONS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(Path(__file__).with_name("recordings").glob("sessions/*.json"))
}
TABLE: dict[str, dict[str, int]] = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture
async def live(renderer: Renderer) -> AsyncIterator[Live]:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=65536)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


def spelled(reply: dict[str, Any]) -> str:
    """A reply as the model of our tests writes it."""
    thought = f"<think>\n{reply['reasoning']}\n</think>\n\n" if reply["reasoning"] else ""
    calls = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in reply["calls"]
    ]
    return thought + "\n".join([*filter(None, [reply["content"]]), *calls])


def call_ids(live: Live, session: str) -> Iterator[str]:
    """The ids of all calls of a session, in the order in which they were sampled."""
    for node in live.manager.sessions.get(session).nodes:
        yield from (call.id for call in node.turn.reply.message.tool_calls)


async def play(live: Live, session: str, recording: dict[str, Any]) -> None:
    """Send what the client sent, with our ids in the place of its server's."""
    ids: list[str] = []
    for request in recording["requests"]:
        text = json.dumps(request["body"])
        for index, id_ in reversed(list(enumerate(ids))):
            text = text.replace(f"$CALL{index}", id_)
        live.says(spelled(request["reply"]))
        answer = await live.call(
            "POST", f"/sessions/{session}{recording['path']}", text.encode(), **recording["headers"]
        )
        assert answer.status == 200, answer.body
        ids = list(call_ids(live, session))


def row(live: Live, session: str) -> dict[str, int]:
    """What the session says of its requests."""
    strands = live.manager.sessions.get(session).strands
    num_requests, discarded = live.manager.sessions.get(session).ledger.num_requests, strands.discarded.num_turns
    opened = [strand for strand in strands.kept if strand.fork_of is None]
    return {
        "requests": num_requests,
        "extends": num_requests - len(strands.kept) - discarded,
        "opens": len(opened),
        "forks": len(strands.kept) - len(opened),
        "replaces": discarded,
        "rewrites": sum(len(node.turn.rewrites) for node in strands.nodes),
    }


@pytest.mark.parametrize("name", [*RECORDINGS, *SESSIONS])
async def test_each_request_becomes_what_the_table_says_and_none_is_refused(live: Live, name: str) -> None:
    session = await live.open()
    if name in SESSIONS:
        await play(live, session, SESSIONS[name])
    else:
        client = Client(live, RECORDINGS[name], session)
        for request in RECORDINGS[name]["requests"]:
            await client.send(request)
    ledger = (await live.call("GET", f"/sessions/{session}/ledger")).json()
    assert Counter(request["status"] for request in ledger["requests"]) == {200: ledger["num_requests"]}
    assert row(live, session) == TABLE[name]


def test_the_table_has_every_session() -> None:
    assert set(TABLE) == {*RECORDINGS, *SESSIONS}
