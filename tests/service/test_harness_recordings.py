"""What agent frameworks send, turn after turn: every request is taken, and what they replay is known again.

Each file of recordings/ is one session of one client, with its own field names, shapes and habits, in words of ours:
the messages that each request adds to the one before it (`keep` says how many of those it keeps), the reply that it
was given, and the request whose turn it continues (`after`).
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.dialects.settings import UnknownFields
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, output_ids, running

FOLDER = Path(__file__).with_name("recordings")
RECORDINGS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))
}
CASES = [(name, history) for name, recording in RECORDINGS.items() for history in recording["histories"]]


@pytest.fixture
async def live(renderer: Renderer) -> AsyncIterator[Live]:
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=65536)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


def spelled(reply: dict[str, Any]) -> str:
    """A recorded reply as the model of our tests writes it."""
    thought = f"<think>\n{reply['reasoning']}\n</think>\n\n" if reply["reasoning"] else ""
    calls = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in reply["tool_calls"]
    ]
    return thought + "\n".join([*filter(None, [reply["content"]]), *calls])


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a client got: text, reasoning, and (id, name, arguments) of each call."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]


def heard(answer: Answer, *, stream: bool) -> Heard:
    if stream:
        *events, done = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
        assert done == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        messages = [choice["delta"] for choice in choices]
    else:
        messages = [answer.json()["choices"][0]["message"]]
    return Heard(
        content="".join(message.get("content") or "" for message in messages),
        reasoning="".join(message.get("reasoning_content") or "" for message in messages),
        calls=tuple(
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for message in messages
            for call in message.get("tool_calls", ())
        ),
    )


class Client:
    """Plays a recording: sends what the client sent, with the call ids that our server gave in place of its own."""

    def __init__(self, live: Live, recording: dict[str, Any], session: str, *, paused: bool = False) -> None:
        self.scripts: list[Script] = []
        self._paused = paused
        self._live = live
        self._recording = recording
        self._path = f"/sessions/{session}/v1/chat/completions"
        self._messages: list[Any] = []
        self._given_ids: dict[str, str] = {}

    async def send(self, request: dict[str, Any]) -> Answer:
        """One request; checks that the reply is the recorded one."""
        self._messages = self._messages[: request.get("keep", len(self._messages))] + request["messages"]
        fields = {**self._recording["body"], **request.get("body", {})}
        body = {name: value for name, value in fields.items() if value is not None}
        text = json.dumps({**body, "messages": self._messages})
        for recorded, given in self._given_ids.items():
            text = text.replace(recorded, given)
        reply = request["reply"]
        stop = reply.get("stopped_by")
        self.scripts.append(
            self._live.says(
                spelled(reply) + (stop or ""),
                paused=self._paused,
                finish=Finish(reason=FinishReason.STOP, matched=stop) if stop else None,
            )
        )
        answer = await self._live.call("POST", self._path, text.encode(), **self._recording["headers"])
        assert answer.status == 200, answer.body
        got = heard(answer, stream=body.get("stream", False))
        assert (got.content, got.reasoning) == (reply["content"] or "", reply["reasoning"] or "")
        assert [(name, arguments) for _, name, arguments in got.calls] == [
            (call["name"], call["arguments"]) for call in reply["tool_calls"]
        ]
        for call, (given, _, _) in zip(reply["tool_calls"], got.calls, strict=True):
            self._given_ids[call["id"]] = given
        return answer


@pytest.mark.parametrize(("name", "history"), CASES)
async def test_every_request_of_a_client_is_taken_and_continues_the_turn_that_it_replays(
    live: Live, name: str, history: str
) -> None:
    recording = RECORDINGS[name]
    session = await live.open(history=history)
    client = Client(live, recording, session)
    lines: list[list[int]] = []
    for index, request in enumerate(recording["requests"]):
        await client.send(request)
        after = request["after"]
        lines.append([*(lines[after] if after is not None else []), index])
        node = live.manager.sessions.get(session).latest
        assert node is not None
        assert [step.id for step in node.line()] == lines[-1]
        prompt, script = list(live.engine.requests[index].prompt.ids), client.scripts[index]
        if after is not None:
            before = list(live.engine.requests[after].prompt.ids) + list(client.scripts[after].ids)
            assert prompt[: len(before)] == before
        view = (await live.call("GET", f"/sessions/{session}")).json()
        assert view["metadata"]["accumulated_token_ids"] == prompt + list(script.ids)
        assert [output_ids(record) for record in view["records"]] == [list(client.scripts[i].ids) for i in lines[-1]]
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", "include_side": True})
    num_samples = recording["num_samples"]
    assert len(answer.json()["samples"]) == (num_samples if isinstance(num_samples, int) else num_samples[history])


@pytest.mark.parametrize("name", RECORDINGS)
async def test_every_request_of_a_client_is_taken_by_strands_and_every_token_is_in_one_sample(
    live: Live, name: str
) -> None:
    recording = RECORDINGS[name]
    session = await live.open(history="strands")
    client = Client(live, recording, session)
    for request in recording["requests"]:
        await client.send(request)
    for index, request in enumerate(recording["requests"]):
        if (after := request["after"]) is not None:
            before = list(live.engine.requests[after].prompt.ids) + list(client.scripts[after].ids)
            assert list(live.engine.requests[index].prompt.ids)[: len(before)] == before
    answer = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json", "include_side": True})).json()
    drawn = [
        id_
        for sample in answer["samples"]
        for id_, is_drawn in zip(
            sample["tokens"][len(sample["tokens"]) - sample["response_length"] :], sample["loss_mask"], strict=True
        )
        if is_drawn
    ]
    assert answer["session_metadata"]["discarded"] == {"turns": 0, "sampled_tokens": 0}
    assert answer["session_metadata"]["left_out"] == {}
    assert sorted(drawn) == sorted(id_ for script in client.scripts for id_ in script.ids)


async def test_what_harbor_reads_of_a_rollout_is_where_it_looks(live: Live) -> None:
    recording = RECORDINGS["harbor-rollout"]
    client = Client(live, recording, await live.open())
    for index, request in enumerate(recording["requests"]):
        body = (await client.send(request)).json()
        (choice,) = body["choices"]
        assert body["prompt_token_ids"] == list(live.engine.requests[index].prompt.ids)
        assert choice["token_ids"] == list(client.scripts[index].ids)
        assert [row["logprob"] for row in choice["logprobs"]["content"]] == [
            -(i + 1) / 8 for i in range(len(choice["token_ids"]))
        ]


async def test_a_field_of_the_caller_s_own_is_recorded_where_the_server_is_told_to(renderer: Renderer) -> None:
    recording = RECORDINGS["pydantic-ai"]
    recording = {**recording, "body": {**recording["body"], "my_extra": {"x": [1]}}}
    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=65536)
    async with (
        running(engine, renderer, unknown_fields=UnknownFields.RECORD) as (url, manager),
        aiohttp.ClientSession() as http,
    ):
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=http)
        session = await live.open()
        client = Client(live, recording, session)
        for request in recording["requests"]:
            await client.send(request)
        records = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert [record["request"]["parameters"]["recorded"]["my_extra"] for record in records] == [{"x": [1]}] * 5


async def test_a_title_request_that_overlaps_the_first_turn_is_a_line_of_its_own(live: Live) -> None:
    recording = RECORDINGS["opencode"]
    title, *rest = recording["requests"]
    session = await live.open(history="tree")
    side = Client(live, recording, session, paused=True)
    asking = asyncio.ensure_future(side.send(title))
    await live.engine.begun(1)
    client = Client(live, recording, session)
    for request in rest:
        await client.send(request)
    live.engine.step(len(side.scripts[0].ids) + 1)
    await asking
    nodes = live.manager.sessions.get(session).nodes
    assert [node.depth for node in nodes] == [1, 2, 3, 4, 5, 1]
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", "include_side": True})
    drawn = [sum(sample["loss_mask"]) for sample in answer.json()["samples"]]
    assert drawn == [sum(len(script.ids) for script in client.scripts), len(side.scripts[0].ids)]


CHAT_FIELDS: list[dict[str, Any]] = [
    {"tool_choice": "auto"},
    {"tool_choice": "required"},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"max_tokens": 512},
    {"max_completion_tokens": 512},
    {"temperature": 0.0, "top_p": 0.9, "seed": 7},
    {"stop": "zz"},
    {"stop": ["zz"]},
    {"logprobs": True},
    {"reasoning_effort": "high"},
    {"prompt_cache_key": "conversation-1"},
    {"session_id": "a-client's-own"},
    {"return_token_ids": True, "logprobs": True},
]
SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"content": "I add."}, {"content": "3"}),
    ({"content": [{"type": "text", "text": "I add."}]}, {"content": [{"type": "text", "text": "3"}]}),
    ({"content": "I add.", "reasoning_content": "let me add"}, {"content": "3", "name": "add"}),
    ({"content": "I add.", "provider_specific_fields": {"refusal": None}}, {"content": "3"}),
]


@pytest.mark.parametrize("fields", CHAT_FIELDS, ids="+".join)
async def test_every_field_that_a_client_sends_to_a_session_is_taken(live: Live, fields: dict[str, Any]) -> None:
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    tools = [{"type": "function", "function": function}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    session = await live.open()
    for stated, result in SHAPES:
        live.says(
            '<think>\nlet me add\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        )
        body = {"model": "any/model", "messages": messages, "tools": tools, **fields}
        answer = await live.call("POST", f"/sessions/{session}/v1/chat/completions", body)
        assert answer.status == 200, answer.body
        ((call_id, name, arguments),) = heard(answer, stream=fields.get("stream", False)).calls
        call = {"index": 0, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [
            {"role": "assistant", "tool_calls": [call], **stated},
            {"role": "tool", "tool_call_id": call_id, **result},
        ]
    records = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert len(records) == len(SHAPES), "each turn goes on from the one before"
