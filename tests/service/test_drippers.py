"""Clients that drip their bodies hold up nobody whose body or reply is large."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from standins.planned_server import ReplyScript
from standins.sglang_server import SGLangServer
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.clock import SystemClock
from stenograph.engine.settings import EngineKind
from stenograph.http.engines import make_engine
from stenograph.http.settings import Settings
from stenograph.model.files import ModelFiles
from stenograph.offload.body_slots import BodySlots
from stenograph.text.renderer import Renderer

from .conftest import END, running, user

NUM_DRIPPERS = 16
NUM_ROUNDS = 3000
"""In each, every dripper brings a byte: their bodies are never whole."""

DRIPPED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 1000000\r\n\r\n"
)


def tiny_files() -> ModelFiles:
    return ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(),
        chat_template=None,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=320,
        max_context_tokens=4096,
        architecture="llama",
    )


async def test_with_sixteen_drippers_a_large_chat_and_its_large_reply_are_served_as_without_them(
    renderer: Renderer,
) -> None:
    slots, files = BodySlots(2), tiny_files()
    encode = renderer.tokenizer.encode
    body = json.dumps({"messages": [user("hi")]}).encode().ljust(100_000)
    async with AsyncExitStack() as stack:
        sglang = await stack.enter_async_context(SGLangServer(encode=lambda text: list(encode(text)), stop_id=END))
        settings = Settings(engine=EngineKind.SGLANG, engine_url=(sglang.url,))
        engine = make_engine(settings, files, files.path, slots, SystemClock())
        await engine.start()
        stack.push_async_callback(engine.aclose)
        url, _ = await stack.enter_async_context(running(engine, renderer, slots=slots))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        address = urlsplit(url)
        drippers: list[asyncio.StreamWriter] = []
        for _ in range(NUM_DRIPPERS):
            _, writer = await asyncio.open_connection(address.hostname, address.port)
            stack.callback(writer.close)
            writer.write(DRIPPED)
            drippers.append(writer)
        ids = (*encode("ab " * 900), END)
        sglang.plan(ReplyScript(ids=ids, text="ab " * 900, matched=END))

        async def chat() -> int:
            headers = {"content-type": "application/json"}
            async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
                await answer.read()
                return answer.status

        chatting = asyncio.ensure_future(chat())
        num_rounds = 0
        while num_rounds < NUM_ROUNDS and not chatting.done():
            num_rounds += 1
            for writer in drippers:
                writer.write(b" ")
            await asyncio.gather(*(writer.drain() for writer in drippers), asyncio.sleep(0))
        assert chatting.done(), "the drippers hold it up"
        assert await chatting == 200
        assert len(sglang.replies[-1].body) >= 72_000
        assert slots.num_held == 0
