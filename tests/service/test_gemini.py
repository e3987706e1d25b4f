"""Gemini's routes on a real server: replies, streams, errors and records, in Google's words."""

import asyncio
import base64
import json
from itertools import pairwise
from typing import Any

import pytest

from standins.scripted_engine import Script
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason

from .conftest import END, Answer, Live, assistant, output_ids, user

MODEL = "/v1beta/models/gemini-3-pro"
LOOK = {
    "functionDeclarations": [
        {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "OBJECT", "properties": {"at": {"type": "STRING"}}},
        }
    ]
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at":  "a"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def said(*texts: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text} for text in texts]}


async def ask(
    live: Live, session: str | None, *contents: dict[str, Any], method: str = "generateContent", **fields: Any
) -> Answer:
    prefix = "" if session is None else f"/sessions/{session}"
    return await live.call("POST", f"{prefix}{MODEL}:{method}", {"contents": contents, **fields})


async def stream(live: Live, session: str | None, *contents: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    answer = await ask(live, session, *contents, method="streamGenerateContent?alt=sse", **fields)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    return [json.loads(event.removeprefix("data: ")) for event in answer.body.decode().split("\n\n") if event]


def parts_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    return list(body["candidates"][0]["content"]["parts"])


async def records(live: Live, session: str) -> list[dict[str, Any]]:
    return list((await live.call("GET", f"/sessions/{session}")).json()["records"])


async def test_a_turn_is_answered_in_google_s_shape_and_recorded(live: Live) -> None:
    session = await live.open()
    script = live.says("fine")
    config = {"temperature": 0.5, "topP": 0.9, "topK": 40.0, "seed": 3, "maxOutputTokens": 50, "stopSequences": ["!!"]}
    answer = await ask(
        live,
        session,
        said("hello"),
        systemInstruction=said("Be brief."),
        generationConfig=config,
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    )
    (record,) = await records(live, session)
    num_prompt = len(record["request"]["input_ids"])
    assert answer.status == 200
    assert answer.json() == {
        "candidates": [{"content": {"role": "model", "parts": [{"text": "fine"}]}, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {
            "promptTokenCount": num_prompt,
            "candidatesTokenCount": len(script.ids),
            "totalTokenCount": num_prompt + len(script.ids),
        },
        "modelVersion": "scripted",
        "responseId": f"gen-{record['request_id']}",
    }
    assert record["path"] == f"{MODEL}:generateContent"
    assert [(one["role"], one["content"]) for one in record["request"]["messages"]] == [
        ("system", "Be brief."),
        ("user", "hello"),
    ]
    assert record["request"]["generationConfig"] == config
    assert record["request"]["parameters"]["recorded"] == {
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}]
    }
    params = live.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 40, 3)
    assert (params.max_tokens, params.stop) == (50, ("!!",))


async def test_a_conversation_with_calls_goes_on_exactly_as_its_client_sends_it_back(live: Live) -> None:
    session = await live.open()
    one, two, three = live.says(f"{THOUGHT}I look.{CALL}{CALL}"), live.says("Both."), live.says("Bye.")
    contents = [said("hello")]
    for follow_up in (None, said("and?")):
        answer = (await ask(live, session, *contents, tools=[LOOK])).json()
        contents.append(answer["candidates"][0]["content"])
        calls = [part["functionCall"] for part in parts_of(answer) if "functionCall" in part]
        results = [{"functionResponse": {"id": c["id"], "name": "look", "response": {"output": "x"}}} for c in calls]
        contents += [{"role": "user", "parts": results}] if results else []
        contents += [follow_up] if follow_up else []
    last = (await ask(live, session, *contents, tools=[LOOK])).json()
    assert parts_of(last) == [{"text": "Bye."}]
    kept = await records(live, session)
    assert [output_ids(record) for record in kept] == [list(script.ids) for script in (one, two, three)]
    for before, after in pairwise(kept):
        line = before["request"]["input_ids"] + output_ids(before)
        assert after["request"]["input_ids"][: len(line)] == line
    (sample,) = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert sum(sample["loss_mask"]) == sum(len(script.ids) for script in (one, two, three))
    tool = next(one for one in kept[1]["request"]["messages"] if one["role"] == "tool")
    assert (tool["content"], tool["name"]) == ('{"output":"x"}', "look")


