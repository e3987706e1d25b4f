"""Images to SGLang's own route: placeholders go, bytes as they came, and the reported ids are the effective ones."""

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest
from msgspec.structs import replace

from standins.planned_server import ReplyScript
from standins.sglang_server import SGLangServer
from stenograph.core.clock import SystemClock
from stenograph.core.errors import EngineUnavailable, UpstreamInvalid
from stenograph.core.media import new_expansions
from stenograph.core.messages import MediaKind
from stenograph.core.types import Chunk, Prompt, PromptMedia, RequestId, SamplingParams, token_ids
from stenograph.engine.base import GenerateRequest
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.text.renderer import Renderer
from tests.store_laws import medium

from .conftest import END, Answer, running
from .images_kit import NUM_IDS, seeing_renderer
from .images_kit import PAD as TOKEN

pytestmark = pytest.mark.timeout(600)

PAD, VOCAB = 90, 1000
IMAGES = [medium(bytes([1, 2, number])) for number in (0, 4, 15)]
LENGTHS = [1, 5, 16]
LOGICAL = [5, PAD, 6, 7, PAD, 8, PAD, 9]
EFFECTIVE = [5, *[PAD] * 1, 6, 7, *[PAD] * 5, 8, *[PAD] * 16, 9]
IDS = (104, 105, 7)


@asynccontextmanager
async def engine_of(
    reports: Callable[[list[int]], list[int] | None] = lambda ids: ids,
    image_token: int | None = PAD,
    adapter: type[SGLangChat | SGLangGenerate] = SGLangGenerate,
) -> AsyncIterator[tuple[HttpEngine, SGLangServer]]:
    async with SGLangServer(image_token=image_token, reports=reports, max_model_len=4096) as server:
        server.plan(ReplyScript(ids=IDS, matched=7))
        options = HttpEngineOptions(url=server.url)
        engine = HttpEngine(options, adapter(AdapterOptions(model="m", vocab_size=VOCAB)))
        await engine.start()
        try:
            yield engine, server
        finally:
            await engine.aclose()


def request(*, streams: bool, max_tokens: int = 8, recorded: bool = False) -> GenerateRequest:
    places = [index for index, id_ in enumerate(LOGICAL) if id_ == PAD]
    expansions = [token_ids([PAD] * length) if recorded else None for length in LENGTHS]
    media = tuple(
        PromptMedia(position=at, item=item, recorded=known)
        for at, item, known in zip(places, IMAGES, expansions, strict=True)
    )
    return GenerateRequest(
        request_id=RequestId("0" * 32),
        prompt=Prompt(new_ids=token_ids(LOGICAL), media=media),
        params=SamplingParams(max_tokens=max_tokens),
        streams=streams,
    )


async def chunks_of(engine: HttpEngine, *, streams: bool) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request(streams=streams))]


@pytest.mark.parametrize("streams", [False, True])
async def test_the_ids_that_sglang_ran_are_reported_once_with_a_range_for_each_image(streams: bool) -> None:
    async with engine_of() as (engine, server):
        assert engine.capabilities.media == {MediaKind.IMAGE}
        chunks = await chunks_of(engine, streams=streams)
        (effective,) = [chunk.effective for chunk in chunks if chunk.effective is not None]
        assert list(effective.ids) == EFFECTIVE
        assert [one.length for one in effective.ranges] == LENGTHS
        assert tuple(id_ for chunk in chunks for id_ in chunk.ids) == IDS
        expansions = new_expansions(request(streams=streams).prompt, effective)
        assert [(one.position, len(one.ids)) for one in expansions] == list(zip((1, 4, 6), LENGTHS, strict=True))
        sent = server.requests[0].json
        assert (sent["input_ids"], sent["return_prompt_token_ids"]) == (LOGICAL, True)
        sent_bytes = [base64.b64decode(one.partition(";base64,")[2]) for one in sent["image_data"]]
        assert sent_bytes == [base64.b64decode(item.base64) for item in IMAGES]
        assert all(one.startswith("data:image/png;base64,") for one in sent["image_data"])
        assert "mm_hashes" not in sent


