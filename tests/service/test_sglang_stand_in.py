"""The stand-in of SGLang answers in the shapes that a real one was recorded with, but for what is named here.

Each recorded request is sent to a stand-in that plays what was sampled; its status, its keys and the types of its
values are the recorded ones. What a real one does beyond shapes, and the stand-in does not, is in docs/engines.md.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.sglang_server import CHAT_PATH, GENERATE_PATH, SERVER_INFO, SGLangServer

from .shapes import differences, parsed, shape

FOLDER = Path(__file__).parent / "recordings" / "sglang"
RECORDED: dict[str, dict[str, Any]] = {
    one["name"]: one
    for file in ("engine", "images")
    for one in json.loads((FOLDER / f"{file}-0.5.23.json").read_text(encoding="utf-8"))
}
IMAGE_PAD = 151655
"""Of the model with images: a Qwen2.5-VL of two layers."""

DIFFERS: dict[str, tuple[set[str], str]] = {
    "chat_return_token_ids": (
        {".choices[].prompt_token_ids is not there", ".choices[].response_token_ids is not there"},
        "asked for by nobody here",
    ),
    "chat_sglext_ids": ({".sglext is not there"}, "asked for by nobody here"),
    "generate_input_logprobs": (
        {".meta_info.input_token_logprobs has 0 for 16", ".meta_info.decode_throughput is new"},
        "a prompt has no log-probabilities; a reply of one token has no pace",
    ),
    "model_info": ({".embedding is not there"}, "nothing for embeddings"),
    "images_model_info": ({".embedding is not there"}, "the same"),
    "inplace_flush_running_model_info": ({".embedding is not there"}, "the same"),
}
"""The differences of each answer, and why they stay."""
NOT_PLAYED = {
    "server_info": "there is none, as with a router, until a test gives one",
    "inplace_flush_running_update": "beside a turn that stands still, below",
    "generate_bad_regex_stream": "a refusal within a stream is planned by each test",
    "images_no_picture_stream": "the same",
    "generate_stream_aborted": "a stream whose client has left",
    "generate_too_long_prompt": "recorded without its 9600 ids",
}
"""Recordings that the stand-in is not asked for, and why."""


def script_of(recording: dict[str, Any]) -> ReplyScript:
    """What was sampled, as a plan for the stand-in."""
    if recording["status"] != 200:
        return ReplyScript(status=recording["status"])
    parts = parsed(recording.get("body") or json.dumps(recording["reply"]))
    parts = parts if isinstance(parts, list) else [parts]
    if "meta_info" not in json.dumps(parts):
        return script_of_chat_stream(parts)
    choices = [part["choices"][0] if "choices" in part else part for part in parts]
    metas, last = [choice["meta_info"] for choice in choices], choices[-1]
    if len(metas[-1]["output_token_logprobs"]) == metas[-1]["completion_tokens"]:
        metas = metas[-1:]  # which has all
    rows = [row for meta in metas for row in meta["output_token_logprobs"]]
    finish = metas[-1]["finish_reason"]
    return ReplyScript(
        ids=tuple(id_ for _, id_, _ in rows),
        logprobs=tuple(logprob for logprob, _, _ in rows),
        text=last["message"]["content"] if "message" in last else None,
        tool_calls=tuple(
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in last.get("message", {}).get("tool_calls", ())
        ),
        finish=finish["type"],
        matched=finish.get("matched"),
        num_cached=metas[-1].get("cached_tokens", 0),
        tops=tuple(
            tuple((id_, logprob) for logprob, id_, _ in row)
            for meta in metas
            for row in meta.get("output_top_logprobs", ())
        ),
        supports=tuple(tuple(row) for meta in metas for row in meta.get("output_token_sampling_mask", ())),
    )


def script_of_chat_stream(parts: list[Any]) -> ReplyScript:
    """The same of a stream of the chat route, which has no `meta_info`."""
    choices = [choice for part in parts for choice in part["choices"]]
    rows = [row for choice in choices if choice["logprobs"] for row in choice["logprobs"]["content"]]
    told = {name: value for part in parts for name, value in part.items() if value is not None}
    return ReplyScript(
        ids=tuple(told["sglext"]["output_ids"][0]),
        logprobs=tuple(row["logprob"] for row in rows),
        text="".join(choice["delta"].get("content") or "" for choice in choices),
        finish=choices[-1]["finish_reason"],
        num_cached=told["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


async def answer_of(server: SGLangServer, recording: dict[str, Any]) -> tuple[int, Any]:
    """The stand-in's status and body for a recorded request."""
    method, path, body = recording["method"], recording["path"], recording.get("request")
    async with aiohttp.ClientSession(server.url) as http, http.request(method, path, json=body) as response:
        return response.status, parsed(await response.text())


