"""OpenAI's Responses on a real socket: sessions, what clients send back, lost ends, the official SDK."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from standins.scripted_engine import Script
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason
from stenograph.http.keep_alive import BEGIN_S, SILENCE_S

from ..openresponses import check_event, check_response
from .conftest import END, Answer, Live, assistant, output_ids, user
from .test_keep_alive import Timed, anext_answer, timed
from .test_sglang_chat import Rig, connect, rig

__all__ = ["connect", "rig", "timed"]

EVENT = TypeAdapter[Any](ResponseStreamEvent)
BASH = {
    "type": "function",
    "name": "bash",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
CHAT_BASH = {"type": "function", "function": {name: value for name, value in BASH.items() if name != "type"}}
ONE_CALL = (
    "<think>\nLook first.\n</think>\n\nI will look.\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls -a", "depth": 1.0}}\n</tool_call>'
)
TWO_CALLS = (
    "<think>\nTwo more.\n</think>\n\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command":"cat README.md"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "git status"}}\n</tool_call>'
)
TEXT = " It is naïve ☃.\n"
RUN = (ONE_CALL, TWO_CALLS, TEXT, "<think>\nSay goodbye.\n</think>\n\nBye.")
"""Replies of a run with one call, two parallel ones, a text with space around it, and a second user turn."""


async def respond(live: Live, session: str | None, items: Any, **fields: Any) -> Answer:
    prefix = "" if session is None else f"/sessions/{session}"
    answer = await live.call("POST", f"{prefix}/v1/responses", {"input": items, **fields})
    if answer.status == 200 and not fields.get("stream"):
        Response.model_validate_json(answer.body, strict=True)
        check_response(answer.json())
    return answer


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, each held against the SDK's type."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    data = [block.split("\ndata: ")[1] for block in answer.body.decode().split("\n\n") if block]
    for one in data:
        EVENT.validate_json(one, strict=True)
        check_event(json.loads(one))
    return [json.loads(one) for one in data]


def result(call: dict[str, Any], output: str = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


async def ledger(live: Live, session: str) -> list[dict[str, Any]]:
    return list((await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"])


async def check_exact(live: Live, session: str, num_turns: int) -> None:
    """One strand, in which each prompt begins with all ids before it, and one sample with all that was sampled."""
    view = (await live.call("GET", f"/sessions/{session}")).json()
    assert (len(view["metadata"]["strands"]), len(view["records"])) == (1, num_turns)
    before: list[int] = []
    for record, asked in zip(view["records"], live.engine.requests, strict=True):
        assert list(asked.prompt.ids)[: len(before)] == before
        before = list(asked.prompt.ids) + output_ids(record)
    assert view["metadata"]["accumulated_token_ids"] == before
    answer = await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})
    (sample,) = answer.json()["samples"]
    assert sum(sample["loss_mask"]) == sum(len(output_ids(record)) for record in view["records"])


# --- what clients send back -----------------------------------------------------------------------------------------


def as_it_came(item: dict[str, Any]) -> dict[str, Any]:
    return item


def as_codex(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "content": None} if item["type"] == "reasoning" else item


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    """As opencode does: no ids, no reasoning text, argument JSON spelled anew."""
    item = {name: value for name, value in item.items() if name not in ("id", "status")}
    match item["type"]:
        case "reasoning":
            item.pop("content")
        case "message":
            return {"role": "assistant", "content": [{"type": "output_text", "text": item["content"][0]["text"]}]}
        case _:
            item["arguments"] = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
    return item


def as_langchain(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "message":
        content = [{name: part[name] for name in ("type", "text", "annotations")} for part in item["content"]]
        return {"type": "message", "role": "assistant", "id": item["id"], "content": content}
    return item


def as_pydantic(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": "assistant", "content": item["content"][0]["text"]}
    return {name: value for name, value in item.items() if name not in ("id", "status")}


def as_inspect(item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "summary": [], "content": []} if item["type"] == "reasoning" else item


HABITS = [as_it_came, as_codex, without_ids, as_langchain, as_pydantic, as_inspect]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("habit", HABITS)
async def test_what_a_client_replays_is_known_again(
    live: Live, habit: Callable[[dict[str, Any]], dict[str, Any]], stream: bool
) -> None:
    session = await live.open()
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "Look."}]
    fields = {"instructions": "Be brief.", "tools": [BASH], "include": ["reasoning.encrypted_content"]}
    for text in RUN:
        live.says(text)
        answer = await respond(live, session, items, stream=stream, **fields)
        assert answer.status == 200, answer.body
        body = events_of(answer)[-1]["response"] if stream else answer.json()
        items += map(habit, body["output"])
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        items += map(result, calls)
        if not calls:
            items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]})
    await check_exact(live, session, len(RUN))
    assert [row["dialect"] for row in await ledger(live, session)] == ["responses"] * len(RUN)


async def test_only_new_items_go_on_after_a_previous_response(live: Live) -> None:
    session = await live.open()
    items: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]
    previous: str | None = None
    for text in RUN:
        live.says(text)
        answer = await respond(live, session, items, previous_response_id=previous, tools=[BASH])
        assert answer.status == 200, answer.body
        body = answer.json()
        assert body["previous_response_id"] == previous
        previous = body["id"]
        calls = [item for item in body["output"] if item["type"] == "function_call"]
        items = [result(call) for call in calls] or [{"role": "user", "content": "And?"}]
    await check_exact(live, session, len(RUN))


async def test_references_go_on_as_the_items_do(live: Live) -> None:
    session = await live.open()
    live.says(ONE_CALL)
    live.says(TEXT)
    asked = {"role": "user", "content": "Look."}
    first = (await respond(live, session, [asked], tools=[BASH])).json()
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    again = await respond(live, session, [asked, *references, result(first["output"][-1])], tools=[BASH])
    assert again.status == 200, again.body
    await check_exact(live, session, 2)


async def test_any_turn_of_a_tree_can_be_gone_on_after(live: Live) -> None:
    session = await live.open(history="tree")
    for text in ("one", "two", "other"):
        live.says(text)
    first = (await respond(live, session, "a")).json()["id"]
    await respond(live, session, "b", previous_response_id=first)
    assert (await respond(live, session, "c", previous_response_id=first)).status == 200
    nodes = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["tree"]["nodes"]
    assert [node["parent"] for node in nodes] == [None, 0, 0]


async def test_a_response_that_is_not_there_is_refused(live: Live) -> None:
    session, other = await live.open(), await live.open()
    for text in ("one", "two"):
        live.says(text)
    first = (await respond(live, session, "a")).json()["id"]
    replaced = await respond(live, session, "a")
    assert replaced.json()["id"] != first
    for where, named in ((session, first), (other, replaced.json()["id"]), (session, "resp_1")):
        error = (await respond(live, where, "b", previous_response_id=named)).json()["error"]
        assert (error["code"], error["param"]) == ("previous_response_not_found", "/previous_response_id")
        assert (await live.call("GET", f"/sessions/{where}/v1/responses/{named}")).status == 404
    assert (await respond(live, None, "b", previous_response_id=first)).json()["error"]["code"] == "invalid_request"
    assert (await live.call("GET", f"/v1/responses/{first}")).status == 404


async def test_a_session_goes_on_from_chat_to_responses_and_back(live: Live) -> None:
    session = await live.open()
    for text in (ONE_CALL, TEXT, "Bye."):
        live.says(text)
    chat = await live.chat(session, user("Look."), tools=[CHAT_BASH])
    message = chat.json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look first."}]},
        {"role": "assistant", "content": message["content"]},
        {"type": "function_call", "call_id": call["id"], **call["function"]},
        {"type": "function_call_output", "call_id": call["id"], "output": "README.md"},
    ]
    second = await respond(live, session, items, tools=[BASH])
    assert second.status == 200, second.body
    tool = {"role": "tool", "tool_call_id": call["id"], "content": "README.md"}
    said = assistant(second.json()["output"][0]["content"][0]["text"])
    last = await live.chat(session, user("Look."), message, tool, said, user("And?"), tools=[CHAT_BASH])
    assert last.status == 200, last.body
    await check_exact(live, session, 3)
    assert [row["dialect"] for row in await ledger(live, session)] == ["chat", "responses", "chat"]


async def test_a_session_goes_on_from_chat_to_messages_to_responses(live: Live) -> None:
    session = await live.open()
    for text in (ONE_CALL, TWO_CALLS, TEXT):
        live.says(text)
    chat = await live.chat(session, user("Look."), tools=[CHAT_BASH])
    first = chat.json()["choices"][0]["message"]
    (call,) = first["tool_calls"]
    use = {"type": "tool_use", "id": call["id"], "name": "bash", "input": json.loads(call["function"]["arguments"])}
    messages = [
        user("Look."),
        {"role": "assistant", "content": [{"type": "text", "text": first["content"]}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"}]},
    ]
    tool = {"name": "bash", "description": BASH["description"], "input_schema": BASH["parameters"]}
    body = {"model": "m", "max_tokens": 500, "messages": messages, "tools": [tool]}
    second = (await live.call("POST", f"/sessions/{session}/v1/messages", body)).json()
    thought, *uses = second["content"]
    items = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": first["content"]},
        {"type": "function_call", "call_id": call["id"], **call["function"]},
        {"type": "function_call_output", "call_id": call["id"], "output": "ok"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought["thinking"]}]},
        *(
            {"type": "function_call", "call_id": one["id"], "name": "bash", "arguments": json.dumps(one["input"])}
            for one in uses
        ),
        *({"type": "function_call_output", "call_id": one["id"], "output": "ok"} for one in uses),
    ]
    third = await respond(live, session, items, tools=[BASH])
    assert third.status == 200, third.body
    await check_exact(live, session, 3)
    assert [row["dialect"] for row in await ledger(live, session)] == ["chat", "messages", "responses"]


async def test_calls_of_namespaces_and_custom_tools_go_on_exactly_and_are_held_in_their_own_form(live: Live) -> None:
    session = await live.open()
    tools = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "fs", "description": "", "tools": [BASH]},
    ]
    live.says(
        '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\n"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "fs__bash", "arguments": {"command": "ls"}}\n</tool_call>'
    )
    live.says("Done.")
    asked = {"role": "user", "content": "Patch."}
    first = await respond(live, session, [asked], tools=tools)
    custom, spaced = first.json()["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** Begin\n")
    assert (spaced["type"], spaced["namespace"], spaced["name"]) == ("function_call", "fs", "bash")
    results = [{**result(custom), "type": "custom_tool_call_output"}, result(spaced)]
    assert (await respond(live, session, [asked, custom, spaced, *results], tools=tools)).status == 200
    await check_exact(live, session, 2)
    held = await live.call("GET", f"/sessions/{session}/v1/responses/{first.json()['id']}")
    assert (held.status, held.body) == (200, first.body)
    by_header = await live.call("GET", f"/v1/responses/{first.json()['id']}", x_session_id=session)
    assert by_header.body == first.body


# --- what a response says of its request -----------------------------------------------------------------------------

NOTHING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    "reasoning": None,
    "store": True,
    "background": False,
    "service_tier": "default",
    "safety_identifier": None,
    "prompt_cache_key": None,
    "metadata": {},
}
"""What a response has whose request asks for nothing, on a session."""
RULED = {"default": {"presence_penalty": 0.5}, "force": {"temperature": 0.7, "top_p": 0.5}}


async def bodies(live: Live, session: str | None, **fields: Any) -> list[dict[str, Any]]:
    """The response of a request as it comes whole, as it is held, and as the first and last event have it."""
    live.says("one")
    live.says("one")
    whole = (await respond(live, session, "a", **fields)).json()
    path = f"/sessions/{session}/v1/responses/{whole['id']}"
    held = [] if session is None else [(await live.call("GET", path)).json()]
    events = events_of(await respond(live, session, "a", stream=True, **fields))
    return [whole, *held, events[0]["response"], events[-1]["response"]]


async def test_a_response_has_the_numbers_that_were_used(live: Live) -> None:
    session = await live.open(sampling=RULED)
    asked = {"temperature": 1.5, "frequency_penalty": -1, "top_logprobs": 2, "max_output_tokens": 9}
    used = {"temperature": 0.7, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": -1.0}
    for body in await bodies(live, session, **asked):
        said = {name: body[name] for name in NOTHING}
        assert said == {**NOTHING, **used, "top_logprobs": 2, "max_output_tokens": 9}
    assert {request.params.temperature for request in live.engine.requests} == {0.7}


async def test_a_response_repeats_what_was_recorded_of_its_request(live: Live) -> None:
    schema = {"type": "object", "properties": {}}
    fields = {
        "max_tool_calls": 3,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "json_schema", "name": "it", "schema": schema}},
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    kept = {"type": "json_schema", "name": "it", "description": None, "schema": schema, "strict": True}
    sent = {**fields, "service_tier": "flex", "store": False, "background": False, "truncation": "disabled"}
    for session in (await live.open(), None):
        for body in await bodies(live, session, **sent):
            text = {"verbosity": "low", "format": kept}
            assert {name: body[name] for name in NOTHING} == {
                **NOTHING,
                **fields,
                "text": text,
                "store": session is not None,
            }


async def test_what_is_of_another_type_than_a_response_has_is_only_recorded(live: Live) -> None:
    sent = {"max_tool_calls": "3", "safety_identifier": 1, "prompt_cache_key": [], "metadata": {"a": 1}}
    for body in await bodies(live, await live.open(), **sent):
        assert {name: body[name] for name in NOTHING} == NOTHING


async def test_a_response_is_completed_when_its_turn_was_kept(live: Live) -> None:
    session = await live.open()
    whole, held, begun, ended = await bodies(live, session)
    assert whole["created_at"] <= whole["completed_at"] == held["completed_at"]
    assert begun["completed_at"] is None
    assert ended["created_at"] == begun["created_at"] <= ended["completed_at"]
    live.says("cut", finish=Finish(reason=FinishReason.LENGTH))
    assert (await respond(live, session, "b")).json()["completed_at"] is None


# --- ends that are lost, streams that break -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_reply_once_more_is_an_echo_without_a_generation(live: Live, stream: bool) -> None:
    session = await live.open()
    live.says(ONE_CALL)
    asked = {"role": "user", "content": "Look."}
    first = (await respond(live, session, [asked], tools=[BASH])).json()
    answer = await respond(live, session, [asked, *first["output"]], tools=[BASH], stream=stream)
    body = events_of(answer)[-1]["response"] if stream else answer.json()
    assert (answer.status, body["status"], body["output"]) == (200, "completed", [])
    total = first["usage"]["total_tokens"]
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (total, 0)
    rows = await ledger(live, session)
    assert [(row["kind"], row["turn"], row["rule"]) for row in rows] == [("main", 0, None), ("echo", None, "echo")]


async def test_after_an_echo_the_line_goes_on(live: Live) -> None:
    session = await live.open()
    for text in ("one", "two"):
        live.says(text)
    asked, more = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    first = (await respond(live, session, [asked])).json()["output"]
    assert (await respond(live, session, [asked, *first])).json()["output"] == []
    second = (await respond(live, session, [asked, *first, more])).json()["output"]
    await check_exact(live, session, 2)
    error = (await respond(live, session, [asked, *first])).json()["error"]
    assert error["code"] == "history_mismatch", "an older reply is none that was lost"
    chat = await live.chat(session, user("a"), assistant("one"), user("b"), assistant("two"))
    assert chat.json()["error"]["code"] == "history_mismatch"
    assert second


async def test_a_sibling_s_reply_in_a_tree_is_no_echo_of_the_last_one(live: Live) -> None:
    session = await live.open(history="tree")
    for text in ("one", "another"):
        live.says(text)
    asked = {"role": "user", "content": "a"}
    older, newer = [(await respond(live, session, [asked])).json()["output"] for _ in range(2)]
    error = (await respond(live, session, [asked, *older])).json()["error"]
    assert error["code"] == "history_mismatch"
    assert (await respond(live, session, [asked, *newer])).json()["output"] == []


async def test_a_retry_that_appends_what_was_done_before_the_stream_broke_attaches(live: Live) -> None:
    session = await live.open()
    asked = {"role": "user", "content": "Look."}
    ids = tuple(live.renderer.tokenizer.encode("<think>\nHm.\n</think>\n\nI wi"))
    live.engine.plan(Script(ids=ids, error=UpstreamUnreachable("It broke.")))
    broken = events_of(await respond(live, session, [asked], stream=True))
    assert (broken[-1]["type"], broken[-1]["response"]["error"]["code"]) == ("response.failed", "server_error")
    done = [event["item"] for event in broken if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning"]
    live.says(ONE_CALL)
    live.says(TEXT)
    again = (await respond(live, session, [asked, *done], tools=[BASH])).json()["output"]
    items = [asked, *done, *again, result(again[-1])]
    assert (await respond(live, session, items, tools=[BASH])).status == 200
    await check_exact_after_failure(live, session)


async def check_exact_after_failure(live: Live, session: str) -> None:
    """As `check_exact`, of a session whose first request failed."""
    del live.engine.requests[0]
    await check_exact(live, session, 2)


async def test_a_cut_reply_is_incomplete_and_an_aborted_one_has_its_header(live: Live) -> None:
    session = await live.open()
    live.says("cut", finish=Finish(reason=FinishReason.LENGTH))
    body = (await respond(live, session, "a", max_output_tokens=3)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    live.says("cut", finish=Finish(reason=FinishReason.ABORT))
    aborted = await respond(live, session, "b")
    assert (aborted.json()["status"], aborted.headers["x-stenograph-finish"]) == ("incomplete", "abort")
    held = await live.call("GET", f"/sessions/{session}/v1/responses/{aborted.json()['id']}")
    assert held.headers["x-stenograph-finish"] == "abort"


async def test_a_prompt_that_does_not_fit_has_openais_code(live: Live) -> None:
    error = (await respond(live, None, "x" * 20_000)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "/input")
    assert error["message"].startswith("This model's maximum context length is ")


async def test_a_websocket_is_refused_so_that_clients_send_the_request(live: Live) -> None:
    session = await live.open()
    path = f"/sessions/{session}/v1/responses"
    answer = await live.call("GET", path, upgrade="websocket", connection="Upgrade", sec_websocket_version="13")
    assert (answer.status, answer.json()["error"]["code"]) == (426, "upgrade_required")
    assert (await live.call("GET", path)).status == 405
    assert (await live.call("DELETE", f"{path}/resp_1")).status == 405


async def test_a_compaction_asked_for_without_tools_is_followed_by_the_main_lines_next_chapter(live: Live) -> None:
    session = await live.open()
    for text in (ONE_CALL, "A summary.", "Bye."):
        live.says(text)
    asked = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Look."}]
    first = (await respond(live, session, asked, tools=[BASH])).json()["output"]
    summarize = [*asked, *first, result(first[-1]), {"role": "user", "content": "Summarize."}]
    kind = {"x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})}
    path = f"/sessions/{session}/v1/responses"
    assert (await live.call("POST", path, {"input": summarize}, **kind)).status == 200
    goes_on = [asked[0], {"role": "user", "content": "Go on from this: A summary."}]
    assert (await respond(live, session, goes_on, tools=[BASH])).status == 200
    strands = (await live.call("GET", f"/sessions/{session}")).json()["metadata"]["strands"]
    assert [(one["kind"], one["continues"]) for one in strands] == [("main", None), ("compaction", 0), ("main", 1)]


async def test_a_reply_that_an_engine_wrote_for_chats_is_written_anew(rig: Rig) -> None:
    """SGLang parses calls itself, and numbers them by the messages that it is given."""
    session = await rig.open()
    path = f"/sessions/{session}/v1/responses"
    ids = (*rig.renderer.tokenizer.encode("<x>"), END)
    rig.sglang.plan(rig.script("", ids=ids, reasoning="why", tool_calls=(("call_7", "bash", '{"command": "ls"}'),)))
    rig.sglang.plan(rig.script("Bye."))
    first = (await rig.call("POST", path, {"input": "go", "tools": [BASH]})).json()
    assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
    items = [{"role": "user", "content": "go"}, *first["output"], result(first["output"][1], "a")]
    answer = await rig.call("POST", path, {"input": items, "tools": [BASH], "stream": True})
    assert events_of(answer)[-1]["response"]["output"][0]["content"][0]["text"] == "Bye."
    call = {"id": "call_7", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    assert rig.sglang.requests[1].json["messages"] == [
        user("go"),
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "content": "a", "tool_call_id": "call_7"},
    ]
    assert len(await rig.records(session)) == 2


# --- silence --------------------------------------------------------------------------------------------------------


async def test_a_silent_stream_is_in_progress_again_and_again(timed: Timed) -> None:
    timed.live.says("good day", paused=True)
    asking = asyncio.create_task(anext_answer(timed, "/v1/responses", {"input": "hello", "stream": True}))
    await timed.live.engine.begun(1)
    timed.clock.advance(BEGIN_S)
    answer = await asking
    head = await answer.content.readuntil(b"\n\n") + await answer.content.readuntil(b"\n\n")
    timed.clock.advance(SILENCE_S)
    head += await answer.content.readuntil(b"\n\n")
    timed.live.engine.step(100)
    whole = Answer(status=200, headers=answer.headers, body=head + await answer.read())
    kinds = [event["type"] for event in events_of(whole)]
    assert kinds[:4] == ["response.created", *["response.in_progress"] * 2, "response.output_item.added"]
    assert kinds[-1] == "response.completed"


# --- the official SDK -----------------------------------------------------------------------------------------------


def sdk(live: Live, session: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/sessions/{session}/v1", api_key="sk-test", max_retries=0)


async def test_the_sdk_accumulates_a_stream_to_what_the_session_holds(live: Live) -> None:
    session = await live.open()
    live.says(ONE_CALL)
    async with sdk(live, session) as client:
        async with client.responses.stream(model="m", input="Look.", tools=[BASH]) as stream:  # type: ignore[list-item]
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        held = await client.responses.retrieve(final.id)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert final.output_text == "I will look."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    dumped = [json.loads(item.model_dump_json(exclude_unset=True)) for item in held.output]
    accumulated = [json.loads(item.model_dump_json(exclude_unset=True)) for item in final.output]
    for item in accumulated:  # the SDK's own
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    assert accumulated == dumped
    assert held.usage == final.usage


async def test_the_sdk_goes_on_after_a_previous_response(live: Live) -> None:
    session = await live.open()
    live.says(ONE_CALL)
    live.says(TEXT)
    async with sdk(live, session) as client:
        first = await client.responses.create(model="m", input="Look.", tools=[BASH])  # type: ignore[call-overload]
        call = next(item for item in first.output if item.type == "function_call")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "README.md"}
        second = await client.responses.create(model="m", input=[output], previous_response_id=first.id, tools=[BASH])  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="x", previous_response_id="resp_1")
    assert second.output_text == TEXT
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "/previous_response_id")
    await check_exact(live, session, 2)


async def test_the_sdks_whole_replay_is_known_again(live: Live) -> None:
    """It sends back all that it was given, with its own fields besides."""
    session = await live.open()
    live.says(ONE_CALL)
    live.says(TEXT)
    items: list[Any] = [{"role": "user", "content": "Look."}]
    async with sdk(live, session) as client:
        async with client.responses.stream(model="m", input=items, tools=[BASH]) as stream:  # type: ignore[list-item]
            first = await stream.get_final_response()
        items += first.output
        items.append(result({"call_id": first.output[-1].call_id}))  # type: ignore[union-attr]
        second = await client.responses.create(model="m", input=items, tools=[BASH])  # type: ignore[list-item]
    assert second.output_text == TEXT
    await check_exact(live, session, 2)


async def test_an_empty_reply_can_be_sent_back(live: Live) -> None:
    session = await live.open()
    live.engine.plan(Script(ids=(END,), finish=Finish(reason=FinishReason.STOP, matched=END)))
    live.says("Bye.")
    asked, more = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    first = (await respond(live, session, [asked])).json()["output"]
    assert [item["content"][0]["text"] for item in first] == [""]
    assert (await respond(live, session, [asked, *first, more])).status == 200
    await check_exact(live, session, 2)
