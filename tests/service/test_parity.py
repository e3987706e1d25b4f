"""The same run gives the same sample, bit for bit: on a line or in a tree, streamed or not; and the contract of another
server, kept to by a session that asks for it."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from openai.types.chat import ChatCompletionChunk
from safetensors.numpy import load

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.kinds import Compat
from stenograph.core.types import Chunk, Finish, FinishReason
from stenograph.engine.base import GenerateRequest
from stenograph.text.renderer import Renderer

from .conftest import Live, output_ids, running, user

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} tool.",
            "parameters": {"type": "object", "properties": {"value": {"type": "string"}}},
        },
    }
    for name in ("bash", "edit")
]
RUN = (
    "<think>\nWhat is there?\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"value":  "ls"}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"value": "cat a"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "edit", "arguments": {"value": "Naïve ☃"}}\n</tool_call>',
    "It is done. \n",
    '<think>\nAgain?\n</think>\n\n<tool_call>\n{"name": "edit", "arguments": {}}\n</tool_call>\n',
    "  ☃\n\nBye.",
)
OTHER = "<think>\nNo.\n</think>\n\nAnother try that nobody goes on from."
STREAMS = {
    "unstreamed": (False,) * len(RUN),
    "streamed": (True,) * len(RUN),
    "mixed": (True, False, True, False, True),
}


class UpdatedEngine(ScriptedEngine):
    """A scripted engine whose weights change every 40 tokens of a line, in the middle of turns too."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        place = len(request.prompt.ids)
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield replace(chunk, weight_version=f"v{place // 40}", num_cached_tokens=request.prompt.num_kept)
                place += len(chunk.ids)


@pytest.fixture
async def live(renderer: Renderer) -> AsyncIterator[Live]:
    engine = UpdatedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        yield Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)


async def ask(live: Live, session: str, messages: list[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
    """One chat; the assistant message as a client appends it."""
    answer = await live.chat(session, *messages, tools=TOOLS, stream=stream, temperature=0.7, seed=1)
    assert answer.status == 200, answer.body
    if not stream:
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    *lines, done = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
    assert done == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    calls = [
        {"id": call["id"], "type": "function", "function": call["function"]}
        for delta in deltas
        for call in delta.get("tool_calls", ())
    ]
    return {
        "role": "assistant",
        "content": "".join(delta.get("content", "") for delta in deltas),
        "reasoning_content": "".join(delta.get("reasoning_content", "") for delta in deltas),
        **({"tool_calls": calls} if calls else {}),
    }


async def run(
    live: Live, *, history: str, streams: Sequence[bool], regenerated: int | None, last: Finish | None = None
) -> str:
    """Play RUN; the turn `regenerated` is first answered with OTHER, and then asked for once more."""
    session = await live.open(history=history)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, user("Fix it.")]
    for turn, (reply, stream) in enumerate(zip(RUN, streams, strict=True)):
        if turn == regenerated:
            live.says(OTHER)
            await ask(live, session, messages, stream=not stream)
        live.says(reply, finish=last if turn == len(RUN) - 1 else None)
        message = await ask(live, session, messages, stream=stream)
        messages.append(message)
        calls = message.get("tool_calls", [])
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "ok\n"} for call in calls]
        if not calls:
            messages.append(user("Go on."))
    return session


async def sample_of(live: Live, session: str, **options: Any) -> dict[str, Any]:
    """The one sample of a session, without what tells where in its history it stands."""
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json", **options})
    assert answer.status == 200, answer.body
    (sample,) = answer.json()["samples"]
    del sample["metadata"]
    for row in sample["turns"]:
        del row["node_id"]
    found: dict[str, Any] = sample
    return found