async def test_a_call_has_its_id_args_and_signature_and_thoughts_stand_where_they_are_asked_for(live: Live) -> None:
    live.says(f"{THOUGHT}I look.{CALL}{CALL}")
    answer = await ask(
        live, None, said("a"), tools=[LOOK], generationConfig={"thinkingConfig": {"includeThoughts": True}}
    )
    thought, text, first, second = parts_of(answer.json())
    assert (thought, text) == ({"text": "hm", "thought": True}, {"text": "I look."})
    signature = base64.b64decode(first.pop("thoughtSignature")).decode()
    assert signature == f"stg1.{answer.json()['responseId']}"
    assert [part["functionCall"]["args"] for part in (first, second)] == [{"at": "a"}, {"at": "a"}]
    assert len({part["functionCall"]["id"] for part in (first, second)}) == 2
    live.says(f"{THOUGHT}Fine.")
    assert parts_of((await ask(live, None, said("a"))).json()) == [{"text": "Fine."}]


@pytest.mark.parametrize("text", ["fine", "", f"{THOUGHT}I look.{CALL}{CALL}", f"{CALL}", "<tool_call>broken", THOUGHT])
@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize("framing", ["sse", "list"])
async def test_a_streamed_reply_is_the_whole_one(live: Live, text: str, shows: bool, framing: str) -> None:
    fields = {"tools": [LOOK], "generationConfig": {"thinkingConfig": {"includeThoughts": shows}}}
    live.says(text)
    whole = (await ask(live, None, said("a"), **fields)).json()
    live.says(text)
    if framing == "sse":
        events = await stream(live, None, said("a"), **fields)
    else:
        answer = await ask(live, None, said("a"), method="streamGenerateContent", **fields)
        assert answer.headers["content-type"].startswith("application/json")
        events = answer.json()
    assert all(parts_of(event) for event in events)
    assert {event["responseId"] for event in events} == {events[-1]["responseId"]}
    assert [event["candidates"][0].get("finishReason") for event in events] == [*[None] * (len(events) - 1), "STOP"]
    assert events[-1]["usageMetadata"] == whole["usageMetadata"]
    assert joined([part for event in events for part in parts_of(event)]) == joined(parts_of(whole))


def joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of a reply, texts of one kind that follow each other as one, without what differs from turn to turn."""
    made: list[dict[str, Any]] = []
    for part in parts:
        if "functionCall" in part:
            call = {name: value for name, value in part["functionCall"].items() if name != "id"}
            made.append({"functionCall": call, "is_signed": "thoughtSignature" in part})
        elif made and "text" in made[-1] and made[-1].get("thought") == part.get("thought"):
            made[-1]["text"] += part["text"]
        elif part["text"]:
            made.append(dict(part))
    return made


async def test_a_client_that_keeps_each_event_as_a_content_goes_on(live: Live) -> None:
    """As Google's own package for Python does."""
    session = await live.open()
    live.says("one two three")
    live.says("bye")
    events = await stream(live, session, said("a"))
    replayed = [event["candidates"][0]["content"] for event in events]
    (text,) = [part["text"] for content in replayed for part in content["parts"] if part["text"]]
    replayed[:1] = [said(text[:3], role="model"), said(text[3:5], text[5:], role="model")]
    answer = await ask(live, session, said("a"), *replayed, said("b"))
    assert answer.status == 200
    first, second = await records(live, session)
    assert second["request"]["messages"][1]["content"] == "one two three"
    line = first["request"]["input_ids"] + output_ids(first)
    assert second["request"]["input_ids"][: len(line)] == line


async def test_a_result_without_an_id_answers_the_first_open_call_of_its_name(live: Live) -> None:
    session = await live.open()
    live.says(f"{CALL}{CALL}")
    live.says("bye")
    answer = (await ask(live, session, said("a"), tools=[LOOK])).json()
    result = {"functionResponse": {"name": "look", "response": {"n": 1}}}
    contents = (said("a"), answer["candidates"][0]["content"], {"role": "function", "parts": [result, result]})
    assert (await ask(live, session, *contents, tools=[LOOK])).status == 200
    calls = [part["functionCall"]["id"] for part in parts_of(answer)]
    kept = (await records(live, session))[1]["request"]["messages"]
    assert [one["tool_call_id"] for one in kept if one["role"] == "tool"] == calls


async def test_logprobs_are_the_record_s(live: Live) -> None:
    session = await live.open()
    script = live.says("fine")
    config = {"responseLogprobs": True, "logprobs": 2}
    answer = await ask(live, session, said("a"), generationConfig=config)
    found = answer.json()["candidates"][0]["logprobsResult"]
    (record,) = await records(live, session)
    kept = record["response"]["choices"][0]["meta_info"]["output_token_logprobs"]
    assert [(one["logProbability"], one["tokenId"]) for one in found["chosenCandidates"]] == [
        (logprob, id_) for logprob, id_, _ in kept
    ]
    live.engine.plan(Script(ids=script.ids, finish=script.finish))
    events = await stream(live, None, said("a"), generationConfig=config)
    results = [event["candidates"][0].get("logprobsResult", {}) for event in events]
    ids = [one["tokenId"] for result in results for one in result.get("chosenCandidates", ())]
    assert ids == list(script.ids)


