"""Scores by a LoRA: of its last load, from an engine that has it."""

from pathlib import Path

import pytest

from stenograph.text.renderer import Renderer

from .conftest import user
from .test_loras import LORAS, by, rigged


@pytest.mark.parametrize("kind", ["sglang-generate", "vllm"])
async def test_scores_by_a_lora_are_of_its_version_and_no_earlier_one_s(
    renderer: Renderer, tmp_path: Path, kind: str
) -> None:
    """A load of the LoRA changes no name of the model's weights: what was scored before is scored again."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with rigged(kind, renderer, {}, {}, weights_dir=tmp_path, weight_version="7") as rig:
        session = await rig.open()
        await by(rig, session, user("one"))
        body, told = {"policy": "a"}, list[tuple[bool, str]]()

        async def score() -> None:
            answer = await rig.call("POST", f"/sessions/{session}/scores", body)
            assert answer.status == 200, answer.body
            told.append((answer.json()["was_scored"], answer.json()["weight_version"]))

        for folder in ("one", "two"):
            load = {"lora_name": "a", "lora_path": folder}
            assert (await rig.call("POST", "/load_lora_adapter", load)).status == 200
            await score()
            await score()
        assert told == [(False, "1"), (True, "1"), (False, "2"), (True, "2")]


async def test_scores_by_a_lora_come_from_an_engine_that_has_it(renderer: Renderer, tmp_path: Path) -> None:
    """One that refused the last load lists the LoRA of before: it scores nothing by that."""
    (tmp_path / "step").mkdir()
    async with rigged("vllm", renderer, {"code": "/loras/code"}, LORAS, weights_dir=tmp_path) as rig:
        session = await rig.open()
        await by(rig, session, user("one"))
        path = f"/sessions/{session}/scores"
        for name in ("one", "two"):
            answer = await rig.call("POST", path, {"policy": "prose", "name": name})
            assert answer.status == 200, answer.body
        assert [
            [asked.json["model"] for asked in server.asked if "prompt_logprobs" in asked.body.decode()]
            for server in rig.servers
        ] == [[], ["prose"] * 2]
        rig.servers[0].refusal = "no memory"
        load = {"lora_name": "code", "lora_path": "step"}
        assert (await rig.call("POST", "/load_lora_adapter", load)).status == 400
        error = await rig.refused(path, {"policy": "code", "engine": rig.servers[0].url}, 503)
        assert "no longer has the LoRA 'code'" in error["message"]
        answer = await rig.call("POST", path, {"policy": "code", "engine": rig.servers[1].url})
        assert (answer.status, answer.json()["weight_version"]) == (200, "1")
