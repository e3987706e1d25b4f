"""A server with a scripted engine for real agents: what they are answered, and what must be in the samples."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from standins.scripted_engine import Script, ScriptedEngine
from standins.tiny.tokenizer import tiny_tokenizer_json
from stenograph.core.clock import Clock
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason
from stenograph.engine.base import GenerateRequest
from stenograph.http.loaded_model import make_renderer
from stenograph.model.files import ModelFiles
from stenograph.text.renderer import Renderer
from tests.service.conftest import END, running

CONTEXT_TOKENS = 1 << 20
"""A byte or so is a token here, and opencode's tools alone are 40 KB."""

SESSION: dict[str, Any] = {}
"""A session as it is by default: a title request beside the main strand replaces nothing."""

SAMPLES: dict[str, Any] = {"format": "json", "include_side": True}
"""All samples of a session."""


def call(name: str, arguments: str) -> str:
    """A call as the model of these tests writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A planned reply. `stop` is a stop string that ends it; `cut`, its token limit does; `paused`, it is drawn as far
    as the engine is stepped; with `breaks` the engine fails after its text."""

    text: str
    stop: str | None = None
    cut: bool = False
    paused: bool = False
    breaks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A server whose engine has `replies` left to give, in order."""

    url: str
    client: aiohttp.ClientSession
    engine: ScriptedEngine
    replies: list[Reply]

    async def open_session(self, **options: Any) -> str:
        """The base URL of a new session."""
        async with self.client.post(f"{self.url}/sessions", json={**SESSION, **options}) as response:
            return str((await response.json())["base_url"])

    async def samples(self, base_url: str) -> list[dict[str, Any]]:
        """The samples of the session, side requests included."""
        async with self.client.post(base_url.removesuffix("/v1") + "/samples", json=SAMPLES) as response:
            assert response.status == 200, await response.text()
            return list((await response.json())["samples"])

    def check_all_trained_once(self, samples: Sequence[dict[str, Any]]) -> None:
        """Check that every token that the engine sampled is trained in exactly one sample, and nothing else is."""
        drawn = Counter(tuple(ids) for ids in self.engine.drawn.values())
        assert Counter(run for sample in samples for run in trained_runs(sample)) == drawn
        assert not self.replies, "each planned reply was asked for"


def trained_runs(sample: dict[str, Any]) -> list[tuple[int, ...]]:
    """The ids that a sample trains, a tuple for each run without a gap: prompt stands between two turns."""
    mask: list[int] = sample["loss_mask"]
    rows = zip(sample["tokens"][len(sample["tokens"]) - len(mask) :], mask, strict=True)
    return [tuple(id_ for id_, _ in run) for is_trained, run in groupby(rows, key=lambda row: row[1]) if is_trained]


@pytest.fixture(scope="session")
def roomy_renderer() -> Renderer:
    files = ModelFiles(
        name="tiny",
        path=Path("tiny"),
        tokenizer_json=tiny_tokenizer_json(),
        chat_template=None,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(END,),
        vocab_size=320,
        max_context_tokens=CONTEXT_TOKENS,
        architecture="llama",
    )
    return make_renderer(files, "smollm2")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a folder to work in, and a note in it."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("a note\n")
    return tmp_path


Talking = Callable[..., AbstractAsyncContextManager[Talk]]


@pytest.fixture
def talking(roomy_renderer: Renderer) -> Talking:
    """Start a server whose engine gives these replies in order: `async with talking("a", Reply(...)) as talk`.

    A prompt with a key of `side` in it gets that reply instead; with `holds_side`, as far as the engine is stepped.
    `rest` is the reply to every request after those that are planned. The other settings are those of `running`.
    """
    tokenizer = roomy_renderer.tokenizer

    @asynccontextmanager
    async def started(
        *replies: str | Reply,
        side: dict[str, str] | None = None,
        holds_side: bool = False,
        rest: str | None = None,
        max_context_tokens: int = CONTEXT_TOKENS,
        clock: Clock | None = None,
        **settings: Any,
    ) -> AsyncIterator[Talk]:
        left = [Reply(text=reply) if isinstance(reply, str) else reply for reply in replies]

        def answer(request: GenerateRequest) -> Script:
            prompt = tokenizer.decode(list(request.prompt.ids)) if side else ""
            found = [text for mark, text in (side or {}).items() if mark in prompt]
            reply = Reply(text=found[0]) if found else left.pop(0) if left or rest is None else Reply(text=rest)
            ids = tuple(tokenizer.encode(reply.text + (reply.stop or "")))
            most = request.params.max_tokens
            if most is not None and len(ids) >= most:
                return Script(ids=ids[:most], finish=Finish(reason=FinishReason.LENGTH))
            if reply.breaks:
                return Script(ids=ids, error=UpstreamUnreachable("The engine's connection broke."))
            if reply.stop is not None:
                return Script(ids=ids, finish=Finish(reason=FinishReason.STOP, matched=reply.stop))
            if reply.cut:
                return Script(ids=ids, finish=Finish(reason=FinishReason.LENGTH))
            finish = Finish(reason=FinishReason.STOP, matched=END)
            return Script(ids=(*ids, END), finish=finish, paused=reply.paused or (bool(found) and holds_side))

        engine = ScriptedEngine(vocab_size=tokenizer.vocab_size, max_context_tokens=max_context_tokens, model=answer)
        async with (
            running(engine, roomy_renderer, clock=clock, **settings) as (url, _),
            aiohttp.ClientSession() as client,
        ):
            yield Talk(url=url, client=client, engine=engine, replies=left)

    return started