@pytest.fixture(params=sorted(set(RECORDED) - set(NOT_PLAYED)))
def recording(request: pytest.FixtureRequest) -> dict[str, Any]:
    return RECORDED[request.param]


async def test_the_stand_in_answers_as_the_real_one_did(recording: dict[str, Any]) -> None:
    name, path = recording["name"], recording["path"]
    is_incremental = name != "generate_stream_cumulative"
    image_token = IMAGE_PAD if name.startswith("images") else None
    async with SGLangServer(
        model="m", incremental=is_incremental, has_spans=True, max_model_len=8192, image_token=image_token
    ) as server:
        server.server_info = SERVER_INFO
        if path in (CHAT_PATH, GENERATE_PATH):
            server.plan(script_of(recording))
        elif recording["status"] != 200:
            server.refusal = "as planned"
        status, body = await answer_of(server, recording)
    real = parsed(recording["body"]) if "body" in recording else recording["reply"]
    assert status == recording["status"]
    assert set(differences(shape(real), shape(body))) == DIFFERS.get(name, (set(), ""))[0]
    if isinstance(real, str) or (path not in (CHAT_PATH, GENERATE_PATH) and status == 200 and "message" in real):
        assert body == real


async def test_a_place_without_an_image_is_refused_in_the_words_of_the_real_one() -> None:
    recording = RECORDED["images_a_place_without_an_image"]
    async with SGLangServer(image_token=IMAGE_PAD) as server:
        assert await answer_of(server, recording) == (recording["status"], recording["reply"])


async def test_an_update_in_place_is_taken_and_refused_as_by_the_real_one() -> None:
    recording = RECORDED["inplace_flush_running_update"]
    async with SGLangServer() as server, asyncio.TaskGroup() as tasks:
        server.plan(ReplyScript(ids=(1, 2), paused=True, num_drawn=1))
        turn = tasks.create_task(answer_of(server, RECORDED["generate"]))
        await server.held(1)
        await answer_of(server, RECORDED["inplace_flush_running_pause"])
        assert await answer_of(server, recording) == (recording["status"], recording["reply"])
        await answer_of(server, RECORDED["abort_in_pause_continue"])
        server.release()
    assert turn.result()[0] == 200


async def test_an_abort_of_a_turn_that_waits_in_a_pause_is_forgotten_as_by_the_real_one() -> None:
    async with SGLangServer(has_spans=True) as server, asyncio.TaskGroup() as tasks:
        server.plan(script_of(RECORDED["abort_in_pause_turn"]))
        await answer_of(server, RECORDED["abort_in_pause_pause"])
        turn = tasks.create_task(answer_of(server, RECORDED["abort_in_pause_turn"]))
        await server.begun(1)
        for name in ("abort_in_pause_abort", "abort_in_pause_abort_again"):
            assert await answer_of(server, RECORDED[name]) == (200, "")
        await answer_of(server, RECORDED["abort_in_pause_continue"])
    _, body = turn.result()
    assert body["meta_info"]["finish_reason"] == RECORDED["abort_in_pause_turn"]["reply"]["meta_info"]["finish_reason"]


async def test_an_abort_of_a_turn_that_stands_in_place_is_heard_when_it_goes_on() -> None:
    """So did a real one, whose turn was 504 after the server's grace and its slot free after the pause."""
    async with SGLangServer() as server, asyncio.TaskGroup() as tasks:
        server.plan(replace(script_of(RECORDED["abort_in_pause_turn"]), paused=True, num_drawn=4))
        turn = tasks.create_task(answer_of(server, RECORDED["abort_in_pause_turn"]))
        await server.held(1)
        for name in ("abort_in_pause_pause", "abort_in_pause_abort", "health"):
            await answer_of(server, RECORDED[name])
        assert server.num_running == 1
        await answer_of(server, RECORDED["abort_in_pause_continue"])
    _, body = turn.result()
    assert (body["meta_info"]["finish_reason"]["type"], len(body["output_ids"])) == ("abort", 4)


def test_what_tells_that_chats_can_be_streamed_is_as_recorded() -> None:
    assert SERVER_INFO.items() <= RECORDED["server_info"]["reply"].items()


def test_each_difference_has_a_recording() -> None:
    assert {*DIFFERS, *NOT_PLAYED} <= set(RECORDED)