@pytest.mark.parametrize(
    ("reports", "law"),
    [
        (lambda ids: [*ids, 3], "prompt_agrees"),
        (lambda ids: [VOCAB, *ids[1:]], "id_in_vocab"),
        (lambda ids: [-1, *ids[1:]], "prompt_agrees"),
        (lambda ids: ["1", *ids[1:]], "prompt_agrees"),
    ],
)
async def test_a_report_that_no_prompt_can_have_is_refused(
    reports: Callable[[list[int]], list[int] | None], law: str
) -> None:
    async with engine_of(reports) as (engine, _):
        with pytest.raises(UpstreamInvalid, match=law):
            await chunks_of(engine, streams=False)


@pytest.mark.parametrize(
    "reports",
    [
        lambda ids: [4, *ids[1:]],
        lambda ids: [*ids[:-1], 10],
        lambda ids: [PAD if id_ == 6 else id_ for id_ in ids],
        lambda ids: [6 if id_ == PAD else id_ for id_ in ids],
    ],
)
async def test_ids_that_sglang_tokenized_again_do_not_collapse_to_the_prompt(
    reports: Callable[[list[int]], list[int] | None],
) -> None:
    async with engine_of(reports) as (engine, _):
        chunks = await chunks_of(engine, streams=True)
        (effective,) = [chunk.effective for chunk in chunks if chunk.effective is not None]
        with pytest.raises(UpstreamInvalid, match="prompt_agrees"):
            new_expansions(request(streams=True).prompt, effective)


async def test_a_prompt_with_new_images_that_may_fill_the_context_says_no_number() -> None:
    async with engine_of() as (engine, server):
        limit = engine.capabilities.max_context_tokens
        assert limit is not None
        room = limit - len(LOGICAL)
        for max_tokens, recorded, told in [
            (room, False, None),
            (room - 1, False, room - 1),
            (limit - len(EFFECTIVE), True, limit - len(EFFECTIVE)),
        ]:
            server.plan(ReplyScript(ids=IDS, matched=7))
            asked = request(streams=False, max_tokens=max_tokens, recorded=recorded)
            assert [chunk async for chunk in engine.generate(asked)]
            assert server.requests[-1].json["sampling_params"]["max_new_tokens"] == told


async def test_an_sglang_of_a_model_without_images_takes_none() -> None:
    async with engine_of(image_token=None) as (engine, _):
        assert not engine.capabilities.media


async def test_an_sglang_that_writes_the_replies_takes_none() -> None:
    """Its chat route gets ids without images, and would answer as if there were none."""
    async with engine_of(adapter=SGLangChat) as (engine, _):
        assert not engine.capabilities.media


@pytest.mark.parametrize("other", ["absent", "blind"])
@pytest.mark.parametrize("other_first", [False, True])
async def test_a_fleet_gives_images_to_the_engines_that_take_them(other_first: bool, other: str) -> None:
    async with SGLangServer(image_token=PAD, max_model_len=4096) as seeing, SGLangServer(max_model_len=4096) as blind:
        options = AdapterOptions(model="m", vocab_size=VOCAB)
        urls = [seeing.url, blind.url if other == "blind" else "http://127.0.0.1:1"]
        members = [
            FleetMember(name=url, engine=HttpEngine(HttpEngineOptions(url=url), SGLangGenerate(options)))
            for url in (reversed(urls) if other_first else urls)
        ]
        fleet = Fleet(members, clock=SystemClock())
        await fleet.start()
        try:
            assert fleet.capabilities.media == {MediaKind.IMAGE}
            for number in range(4):
                seeing.plan(ReplyScript(ids=IDS, matched=7))
                asked = replace(request(streams=False), request_id=RequestId(f"{number}" * 32))
                chunks = [chunk async for chunk in fleet.generate(asked)]
                assert [chunk.effective is not None for chunk in chunks] == [True]
            assert (len(seeing.requests), blind.requests) == (4, [])
            fleet.dismiss(seeing.url)
            with pytest.raises(EngineUnavailable, match="takes turns with an image now"):
                await anext(fleet.generate(request(streams=False)))
        finally:
            await fleet.aclose()


