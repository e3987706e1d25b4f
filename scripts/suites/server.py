"""Runs a command against a real server whose model is scripted: it calls `get_weather` where it is shown tools.

`server.py COMMAND…`: the server's address is the command's last argument. Suites by others want a call where a tool is
shown, which no model small enough for a laptop makes each time.
"""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.base import GenerateRequest
from stenograph.http.loaded_model import make_renderer
from tests.service.conftest import END, running, tiny_files

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}\n</tool_call>'
TEXT = "Hello there."


async def main(command: list[str]) -> int:
    renderer = make_renderer(tiny_files(), "smollm2")

    def reply(request: GenerateRequest) -> Script:
        has_tools = request.chat is not None and bool(request.chat.tools)
        ids = (*renderer.tokenizer.encode(CALL if has_tools else TEXT), END)
        return Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=END))

    engine = ScriptedEngine(vocab_size=renderer.tokenizer.vocab_size, max_context_tokens=4096, model=reply)
    async with running(engine, renderer) as (url, _):
        process = await asyncio.create_subprocess_exec(*command, url)
        return await process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