@pytest.mark.parametrize(
    ("reason", "said_so"),
    [(FinishReason.LENGTH, "MAX_TOKENS"), (FinishReason.ABORT, "OTHER"), (FinishReason.STOP, "STOP")],
)
async def test_the_finish_is_google_s(live: Live, reason: FinishReason, said_so: str) -> None:
    for streams in (False, True):
        live.says("fine", finish=Finish(reason=reason, matched=END if reason is FinishReason.STOP else None))
        if streams:
            assert (await stream(live, None, said("a")))[-1]["candidates"][0]["finishReason"] == said_so
            continue
        answer = await ask(live, None, said("a"))
        assert answer.json()["candidates"][0]["finishReason"] == said_so
        assert answer.headers.get("x-stenograph-finish") == ("abort" if reason is FinishReason.ABORT else None)


async def test_a_session_goes_on_from_chat_to_gemini_and_back(live: Live) -> None:
    session = await live.open()
    for text in ("one", "two", "three"):
        live.says(text)
    await live.chat(session, user("a"))
    await ask(live, session, said("a"), said("one", role="model"), said("b"))
    await live.chat(session, user("a"), assistant("one"), user("b"), assistant("two"), user("c"))
    kept = await records(live, session)
    assert [record["path"].split("/")[1] for record in kept] == ["v1", "v1beta", "v1"]
    (sample,) = (await live.call("POST", f"/sessions/{session}/samples", {"format": "json"})).json()["samples"]
    assert sum(sample["loss_mask"]) == sum(len(output_ids(record)) for record in kept)


async def test_tokens_are_counted_as_the_turn_has_them(live: Live) -> None:
    session = await live.open()
    contents = [said("a")]
    for _ in range(2):
        counted = await ask(live, session, *contents, method="countTokens", tools=[LOOK])
        whole = {"generateContentRequest": {"model": "models/m", "contents": contents, "tools": [LOOK]}}
        again = await live.call("POST", f"/sessions/{session}{MODEL}:countTokens", whole)
        live.says("fine")
        answer = (await ask(live, session, *contents, tools=[LOOK])).json()
        assert counted.json() == again.json() == {"totalTokens": answer["usageMetadata"]["promptTokenCount"]}
        contents += [answer["candidates"][0]["content"], said("b")]
    refused = await live.call("POST", f"{MODEL}:countTokens", {"generateContentRequest": {"contents": []}})
    assert (refused.status, violated(refused)) == (400, "/generateContentRequest/contents")
    refused = await live.call("POST", f"{MODEL}:countTokens", {"generateContentRequest": {}, "contents": []})
    assert (refused.status, violated(refused)) == (400, "/generateContentRequest")


# --- errors ---------------------------------------------------------------------------------------------------------


def violated(answer: Answer) -> str | None:
    """The field that an error names."""
    found = [
        one["fieldViolations"][0]["field"] for one in answer.json()["error"]["details"] if "fieldViolations" in one
    ]
    return found[0] if found else None


PARTS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"text": "a", "functionCall": {"name": "f"}}, ""),
    ({"inlineData": {"mimeType": "image/png", "data": ""}}, "/inlineData"),
    ({"functionCall": {"name": "f"}}, "/functionCall"),
    ({"functionResponse": {"name": "f", "response": {}}}, "/functionResponse"),
    ({"functionResponse": {"name": "f", "response": [1]}}, "/functionResponse/response"),
    ({"functionResponse": {"name": "f"}}, "/functionResponse/response"),
    ({"text": "a", "thought": True}, "/thought"),
    ({"txt": "a"}, "/txt"),
    ({"text": 1}, "/text"),
]

REQUESTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"contents": []}, "/contents", "empty"),
    ({"contents": [{"parts": []}]}, "/contents/0/parts", "at least one part"),
    ({"contents": [{"role": "assistant", "parts": [{"text": "a"}]}]}, "/contents/0/role", "model"),
    ({"SystemInstruction": {}}, "/SystemInstruction", "Did you mean 'systemInstruction'?"),
    ({"generationConfig": {"maxOutputToken": 1}}, "/generationConfig/maxOutputToken", "'maxOutputTokens'"),
    ({"generationConfig": {"hm_hm": 1}}, "/generationConfig/hm_hm", "--unknown-fields record"),
    ({"generationConfig": {"topK": 1, "top_k": 2}}, "/generationConfig/top_k", "comes twice"),
    ({"generationConfig": {"temperature": "hot"}}, "/generationConfig/temperature", "float"),
    ({"generationConfig": {"topP": 2}}, "/generationConfig/topP", "topP must be in (0, 1], got 2"),
    ({"generationConfig": {"topK": 1.5}}, "/generationConfig/topK", "whole number"),
    ({"generationConfig": {"candidateCount": 2}}, "/generationConfig/candidateCount", "one reply"),
    ({"generationConfig": {"stopSequences": [""]}}, "/generationConfig/stopSequences", "empty"),
    ({"generationConfig": {"logprobs": 3}}, "/generationConfig/logprobs", "responseLogprobs"),
    ({"generationConfig": {"speechConfig": {}}}, "/generationConfig/speechConfig", "only text"),
    ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "/generationConfig/responseModalities", "only text"),
    ({"generationConfig": {"responseMimeType": "text/html"}}, "/generationConfig/responseMimeType", "text/html"),
    ({"generationConfig": {"responseSchema": {}}}, "/generationConfig/responseMimeType", "application/json"),
    ({"generationConfig": {"maxOutputTokens": 5000}}, "/generationConfig/maxOutputTokens", "exceed the maximum"),
    ({"contents": [said("x" * 5000)]}, "/contents", "The input token count (5"),
    ({"cachedContent": "cachedContents/1"}, "/cachedContent", "not cached by name"),
    ({"tools": [{"googleSearch": {}}]}, "/tools/0/googleSearch", "cannot be shown"),
    ({"tools": [{"functionDeclarations": [{"name": ""}]}]}, "/tools/0/functionDeclarations/0/name", "length"),
    (
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        "/toolConfig/functionCallingConfig/mode",
        "needs functions",
    ),
    (
        {"tools": [LOOK], "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}},
        "/toolConfig/functionCallingConfig/mode",
        "VALIDATED is not supported",
    ),
    (
        {"tools": [LOOK], "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["x"]}}},
        "/toolConfig/functionCallingConfig/allowedFunctionNames",
        "not declared",
    ),
]


@pytest.mark.parametrize(("part", "pointer"), PARTS)
async def test_a_bad_part_is_400_with_its_pointer(live: Live, part: dict[str, Any], pointer: str) -> None:
    answer = await ask(live, None, {"parts": [{"text": "b"}, part]})
    assert (answer.status, violated(answer)) == (400, f"/contents/0/parts/1{pointer}")


@pytest.mark.parametrize(("fields", "pointer", "message"), REQUESTS)
async def test_a_bad_request_is_400_with_its_pointer(
    live: Live, fields: dict[str, Any], pointer: str, message: str
) -> None:
    answer = await live.call("POST", f"{MODEL}:generateContent", {"contents": [said("a")], **fields})
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    assert violated(answer) == pointer
    assert message in error["message"]


async def test_a_stream_has_one_of_two_framings(live: Live) -> None:
    refused = await ask(live, None, said("a"), method="streamGenerateContent?alt=proto")
    assert (refused.status, "alt must be 'sse'" in refused.json()["error"]["message"]) == (400, True)
    live.says("fine")
    assert (await ask(live, None, said("a"), method="streamGenerateContent?alt=json")).json()[0]["candidates"]


async def test_errors_have_google_s_shape(live: Live) -> None:
    session = await live.open()
    live.says("fine", paused=True)
    turn = asyncio.ensure_future(ask(live, session, said("a")))
    await live.engine.begun(1)
    busy = await ask(live, session, said("a"))
    live.engine.step(10)
    await turn
    for answer, status, name, reason in (
        (busy, 409, "ABORTED", "SESSION_BUSY"),
        (await ask(live, "none", said("a")), 404, "NOT_FOUND", "SESSION_NOT_FOUND"),
        (await live.call("POST", f"{MODEL}:generateContent", b"{"), 400, "INVALID_ARGUMENT", "INVALID_JSON"),
        (await live.call("GET", f"{MODEL}:generateContent"), 405, "UNIMPLEMENTED", "METHOD_NOT_ALLOWED"),
    ):
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["status"]) == (status, status, name)
        assert error["details"][0]["reason"] == reason


async def test_a_stream_that_fails_ends_with_the_error_and_no_finish(live: Live) -> None:
    ids = tuple(live.renderer.tokenizer.encode("good day"))
    live.engine.plan(Script(ids=ids, error=UpstreamUnreachable("It broke.")))
    answer = await ask(live, None, said("a"), method="streamGenerateContent?alt=sse")
    *events, last = answer.body.decode().strip().split("\n\n")
    assert all("finishReason" not in event for event in events)
    assert json.loads(last)["error"]["message"] == "It broke."
    live.engine.plan(Script(ids=ids, error=UpstreamUnreachable("It broke.")))
    answer = await ask(live, None, said("a"), method="streamGenerateContent")
    assert answer.json()[-1]["error"]["status"] == "INTERNAL"
