"""`/metrics` has what the embedded engine's process spent on grammars: real weights, a real process."""

import re
from pathlib import Path
from typing import Any

import aiohttp

from standins.tiny.llama import write_tiny_folder
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import load_model_files

from .conftest import running


async def grammar_series(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Counts by step, and sums as `step sum`."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'^stenograph_grammar_seconds_(count|sum)\{step="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {step if kind == "count" else f"{step} sum": float(value) for kind, step, value in found}


async def complete(http: aiohttp.ClientSession, url: str, **fields: Any) -> int:
    """The number of tokens sampled."""
    body = {"prompt": "it", "max_tokens": 9, "temperature": 0, **fields}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        num: int = answer["usage"]["completion_tokens"]
        return num


async def test_a_grammar_is_compiled_once_and_each_token_has_a_fill_and_an_accept(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    engine = EmbeddedEngine(folder, EmbeddedOptions(max_batch=4, kv_tokens=2048))
    await engine.start()
    try:
        renderer = make_renderer(load_model_files(folder), "auto")
        async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as http:
            await complete(http, url)
            before = await grammar_series(http, url)
            assert before == dict.fromkeys(
                (f"{step}{kind}" for step in ("compile", "fill", "accept") for kind in ("", " sum")), 0
            )
            sampled = [await complete(http, url, guided_regex="[ab]{5}") for _ in range(2)]
            await complete(http, url)  # what a grammar did after its last token comes with the next event
            after = await grammar_series(http, url)
    finally:
        await engine.aclose()
    assert after["compile"] == 1
    assert after["fill"] >= after["accept"] >= sum(sampled) - len(sampled)
    assert min(after[f"{step} sum"] for step in ("compile", "fill", "accept")) > 0
