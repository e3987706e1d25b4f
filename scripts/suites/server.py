"""Runs a command against a real server whose model is scripted: it calls `get_weather` where it is shown tools.

`server.py COMMAND…`: the server's address is the command's last argument. Suites by others want a call where a tool is
shown, which no model small enough for a laptop makes each time. The engine is a stand-in of vLLM that takes images.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from standins.planned_server import AskedRequest, ReplyScript
from standins.vllm_server import VLLMServer
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.vllm.adapter import VLLM
from tests.service.conftest import END, running
from tests.service.images_kit import NUM_IDS, PAD, seeing_renderer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
TEXT = "Hello there."


async def main(command: list[str]) -> int:
    renderer = seeing_renderer()
    tokenizer = renderer.tokenizer

    def reply(asked: AskedRequest) -> ReplyScript:
        has_tools = "<tools>" in tokenizer.decode(asked.json["token_ids"])
        return ReplyScript(ids=(*tokenizer.encode(CALL if has_tools else TEXT), END))

    known = AdapterOptions(model="tiny", vocab_size=NUM_IDS, max_context_tokens=4096, eos_token_ids=(END,))
    async with VLLMServer(answers=reply, image_token=tokenizer.added_tokens[PAD], dev_mode=True) as vllm:
        engine = HttpEngine(HttpEngineOptions(url=vllm.url), VLLM(known))
        await engine.start()
        try:
            async with running(engine, renderer) as (url, _):
                process = await asyncio.create_subprocess_exec(*command, url)
                return await process.wait()
        finally:
            await engine.aclose()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
