"""Each `stenograph serve` of docs/engines.md for an engine runs as it stands, but for addresses and paths."""

import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.llamacpp_server import LlamaCppServer
from standins.lmdeploy_server import LMDeployServer
from standins.planned_server import AskedRequest, ReplyScript
from standins.sglang_server import SGLangServer
from standins.tiny.llama import CONTEXT, write_tiny_gguf
from standins.vllm_server import VLLMServer

from ..docs.test_commands_documented import DOCUMENTED, words_of
from .test_serve_life import address, post, serving

LINES = [words_of(text)[1:] for page, text in DOCUMENTED if page == "engines.md" and "--engine-url" in text]
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


def ok(asked: AskedRequest) -> ReplyScript:
    return ReplyScript(ids=(111, 107, 2), text="ok", matched=2)


@asynccontextmanager
async def real_llamacpp(model: Path) -> Any:
    pytest.importorskip("xllamacpp", reason="xllamacpp, a real llama.cpp, has no wheel for this platform")
    with LlamaCppServer(model, slot_tokens=CONTEXT, slots=2) as server:
        yield server


ENGINES: dict[str, Callable[[Path], AbstractAsyncContextManager[Any]]] = {
    "sglang": lambda model: SGLangServer(answers=ok),
    "sglang-generate": lambda model: SGLangServer(answers=ok),
    "vllm": lambda model: VLLMServer(answers=ok),
    "lmdeploy": lambda model: LMDeployServer(answers=ok),
    "llamacpp": real_llamacpp,
}


@pytest.mark.parametrize("words", LINES, ids=" ".join)
async def test_a_documented_server_is_ready_and_answers(tiny: Path, tmp_path: Path, words: list[str]) -> None:
    asked = dict(zip(words[::2], words[1::2], strict=True))
    assert asked.keys() == {"--engine", "--engine-url", "--model"}
    is_gguf = asked["--model"].endswith(".gguf")
    model = write_tiny_gguf(tmp_path / "tiny.gguf") if is_gguf else tiny
    async with ENGINES[asked["--engine"]](model) as engine:
        flags = [str(model) if flag == asked["--model"] else flag for flag in words]
        flags = [engine.url if flag.startswith("http://") else flag for flag in flags]
        async with serving(*flags) as served, aiohttp.ClientSession() as client:
            url = address(await served.says("stenograph ready at"))
            status, reply = await post(client, f"{url}/v1/chat/completions", CHAT)
            assert (status, reply["usage"]["completion_tokens"]) == (200, 3), reply
            assert await served.end(signal.SIGTERM) == 0


def test_every_engine_has_its_line() -> None:
    assert {words[words.index("--engine") + 1] for words in LINES} == ENGINES.keys()
