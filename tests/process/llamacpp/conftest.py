"""A real llama.cpp on the tiny model, and engines of it."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from standins.llamacpp_server import LlamaCppServer
from standins.tiny.llama import CONTEXT, VOCAB, write_tiny_folder, write_tiny_gguf
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import pieces_of

Connect = Callable[..., AbstractAsyncContextManager[HttpEngine]]


@pytest.fixture(scope="session", autouse=True)
def _llama_cpp_is_there() -> None:
    pytest.importorskip("xllamacpp", reason="xllamacpp, a real llama.cpp, has no wheel for this platform")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as another kind of file, for our own forward pass."""
    return write_tiny_folder(tmp_path_factory.mktemp("folder") / "tiny")


@pytest.fixture(scope="session")
def tiny_server(tiny_gguf: Path) -> Iterator[LlamaCppServer]:
    with LlamaCppServer(tiny_gguf, slot_tokens=CONTEXT, slots=8) as server:
        yield server


@pytest.fixture
def connect() -> Connect:
    """Engines of a server: `async with connect(url) as engine`."""

    @asynccontextmanager
    async def connected(url: str, *, vocab_size: int = VOCAB, model: str = "tiny") -> AsyncIterator[HttpEngine]:
        pieces = pieces_of(tiny_tokenizer_json(VOCAB), vocab_size)
        engine = HttpEngine(
            HttpEngineOptions(url=url), LlamaCpp(AdapterOptions(model=model, vocab_size=vocab_size), pieces)
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.aclose()

    return connected
