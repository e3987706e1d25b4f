"""A vLLM that has lost an image of a turn between its two caches is asked again, once, and nothing else is."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from standins.planned_server import ReplyScript

from .test_images import part, rig, samples, seeing, sees, text
from .test_vllm_sessions import Rig

__all__ = ["rig", "seeing"]  # fixtures

pytestmark = pytest.mark.timeout(600)

_FILE = Path(__file__).parent / "recordings" / "vllm" / "images.json"
_RECORDED: dict[str, str] = {one["name"]: one["body"] for one in json.loads(_FILE.read_text(encoding="utf-8"))}
LOST = _RECORDED["lost: after that whole"].encode()
"""vLLM 0.32's answer where its engine has no image behind the hash in its server (`engine/vllm/lost_media.py`)."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_whose_image_vllm_has_lost_is_asked_again(rig: Rig, stream: bool) -> None:
    session = await rig.session()
    rig.vllm.plan(ReplyScript(status=500, body=LOST, error_event=stream))
    rig.says("seen")
    answer = await rig.chat(session, sees(part(1)), stream=stream)
    assert answer.status == 200, answer.body
    first, second = rig.vllm.requests
    assert first.body == second.body
    assert rig.vllm.aborts == [], "a late abort could end the second try, whose id is the same"
    (sample,) = await samples(rig, session)
    assert rig.renderer.tokenizer.decode(sample["tokens"][-sample["response_length"] :]).startswith("seen")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("message", "num_tries"), [(sees(part(1)), 2), (sees(text("no image")), 1)], ids=["an image", "no image"]
)
async def test_an_engine_that_goes_on_failing_is_asked_twice_at_most(
    rig: Rig, message: dict[str, Any], num_tries: int, stream: bool
) -> None:
    for _ in range(num_tries):
        rig.vllm.plan(ReplyScript(status=500, body=LOST, error_event=stream))
    answer = await rig.chat(await rig.session(), message, stream=stream)
    assert (answer.status, answer.body) == (500, LOST)
    assert len(rig.vllm.requests) == num_tries


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_aborted_before_vllm_says_that_it_lost_its_image_is_not_asked_again(
    rig: Rig, stream: bool
) -> None:
    session = await rig.session()
    rig.vllm.plan(ReplyScript(status=500, body=LOST, paused=True))
    rig.says("seen")
    chat = asyncio.ensure_future(rig.chat(session, sees(part(1)), stream=stream))
    await rig.vllm.held(1)
    assert (await rig.call("POST", f"/sessions/{session}/abort")).json() == {"aborted": 1}
    answer = await chat
    assert (answer.status, len(rig.vllm.requests)) == (200, 1), answer.body
    (record,) = await rig.records(session)
    assert record["status"] == "aborted"


async def test_another_refusal_of_an_image_is_not_asked_again(rig: Rig) -> None:
    rig.vllm.plan(ReplyScript(status=500, body=LOST.replace(b"Internal server error", b"Failed to apply prompt")))
    assert (await rig.chat(await rig.session(), sees(part(1)))).status == 500
    assert len(rig.vllm.requests) == 1