async def tensors_of(live: Live, session: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    answer = await live.call("POST", f"/sessions/{session}/samples", {})
    assert answer.status == 200, answer.body
    tensors = load(answer.body)
    return {
        name: (str(value.dtype), value.shape, value.tobytes())
        for name, value in tensors.items()
        if name != "_samples_meta"
    }


@pytest.mark.parametrize("regenerated", [None, *range(len(RUN))])
async def test_a_run_gives_one_sample_however_it_is_kept_and_sent(live: Live, regenerated: int | None) -> None:
    samples, tensors = [], []
    for history in ("linear", "tree"):
        for streams in STREAMS.values():
            session = await run(live, history=history, streams=streams, regenerated=regenerated)
            samples.append(await sample_of(live, session))
            tensors.append(await tensors_of(live, session))
            nodes = live.manager.sessions.get(session).nodes
            assert len(nodes) == len(RUN) + (history == "tree" and regenerated is not None)
    assert all(sample == samples[0] for sample in samples)
    assert all(tensor == tensors[0] for tensor in tensors)
    assert samples[0]["status"] == "completed"
    start = len(samples[0]["tokens"]) - samples[0]["response_length"]
    sampled = {start + i for i, bit in enumerate(samples[0]["loss_mask"]) if bit}
    versions = {
        place: span["version"]
        for span in samples[0]["weight_spans"]
        for place in range(span["start"], span["end"])
        if place in sampled
    }
    assert versions == {place: f"v{place // 40}" for place in sampled}
    assert sum(samples[0]["loss_mask"]) == sum(len(live.renderer.tokenizer.encode(reply)) + 1 for reply in RUN)
    assert "nobody goes on from" not in samples[0]["response"]


async def test_the_prompts_that_the_engine_gets_are_the_same_on_a_line_and_in_a_tree(live: Live) -> None:
    for history in ("linear", "tree"):
        await run(live, history=history, streams=STREAMS["mixed"], regenerated=2)
    requests = live.engine.requests
    half = len(requests) // 2
    for one, other in zip(requests[:half], requests[half:], strict=True):
        assert one.prompt.ids == other.prompt.ids
        assert one.prompt.num_kept == other.prompt.num_kept
        assert one.params == other.params


async def test_a_cut_falls_at_the_same_place_on_a_line_and_in_a_tree(live: Live) -> None:
    sessions = [
        await run(live, history=history, streams=STREAMS["mixed"], regenerated=len(RUN) - 1)
        for history in ("linear", "tree")
    ]
    num_tokens = len((await sample_of(live, sessions[0]))["tokens"])
    first = next(len(request.prompt.ids) for request in live.engine.requests)
    for max_seq_len in range(first + 1, num_tokens + 1, 29):
        one, other = [await sample_of(live, session, max_seq_len=max_seq_len) for session in sessions]
        assert one == other
        assert len(one["tokens"]) <= max_seq_len


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
async def test_a_run_that_is_cut_short_is_marked_alike_on_a_line_and_in_a_tree(
    live: Live, reason: FinishReason
) -> None:
    samples = [
        await sample_of(
            live, await run(live, history=history, streams=streams, regenerated=None, last=Finish(reason=reason))
        )
        for history in ("linear", "tree")
        for streams in STREAMS.values()
    ]
    assert all(sample == samples[0] for sample in samples)
    assert samples[0]["status"] == {FinishReason.LENGTH: "truncated", FinishReason.ABORT: "aborted"}[reason]


async def test_a_turn_that_failed_or_was_cut_leaves_no_trace_in_the_sample(live: Live) -> None:
    """Cut by length, then asked for again: on a line it is replaced, in a tree superseded."""
    whole: list[dict[str, Any]] = []
    for history in ("linear", "tree"):
        for cut in (False, True):
            session = await live.open(history=history)
            if cut:
                live.says("half a", finish=Finish(reason=FinishReason.LENGTH))
                await ask(live, session, [user("hi")], stream=False)
                live.engine.plan(Script(ids=(10**6,)))
                assert (await live.chat(session, user("hi"), tools=TOOLS)).status == 502
            live.says("half an answer")
            await ask(live, session, [user("hi")], stream=cut)
            whole.append(await sample_of(live, session))
    assert all(sample == whole[0] for sample in whole)


# --- the contract of the miles session server -----------------------------------------------------------------------


async def miles(live: Live) -> str:
    return await live.open(compat="miles")


async def test_a_tool_message_that_answers_no_call_is_shown_in_a_session_of_miles(live: Live) -> None:
    tool = {"role": "tool", "tool_call_id": "t0", "content": "ok"}
    for options, status in (({"history": "linear"}, 400), ({"compat": "miles"}, 200)):
        session = await live.open(**options)
        live.says("one")
        reply = (await live.chat(session, user("a"))).json()["choices"][0]["message"]
        if status == 200:
            live.says("two")
        answer = await live.chat(session, user("a"), reply, tool)
        assert answer.status == status, answer.body
    text = live.renderer.tokenizer.decode(live.engine.requests[-1].prompt.ids)
    assert "<tool_response>\nok\n</tool_response>" in text


async def test_the_last_reply_without_anything_new_is_answered_by_another_one_in_a_session_of_miles(live: Live) -> None:
    session = await miles(live)
    live.says("one")
    live.says("two")
    reply = (await live.chat(session, user("a"))).json()["choices"][0]["message"]
    again = await live.chat(session, user("a"), reply)
    assert again.status == 200, again.body
    view = (await live.call("GET", f"/sessions/{session}")).json()
    first, second = view["records"]
    assert second["request"]["input_ids"][: len(first["request"]["input_ids"])] == first["request"]["input_ids"]
    line = second["request"]["input_ids"] + output_ids(second)
    assert view["metadata"]["accumulated_token_ids"] == line


@pytest.mark.parametrize("calls", [False, True])
async def test_a_streamed_chat_of_miles_is_one_event_with_all_of_the_whole_reply(live: Live, calls: bool) -> None:
    text = RUN[1] if calls else RUN[0].partition("<tool_call>")[0]
    fields: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    bodies = []
    for stream in (False, True):
        live.says(text)
        bodies.append(await live.chat(await miles(live), user("a"), stream=stream, **fields))
    whole = bodies[0].json()
    event, done = [block.removeprefix("data: ") for block in bodies[1].body.decode().split("\n\n") if block]
    chunk = json.loads(event)
    ChatCompletionChunk.model_validate_json(event, strict=True)
    (choice,), (expected,) = chunk["choices"], whole["choices"]
    numbers = [call.pop("index") for call in choice["delta"].get("tool_calls", [])]
    assert numbers == list(range(2 * calls))
    calls_of = [
        [call.pop("id") for call in one.get("tool_calls", [])] for one in (choice["delta"], expected["message"])
    ]
    assert len(calls_of[0]) == len(calls_of[1])
    assert choice.pop("delta") == expected.pop("message")
    assert choice == expected
    assert (chunk["usage"], chunk["prompt_token_ids"]) == (whole["usage"], whole["prompt_token_ids"])
    assert done == "[DONE]"


async def test_an_error_of_a_session_of_miles_is_a_text(live: Live) -> None:
    session = await miles(live)
    path = f"/sessions/{session}/v1/chat/completions"
    error = (await live.call("POST", path, b"{not json")).json()["error"]
    assert error.startswith("invalid JSON body: ")
    for stream in (False, True):
        live.engine.plan(Script(ids=(*live.renderer.tokenizer.encode("one"), 10**6)))
        answer = await live.chat(session, user("a"), stream=stream)
        text = answer.body.decode().removeprefix("data: ")
        assert json.loads(text)["error"].startswith("id_in_vocab: ")
    for turn in ("one", "two", "three"):
        live.says(turn)
    history = [user("a")]
    for _ in range(3):
        history += [(await live.chat(session, *history)).json()["choices"][0]["message"], user("more")]
    before = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert (await live.chat(session, *history[:2], user("other"))).json() == {
        "error": "rollback failed: discard_count=2 exceeds max_assistant_rollback_steps=1"
        " (stored has 6 messages, request has 3 messages)"
    }
    assert (await live.call("GET", f"/sessions/{session}")).json()["records"] == before
    other = await live.call("POST", f"/sessions/{session}/v1/messages", {"messages": []})
    assert other.json()["type"] == "error", "another protocol's errors keep their shape"


async def test_every_error_of_a_server_for_miles_is_a_text(serve: Callable[..., Any]) -> None:
    async with serve(compat=Compat.MILES) as live:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/samples"), ("POST", "/v1/chat/completions")):
            answer = await live.call(method, f"/sessions/nonexistent{path}", {} if method == "POST" else None)
            assert (answer.status, answer.json()) == (404, {"error": "session not found: session_id=nonexistent"})
        session = await live.open()
        assert isinstance((await live.chat(session)).json()["error"], str)


async def test_a_request_may_say_return_logprob_which_is_always_so(live: Live) -> None:
    session = await miles(live)
    live.says("one")
    assert (await live.chat(session, user("a"), return_logprob=True)).status == 200
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    assert record["request"]["parameters"]["recorded"] == {"return_logprob": True}
    assert record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]


async def test_a_call_of_a_record_has_its_number_as_sglang_writes_it(live: Live) -> None:
    session = await miles(live)
    live.says(RUN[1])
    message = (await live.chat(session, user("a"), tools=TOOLS)).json()["choices"][0]["message"]
    (record,) = (await live.call("GET", f"/sessions/{session}")).json()["records"]
    recorded = record["response"]["choices"][0]["message"]
    assert recorded == {**message, "tool_calls": [{**call, "index": i} for i, call in enumerate(message["tool_calls"])]}