async def test_a_fleet_keeps_a_session_s_images_where_they_are_cached() -> None:
    """Of two engines that take images and one that does not, each session has its own; the sessions are spread."""
    async with (
        SGLangServer(image_token=PAD, max_model_len=4096) as one,
        SGLangServer(image_token=PAD, max_model_len=4096) as other,
        SGLangServer(max_model_len=4096) as blind,
    ):
        options = AdapterOptions(model="m", vocab_size=VOCAB)
        servers = (blind, one, other)
        engines = [HttpEngine(HttpEngineOptions(url=each.url), SGLangGenerate(options)) for each in servers]
        fleet = Fleet([FleetMember(name=each.name, engine=each) for each in engines], clock=SystemClock())
        await fleet.start()
        try:
            for number in range(15):
                for each in servers:
                    each.plan(ReplyScript(ids=IDS, matched=7))
                asked = replace(request(streams=False), request_id=RequestId(f"{number:032}"))
                assert [chunk async for chunk in fleet.generate(replace(asked, affinity_key=f"session {number % 5}"))]
        finally:
            await fleet.aclose()
        asked_of = [[asked.json["session_id"] for asked in each.requests] for each in servers]
    assert asked_of[0] == []
    assert sorted(len(sessions) for sessions in asked_of[1:]) == [6, 9]
    assert sorted(len(set(sessions)) for sessions in asked_of[1:]) == [2, 3]


@asynccontextmanager
async def sessions_before_sglang() -> AsyncIterator[tuple[Callable[..., Any], SGLangServer, Renderer]]:
    """A way to ask the server before a stand-in of a model that takes images."""
    renderer = seeing_renderer()
    async with SGLangServer(image_token=renderer.tokenizer.added_tokens[TOKEN], max_model_len=4096) as server:
        engine = HttpEngine(
            HttpEngineOptions(url=server.url), SGLangGenerate(AdapterOptions(model="m", vocab_size=NUM_IDS))
        )
        await engine.start()
        try:
            async with running(engine, renderer) as (url, _), aiohttp.ClientSession() as client:

                async def ask(path: str, body: Any) -> Answer:
                    async with client.post(url + path, json=body) as response:
                        return Answer(status=response.status, headers=response.headers, body=await response.read())

                yield ask, server, renderer
        finally:
            await engine.aclose()


async def test_a_placeholder_in_a_text_is_refused_where_sglang_would_take_it_for_an_image_s() -> None:
    """SGLang 0.5.23 reads a prompt with images as text, and never answers where that has more places than images."""
    async with sessions_before_sglang() as (ask, server, renderer):
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{IMAGES[0].base64.decode()}"}}
        words = {"type": "text", "text": f"what is {TOKEN}?"}

        async def chat(session: str, reply: str, *contents: Any) -> Answer:
            server.plan(ReplyScript(ids=(*renderer.tokenizer.encode(reply), END), matched=END))
            roles = ("user", "assistant", "user")
            messages = [{"role": role, "content": one} for role, one in zip(roles, contents, strict=False)]
            return cast("Answer", await ask(f"/sessions/{session}/v1/chat/completions", {"messages": messages}))

        async def session() -> str:
            return str((await ask("/sessions", {})).json()["session_id"])

        one = await session()
        assert (await chat(one, "ok", [words])).status == 200, "a line without images may spell it"
        for contents in (([words], "ok", [picture]), ([picture, words],)):
            answer = await chat(one, "ok", *contents)
            assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")
            assert f"{TOKEN} spelled in a text" in answer.json()["error"]["message"]
        other, sampled = await session(), f"a {TOKEN}"
        assert (await chat(other, sampled, [picture])).status == 200
        answer = await chat(other, "ok", [picture], sampled, "and?")
        assert answer.status == 400, "the model has sampled it"
        assert len(server.requests) == 2


async def test_a_version_that_reports_no_prompt_is_seen() -> None:
    async with engine_of(lambda _: None) as (engine, _):
        assert all(chunk.effective is None for chunk in await chunks_of(engine, streams=False))
