"""The stand-in of vLLM answers in the shapes that a real one was recorded with, but for what is named here.

Each recorded request of both routes is sent to a stand-in that plays what was sampled; its status, its keys and the
types of its values are the recorded ones.
"""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.vllm_server import COMPLETIONS_PATH, GENERATE_PATH, VLLMServer

from .shapes import differences, parsed, shape

FOLDER = Path(__file__).parent / "recordings" / "vllm"
RECORDED: dict[str, dict[str, Any]] = {
    f"{name}: {one['name']}": one
    for name, file in (("generate", "dialect-generate"), ("completions", "dialect-completions"), ("images", "images"))
    for one in json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))
}
IMAGE_PAD = 151655
"""Of the model with images: a Qwen2.5-VL of two layers."""
NOT_PLAYED = {
    "aborted": "another request ends them: tests/service/test_vllm_engine.py",
    "refused: too long": "recorded without its 4097 ids",
    "scores of": "scored with made-up numbers, in the fields alone that are read",
}
"""Parts of names, and why the stand-in is not asked for these."""
NO_PERMISSIONS = {".data[].permission has 0 for 1"}
DIFFERS: dict[str, set[str]] = {
    "generate: discover GET /v1/models": NO_PERMISSIONS,
    "completions: discover GET /v1/models": NO_PERMISSIONS,
    "generate: discover POST /inference/v1/generate": {".error.param is NoneType for str"},
}
"""The differences of each answer: what nobody here reads."""


def script_of(recording: dict[str, Any]) -> ReplyScript:
    """What was sampled, as a plan for the stand-in."""
    if recording["status"] != 200:
        return ReplyScript(status=recording["status"])
    told = parsed(recording["body"])
    parts = told if isinstance(told, list) else [told]
    if "error" in parts[0]:
        return ReplyScript(status=400, error_event=True)
    choices = [part["choices"][0] for part in parts if part["choices"]]
    finish = next(choice for choice in choices if choice["finish_reason"])
    ids = [id_ for choice in choices for id_ in choice["token_ids"]]
    return ReplyScript(
        ids=tuple(ids),
        finish=finish["finish_reason"],
        matched=finish["stop_reason"],
        num_top=recording["num_top"],
    )


@pytest.mark.parametrize("name", [name for name in RECORDED if not any(one in name for one in NOT_PLAYED)])
async def test_the_stand_in_answers_as_the_real_one_did(name: str) -> None:
    recording = RECORDED[name]
    scale_out = not name.startswith("completions")
    async with VLLMServer(scale_out=scale_out, dev_mode=True, models=["smollm2"], image_token=IMAGE_PAD) as server:
        if recording["path"] in (GENERATE_PATH, COMPLETIONS_PATH) and recording["request_id"] is not None:
            server.plan(script_of(recording))
        method = "GET" if " GET " in name else "POST"
        headers = {"content-type": "application/json", "x-request-id": recording["request_id"] or "r"}
        async with (
            aiohttp.ClientSession(server.url, headers=headers) as http,
            http.request(method, recording["path"], data=recording["request"] or None) as response,
        ):
            status, body = response.status, parsed(await response.text())
    assert status == recording["status"]
    assert set(differences(shape(parsed(recording["body"])), shape(body))) == DIFFERS.get(name, set())
